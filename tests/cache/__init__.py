"""Tests of what is kept between requests."""
