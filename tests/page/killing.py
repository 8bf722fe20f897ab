"""Servers that are killed while somebody at their page reads a reply, as `sessions.killing` does to others.

    python -m page.killing '{"surface": "page", "rounds": 20, "seed": 1, "store": "/tmp/s"}'

A round asks in a new tab, ends the server at a random moment, starts another one at its port, reloads the
tab, and has the page continue what was interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import perdure
from page.user import letters
from perdure.server.http_server import bind
from sessions.killing import TOKENS, Hunt, forked, open_runtime, server


class _Visitor:
    """The browser's process (`page/visitor.py`)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "page.visitor"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def tell(self, use: str, **values: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": use, **values}) + "\n")
        self._process.stdin.flush()

    def do(self, use: str, **values: Any) -> dict[str, Any]:
        self.tell(use, **values)
        return self._answer()

    def close(self) -> None:
        self.tell("quit")
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert "failed" not in answer, answer["failed"]
        return answer


@contextmanager
def _serving(store: str, port: int, *, slow: bool) -> Iterator[tuple[int, int]]:
    """A server in a fork: its process and its port."""
    listening = bind("127.0.0.1", port)
    listening.listen(64)
    port = listening.getsockname()[1]
    if not (child := os.fork()):
        try:
            server(store, listening, slow=slow, words=True)
        finally:
            os._exit(0)
    listening.close()
    try:
        yield child, port
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@dataclass
class PageHunt(Hunt):
    """Rounds on the page. What is compared of texts there are their letters: Markdown takes spaces."""

    visitor: _Visitor = field(default_factory=_Visitor)
    port: int = 0

    def settings(self, seed: int) -> dict[str, Any]:
        return {"max_tokens": TOKENS, "temperature": 0.9, "seed": seed}

    def _undisturbed(self, question: str, seed: int) -> str:
        with open_runtime(None, words=True) as rt:
            return rt.session("whole").say(question, **self.settings(seed)).text

    def _victim(
        self, name: str, question: str, seed: int, end: signal.Signals, wait: float
    ) -> tuple[str, bool, str]:
        with _serving(self.store, 0, slow=True) as (child, self.port):
            values = {name: str(value) for name, value in self.settings(seed).items()}
            url = f"http://127.0.0.1:{self.port}"
            self.visitor.do("visit", url=url, settings=values, question=question)
            self.visitor.do("send")
            time.sleep(wait)
            os.kill(child, end)
            seen = self.visitor.do("look")
        return seen["name"], seen["box"] == "", seen["text"]

    def _seen(
        self, session: str, sent: str, question: str, seed: int, *, accepted: bool, orderly: bool
    ) -> tuple[str, str]:
        stored = forked(partial(self._stored, session))
        want = self.expected[question, seed]
        with _serving(self.store, self.port, slow=False):
            there = self.visitor.do("reload")
            if question not in (there["question"].strip(), there["box"]):
                return "unasked", f"the question is gone: {there}"
            # What is killed may lose the last second of what it wrote.
            if sent and orderly and not there["text"]:
                return "unasked", f"{sent!r} was read, and of that nothing is there"
            if not there["stored"]:
                if there["pending"] or not there["question"]:
                    # The server never had it: it stands there to be sent again.
                    return "unasked", "" if not (
                        (sent and orderly) or stored["asked"]
                    ) else f"it is lost: {there}"
                same = stored["whole"] == want and letters(there["text"]) == letters(want)
                return "whole", "" if same else f"it has {there['text']!r}"
            kind, part = ("parts" if stored["part"] else "questions"), stored["part"]
            if stored["asked"] != question:
                return kind, f"it was asked {stored['asked']!r}"
            if not want.startswith(part) or letters(there["text"]) != letters(part):
                return kind, f"{part!r} is stored, {there['text']!r} is shown, and it would be {want!r}"
            read = letters(sent)
            if not letters(want).startswith(read) or (orderly and not letters(part).startswith(read)):
                return kind, f"{sent!r} was read, and of that {part!r} is there"
            whole = self.visitor.do("continue")
        after = forked(partial(self._stored, session))
        if after["whole"] != want or after["asked"] or letters(whole["text"]) != letters(want):
            return kind, f"it goes on to {after['whole']!r}, shown as {whole['text']!r}"
        return kind, ""

    def _stored(self, session: str) -> dict[str, str]:
        """What the store has of it: what is asked, the part of its reply, and its reply."""
        answer = {"asked": "", "part": "", "whole": ""}
        with open_runtime(self.store, words=True) as rt:
            try:
                there = rt.sessions.get(session)
            except perdure.PerdureError:
                return answer
            if (info := there.pending) is not None:
                answer |= {"asked": info.messages[-1].content or "", "part": info.text}
            if there.turns:
                answer["whole"] = there.history()[-1].text
        return answer


def main() -> None:
    hunt = PageHunt(**json.loads(sys.argv[1]))
    try:
        print(json.dumps(dataclasses.asdict(hunt.run())))
    finally:
        hunt.visitor.close()


if __name__ == "__main__":
    main()
