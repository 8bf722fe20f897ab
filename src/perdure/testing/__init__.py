"""Test doubles: `toy`, a deterministic engine in plain Python with the full contract of a real one."""
