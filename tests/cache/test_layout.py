"""The bytes of a state: taken apart by token and put together again, byte for byte, on every model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import zoo
from inside import core_of
from perdure import Context
from perdure.engine.llama.core import LlamaCore
from perdure.engine.llama.native.layout import StateLayout, discover
from perdure.memory import FullAttention
from subjects import NARROW, Subject, check

from .served import BOUND, Served

LENGTH = 50
OPENING = 8

WAYS: dict[str, dict[str, Any]] = {
    "one": {"n_seq": 1},
    "streams": {"n_seq": 4},
    "pool": {"n_seq": 4, "shared": True},
    "window": {"n_seq": 4, "swa_full": False},
    "q8_0": {"n_seq": 2, "k_type": "q8_0", "v_type": "q8_0"},
}


@dataclasses.dataclass
class Sample:
    """A sequence that holds `tokens`, its state, and the layout found in it."""

    ctx: Context
    core: LlamaCore
    seq: int
    tokens: list[int]
    state: NDArray[np.uint8]
    tail_state: NDArray[np.uint8] | None
    streams: int

    def layout(self) -> StateLayout:
        found = discover(self.state, self.tail_state, self.seq, self.streams)
        assert found is not None
        return found

    def build(self, layout: StateLayout, pieces: list[NDArray[np.uint8]], seq: int) -> NDArray[np.uint8]:
        return layout.build(seq, pieces, self.tail_state, np.empty(2 * len(self.state), np.uint8))


def llama_core(ctx: Context) -> LlamaCore:
    core = core_of(ctx)
    assert isinstance(core, LlamaCore)
    return core


def sample_of(ctx: Context, seq: int) -> Sample:
    core = llama_core(ctx)
    rest = None
    if ctx.memory.kind is not FullAttention:
        rest = core.read(seq, partial=True)[OPENING:]
    return Sample(ctx, core, seq, ctx.tokens(seq), core.read(seq, partial=False), rest, core._n_streams)


@contextmanager
def sampled(subject: Subject, way: str, length: int = LENGTH) -> Iterator[Sample]:
    """The last sequence of a context, with others in use beside it."""
    with subject.context(**WAYS[way]) as ctx:
        for seq in range(ctx.n_seq):
            ctx.decode(subject.tokens(length + 3 * seq, seq), seq)
        yield sample_of(ctx, ctx.n_seq - 1)


@pytest.fixture(params=[name for name, recipe in zoo.ZOO.items() if recipe.memory != "recurrent"])
def rowed(request: pytest.FixtureRequest, find_subject: Callable[[str], Subject]) -> Subject:
    """The models whose state has a row for each token."""
    return find_subject(request.param)


@pytest.fixture(params=WAYS)
def sample(request: pytest.FixtureRequest, rowed: Subject) -> Iterator[Sample]:
    with sampled(rowed, request.param) as found:
        yield found


def test_a_state_is_rebuilt_byte_for_byte(sample: Sample) -> None:
    layout = sample.layout()
    rows = layout.rows(sample.state)
    assert rows is not None
    assert len(rows) == len(sample.tokens)
    whole = rows.cut(0, len(rows))
    assert whole.shape == (len(rows), layout.row_bytes)
    assert np.array_equal(sample.build(layout, [whole], sample.seq), sample.state)


def test_random_ranges_are_cut_and_joined_byte_for_byte(sample: Sample) -> None:
    layout = sample.layout()
    rows = layout.rows(sample.state)
    assert rows is not None
    dice = np.random.default_rng(3)
    for _ in range(20):
        cuts = sorted({0, len(rows), *dice.integers(0, len(rows), int(dice.integers(0, 9))).tolist()})
        pieces = [rows.cut(start, end) for start, end in pairwise(cuts)]
        assert np.array_equal(sample.build(layout, pieces, sample.seq), sample.state)
        start, end = cuts[0], cuts[-1]
        assert np.array_equal(rows.cut(start, end), np.concatenate(pieces))


def test_rows_belong_to_a_token_wherever_it_lies(sample: Sample) -> None:
    """The row of a token in a beginning of the sequence is its row in the whole."""
    layout = sample.layout()
    rows = layout.rows(sample.state)
    assert rows is not None
    whole = rows.cut(0, len(rows))
    keep = len(rows) - 7
    if sample.ctx.memory.kind is FullAttention:
        sample.ctx.truncate(keep, sample.seq)
        shorter = layout.rows(sample.core.read(sample.seq, partial=False))
        assert shorter is not None
        assert np.array_equal(shorter.cut(0, keep), whole[:keep])


def test_what_is_built_for_another_sequence_is_what_that_one_then_holds(sample: Sample) -> None:
    ctx, layout = sample.ctx, sample.layout()
    rows = layout.rows(sample.state)
    assert rows is not None
    pieces = [rows.cut(0, 20), rows.cut(20, len(rows))]
    for seq in range(ctx.n_seq):
        ctx.clear(seq)
        built = sample.build(layout, pieces, seq)
        assert sample.core.write(seq, built, partial=False)
        again = sample.core.read(seq, partial=False)
        # A window says in its own cells whose they are, so only the part before it is the same.
        same = len(built) - (0 if sample.tail_state is None else len(sample.tail_state))
        assert len(again) == len(built)
        assert np.array_equal(again[:same], built[:same])


def test_another_layout_is_not_accepted_by_the_engine(sample: Sample) -> None:
    layout = sample.layout()
    rows = layout.rows(sample.state)
    assert rows is not None
    (kind, size), *others = layout.regions
    opening = bytes([layout.opening[0] ^ 1]) + layout.opening[1:]
    changes: list[dict[str, Any]] = [
        {"opening": opening},
        {"streams": layout.streams + 4},
        {"layers": layout.layers + 1},
        {"regions": ((kind + 1, size), *others)},
    ]
    for change in changes:
        sample.ctx.clear(sample.seq)
        wrong = dataclasses.replace(layout, **change)
        assert not sample.core.write(
            sample.seq, sample.build(wrong, [rows.cut(0, len(rows))], sample.seq), partial=False
        )
    sample.ctx.clear(sample.seq)
    again = sample.build(layout, [rows.cut(0, len(rows))], sample.seq)
    assert sample.core.write(sample.seq, again, partial=False)


def test_bytes_that_no_reading_accounts_for_have_no_layout(sample: Sample) -> None:
    layout = sample.layout()
    state = sample.state
    cells = 12 + 4 * (1 + (sample.seq if sample.streams > 1 else 0))
    head = cells + len(sample.tokens) * layout.cell_bytes
    places = [
        *range(4, 12),  # whose state it is, and how many streams
        *range(12, cells),  # how many cells in each
        *range(cells, cells + 3 * layout.cell_bytes),  # positions and owners
        *range(head, head + 4),  # whether rows lie as columns
        *range(head + 12 + len(layout.figures), head + 20 + len(layout.figures)),  # the bytes of a row
    ]
    for place in places:
        changed = state.copy()
        changed[place] ^= 1
        assert discover(changed, sample.tail_state, sample.seq, sample.streams) is None, place
    for damaged in (state[:-1], np.append(state, np.uint8(0)), state[:40], state[:0]):
        assert discover(damaged, sample.tail_state, sample.seq, sample.streams) is None
    assert discover(state, sample.tail_state, sample.seq, sample.streams + 1) is None
    assert discover(state, sample.tail_state, sample.seq + 1, sample.streams) is None


# Cells in disorder.


def disordered(subject: Subject, ctx: Context) -> list[int]:
    """Leave in sequence 1 of a pool tokens whose cells lie in another order than they do."""
    first = subject.tokens(20, 1)
    ctx.decode(subject.tokens(24, 0), 0)
    ctx.decode(first, 1)
    ctx.decode(subject.tokens(12, 2), 2)
    ctx.clear(0)
    more = subject.tokens(30, 3)
    ctx.decode(more, 1)
    return first + more


def is_disordered(ctx: Context) -> bool:
    sample = sample_of(ctx, 1)
    count = int(sample.state[12:16].view("<u4")[0])
    # Every extension of a cell that the zoo knows is empty.
    positions = sample.state[16 : 16 + 12 * count].reshape(count, 12)[:, :4].copy().view("<i4").reshape(-1)
    assert sorted(positions.tolist()) == list(range(count))
    return bool((np.diff(positions) < 0).any())


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_a_sequence_whose_cells_are_out_of_order_is_cut_by_token(rowed: Subject, first: bool) -> None:
    """Also when it is the first state that is ever taken apart."""
    with rowed.context(n_seq=3, shared=True, n_batch=8) as ctx:
        if not first:
            ctx.decode([1, 2, 3])
            assert ctx.capture().rows is not None
            ctx.clear()
        tokens = disordered(rowed, ctx)
        assert is_disordered(ctx)
        capture = ctx.capture(1)
        assert capture.rows is not None
        pieces = [capture.rows.cut(0, 17), capture.rows.cut(17, len(tokens))]
        ctx.clear(2)
        ctx.assemble(tokens, pieces, capture.tail_state, 2)
        sorted_rows = ctx.capture(2).rows
        assert sorted_rows is not None
        assert np.array_equal(sorted_rows.cut(0, len(tokens)), np.concatenate(pieces))
        ctx.decode([65], 2)
        check(ctx.logits().copy(), rowed.cold([[*tokens, 65]]), BOUND[rowed.name])


@pytest.mark.parametrize("way", ["streams", "pool"])
def test_forks_and_cuts_leave_rows_that_can_be_put_back(rowed: Subject, way: str) -> None:
    narrow = rowed.narrow
    with rowed.context(n_seq=3, n_batch=NARROW, shared=way == "pool", **narrow.settings) as ctx:
        tokens = rowed.tokens(30)
        ctx.decode(tokens)
        ctx.fork(0, 1)
        ctx.decode(rowed.tokens(9, 4), 1)
        ctx.decode(rowed.tokens(9, 5), 0)
        if ctx.shortest_cut(1) <= 34:
            ctx.truncate(34, 1)
        ctx.decode([7, 8], 1)
        held = ctx.tokens(1)
        capture = ctx.capture(1)
        assert capture.rows is not None
        pieces = [capture.rows.cut(at, min(at + 8, len(held))) for at in range(0, len(held), 8)]
        ctx.assemble(held, pieces, capture.tail_state, 2)
        ctx.decode([65], 2)
        bound = BOUND[rowed.name] if way == "pool" else narrow.bound
        check(ctx.logits().copy(), rowed.cold([[*held, 65]], n_batch=NARROW, **narrow.settings), bound)


# Where there are no rows.


def test_without_flash_attention_a_state_is_kept_whole(real: Subject) -> None:
    settings: dict[str, Any] = {"n_batch": NARROW, "flash": False, **real.narrow.settings}
    with real.context(n_seq=3, **settings) as ctx:
        tokens = real.tokens(LENGTH)
        ctx.decode(tokens)
        capture = ctx.capture()
        assert capture.rows is None
        assert capture.tail_state is not None
        ctx.decode([9, 9], 1)
        ctx.assemble(tokens, [], capture.tail_state, 1)
        assert ctx.tokens(1) == tokens
        ctx.decode([65], 1)
        check(ctx.logits().copy(), real.cold([[*tokens, 65]], **settings), real.narrow.bound)


def test_a_recurrent_state_is_kept_whole(find_subject: Callable[[str], Subject]) -> None:
    real = find_subject("mamba")
    narrow = real.narrow
    with real.context(n_batch=NARROW, **narrow.settings) as ctx:
        tokens = real.tokens(LENGTH)
        ctx.decode(tokens)
        part = ctx.checkpoint()
        whole = ctx.capture()
        assert whole.rows is None
        assert whole.tail_state is not None
        # A checkpoint of it is all of it, so either can be put back.
        assert part.state is not None
        for state in (whole.tail_state, part.state):
            ctx.assemble(tokens, [], state, 2)
            ctx.decode([65], 2)
            check(
                ctx.logits().copy(),
                real.cold([[*tokens, 65]], n_batch=NARROW, **narrow.settings),
                narrow.bound,
            )


def test_c7_memory_for_states_on_their_way_keeps_to_its_limit(find_subject: Callable[[str], Subject]) -> None:
    """C7: it is part of the cache's budget, and a state that is larger than it leaves nothing behind."""
    subject = find_subject("llama")
    text = subject.tokens(80)
    with Served(subject, budget=1 << 20, n_batch=64) as served:
        served.say(text)
        served.cache.warm(text)
        small = served.context.scratch_bytes
        assert 0 < small <= 1 << 17
        assert served.cache.stats().nbytes >= small
        # On a GPU it may be four times what is asked for, where a state needs it.
        limit = served.context.limit_scratch(small // 8)
        assert small // 8 <= limit <= small // 2
        assert served.context.scratch_bytes == 0
        long = subject.tokens(200, 1)
        served.cache.warm(long)
        assert served.context.scratch_bytes == 0
        # It moves out and back as before.
        served.say(subject.tokens(70, 2))
        served.say(subject.tokens(70, 3))
        assert served.say([*long, *subject.tokens(3, 4)]).tiers.get("memory", 0) > 100
        assert served.context.scratch_bytes <= limit
