"""Somebody at the page while servers come and go, in a process: commands on standard input, a line each.

    {"do": "visit", "url": "http://127.0.0.1:4711", "settings": {"seed": "5"}, "question": "Well"}
    {"do": "send"}        Enter is pressed
    {"do": "look"}        what is seen once the reply has ended, or broke off
    {"do": "reload"}      the same after a reload
    {"do": "continue"}    Continue is pressed, and the whole reply is waited for
    {"do": "quit"}

Each is answered by a line of JSON. Who kills servers is forked often and has no threads; a browser has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Browser, BrowserContext, expect, sync_playwright

from page.conftest import executable, launch
from page.user import PATIENCE, User

_OVER = """() => {
    const turn = document.querySelector('article.turn');
    if (!turn) return document.querySelector('textarea')?.value !== '';
    return !turn.matches('.pending') || turn.querySelector('[role=alert]') !== null;
}"""
"""The turn is kept, or broke off; or there is none, and the message is where it was written."""


class Visitor:
    """One tab at a time, the first conversation in it."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._context: BrowserContext | None = None
        self._user: User

    def visit(self, url: str, settings: dict[str, str], question: str) -> dict[str, Any]:
        if self._context is not None:
            self._context.close()
        self._context = self._browser.new_context(viewport={"width": 1280, "height": 860})
        self._context.set_default_timeout(PATIENCE)
        self._user = User(self._context.new_page(), _Address(url))
        self._user.page.goto(url)
        self._user.set(**settings)
        self._user.write(question)
        return {}

    def send(self) -> dict[str, Any]:
        self._user.page.keyboard.press("Enter")
        return {}

    def look(self) -> dict[str, Any]:
        user = self._user
        user.page.wait_for_function(_OVER)
        pending = user.pending.count() > 0
        text = user.written if pending else user.said
        shown = user.page.locator("article.turn .said.user")
        return {
            "name": user.name,
            "question": shown.first.inner_text().splitlines()[-1] if shown.count() else "",
            "box": user.page.get_by_label("Message", exact=True).input_value(),
            "text": (text.text_content() or "") if text.count() else "",
            "pending": pending,
            "stored": user.button("Continue", user.pending).count() > 0,
        }

    def reload(self) -> dict[str, Any]:
        self._user.page.reload()
        return self.look()

    def resume(self) -> dict[str, Any]:
        user = self._user
        user.button("Continue", user.pending).click()
        expect(user.pending).to_have_count(0)
        return self.look()


class _Address:
    def __init__(self, url: str) -> None:
        self.url = url


def main() -> None:
    with sync_playwright() as playwright, launch(playwright, executable()) as browser:
        visitor = Visitor(browser)
        uses: dict[str, Callable[..., dict[str, Any]]] = {
            "visit": visitor.visit,
            "send": visitor.send,
            "look": visitor.look,
            "reload": visitor.reload,
            "continue": visitor.resume,
        }
        print("{}", flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            if (use := command.pop("do")) == "quit":
                return
            try:
                answer = uses[use](**command)
            except Exception as error:
                answer = {"failed": f"{use}: {error}"}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
