"""Growth of the library: requests, turns and moving about, in sessions, namespaces, turns and tokens."""

from __future__ import annotations

import atexit
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import perdure
from bench.growing.measure import LINEAR, Operation, growing, new_folder, opened, prompt
from bench.harness import Figure, Gauge, Run, at_most
from perdure import Message, Session, Turn
from perdure.sessions.sessions import Sessions
from perdure.sessions.store.sqlite.store import SqliteStore

ASK: dict[str, Any] = {"max_tokens": 1, "temperature": 0}


def chain(turns: int, *, fold: bool = False, system: str = "Be brief.") -> list[Turn]:
    """A start and so many turns of a few words; with `fold`, a summary of them and one turn more."""
    found = [Turn(kind="start", messages=(Message(role="system", content=system),))]
    for number in range(turns):
        found.append(_turn(f"Message {number}", found[-1]))
    if fold:
        said = (Message(role="system", content="A summary."),)
        found.append(Turn(kind="fold", messages=said, before=found[-1].digest))
        found.append(_turn("And then?", found[-1]))
    return found


def _turn(text: str, before: Turn) -> Turn:
    return Turn(
        kind="turn",
        messages=(Message(role="user", content=text),),
        reply=Message(role="assistant", content="Yes."),
        finish_reason="stop",
        before=before.digest,
    )


def fill(store: SqliteStore, names: Iterator[tuple[str, str]], turns: Sequence[Turn]) -> None:
    """Sessions of the same few turns, all in one transaction."""
    with store._writing(""):
        for namespace, name in names:
            store._create(namespace, name, turns)


_prepared: dict[tuple[int, bool], Path] = {}
_preparing = ExitStack()
atexit.register(_preparing.close)


def talked(size: int, cleanup: ExitStack, *, namespaces: bool = False) -> perdure.Runtime:
    """A runtime with so many sessions, each in a namespace of its own if wanted. They are written once, and
    copied for each operation that is measured."""
    key = size, namespaces
    if key not in _prepared:
        folder = new_folder(_preparing)
        store = SqliteStore(folder)
        names = ((f"n{n}", "s") if namespaces else ("", f"s{n}") for n in range(size))
        fill(store, names, chain(2))
        store.close()
        _prepared[key] = folder
    folder = new_folder(cleanup)
    shutil.copytree(_prepared[key], folder, dirs_exist_ok=True)
    return opened(cleanup, folder)


def say(session: Session, **settings: Any) -> None:
    """A turn that is taken back, so that the next one finds the session as it was."""
    session.say("Go on", **ASK, **settings)
    session.rewind(1)


def requests(run: Run) -> Iterator[Figure]:
    def generate(size: int, cleanup: ExitStack) -> Operation:
        rt = opened(cleanup)
        for _ in range(size):
            rt.generate(prompt=prompt().tolist(), **ASK)
        return lambda: rt.generate(prompt=prompt().tolist(), **ASK)

    def namespaced(size: int, cleanup: ExitStack) -> Operation:
        rt, numbers = opened(cleanup), count()
        for _ in range(size):
            rt.generate(prompt=prompt().tolist(), namespace=f"n{next(numbers)}", **ASK)
        return lambda: rt.generate(prompt=prompt().tolist(), namespace=f"n{next(numbers)}", **ASK)

    def chat(size: int, cleanup: ExitStack) -> Operation:
        rt, numbers = opened(cleanup), count()

        def one() -> object:
            said = f"Message {next(numbers)}"
            return rt.chat([{"role": "user", "content": said}], namespace=f"n{next(numbers) % 97}", **ASK)

        for _ in range(size):
            one()
        return one

    def length(size: int, cleanup: ExitStack) -> Operation:
        rt = opened(cleanup, n_ctx=1 << 15)
        return lambda: rt.generate(prompt=prompt(size).tolist(), **ASK)

    small = run.pick(20, 5)
    yield growing(run, "a request, earlier requests", generate, small=small)
    yield growing(run, "a request, namespaces", namespaced, small=small)
    yield growing(run, "a chat, earlier requests", chat, small=small)
    yield growing(run, "a request, tokens", length, small=run.pick(200, 100), exponent=LINEAR)


