"""Sessions that sleep: what it takes to wake one, to keep many, and to keep them at all."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from bench.child import Child
from bench.engine import model_path
from bench.harness import Bench, Figure, Gauge, Pairs, Run, at_least, at_most
from bench.machine import Watch
from bench.processes.sleepers import Folders, forget_pages, size
from bench.turns import SYSTEM

THREADS = 2
_SENTENCE = "The harbour lies still this morning, and the ferry comes in at ten past nine with the mail. "


def wake(run: Run) -> Iterator[Figure]:
    """The first token of a session in a new process, from the call of `wake`, against computing it."""
    text = _SENTENCE * run.pick(102, 12)
    with _folders() as folders, ExitStack() as held:
        store = folders.new()
        with Child("bench.processes.sleepers", "ours") as child:
            child.ask("open", path=model_path(), threads=THREADS, folder=str(store))
            tokens = child.ask("sleep", text=text)
            child.ask("close")
        computing = held.enter_context(Child("bench.processes.sleepers", "ours"))
        computing.ask("open", path=model_path(), threads=THREADS, folder=None)
        with Watch() as watch:
            afresh = computing.ask("compute", text=text) * 1e3
        for cold, target in ((True, at_least(50)), (False, at_least(150))):
            took = []
            for _ in range(run.pick(7, 3)):
                took.append(_woken("ours", folders.copy(store), text, cold=cold))
            yield Figure(
                name=f"first token of a session of {tokens:,} tokens, {'cold' if cold else 'warm'} pages",
                against="computing it",
                unit="ms",
                gauge=Gauge.COST,
                pairs=Pairs(tuple(took), tuple([afresh] * len(took))),
                target=target if not run.quick else at_least(1),
                machine=watch.machine,
            )


def peers(run: Run) -> Iterator[Figure]:
    """The same for llama-cpp-python's disk cache and llama-server's saved slots, warm pages."""
    text = _SENTENCE * run.pick(102, 12)
    with _folders() as folders:
        stores = {}
        for kind in ("ours", "llama-cpp-python", "llama-server"):
            stores[kind] = folders.new()
            with Child("bench.processes.sleepers", kind) as child:
                child.ask("open", path=model_path(), threads=THREADS, folder=str(stores[kind]))
                child.ask("sleep", text=text)
                child.ask("close")
        for kind, name in (
            ("llama-cpp-python", "llama-cpp-python with LlamaDiskCache"),
            ("llama-server", "llama-server restoring a slot"),
        ):
            ours, peer = [], []
            with Watch() as watch:
                for _ in range(run.pick(5, 2)):
                    ours.append(_woken("ours", folders.copy(stores["ours"]), text, cold=False))
                    peer.append(_woken(kind, folders.copy(stores[kind]), text, cold=False))
            yield Figure(
                name="first token of the same session, woken",
                against=name,
                unit="ms",
                gauge=Gauge.COST,
                pairs=Pairs(tuple(ours), tuple(peer)),
                # Beside it, to compare: a slot's file is one read, without blocks, checks or sharing.
                target=at_least(0),
                machine=watch.machine,
            )


def many(run: Run) -> Iterator[Figure]:
    """Many sessions that begin alike: bytes on the disk, and the time to open the store and find one."""
    count = run.pick(1000, 20)
    prefix = (SYSTEM.format(number=1) + " ") * run.pick(5, 1) + _SENTENCE * run.pick(3, 0)
    with _folders() as folders:
        store = folders.new()
        with Child("bench.processes.sleepers", "ours") as child:
            child.ask("open", path=model_path(), threads=THREADS, folder=str(store), n_ctx=1792)
            with Watch() as watch:
                tokens = child.ask("many", prefix=prefix, count=count)["tokens"]
            child.ask("close")
        stored, states = size(store) / 1e6, tokens * _token_bytes() / 1e6
        yield Figure(
            name=f"{count:,} sessions with a beginning of {tokens // count:,} tokens in common, on the disk",
            against="the sum of their states",
            unit="MB",
            gauge=Gauge.GROWTH,
            pairs=Pairs((stored,), (states,)),
            target=at_most(0.1 if not run.quick else 1),
            machine=watch.machine,
        )
        took = []
        with Watch() as watch:
            for number in range(run.pick(9, 3)):
                forget_pages(store)
                took.append(_found(store, str(number)) * 1e3)
        yield Figure(
            name=f"opening that store and finding one of {count:,} sessions, cold pages",
            against="50 ms",
            unit="ms",
            gauge=Gauge.COST,
            pairs=Pairs(tuple(took), tuple([50.0] * len(took))),
            target=at_most(50, "ms"),
            machine=watch.machine,
        )


def durability(run: Run) -> Iterator[Figure]:
    """A turn that somebody waits for, kept on the disk, against the same turn in memory."""
    with _folders() as folders, ExitStack() as held:
        sides = []
        for folder in (str(folders.new()), None):
            child = held.enter_context(Child("bench.processes.sleepers", "ours"))
            child.ask("open", path=model_path(), threads=THREADS, folder=folder)
            child.ask("turn", number=0)
            sides.append(child)
        numbers = iter(range(1, 10_000))
        kept, unkept = sides
        yield run.compare(
            "a turn of 32 tokens, kept on the disk",
            ours=lambda: kept.ask("turn", number=next(numbers)) * 1e3,
            peer=lambda: unkept.ask("turn", number=next(numbers)) * 1e3,
            against="in memory",
            unit="ms",
            gauge=Gauge.COST,
            target=at_least(0.98),
            repeats=run.pick(31, 7),
        )


main = Bench("wake", (wake, peers, many, durability))


def _folders() -> Folders:
    # Not in /tmp, which may be memory: sessions are kept in a home.
    return Folders(Path(tempfile.mkdtemp(prefix=".perdure-bench-", dir=Path.home())))


def _woken(kind: str, store: Path, text: str, *, cold: bool) -> float:
    """In a new process that has loaded the model, in ms."""
    with Child("bench.processes.sleepers", kind) as child:
        child.ask("open", path=model_path(), threads=THREADS, folder=str(store))
        if cold:
            forget_pages(store)
        took: float = child.ask("wake", text=text)
        child.ask("close")
        return took * 1e3


def _found(store: Path, name: str) -> float:
    from perdure.cache.tiers.disk import DiskTier
    from perdure.sessions.store.sqlite.store import SqliteStore

    started = time.perf_counter()
    with closing(DiskTier(store, budget=1 << 40)), closing(SqliteStore(store)) as sessions:
        sessions.chain(sessions.find("", name).head, name)
        return time.perf_counter() - started


def _token_bytes() -> int:
    """What a token's state takes in this model."""
    from perdure import Model

    with Model(model_path()) as model, model.context(n_ctx=256, n_seq=1) as context:
        context.decode(list(range(100, 200)))
        more = len(context.save())
        context.truncate(50)
        return (more - len(context.save())) // 50


if __name__ == "__main__":
    sys.exit(main())
