"""Tests of durable bytes."""
