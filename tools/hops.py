"""Counts the modules that one chat message and one block of state pass, and the shapes that a request takes.

`python -m tools.hops` prints the modules in the order in which a function of each first ran, between asking
and the answer. What runs once, when something is opened, is not counted. Those with a star stand between
somebody who asks and where something happens (a template is rendered, a step is computed, a turn is written):
they were on the stack then. The others were called on the way and returned.

A shape of a message is a class, or a dict, that holds its text itself. A shape of a request is a class of
which an object was made for it and holds its seed or its stop, itself or in what it holds; the keywords that
name them, in whatever dict, are one more, and the body that came over HTTP is another.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

import perdure
from perdure.server.app import served
from perdure.server.core.server_state import ServerState
from perdure.testing.toy import ToyModel

_ENDS = {
    "Template.render",
    "ToyModel.tokenize",
    "ToyCore.decode",
    "OutputQueue.push",
    "Index.run",
    "DiskTier.store",
    "DiskTier.load",
}
"""Where something happens."""
TEXT, SEED, STOP = "what no other message says", 987654321, "what no reply says"
_DEPTH = 4
"""How far down a value is looked for in what holds it."""


@dataclass
class Way:
    """What one act passed. Each is kept in the order in which it was first seen."""

    modules: dict[str, bool] = field(default_factory=dict)
    """And whether they were on the stack where something happened."""
    message: dict[str, None] = field(default_factory=dict)
    request: dict[str, None] = field(default_factory=dict)


class Watch:
    """Sees every call while an act is watched, in all threads that are started within."""

    def __init__(self) -> None:
        self._way: Way | None = None
        self._before: set[int] = set()

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def passed(self, act: Callable[[], object]) -> Way:
        """What is passed while `act` runs."""
        gc.collect()
        self._before = {id(each) for each in gc.get_objects() if _is_ours(each)}
        way = self._way = Way()
        try:
            act()
        finally:
            self._way = None
        return way

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        way = self._way
        if event != "call" or way is None or not (name := _module(frame)):
            return
        way.modules.setdefault(name, False)
        if frame.f_code.co_qualname in _ENDS:
            above: FrameType | None = frame
            while above is not None:
                if passed := _module(above):
                    way.modules[passed] = True
                above = above.f_back
        code = frame.f_code
        arguments = (
            code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        )
        for argument in code.co_varnames[:arguments]:
            value = frame.f_locals.get(argument)
            for each in _with_items(value):
                if _is_ours(each) or isinstance(each, Mapping):
                    self._look(each, way)

    def _look(self, value: object, way: Way) -> None:
        parts = list(_parts(value))
        if any(isinstance(part, str) and TEXT in part for part in parts):
            way.message.setdefault(_shape(value))
        if isinstance(value, Mapping):
            if any(_is_asked(each) for part in parts for each in _with_items(part)):
                way.request.setdefault("keywords")
        elif (
            id(value) not in self._before
            and _shape(value) not in way.request
            and self._holds(value, _DEPTH, set())
        ):
            way.request.setdefault(_shape(value))

    def _holds(self, value: object, depth: int, seen: set[int]) -> bool:
        if _is_asked(value):
            return True
        if not depth or id(value) in seen or id(value) in self._before:
            return False
        seen.add(id(value))
        return any(self._holds(part, depth - 1, seen) for part in _parts(value))


def _module(frame: FrameType) -> str:
    name = str(frame.f_globals.get("__name__", ""))
    return name.removeprefix("perdure.") if name.startswith("perdure.") else ""


def _is_ours(value: object) -> bool:
    return str(type(value).__module__).startswith("perdure") and not isinstance(value, type)


def _is_asked(value: object) -> bool:
    return type(value) in (int, str) and value in (SEED, STOP)


def _with_items(value: object) -> list[object]:
    return [value, *value[-8:]] if type(value) in (list, tuple) else [value]  # type: ignore[index]


def _parts(value: object) -> Iterator[object]:
    """What a value holds itself: the values of a dict, the items of a list, the attributes of ours."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif type(value) in (list, tuple):
        yield from value[-8:]  # type: ignore[index]
    elif _is_ours(value):
        yield from getattr(value, "__dict__", {}).values()
        for each in type(value).__mro__:
            slots = each.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    yield getattr(value, name)


def _shape(value: object) -> str:
    if isinstance(value, Mapping):
        return "dict"
    return f"{type(value).__module__.removeprefix('perdure.')}.{type(value).__qualname__}"


def ways() -> dict[str, Way]:
    """What a message passes in the library and over HTTP, and what a block passes to the disk and back."""
    found = {}
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder, watch.everywhere():
        store = Path(folder) / "store"
        with perdure.open(ToyModel(), store=store, n_ctx=2048, slots=1) as rt:
            session = rt.session("a", system="Be terse.")
            for _ in range(2):
                session.say("Hello", max_tokens=4)
            found["a message to a session"] = watch.passed(
                lambda: session.say(TEXT, max_tokens=4, seed=SEED, stop=[STOP])
            )
            app = served(ServerState(runtime=rt, name="toy"))

            def ask(text: str) -> None:
                async def post() -> None:
                    messages = [{"role": "user", "content": text}]
                    asked = {
                        "model": "toy",
                        "messages": messages,
                        "max_tokens": 4,
                        "seed": SEED,
                        "stop": [STOP],
                    }
                    transport = httpx.ASGITransport(app=app)
                    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                        answer = await client.post("/v1/chat/completions", json=asked)
                        answer.raise_for_status()

                asyncio.run(post())

            ask("Hi")
            over_http = found["a message over HTTP"] = watch.passed(lambda: ask(TEXT))
            over_http.request = {"JSON": None, **over_http.request}
            rt.generate("z" * 600, max_tokens=1)

            def sleep_and_wake() -> None:
                session.sleep()
                session.wake()

            found["a block to the disk and back"] = watch.passed(sleep_and_wake)
    return found


def main() -> None:
    for name, way in ways().items():
        print(f"{name}: {len(way.modules)} modules, {sum(way.modules.values())} of them on the stack")
        for module, between in way.modules.items():
            print(f"  {module}{' *' if between else ''}")
        for what, shapes in (("message", way.message), ("request", way.request)):
            if shapes:
                print(f"  shapes of the {what}: {len(shapes)}: {', '.join(shapes)}")


if __name__ == "__main__":
    main()
