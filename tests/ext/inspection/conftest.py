"""A browser, for pages of analyses."""

from page.conftest import browser

__all__ = ["browser"]
