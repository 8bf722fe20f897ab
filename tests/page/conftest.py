"""A real browser, and servers for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Error, Page, Playwright, sync_playwright

from page.gates import PatientTurnstile
from page.user import PATIENCE, Served, User
from page.words import open_words
from server.live_server import LiveServer, live_server

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def executable() -> str | None:
    named = os.environ.get("PLAYWRIGHT_CHROMIUM_EXECUTABLE_PATH")
    return named or next((found for name in _NAMES if (found := shutil.which(name))), None)


def launch(playwright: Playwright, path: str | None) -> Browser:
    # As root, which containers run as, Chromium starts only without its sandbox.
    args = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
    return playwright.chromium.launch(executable_path=path, args=args)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium. Where there is none, or where it cannot start, what needs it is skipped and says why."""
    with sync_playwright() as playwright:
        try:
            started = launch(playwright, executable())
        except Error as error:
            reason = str(error).strip().splitlines()[0]
            pytest.skip(f"no Chromium: install it, or set PLAYWRIGHT_CHROMIUM_EXECUTABLE_PATH ({reason})")
        yield started
        started.close()


@pytest.fixture(scope="module")
def gate() -> PatientTurnstile:
    return PatientTurnstile(is_open=True)


@pytest.fixture(autouse=True)
def opened_gate(request: pytest.FixtureRequest) -> Iterator[None]:
    """What one test leaves held does not hold the next one."""
    yield
    if "gate" in request.fixturenames:
        request.getfixturevalue("gate").open()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, gate: PatientTurnstile) -> Iterator[LiveServer]:
    """A server with a store on the toy engine, whose steps wait at the `gate`."""
    store = tmp_path_factory.mktemp("store")
    with open_words(gate=gate, store=store) as rt, live_server(rt) as server:
        yield server
        gate.open()


OpenPage = Callable[..., User]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """`open_page(server)` is somebody who has the page of that server open. Each has a browser of their own,
    unless one says whose tab it is. At the end nothing may have gone wrong in any of them."""
    opened: list[User] = []

    def open_(
        server: Served,
        path: str = "/",
        *,
        beside: User | None = None,
        titles: bool = False,
        **settings: Any,
    ) -> User:
        if beside is not None:
            context = beside.page.context
        else:
            context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **settings})
            context.set_default_timeout(PATIENCE)
            if not titles:
                # The first words are what a test can know, and nothing else may reach a gate.
                context.add_init_script(
                    # A frame without an origin has no storage.
                    "try { localStorage.setItem('perdure-titles', 'off') } catch {}"
                )
        page: Page = context.new_page()
        user = User(page, server)
        opened.append(user)
        page.goto(server.url + path)
        return user

    yield open_
    try:
        for user in opened:
            user.check()
    finally:
        for user in opened:
            user.page.context.close()


@pytest.fixture
def images() -> Path:
    """Where screenshots go: into the documentation when they are asked for, else nowhere that stays."""
    return Path(__file__).resolve().parents[2] / "docs" / "images"
