"""Several tiers in order: memory, disk, and one that is made up here, whatever the last one does."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perdure
from perdure import Sampling
from perdure.backend import BlockStorage, LocalBackend
from perdure.cache.block import Block, BlockId, BlockMeta
from perdure.cache.prefix_search import ANY_TOKEN, AT_TAIL_STATES, key_of
from perdure.cache.tiers.base import BlockTier
from perdure.cache.tiers.disk import DiskTier
from perdure.cache.tiers.memory import MemoryTier
from perdure.cache.tiers.tiered import Tiers
from perdure.cache.tiers.write_behind import WriteBehind
from perdure.decode.request import KeptPrefix, Request, ReuseReport
from perdure.decode.stream import Stream, one_request
from perdure.engine_config import EngineConfig
from perdure.errors import CorruptStateError, StoreError
from perdure.testing.toy import ToyModel
from store.chains import SIZE, block, chain, root, same
from store.chains import size as file_size

PLENTY = 1 << 30


class ShelfTier(BlockTier):
    """Blocks as packed bytes in a dict, as a remote store would have them. It fails or hangs when told to."""

    name = "shelf"
    patience: float | None = 60

    def __init__(self, budget: int = PLENTY) -> None:
        super().__init__()
        self.budget = budget
        self.files: dict[BlockId, bytes] = {}
        self.metas: dict[BlockId, BlockMeta] = {}
        self.error: Exception | None = None
        self.let_through = threading.Event()
        self.let_through.set()
        self.loads = 0

    def hang(self) -> None:
        self.patience = 0.1
        self.let_through.clear()

    def go_on(self) -> None:
        """Answer again, once the calls that were given up have returned."""
        self.patience = 60
        self.let_through.set()
        for thread in threading.enumerate():
            if thread.name == "perdure-shelf-call":
                thread.join()

    def _answer(self) -> None:
        self.let_through.wait()
        if self.error is not None:
            raise self.error

    @property
    def nbytes(self) -> int:
        return sum(len(data) for data in self.files.values())

    def lookup(self, block: BlockId) -> BlockMeta | None:
        self._answer()
        return self.metas.get(block)

    def children(self, parent: BlockId, *, start: bytes = b"", back: bool = False) -> Iterator[BlockMeta]:
        self._answer()
        keys: list[tuple[bytes, BlockId]] = []
        for meta in self.metas.values():
            if meta.parent == parent:
                insort(keys, (key_of(meta.tokens), meta.id))
        at = bisect_left(keys, (start, b"\xff" * 32 if back else b""))
        for _, name in reversed(keys[:at]) if back else keys[at:]:
            yield self.metas[name]

    def load(self, block: BlockId) -> Block | None:
        self._answer()
        self.loads += 1
        try:
            return Block.unpack(self.files[block], block)
        except (KeyError, CorruptStateError):
            return None

    def store(self, blocks: Sequence[Block]) -> int:
        self._answer()
        stored = 0
        for each in blocks:
            data = b"".join(each.pack())
            if each.start and each.parent not in self.files:
                continue
            while self.nbytes + len(data) > self.budget and self._drop_leaf(spared={each.parent}):
                pass
            if self.nbytes + len(data) <= self.budget:
                self.files[each.id] = data
                self.metas[each.id] = BlockMeta(
                    each.id, each.parent, each.start, each.tokens, each.has_tail_state, len(data), self.name
                )
                stored += 1
        return stored

    def _drop_leaf(self, spared: set[BlockId]) -> bool:
        parents = {meta.parent for meta in self.metas.values()} | spared
        leaf = next((name for name in self.files if name not in parents and not self.pinned(name)), None)
        if leaf is not None:
            self.forget([leaf])
        return leaf is not None

    def drop(self, blocks: Iterable[BlockId], prefixes: Iterable[KeptPrefix] = ()) -> None:
        self._answer()
        left = list(blocks)
        for name in left:
            left += [meta.id for meta in self.metas.values() if meta.parent == name]
        self.forget(left)

    def forget(self, blocks: Iterable[BlockId]) -> None:
        for name in blocks:
            self.files.pop(name, None)
            self.metas.pop(name, None)

    def clear(self) -> None:
        self._answer()
        self.files.clear()
        self.metas.clear()

    def close(self) -> None:
        pass


# The tiers by themselves.


@contextmanager
def three(folder: Path, *, memory: int = PLENTY, disk: int = PLENTY, shelf: int = PLENTY) -> Iterator[Three]:
    tiers = Three(folder, memory, disk, shelf)
    try:
        yield tiers
    finally:
        tiers.shelf.go_on()
        for tier in tiers.all.lower:
            tier.close()


class Three:
    def __init__(self, folder: Path, memory: int, disk: int, shelf: int) -> None:
        self.disk, self.shelf = DiskTier(folder, budget=disk), ShelfTier(shelf)
        self.all = Tiers(MemoryTier(memory), [WriteBehind(self.disk), WriteBehind(self.shelf)])

    def flush(self) -> None:
        for tier in self.all.lower:
            tier.flush()

    def find(self, blocks: Sequence[Block], rule: Any = ANY_TOKEN) -> dict[str, int]:
        """What of the sequence of `blocks` is loaded, by tier; all of it is what was stored."""
        tokens = np.concatenate([each.tokens for each in blocks])
        names = [each.id for each in blocks if len(each.tokens) == SIZE]
        hit = self.all.longest_prefix(blocks[0].parent, names, tokens, size=SIZE, rule=rule)
        prefix = self.all.load(hit, rule)
        assert all(same(loaded, each) for loaded, each in zip(prefix.blocks, blocks, strict=False))
        assert sum(prefix.tiers.values()) == prefix.length
        return dict(prefix.tiers)


def test_p5_the_longest_prefix_over_three_tiers_wins_and_each_is_named(tmp_path: Path) -> None:
    blocks = chain(list(range(6 * SIZE)))
    with three(tmp_path) as tiers:
        tiers.shelf.store(blocks)
        tiers.disk.store(blocks[:4])
        for each in blocks[:2]:
            tiers.all.memory.store(each)
        assert tiers.find(blocks) == {"memory": 2 * SIZE, "disk": 2 * SIZE, "shelf": 2 * SIZE}
        # What was read from the last tier is in those before it now.
        assert tiers.find(blocks) == {"memory": 6 * SIZE}
        tiers.flush()
        assert all(tiers.disk.lookup(each.id) is not None for each in blocks)


def test_p5_a_tail_state_in_a_later_tier_is_not_hidden_by_a_block_without_it(tmp_path: Path) -> None:
    """P5: the memory computed a block anew without its tail state; a lower tier still has that."""
    full = chain(list(range(2 * SIZE)), tail_state=9)
    bare = chain(list(range(2 * SIZE)))
    with three(tmp_path) as tiers:
        tiers.shelf.store(full)
        for each in bare:
            tiers.all.memory.store(each)
        tokens = np.concatenate([each.tokens for each in full])
        names = [each.id for each in full]
        hit = tiers.all.longest_prefix(root(), names, tokens, size=SIZE, rule=AT_TAIL_STATES)
        assert hit.length == 2 * SIZE
        prefix = tiers.all.load(hit, AT_TAIL_STATES)
        assert prefix.tail_state is not None
        assert same(prefix.blocks[-1], full[-1])


def test_p6_each_tier_keeps_to_its_own_budget(tmp_path: Path) -> None:
    blocks = chain(list(range(40 * SIZE)))
    room = file_size(blocks[:10])
    with three(tmp_path, memory=5 * blocks[0].nbytes, disk=room, shelf=2 * room) as tiers:
        for each in blocks:
            tiers.all.memory.store(each)
            tiers.all.store_lower([each])
            tiers.flush()
            assert tiers.all.memory.nbytes <= 5 * blocks[0].nbytes
            assert tiers.disk.nbytes <= room
            assert tiers.shelf.nbytes <= 2 * room
        # Leaves go first, so each has the beginning; the largest has most.
        assert len(tiers.shelf.files) == 20
        assert sum(tiers.find(blocks).values()) == 20 * SIZE


@pytest.mark.parametrize("spoilt", ["disk", "shelf", "both"])
def test_p2_a_damaged_copy_is_never_used_and_another_tier_gives_its_own(tmp_path: Path, spoilt: str) -> None:
    """P2, S4: each copy is verified before it is used."""
    blocks = chain(list(range(4 * SIZE)))
    with three(tmp_path) as tiers:
        tiers.all.store_lower(blocks)
        tiers.flush()
        if spoilt != "shelf":
            path = tiers.disk.files.path(blocks[2].id)
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        if spoilt != "disk":
            data = bytearray(tiers.shelf.files[blocks[2].id])
            data[-1] ^= 1
            tiers.shelf.files[blocks[2].id] = bytes(data)
        expected = {"disk": {"disk": 3 * SIZE, "shelf": SIZE}, "both": {"disk": 2 * SIZE}}
        assert tiers.find(blocks) == expected.get(spoilt, {"disk": 4 * SIZE})


def test_s4_what_one_tier_lost_is_written_to_it_again(tmp_path: Path) -> None:
    blocks = chain(list(range(4 * SIZE)))
    with three(tmp_path) as tiers:
        tiers.all.store_lower(blocks)
        tiers.flush()
        tiers.disk.files.path(blocks[1].id).unlink()
        assert tiers.find(blocks) == {"disk": 3 * SIZE, "shelf": SIZE}
        tiers.flush()
        tiers.all.store_lower(blocks)
        tiers.flush()
        assert all(same(tiers.disk.load(each.id), each) for each in blocks)


@pytest.mark.parametrize("error", [StoreError("no route"), OSError("no route"), KeyError("a defect")])
def test_s4_a_tier_that_fails_costs_what_it_holds(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = chain(list(range(4 * SIZE)))
    with three(tmp_path) as tiers:
        tiers.shelf.store(blocks)
        tiers.disk.store(blocks[:2])
        tiers.shelf.error = error
        with caplog.at_level(logging.WARNING, "perdure.store"):
            for _ in range(3):
                assert sum(tiers.find(blocks).values()) == 2 * SIZE
        # Said once, and by name; the others go on.
        assert [record.getMessage() for record in caplog.records] == [
            f"kept state cannot be found: {error}",
        ]
        tiers.all.store_lower(blocks)
        tiers.all.flush()
        assert all(tiers.disk.lookup(each.id) is not None for each in blocks)
        tiers.shelf.error = None
        assert tiers.all.lower[1].lookup(blocks[3].id) is not None


@pytest.mark.parametrize("when", ["looking up", "loading", "writing"])
def test_s4_a_tier_that_hangs_is_asked_nothing_more_until_it_answers(tmp_path: Path, when: str) -> None:
    blocks = chain(list(range(4 * SIZE)))
    with three(tmp_path) as tiers:
        shelf = tiers.all.lower[1]
        tiers.disk.store(blocks[:2])
        if when != "writing":
            tiers.shelf.store(blocks)
        if when == "loading":
            metas = [shelf.lookup(each.id) for each in blocks]
            tiers.shelf.hang()
            assert all(isinstance(meta, BlockMeta) and shelf.load(meta.id) is None for meta in metas)
        tiers.shelf.hang()
        if when == "writing":
            shelf.store(blocks)
            shelf.flush()
        else:
            assert sum(tiers.find(blocks).values()) == 2 * SIZE
        assert "has not answered" in str(shelf.error)
        # Neither a flush nor a drop waits for it for ever; what must not be left undone says so.
        tiers.all.store_lower(blocks)
        tiers.all.flush()
        with pytest.raises(StoreError, match="shelf tier has not answered"):
            shelf.drop([blocks[0].id])
        tiers.shelf.go_on()
        tiers.all.store_lower(blocks)
        shelf.flush()
        assert all(same(shelf.load(each.id), each) for each in blocks)


def test_a_slow_tier_is_left_out_where_computing_is_cheaper(tmp_path: Path) -> None:
    blocks = chain(list(range(6 * SIZE)))
    with three(tmp_path) as tiers:
        tiers.shelf.store(blocks)
        tiers.disk.store(blocks[:4])
        tiers.all.memory.store(blocks[0])
        tokens = np.concatenate([each.tokens for each in blocks])
        names = [each.id for each in blocks]
        hit = tiers.all.longest_prefix(root(), names, tokens, size=SIZE, rule=ANY_TOKEN)
        assert tiers.all.ways(hit, ANY_TOKEN) == [(hit, 0.0)]
        tiers.all.rates.computed(1, 1.0)
        tiers.all.rates.read("disk", 1, 1.0)
        tiers.all.rates.read("shelf", 1, 10.0)
        ways = tiers.all.ways(hit, ANY_TOKEN)
        assert [way.length // SIZE for way, _ in ways] == [6, 4, 1]
        costs = [cost for _, cost in ways]
        assert costs == [
            file_size(blocks[1:4]) + 10 * file_size(blocks[4:]),
            file_size(blocks[1:4]),
            0,
        ]


# With an engine in front.

PROMPT = list(range(1, 200))


@contextmanager
def running(folder: Path | None, shelf: ShelfTier, **options: Any) -> Iterator[LocalBackend]:
    settings: dict[str, Any] = {"n_ctx": 512, "slots": 1, **options}
    storage = BlockStorage(folder=folder)
    with closing(
        LocalBackend(ToyModel(), EngineConfig(**settings), storage=storage, tiers=[shelf])
    ) as backend:
        yield backend


def ask(backend: LocalBackend, prompt: Sequence[int] = PROMPT) -> tuple[list[int], ReuseReport]:
    request = Request(prompt=list(prompt), max_tokens=4, sampling=Sampling(temperature=0), ignore_eos=True)
    with Stream(one_request(request), backend.submit) as stream:
        reply = stream.reply()
    return list(reply.tokens), reply.reuse


@pytest.mark.extension("inspection")
def test_reports_counters_and_views_name_the_tier_that_gave_the_state(tmp_path: Path) -> None:
    shelf = ShelfTier()
    with running(None, shelf) as backend:
        cold, _ = ask(backend)
    with running(tmp_path, shelf) as backend:
        assert backend.cache.plan(PROMPT[:-1]).tiers == {"shelf": 198}
        assert backend.cache.held(PROMPT)["shelf"].tokens >= 192
        assert {each.tier for each in backend.cache.blocks()} == {"shelf"}
        tokens, reuse = ask(backend)
        assert (tokens, dict(reuse.tiers)) == (cold, {"shelf": 198})
        stats = backend.cache.stats()
        assert stats.reused_tokens == {"shelf": 198}
        assert stats.tier_bytes == {"disk": stats.disk_bytes, "shelf": shelf.nbytes}
        [run] = backend.cache.runs() or []
        assert set(run.nbytes) == {"memory", "disk", "shelf"}
    # It came through the disk's hands too.
    with running(tmp_path, ShelfTier()) as backend:
        tokens, reuse = ask(backend)
        assert (tokens, dict(reuse.tiers)) == (cold, {"disk": 198})


@pytest.mark.parametrize("how", ["fails", "hangs", "lies"])
def test_s4_whatever_the_last_tier_does_replies_are_those_of_a_cold_engine(tmp_path: Path, how: str) -> None:
    other = [7, *PROMPT]
    with closing(LocalBackend(ToyModel(), EngineConfig(n_ctx=512, slots=1, cache=0))) as backend:
        cold = [ask(backend)[0], ask(backend, other)[0]]
    shelf = ShelfTier()
    with running(None, shelf) as backend:
        assert [ask(backend)[0], ask(backend, other)[0]] == cold
    if how == "lies":
        # Each block in the place of another.
        names = list(shelf.files)
        shelf.files = dict(zip(names, [*list(shelf.files.values())[1:], b""], strict=True))
    with running(tmp_path, shelf) as backend:
        if how == "fails":
            shelf.error = OSError("unreachable")
        if how == "hangs":
            shelf.hang()
        for _ in range(2):
            assert [ask(backend)[0], ask(backend, other)[0]] == cold
        backend.cache.sleep(PROMPT)
        assert ask(backend)[0] == cold[0]
    shelf.go_on()


def test_a_label_is_cleared_from_every_tier(tmp_path: Path) -> None:
    """P4: and what could not be cleared everywhere is not said to be."""
    shelf = ShelfTier()
    with running(tmp_path, shelf) as backend:
        prefix = backend.cache.warm(PROMPT, labels=["a"])
        assert (prefix.kept, prefix.seconds) == (len(PROMPT), None)
        backend.slot_cache.tiers.lower[1].flush()
        assert shelf.files
        shelf.error = StoreError("unreachable")
        with pytest.raises(StoreError, match="unreachable"):
            backend.cache.clear(["a"])
        assert [each.labels for each in backend.cache.records()] == [{"a"}]
        shelf.error = None
        assert backend.cache.clear(["a"]) == 1
        assert not shelf.files
        assert backend.cache.stats().disk_bytes == 0
    with running(tmp_path, ShelfTier()) as backend:
        assert backend.cache.records() == []


def test_sleeping_needs_one_tier_that_takes_the_state(tmp_path: Path) -> None:
    shelf = ShelfTier()
    with running(None, shelf) as backend:
        ask(backend)
        shelf.error = StoreError("unreachable")
        with pytest.raises(StoreError, match="unreachable"):
            backend.cache.sleep(PROMPT)
        shelf.error = None
    with running(tmp_path, shelf) as backend:
        ask(backend)
        shelf.error = StoreError("unreachable")
        backend.cache.sleep(PROMPT)
        assert backend.cache.held(PROMPT)["disk"].tokens >= 192


def test_a_kept_prefix_needs_an_end() -> None:
    with pytest.raises(perdure.InvalidInputError, match="seconds"):
        perdure.KeptPrefix(after=1)
    assert block([1]).tier == "memory"
