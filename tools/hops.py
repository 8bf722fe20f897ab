"""Counts the modules that one chat message and one block of state pass.

`python -m tools.hops` prints them in the order in which a function of each first ran, between asking and the
answer. What runs once, when something is opened, is not counted. Those with a star stand between somebody who
asks and where something happens (a template is rendered, a step is computed, a turn is written): they were on
the stack then. The others were called on the way and returned.
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

_ENDS = {
    "Template.render",
    "ToyModel.tokenize",
    "ToyCore.decode",
    "OutputQueue.put",
    "Index.run",
    "DiskTier.store",
    "DiskTier.load",
}
"""Where something happens."""
_seen: dict[str, None] = {}
_between: set[str] = set()
_watching = threading.Event()


def _profile(frame: FrameType, event: str, _: Any) -> None:
    if event == "call" and _watching.is_set() and (name := _module(frame)):
        _seen.setdefault(name)
        if frame.f_code.co_qualname in _ENDS:
            above: FrameType | None = frame
            while above is not None:
                _between.add(_module(above))
                above = above.f_back


def _module(frame: FrameType) -> str:
    name = str(frame.f_globals.get("__name__", ""))
    return name if name.startswith("perdure.") else ""


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


def passed(act: Callable[[], object]) -> dict[str, bool]:
    """The modules of which a function ran meanwhile, and whether they were on the stack at an end."""
    _seen.clear()
    _between.clear()
    _watching.set()
    try:
        act()
    finally:
        _watching.clear()
    return {name: name in _between for name in _seen}


def ways() -> dict[str, dict[str, bool]]:
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
        print(f"{way}: {len(modules)} modules, {sum(modules.values())} of them on the stack")
        for module, between in modules.items():
            print(f"  {module.removeprefix('perdure.')}{' *' if between else ''}")


if __name__ == "__main__":
    main()
