"""One store with 100,000 sessions and 1,000,000 blocks, against one with ten."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import numpy as np

import perdure
from bench.growing.measure import SIZE, new_folder
from bench.growing.sessions import ASK, chain, fill
from bench.harness import Figure, Gauge, Run, at_most
from perdure.cache.tiers.disk import DiskTier
from perdure.memory import FullAttention
from perdure.sessions.store.sqlite.store import SqliteStore
from perdure.testing.toy import ToyModel

_LENGTH = 10
"""Blocks one after the other in a chain."""


def large(run: Run) -> Iterator[Figure]:
    sessions, blocks = run.pick((100_000, 1_000_000), (2_000, 20_000))
    with ExitStack() as cleanup:
        folders = {}
        for size, entries in ((10, 100), (sessions, blocks)):
            folders[size] = new_folder(cleanup)
            store = SqliteStore(folders[size])
            fill(store, (("", f"s{number}") for number in range(size)), chain(2))
            store.close()
            enter_blocks(folders[size], entries)
        there = f"with {sessions:,} sessions and {blocks:,} blocks"

        def opening(folder: Path) -> float:
            started = time.perf_counter()
            rt = _open(folder)
            took = time.perf_counter() - started
            rt.close()
            return took

        yield run.compare(
            f"opening a store {there}",
            ours=lambda: opening(folders[sessions]),
            peer=lambda: opening(folders[10]),
            against="with ten",
            unit="s",
            gauge=Gauge.GROWTH,
            target=at_most(0.1, "s"),
            repeats=run.pick(9, 3),
        )

        def first_page(folder: Path) -> float:
            """It waits until the tables were read through, once after opening."""
            with _open(folder) as rt:
                started = time.perf_counter()
                rt.sessions.list(limit=100)
                return time.perf_counter() - started

        yield run.compare(
            f"the first page of 100 sessions after opening {there}",
            ours=lambda: first_page(folders[sessions]),
            peer=lambda: first_page(folders[10]),
            against="with ten",
            unit="s",
            gauge=Gauge.GROWTH,
            target=at_most(1, "s"),
            repeats=run.pick(5, 3),
        )
        full, few = (cleanup.enter_context(_open(folders[size])) for size in (sessions, 10))
        numbers = count(1)

        def turn(rt: perdure.Runtime, size: int) -> Callable[[], float]:
            def milliseconds() -> float:
                name = f"s{next(numbers) * 7919 % size}"
                started = time.perf_counter()
                rt.session(name).say("Hello", **ASK)
                return (time.perf_counter() - started) * 1e3

            return milliseconds

        here, small = turn(full, sessions), turn(few, 10)
        yield run.compare(
            f"a turn of a random session {there}, beyond what it takes with ten",
            ours=lambda: here() - small(),
            peer=small,
            against="with ten",
            unit="ms",
            gauge=Gauge.GROWTH,
            target=at_most(5, "ms"),
            repeats=run.pick(31, 9),
        )

        def page(rt: perdure.Runtime, after: str) -> Callable[[], float]:
            def milliseconds() -> float:
                started = time.perf_counter()
                rt.sessions.list(limit=100, after=after)
                return (time.perf_counter() - started) * 1e3

            return milliseconds

        yield run.compare(
            f"a page of 100 sessions {there}",
            ours=page(full, f"s{sessions // 2}"),
            peer=page(few, "s9"),
            against="with ten",
            unit="ms",
            gauge=Gauge.GROWTH,
            target=at_most(10, "ms"),
            repeats=run.pick(31, 9),
        )


def _open(folder: Path) -> perdure.Runtime:
    return perdure.open(ToyModel(FullAttention), n_ctx=512, slots=2, template="chatml", store=folder)


def enter_blocks(folder: Path, number: int) -> None:
    """List blocks in chains, without their files: opening and looking up read the index alone."""
    disk = DiskTier(folder, budget=1 << 50)
    dice = np.random.default_rng(16)

    def rows() -> Iterator[tuple[object, ...]]:
        for made in range(number):
            if made % _LENGTH == 0:
                parent = dice.bytes(32)
                ids = dice.integers(0, 250, (_LENGTH, SIZE), np.int32).astype("<i4")
            data = ids[made % _LENGTH].tobytes()
            name = hashlib.sha256(parent + data).digest()
            yield name, parent, made % _LENGTH * SIZE, data, 0, 1000, made, made % _LENGTH == _LENGTH - 1
            parent = name

    with disk.table.writing():
        for row in rows():
            disk.index.run("INSERT INTO block VALUES (?, ?, ?, ?, ?, ?, ?, ?)", *row)
        disk.table._count, disk.table.nbytes = number, 1000 * number
    disk.close()
