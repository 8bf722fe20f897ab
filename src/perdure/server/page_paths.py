"""Paths of the page, for its route and for the middleware before it."""

from __future__ import annotations

ASSETS = "/page/"
"""Where the files of the page lie, each under a name with its digest."""


def is_page(path: str) -> bool:
    """Whether a path is of the page itself, which anybody may load: what it asks for then needs a key."""
    return path == "/" or path.startswith(ASSETS)
