"""Writing behind the reply: never in its way, never its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import perdure
from perdure.cache.block import Block, BlockId, BlockMeta
from perdure.cache.tiers.disk import DiskTier
from perdure.cache.tiers.write_behind import WriteBehind
from perdure.errors import StoreError, StoreFullError
from perdure.runtime import Runtime
from perdure.testing.toy import ToyModel
from store import children
from store.chains import block, chain, file_of, files, same

PLENTY = 1 << 30


class Gated(DiskTier):
    """A disk whose writes wait until they are let through."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, budget=PLENTY)
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.batches: list[list[BlockId]] = []

    def store(self, blocks: Sequence[Block]) -> int:
        self.batches.append([each.id for each in blocks])
        self.reached.set()
        self.gate.wait()
        return super().store(blocks)


class Failing(DiskTier):
    """A disk that is full, or broken, as long as it is told to be."""

    def __init__(self, folder: Path, error: Exception | None, *, reading: bool = False) -> None:
        super().__init__(folder, budget=PLENTY)
        self.error = error
        self.reading = reading

    def store(self, blocks: Sequence[Block]) -> int:
        if self.error is not None:
            raise self.error
        return super().store(blocks)

    def lookup(self, block: BlockId) -> BlockMeta | None:
        if self.reading and self.error is not None:
            raise self.error
        return super().lookup(block)

    def children(self, parent: BlockId, *, start: bytes = b"", back: bool = False) -> Iterator[BlockMeta]:
        if self.reading and self.error is not None:
            raise self.error
        return super().children(parent, start=start, back=back)


@contextmanager
def behind(disk: DiskTier, limit: int = PLENTY) -> Iterator[WriteBehind]:
    writer = WriteBehind(disk, limit=limit)
    try:
        yield writer
    finally:
        if isinstance(disk, Gated):
            disk.gate.set()
        writer.close()


def test_what_waits_to_be_written_can_be_read(tmp_path: Path) -> None:
    blocks = chain(list(range(12)))
    disk = Gated(tmp_path)
    with behind(disk) as writer:
        writer.store(blocks)
        assert disk.reached.wait(60)
        assert files(tmp_path) == []
        for each in blocks:
            assert writer.load(each.id) is each
            assert writer.lookup(each.id) is each
            assert [child.id for child in writer.children(each.parent)] == [each.id]


def test_flush_returns_when_everything_is_on_the_disk(tmp_path: Path) -> None:
    blocks = chain(list(range(40)))
    with behind(DiskTier(tmp_path, budget=PLENTY)) as writer:
        for each in blocks:
            writer.store([each])
        writer.flush()
        with closing(DiskTier(tmp_path, budget=0, readonly=True)) as reader:
            assert all(same(reader.load(each.id), each) for each in blocks)
        for each in blocks:
            found = writer.lookup(each.id)
            assert isinstance(found, BlockMeta)
            assert [child.id for child in writer.children(each.parent)] == [each.id]


def test_flush_waits_for_what_was_there_and_not_for_what_comes_after(tmp_path: Path) -> None:
    first, second = chain([1, 2]), chain([3, 4])
    disk = Gated(tmp_path)
    with behind(disk) as writer:
        writer.store(first)
        flushed = threading.Thread(target=writer.flush)
        flushed.start()
        assert disk.reached.wait(60)
        assert flushed.is_alive()
        disk.gate.set()
        flushed.join(60)
        disk.gate.clear()
        disk.reached.clear()
        writer.store(second)
        assert disk.reached.wait(60)
        assert same(disk.load(first[0].id), first[0])


def test_closing_writes_what_was_offered_first(tmp_path: Path) -> None:
    blocks = chain(list(range(40)))
    with behind(DiskTier(tmp_path, budget=PLENTY)) as writer:
        writer.store(blocks)
    with closing(DiskTier(tmp_path, budget=PLENTY)) as disk:
        assert len(disk) == len(blocks)
    writer.store(chain([9]))
    assert writer.turned_down == 1


def test_over_the_limit_offers_are_turned_down_with_all_that_follow_them(tmp_path: Path) -> None:
    blocks = chain(list(range(40)))
    short = block([1], blocks[-1])
    disk = Gated(tmp_path)
    with behind(disk, limit=3 * blocks[0].nbytes) as writer:
        writer.store([*blocks, short])
        assert disk.reached.wait(60)
        assert writer.turned_down == 1
        assert [writer.lookup(each.id) for each in [*blocks, short]] == blocks[:3] + [None] * 8
        disk.gate.set()
        writer.flush()
        writer.store([*blocks, short])
        writer.flush()
        assert len(disk) == 6
        assert disk.batches[-1] == [each.id for each in blocks[3:6]]