def sessions(run: Run) -> Iterator[Figure]:
    def on_one(use: Callable[[Session, Iterator[int]], object]) -> Callable[[int, ExitStack], Operation]:
        def setting(size: int, cleanup: ExitStack) -> Operation:
            session, numbers = talked(size, cleanup).session("s0"), count()
            session.say("Hello", **ASK)
            return lambda: use(session, numbers)

        return setting

    def first_turn(size: int, cleanup: ExitStack) -> Operation:
        rt, fresh = talked(size, cleanup), count()
        return lambda: rt.session(f"new {next(fresh)}").say("Hello", **ASK)

    def woken(size: int, cleanup: ExitStack) -> Operation:
        rt, numbers = talked(size, cleanup), count()
        return lambda: say(rt.session(f"s{next(numbers) * 7919 % size}"))

    def by_name(size: int, cleanup: ExitStack) -> Operation:
        rt = talked(size, cleanup)
        return lambda: rt.session("s0")

    def listed(size: int, cleanup: ExitStack) -> Operation:
        rt = talked(size, cleanup)
        return lambda: rt.sessions.list(limit=5, after=f"s{size // 2}")

    def lookup(size: int, cleanup: ExitStack) -> Operation:
        rt = talked(size, cleanup)
        made = [rt.session(f"s{number}").label("x").address for number in range(size)]
        return lambda: rt.memories.get(made[size // 2])

    def in_namespaces(size: int, cleanup: ExitStack) -> Operation:
        rt, numbers = talked(size, cleanup, namespaces=True), count()
        return lambda: say(rt.session("s", namespace=f"n{next(numbers) * 7919 % size}"))

    small = run.pick(100, 10)
    yield growing(run, "the first turn of a new session, sessions", first_turn, small=small)
    yield growing(run, "a turn of any session, sessions", woken, small=small)
    # More than are visited: at every size, each turn is the first of its namespace, whose prompt is computed.
    some = run.pick(200, 60)
    yield growing(run, "a turn of any namespace, namespaces", in_namespaces, small=some)
    yield growing(run, "a turn and back, sessions", on_one(lambda s, _: say(s)), small=small)
    yield growing(run, "fork, sessions", on_one(lambda s, n: s.fork(f"f{next(n)}")), small=small)
    yield growing(run, "edit, sessions", on_one(lambda s, _: s.edit(s.turns, "Else", **ASK)), small=small)
    yield growing(run, "label, sessions", on_one(lambda s, n: s.label(f"l{next(n)}")), small=small)
    yield growing(run, "opening a session by name, sessions", by_name, small=small)
    yield growing(run, "a page of sessions, sessions", listed, small=small)
    yield growing(run, "a memory by its address, memories", lookup, small=run.pick(30, 5))


def turns(run: Run) -> Iterator[Figure]:
    small = run.pick(100, 20)

    def long(
        size: int, cleanup: ExitStack, *, fold: bool, n_ctx: int = 2048
    ) -> tuple[perdure.Runtime, Session]:
        rt = opened(cleanup, n_ctx=n_ctx)
        rt.sessions.store.create("", "a", chain(size, fold=fold))
        return rt, rt.session("a")

    def used(use: Callable[[Session, Iterator[int]], object], *, fold: bool = True, n_ctx: int = 2048) -> Any:
        def setting(size: int, cleanup: ExitStack) -> Operation:
            _, session = long(size, cleanup, fold=fold, n_ctx=n_ctx)
            numbers = count()
            use(session, numbers)
            return lambda: use(session, numbers)

        return setting

    def first(use: Callable[[Session, Iterator[int]], object], *, fold: bool = True) -> Any:
        """The first use of a session that nobody has at hand."""

        def setting(size: int, cleanup: ExitStack) -> Operation:
            rt, _ = long(size, cleanup, fold=fold)
            numbers = count()

            def fresh() -> None:
                use(Session(rt.sessions, rt.sessions.store.find("", "a")), numbers)

            return fresh

        return setting

    def edit(session: Session, _: Iterator[int]) -> None:
        session.edit(session.turns, "Else", **ASK)

    def fork(session: Session, numbers: Iterator[int]) -> None:
        session.fork(f"f{next(numbers)}")

    def fork_back(session: Session, numbers: Iterator[int]) -> None:
        session.fork(f"g{next(numbers)}", turn=session.turns - 3)

    yield growing(run, "say and rewind, turns before a fold", used(lambda s, _: say(s)), small=small)
    leaving_out = used(lambda s, _: say(s, overflow="drop_oldest"), fold=False)
    yield growing(run, "say and rewind, turns of which most are left out", leaving_out, small=100)
    reading_all = used(lambda s, _: say(s), fold=False, n_ctx=1 << 17)
    yield growing(
        run, "say and rewind, turns that are all read", reading_all, small=run.pick(20, 5), exponent=LINEAR
    )
    yield growing(run, "edit, turns before a fold", used(edit), small=small)
    yield growing(run, "fork, turns", used(fork, fold=False), small=small)
    yield growing(run, "label, turns", used(lambda s, n: s.label(f"l{next(n)}"), fold=False), small=small)
    at_once = first(lambda s, _: say(s))
    yield growing(run, "say at once after opening, turns before a fold", at_once, small=small)
    yield growing(run, "fork at once after opening, turns", first(fork, fold=False), small=small)
    yield growing(run, "fork back after opening, turns", first(fork_back, fold=False), small=small)


def long_session(run: Run) -> Iterator[Figure]:
    """A session of 10,000 turns, in seconds."""
    size = run.pick(10_000, 1_000)
    with ExitStack() as cleanup:
        folders = []
        for turns_there in (10, size):
            folder = new_folder(cleanup)
            with Sessions(folder) as made:
                made.store.create("", "a", chain(turns_there))
            folders.append(folder)

        def opening(folder: Path) -> Callable[[], float]:
            def seconds() -> float:
                with Sessions(folder) as found:
                    started = time.perf_counter()
                    session = found.open("a", system="Be brief.")
                    session.history(after=session.turns - 5)
                    return time.perf_counter() - started

            return seconds

        yield run.compare(
            f"opening a session of {size:,} turns by name and system message, with its last turns",
            ours=opening(folders[1]),
            peer=opening(folders[0]),
            against="of 10",
            unit="s",
            gauge=Gauge.GROWTH,
            target=at_most(0.1, "s"),
            repeats=run.pick(15, 5),
        )
