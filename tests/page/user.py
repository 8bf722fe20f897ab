"""Somebody who uses the page, by what can be seen and pressed there."""

from __future__ import annotations

import re
from typing import Protocol

from playwright.sync_api import ConsoleMessage, Dialog, Locator, Page, Request, expect

PATIENCE = 60_000
"""Milliseconds after which something that was waited for has not come. None is meant to take so long."""
expect.set_options(timeout=PATIENCE)


class Served(Protocol):
    """Something that serves the page."""

    @property
    def url(self) -> str: ...


class User:
    """One tab. It remembers what went wrong in it, and every request that did not go to its own server."""

    def __init__(self, page: Page, server: Served) -> None:
        self.page = page
        self.server = server
        self.wrong: list[str] = []
        # A name that is taken: the page tries the next one.
        self.expected: list[str] = [r"status of 409 "]
        """Patterns of what may be told on the console."""
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("console", self._console)
        page.on("request", self._request)
        page.on("dialog", self._dialog)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(f"console: {message.text}")

    def _dialog(self, dialog: Dialog) -> None:
        self.wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Request) -> None:
        if not request.url.startswith((f"{self.server.url}/", "blob:", "data:")):
            self.wrong.append(f"request: {request.url}")

    def check(self) -> None:
        """Nothing went wrong but what the test has provoked."""
        left = [each for each in self.wrong if not any(re.search(known, each) for known in self.expected)]
        assert not left, left

    # What there is.

    @property
    def turns(self) -> Locator:
        return self.page.locator("article.turn")

    @property
    def replies(self) -> Locator:
        return self.page.locator("article.turn:not(.pending) .said.assistant")

    @property
    def pending(self) -> Locator:
        """The turn that is on its way, or that failed."""
        return self.page.locator("article.pending")

    @property
    def written(self) -> Locator:
        """The text of the reply that is on its way."""
        return self.pending.locator(".assistant .markdown")

    @property
    def said(self) -> Locator:
        """The text of the last reply that was kept."""
        return self.replies.last.locator(".markdown")

    def turn(self, number: int) -> Locator:
        return self.page.locator(f"#turn-{number}")

    def button(self, name: str, within: Locator | None = None) -> Locator:
        return (within or self.page).get_by_role("button", name=name, exact=True)

    @property
    def name(self) -> str:
        """Of the conversation that is open."""
        return self.page.evaluate("decodeURIComponent(location.hash.split('/')[2] ?? '')")  # type: ignore[no-any-return]

    # What one does.

    def write(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)

    def say(self, text: str) -> None:
        self.write(text)
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> str:
        """Say something and wait until the turn is kept: the text of its reply."""
        before = self.replies.count()
        self.say(text)
        expect(self.replies).to_have_count(before + 1)
        expect(self.pending).to_have_count(0)
        return self.said.text_content() or ""

    def choose(self, label: str, option: str) -> None:
        """Take one of several, in a choice that has that label."""
        self.page.get_by_role("combobox", name=label, exact=True).click()
        self.page.get_by_role("option", name=option, exact=True).click()

    def pick(self, menu: str, item: str) -> None:
        """Take an item of the menu under a button."""
        self.button(menu).click()
        self.page.get_by_role("menu").locator("[role^=menuitem]").filter(has_text=item).first.click()

    def show_branches(self) -> Locator:
        self.button("Show branches").click()
        return self.page.locator("#branches")

    def show_reuse(self, number: int) -> Locator:
        """Open the line under a reply that says what was reused."""
        line = self.turn(number).locator(".reuse-line")
        line.click()
        return self.turn(number).locator(".reuse")

    def look_inside(self, number: int) -> None:
        self.button("Look inside", self.show_reuse(number)).click()

    def set(self, **settings: str) -> None:
        """Fill fields of the settings, by their names in the form."""
        self.button("Settings").click()
        for name, value in settings.items():
            self.page.locator(f"dialog input[name={name}]").fill(value)
        self.button("Done").click()


def letters(text: str) -> str:
    """What no Markdown changes of a text: a toy writes anything, marks of emphasis too."""
    return "".join(filter(str.isalnum, text))