def test_what_was_turned_down_is_made_up_for_piece_by_piece(tmp_path: Path) -> None:
    blocks = chain(list(range(40)))
    with behind(DiskTier(tmp_path, budget=PLENTY), limit=4 * blocks[0].nbytes) as writer:
        writer.store(blocks)
        assert writer.turned_down
        writer.backfill(blocks)
        assert all(isinstance(writer.lookup(each.id), BlockMeta) for each in blocks)


def test_a_tier_that_fails_is_not_waited_for_to_make_up(tmp_path: Path) -> None:
    blocks = chain(list(range(40)))
    disk = Failing(tmp_path, StoreError("no"))
    with behind(disk, limit=4 * blocks[0].nbytes) as writer:
        writer.store(blocks)
        writer.backfill(blocks)
        assert writer.error is not None
        disk.error = None
        writer.store(blocks[:1])
        writer.flush()
        writer.backfill(blocks)
        assert all(isinstance(writer.lookup(each.id), BlockMeta) for each in blocks)


def test_what_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    blocks = chain(list(range(12)))
    disk = Gated(tmp_path)
    with behind(disk) as writer:
        disk.gate.set()
        writer.store(blocks)
        writer.flush()
        writer.store([*blocks, *chain([5])])
        writer.flush()
        assert [name for batch in disk.batches for name in batch] == [
            *(each.id for each in blocks),
            chain([5])[0].id,
        ]


@pytest.mark.parametrize("when", ["waiting", "being written", "written"])
def test_a_block_that_gained_a_rest_is_written_with_it_whatever_happens_to_the_first(
    tmp_path: Path, when: str
) -> None:
    bare, full = block([1, 2, 3]), block([1, 2, 3], tail_state=99)
    other = chain([8, 8])
    disk = Gated(tmp_path)
    with behind(disk) as writer:
        writer.store(other if when == "waiting" else [bare])
        assert disk.reached.wait(60)
        if when == "waiting":
            writer.store([bare])
        if when == "written":
            disk.gate.set()
            writer.flush()
        writer.store([full])
        writer.store([bare])
        assert writer.load(full.id) is full
        disk.gate.set()
        writer.flush()
        assert same(disk.load(full.id), full)
        writer.flush()


def test_dropping_and_clearing_reach_what_still_waits(tmp_path: Path) -> None:
    blocks, others = chain(list(range(12))), chain(list(range(12)), "others")
    with behind(DiskTier(tmp_path, budget=PLENTY)) as writer:
        writer.store(blocks + others)
        writer.drop([blocks[1].id])
        assert writer.load(blocks[1].id) is None
        assert writer.load(blocks[2].id) is None
        assert writer.load(others[2].id) is not None
        writer.store(chain([7]))
        writer.clear()
        assert files(tmp_path) == []
        assert writer.lookup(chain([7])[0].id) is None


def test_s4_a_damaged_block_is_forgotten_and_can_be_written_again(tmp_path: Path) -> None:
    blocks = chain(list(range(16)))
    disk = DiskTier(tmp_path, budget=PLENTY)
    with behind(disk) as writer:
        writer.store(blocks)
        writer.flush()
        file_of(tmp_path, blocks[1]).write_bytes(b"damaged")
        file_of(tmp_path, blocks[2]).unlink()
        assert writer.load(blocks[1].id) is None
        assert writer.load(blocks[2].id) is None
        assert writer.lookup(blocks[1].id) is None
        assert list(writer.children(blocks[0].id)) == []
        writer.store(blocks[:3])
        writer.flush()
        assert all(same(disk.load(each.id), each) for each in blocks)
        assert disk.verify().sound


