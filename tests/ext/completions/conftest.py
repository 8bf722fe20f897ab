"""Servers whose prompts are traced, word by word."""

from server.conftest import pytest_runtest_setup, pytest_runtest_teardown

__all__ = ["pytest_runtest_setup", "pytest_runtest_teardown"]
