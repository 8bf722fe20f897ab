"""What a newcomer has for tasks of docs/internals/walk.md besides a shell: a browser's tab, a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import expect, sync_playwright

from cli.pty_user import PtyUser, plain, terminal
from page.conftest import executable, launch
from page.user import User

__all__ = ["at_page", "at_terminal", "expect", "plain"]


class _Address:
    def __init__(self, url: str) -> None:
        self.url = url


@contextmanager
def at_page(url: str, path: str = "/", **settings: Any) -> Iterator[User]:
    """Somebody with the page of a server open; the settings are Playwright's of a browser."""
    with sync_playwright() as playwright, launch(playwright, executable()) as browser:
        context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **settings})
        context.set_default_timeout(120_000)
        user = User(context.new_page(), _Address(url))
        user.page.goto(url + path)
        yield user


@contextmanager
def at_terminal(*arguments: str) -> Iterator[PtyUser]:
    """Somebody at a terminal with the command, on the machine and in the home of the walk."""
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    with terminal({**environment, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}, *arguments) as user:
        yield user