@pytest.mark.parametrize("error", [StoreFullError("full", needed=9), RuntimeError("a defect of our own")])
def test_c6_an_error_of_the_disk_ends_neither_the_caller_nor_the_writer(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = chain(list(range(12)))
    disk = Failing(tmp_path, error)
    with caplog.at_level(logging.WARNING, "perdure.store"), behind(disk) as writer:
        for _ in range(3):
            writer.store(blocks)
            writer.flush()
            assert writer.error is error
            assert writer.load(blocks[0].id) is None
        assert [record.getMessage() for record in caplog.records] == [f"blocks could not be kept: {error}"]
        disk.error = None
        writer.store(blocks)
        writer.flush()
        assert writer.error is None
        assert same(writer.load(blocks[0].id), blocks[0])


def test_c6_an_index_that_cannot_be_read_is_like_one_that_has_nothing(tmp_path: Path) -> None:
    blocks = chain(list(range(12)))
    disk = Failing(tmp_path, None, reading=True)
    with behind(disk) as writer:
        writer.store(blocks)
        writer.flush()
        disk.error = StoreError("gone")
        assert writer.lookup(blocks[0].id) is None
        assert list(writer.children(blocks[0].parent)) == []
        assert writer.error is disk.error
        disk.error = None
        assert writer.lookup(blocks[0].id) is not None


# With a runtime in front.

PROMPT = "a prompt that is longer than a block of tokens, and then some more of it to be kept. " * 2


def runtime_on(disk: Callable[[Path], DiskTier], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setattr("perdure.cache.tiers.opening.DiskTier", lambda path, **_: disk(path))
    return perdure.open(ToyModel(), n_ctx=512, slots=1, store=folder)


def answer(runtime: Runtime, prompt: str = PROMPT) -> list[int]:
    reply = runtime.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True)
    assert reply.finish_reason == "length"
    return list(reply.tokens)


@pytest.fixture
def cold() -> dict[str, list[int]]:
    with perdure.open(ToyModel(), n_ctx=512, slots=1, cache=0) as runtime:
        return {text: answer(runtime, text) for text in (PROMPT, "another")}


@pytest.mark.parametrize("reading", [False, True])
def test_c6_the_reply_comes_whatever_the_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reading: bool, cold: dict[str, list[int]]
) -> None:
    error = StoreFullError("full", needed=9)
    with runtime_on(lambda path: Failing(path, error, reading=reading), tmp_path, monkeypatch) as runtime:
        for _ in range(3):
            # Two prompts on one slot: each goes out to the tiers, and comes back from memory.
            assert answer(runtime) == cold[PROMPT]
            assert answer(runtime, "another") == cold["another"]


def test_c6_a_slow_disk_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: dict[str, list[int]]
) -> None:
    disks: list[Gated] = []

    def make(path: Path) -> DiskTier:
        disks.append(Gated(path))
        return disks[0]

    with runtime_on(make, tmp_path, monkeypatch) as runtime:
        for _ in range(3):
            assert answer(runtime) == cold[PROMPT]
            assert answer(runtime, "another") == cold["another"]
        assert disks[0].reached.wait(60)
        assert files(tmp_path) == []
        disks[0].gate.set()
    assert len(files(tmp_path)) > 0


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in its slot", "out of its slot"])
def test_warming_says_when_it_could_not_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    disks: list[Failing] = []

    def make(path: Path) -> DiskTier:
        disks.append(Failing(path, StoreFullError("full", needed=9)))
        return disks[0]

    with runtime_on(make, tmp_path, monkeypatch) as runtime:
        with pytest.raises(StoreFullError):
            runtime.cache.warm(PROMPT, labels=["a"])
        if elsewhere:
            answer(runtime, "another")
        disks[0].error = None
        # What is in memory by now is written all the same.
        assert runtime.cache.warm(PROMPT, labels=["a"]).kept == len(PROMPT)
    monkeypatch.undo()
    with perdure.open(ToyModel(), n_ctx=512, slots=1, store=tmp_path) as runtime:
        assert [record.kept for record in runtime.cache.records(["a"])] == [len(PROMPT)]


FULL = """
import logging, resource, sys
from perdure.testing.toy import ToyModel
import perdure
logging.disable()
prompt = sys.argv[2]
with perdure.open(ToyModel(), n_ctx=512, slots=1, store=sys.argv[1]) as runtime:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
    for text in (prompt, "another", prompt, "another"):
        reply = runtime.generate(text, max_tokens=8, temperature=0, ignore_eos=True)
        print(reply.finish_reason, *reply.tokens)
"""


@pytest.mark.parametrize("limit", [0, 5_000, 60_000])
def test_c6_the_reply_comes_also_when_nothing_can_be_written_at_all(
    tmp_path: Path, limit: int, cold: dict[str, list[int]]
) -> None:
    lines = children.run(FULL, tmp_path, PROMPT, limit).splitlines()
    expected = [" ".join(["length", *map(str, cold[text])]) for text in (PROMPT, "another")]
    assert lines == expected * 2
    with perdure.open(ToyModel(), n_ctx=512, slots=1, store=tmp_path) as runtime:
        assert answer(runtime) == cold[PROMPT]
