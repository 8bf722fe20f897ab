"""Counts the modules that one chat message and one block of state pass.

`python -m tools.hops` prints them in the order in which a function of each first ran, between asking and the
answer. What runs once, when something is opened, is not counted.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

import perdure
from perdure.engine.toy import ToyModel
from perdure.server.app import served
from perdure.server.app_state import AppState

_seen: dict[str, None] = {}
_watching = threading.Event()


def _profile(frame: FrameType, event: str, _: Any) -> None:
    name = frame.f_globals.get("__name__", "")
    if event == "call" and _watching.is_set() and name.startswith("perdure."):
        _seen.setdefault(name)


@contextmanager
def _profiled() -> Iterator[None]:
    """Threads that are started within are watched, too."""
    threading.setprofile(_profile)
    sys.setprofile(_profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def passed(act: Callable[[], object]) -> list[str]:
    """The modules of which a function ran meanwhile."""
    _seen.clear()
    _watching.set()
    try:
        act()
    finally:
        _watching.clear()
    return list(_seen)


def ways() -> dict[str, list[str]]:
    """What a message passes in the library and over HTTP, and what a block passes to the disk and back."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, _profiled():
        store = Path(folder) / "store"
        with perdure.open(ToyModel(), store=store, n_ctx=2048, slots=1) as rt:
            session = rt.session("a", system="Be terse.")
            for _ in range(2):
                session.say("Hello", max_tokens=4)
            found["a message to a session"] = passed(lambda: session.say("And?", max_tokens=4))
            app = served(AppState(runtime=rt, name="toy"))
            asked = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}

            def ask() -> None:
                async def post() -> None:
                    transport = httpx.ASGITransport(app=app)
                    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                        answer = await client.post("/v1/chat/completions", json=asked)
                        answer.raise_for_status()

                asyncio.run(post())

            ask()
            found["a message over HTTP"] = passed(ask)
            rt.generate("z" * 600, max_tokens=1)

            def sleep_and_wake() -> None:
                session.sleep()
                session.wake()

            found["a block to the disk and back"] = passed(sleep_and_wake)
    return found


def main() -> None:
    for way, modules in ways().items():
        print(f"{way}: {len(modules)} modules")
        for module in modules:
            print(f"  {module.removeprefix('perdure.')}")


if __name__ == "__main__":
    main()
