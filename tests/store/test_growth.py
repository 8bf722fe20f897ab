"""What the store does for one block, and to be opened, does not grow with what it holds.

Counted as work: statements that are run, and rows that are read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counting import sql_of
from perdure.cache.block import Block, BlockId, chain
from perdure.cache.prefix_search import ANY_TOKEN
from perdure.cache.tiers.codec import Encryption
from perdure.cache.tiers.disk import DiskTier
from perdure.cache.tiers.memory import MemoryTier
from perdure.cache.tiers.tiered import Tiers
from perdure.cache.tiers.write_behind import WriteBehind
from perdure.errors import StoreDamagedError
from perdure.sessions.sessions import Sessions
from perdure.store.index import Index

SIZE = 16
ROOT = BlockId(bytes(32))
SIZES = (10, 500)


def block(number: int) -> Block:
    tokens = np.array([1, 2, 3, *np.random.default_rng(number).integers(4, 250, SIZE - 3)], np.int32)
    return Block.make(ROOT, 0, tokens, np.zeros((SIZE, 4), np.uint8), None)


def filled(folder: Path, size: int, encryption: Encryption | None = None) -> DiskTier:
    disk = DiskTier(folder, budget=1 << 40, encryption=encryption)
    with disk.table.writing():
        # Without their files: what is counted is what the index does.
        for number in range(size):
            disk.table.add(block(number), 1000, used=number)
    return disk


def full(disk: DiskTier) -> None:
    disk.budget = disk.nbytes
    disk.store([block(-1 & 0xFFFF)])


def lookup(disk: DiskTier) -> None:
    with closing(WriteBehind(disk)) as behind:
        tiers, tokens = Tiers(MemoryTier(0), [behind]), block(77_777).tokens
        hit = tiers.longest_prefix(ROOT, chain(ROOT, tokens, SIZE), tokens, size=SIZE, rule=ANY_TOKEN)
    assert hit.length >= 3


USES: dict[str, Callable[[DiskTier], Any]] = {
    "look up": lookup,
    "store": lambda disk: disk.store([block(88_888)]),
    "store in a full one": full,
    "drop": lambda disk: disk.drop([block(3).id]),
    "how much there is": lambda disk: (len(disk), disk.nbytes),
    "a page": lambda disk: disk.page(limit=5, after="01" * 32),
    "open": lambda disk: DiskTier(disk.folder, budget=1 << 40, readonly=True).close(),
}


@pytest.mark.parametrize("use", USES)
def test_the_index_does_as_much_for_many_blocks(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = []
    for size in SIZES:
        disk = filled(tmp_path / str(size), size)
        with sql_of(monkeypatch) as sql:
            USES[use](disk)
        disk.close()
        costs.append((sql.statements, sql.rows))
    assert costs[0][0] == costs[1][0]
    # Where few are kept, there may be none on one side of a prompt.
    assert costs[0][1] <= costs[1][1] <= costs[0][1] + 1


PLANS = {
    "SELECT id FROM block WHERE parent = ? AND tokens >= ? ORDER BY tokens LIMIT 1": "block_follows",
    "SELECT id FROM block WHERE leaf = 1 ORDER BY used LIMIT ?": "block_leaf",
}


@pytest.mark.parametrize("query", PLANS)
def test_rows_are_found_through_an_index(query: str, tmp_path: Path) -> None:
    """A count of rows does not show those that SQLite looks at and leaves."""
    disk = filled(tmp_path, 3)
    plan = disk.index.rows(f"EXPLAIN QUERY PLAN {query}", *([b""] * query.count("?")))
    assert PLANS[query] in plan[0][-1]
    assert not any("SCAN" in row[-1] and "USING" not in row[-1] for row in plan)
    assert not any("TEMP B-TREE" in row[-1] for row in plan)
    disk.close()


class Held:
    """A check of tables that takes as long as a test wants."""

    def __init__(self, patching: pytest.MonkeyPatch, *, damaged: bool = False) -> None:
        self.go_on = threading.Event()
        check = Index.check

        def held(index: Index, table: str | None = None, reader: Any = None) -> None:
            if table == "session":
                assert self.go_on.wait(60)
                if damaged:
                    raise StoreDamagedError("the index is damaged (row 1 missing from index)")
            check(index, table, reader)

        patching.setattr(Index, "check", held)


def test_opening_waits_for_no_check_of_tables_and_a_new_name_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there proves itself; what seems not to be there is not made anew before all was looked at."""
    with Sessions(tmp_path) as sessions:
        sessions.create("known").label("x")
        sessions.create("other")
    held = Held(monkeypatch)
    with Sessions(tmp_path) as sessions:
        assert sessions.get("known").turns == 0
        waiting = [
            threading.Thread(target=use)
            for use in (
                lambda: sessions.open("new"),
                sessions.list,
                sessions.memories.search,
                lambda: sessions.delete("other"),
            )
        ]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join(0.05)
        still = [thread.is_alive() for thread in waiting]
        held.go_on.set()
        for thread in waiting:
            thread.join(60)
        assert still == [True] * 4
        assert {info.name for info in sessions.list()} == {"known", "new"}


def test_damage_that_a_check_finds_later_is_refused_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Sessions(tmp_path) as sessions:
        sessions.create("known")
    held = Held(monkeypatch, damaged=True)
    with Sessions(tmp_path) as sessions:
        known = sessions.get("known")
        held.go_on.set()
        for use in (lambda: sessions.open("new"), sessions.list, sessions.memories.search):
            with pytest.raises(StoreDamagedError):
                use()
        with pytest.raises(StoreDamagedError):
            known.label("x")


def test_a_store_is_closed_while_its_tables_are_checked(tmp_path: Path) -> None:
    with Sessions(tmp_path) as sessions:
        for number in range(50):
            sessions.create(f"s{number}")
    for _ in range(20):
        Sessions(tmp_path).close()
