"""Our sampling against the library's own chain: the same candidates with the same probabilities (M6)."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.processes.library_sampler import LibrarySampler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inside import weights_of
from perdure import Model, Sampling
from perdure.decode.sampling.repetition import BreakerTable
from perdure.decode.sampling.sampler import CompiledChain, Sampler, draw, draw_together, weights
from perdure.decode.sampling.stage import masked, top
from perdure.engine.contract import Step
from perdure.engine.logits import LogitsView
from perdure.engine.row_kernels import NothingToDraw
from perdure.errors import EngineError

Row = NDArray[np.float32]
N_CTX = 256
PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture(scope="module")
def model(zoo_path: Callable[[str], Path]) -> Iterator[Model]:
    with Model(zoo_path("llama")) as model:
        yield model


@pytest.fixture(scope="module")
def breakers(model: Model) -> BreakerTable:
    return BreakerTable(model)


def random_row(seed: int, size: int, spread: float) -> Row:
    """Logits without ties: of equals, the library keeps any."""
    dice = np.random.default_rng(seed)
    steps = np.sort(dice.normal(0, spread, size)) + np.linspace(0, size * 1e-5, size)
    row: Row = dice.permutation(steps).astype(np.float32)
    assert len(np.unique(row)) == size
    return row


def ours(sampler: Sampler, row: Row, mask: NDArray[np.uint8] | None = None) -> dict[int, float]:
    """The tokens that can be drawn, with their probabilities. XTC strikes."""
    found = sampler.select(row, mask)
    if len(found) == 1:
        return {int(found.ids[0]): 1.0}
    shares = weights([(sampler, found)], np.zeros(1))[0]
    total = shares.sum()
    return {int(token): share / total for token, share in zip(found.ids, shares, strict=True) if share > 0}


def check_same(mine: dict[int, float], theirs: dict[int, float], case: str) -> None:
    """The same tokens with the same probabilities."""
    likely = {token: p for token, p in theirs.items() if p > 1e-9}
    assert {token for token, p in mine.items() if p > 1e-9} == set(likely), case
    for token, p in likely.items():
        assert mine[token] == pytest.approx(p, rel=2e-3, abs=1e-6), case


CUTS: dict[str, Any] = {
    "temperature": st.sampled_from([0.3, 0.8, 1.0, 1.7, 40.0]),
    "top_k": st.sampled_from([0, 1, 5, 40, 300, 100_000]),
    "top_p": st.sampled_from([0.0, 0.3, 0.713, 0.95, 1.0]),
    "min_p": st.sampled_from([0.0, 0.05, 0.2, 1.0]),
    "typical_p": st.sampled_from([1.0, 1.0, 0.213, 0.5, 0.9]),
    "top_n_sigma": st.sampled_from([0.0, 0.0, 1.0, 2.5]),
    "xtc_probability": st.sampled_from([0.0, 1.0]),
    "xtc_threshold": st.sampled_from([0.03, 0.1, 0.3, 0.7]),
    "repeat_penalty": st.sampled_from([1.0, 1.3, 0.8]),
    "frequency_penalty": st.sampled_from([0.0, 0.4, -0.2]),
    "presence_penalty": st.sampled_from([0.0, 0.7]),
    "penalty_last_n": st.sampled_from([-1, 0, 3, 64]),
    "dry_multiplier": st.sampled_from([0.0, 0.8]),
    "dry_base": st.sampled_from([1.0, 1.75, 4.0]),
    "dry_allowed_length": st.sampled_from([1, 2, 5]),
    "dry_last_n": st.sampled_from([-1, 0, 7, 40]),
    "dry_breakers": st.sampled_from([(), ("\n",), ("a", "bc"), ("the end", "\n", ":")]),
    "logit_bias": st.sampled_from([{}, {3: 2.0, 7: -math.inf}, {5: 50.0}]),
}


def accepted(seed: int) -> list[int]:
    """Tokens with phrases that come again."""
    dice = np.random.default_rng(seed)
    phrase: list[int] = dice.integers(0, 384, dice.integers(2, 6)).tolist()
    found: list[int] = []
    for _ in range(int(dice.integers(0, 12))):
        found += phrase if dice.random() < 0.5 else dice.integers(90, 110, 3).tolist()
    return found + phrase[: int(dice.integers(0, len(phrase)))]


def pair(model: Model, breakers: BreakerTable, sampling: Sampling, before: Sequence[int]) -> tuple[Any, Any]:
    mine = Sampler(sampling, n_ctx=N_CTX, breakers=breakers.find)
    theirs = LibrarySampler(sampling, n_vocab=model.n_vocab, n_ctx=N_CTX, vocab=weights_of(model).vocab)
    mine.prime(before)
    for token in before:
        theirs.accept(token)
    return mine, theirs


def has_no_entropy(sampling: Sampling, mine: Sampler, row: Row) -> bool:
    """Whether the library's typical stage computes 0 times infinity, and so keeps whatever it meets.

    That is so with a token whose share rounds to 0: a banned one, or one that DRY found in a long repetition.
    """
    logits = mine.select(row).logits
    return sampling.typical_p < 1 and not np.exp(logits - logits.max()).all()


def beside_a_cut(sampling: Sampling, mine: Sampler, row: Row) -> bool:
    """Whether a cumulative share comes so near to a cut that the library's rounding decides."""
    if sampling.top_p in (0.0, 1.0) and sampling.typical_p == 1.0 and not sampling.xtc_probability:
        return False
    nudged = [row * np.float32(1 + change) for change in (1e-4, -1e-4)]
    return len({frozenset(ours(mine, each)) for each in (row, *nudged)}) > 1


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.5, 2.0, 6.0]),
    chosen=st.fixed_dictionaries(CUTS),
)
def test_m6_candidates_and_probabilities_are_the_librarys(
    seed: int, spread: float, chosen: dict[str, Any], model: Model, breakers: BreakerTable
) -> None:
    sampling = Sampling(**chosen, seed=1)
    mine, theirs = pair(model, breakers, sampling, accepted(seed))
    row = random_row(seed, model.n_vocab, spread)
    if has_no_entropy(sampling, mine, row) or beside_a_cut(sampling, mine, row):
        return
    check_same(ours(mine, row), theirs.apply(row)[0], str(chosen))


@pytest.mark.parametrize("typical_p", [0.213, 0.5, 0.9])
@pytest.mark.parametrize("low", [-200.0, -1e6, -math.inf])
def test_m6_typical_counts_an_impossible_token_as_nothing(
    low: float, typical_p: float, model: Model, breakers: BreakerTable
) -> None:
    """Held against the library where those tokens have a share so small that it adds nothing."""
    for seed in range(100):
        mine, theirs = pair(model, breakers, Sampling(**{**PLAIN, "typical_p": typical_p}, seed=1), [])
        row = random_row(seed, model.n_vocab, 2.0)
        impossible, unlikely = row.copy(), row.copy()
        impossible[:9], unlikely[:9] = low, np.float32(-50) - row[:9]
        if beside_a_cut(mine.sampling, mine, unlikely):
            continue
        check_same(ours(mine, impossible), theirs.apply(unlikely)[0], f"seed {seed}")


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10_000),
    version=st.sampled_from([1, 2]),
    tau=st.sampled_from([0.5, 3.0, 5.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_m6_mirostat_keeps_its_aim_as_the_library_does(
    seed: int, version: int, tau: float, temperature: float, model: Model, breakers: BreakerTable
) -> None:
    """Over several draws: ours is told what the library drew."""
    sampling = Sampling(
        mirostat=version, mirostat_tau=tau, mirostat_eta=0.3, temperature=temperature, seed=seed
    )
    mine, theirs = pair(model, breakers, sampling, [])
    for at in range(6):
        row = random_row(seed + at, model.n_vocab, 3.0)
        expected, drawn = theirs.apply(row)
        found = ours(mine, row)
        # How many are left hangs on rounding; which ones they are does not.
        assert abs(len(found) - len(expected)) <= 1 + len(expected) // 100
        if set(found) != set(expected):
            return
        check_same(found, expected, f"draw {at}")
        mine.observe(found[drawn])


@pytest.mark.parametrize("size", [50_000, 4097])
@pytest.mark.parametrize("k", [1, 7, 40, 200, 5000])
def test_the_largest_are_found_in_blocks_as_by_sorting(size: int, k: int) -> None:
    row = random_row(k, size, 4.0)
    ids, values = top(row, k)
    expected = np.argsort(-row)[:k]
    assert ids.tolist() == expected.tolist()
    assert values.tolist() == row[expected].tolist()


def test_equal_logits_leave_as_many_candidates_as_asked_for() -> None:
    row = np.zeros(50_000, np.float32)
    row[::3] = 1.0
    ids, values = top(row, 40)
    assert len(set(ids.tolist())) == 40
    assert set(values.tolist()) == {1.0}


@pytest.mark.parametrize(
    "chosen",
    [
        {"temperature": 0},
        {},
        {"top_k": 0},
        {**PLAIN},
        {"top_k": 5, "typical_p": 0.5},
        {"xtc_probability": 1.0, "xtc_threshold": 0.01},
        {"top_n_sigma": 1.0},
        {"mirostat": 1},
        {"mirostat": 2},
        {"repeat_penalty": 1.3, "logit_bias": {3: 2.0}},
    ],
    ids=str,
)
@pytest.mark.parametrize("share", [0.9, 0.5, 0.02])
def test_m6_a_mask_comes_before_every_stage(chosen: dict[str, Any], share: float) -> None:
    """A grammar's mask that is looked up for candidates gives what masking the whole row gives."""
    dice = np.random.default_rng(4)
    for case in range(20):
        row = random_row(case, 6000, 3.0)
        allowed = dice.random(6000) < share
        mask = np.packbits(allowed, bitorder="little")
        lazy, eager = (Sampler(Sampling(**chosen, seed=1), n_ctx=N_CTX) for _ in range(2))
        for each in (lazy, eager):
            each.prime([1, 2, 3])
        assert ours(lazy, row, mask) == ours(eager, masked(row, mask))
        # And drawn, not only weighed.
        tokens = [draw([(each, each.select(row, mask), case)])[0] for each in (lazy, eager)]
        assert tokens[0] == tokens[1]
        assert allowed[tokens[0]]


@pytest.mark.parametrize(
    "chosen", [{}, {"top_k": 0}, {"mirostat": 1}, {"mirostat": 2}, {"top_n_sigma": 1.0}], ids=str
)
def test_nothing_left_is_said(chosen: dict[str, Any]) -> None:
    sampler = Sampler(Sampling(**chosen), n_ctx=N_CTX)
    with pytest.raises(NothingToDraw):
        sampler.select(np.full(384, -np.inf, np.float32))
    with pytest.raises(NothingToDraw):
        sampler.select(np.zeros(384, np.float32), np.zeros(48, np.uint8))


# Random numbers.


def test_k5_a_draw_depends_on_the_seed_and_the_position_alone() -> None:
    """Whoever else is served, and whatever was drawn before."""
    row = random_row(1, 5000, 1.0)
    kinds: list[dict[str, Any]] = [{}, {"top_k": 0, "min_p": 0.0}, {**PLAIN}, {"temperature": 0}]

    def drawn(company: int, position: int) -> int:
        crowd = [Sampler(Sampling(seed=7), n_ctx=N_CTX)]
        crowd += [Sampler(Sampling(seed=at, **kinds[at % 4]), n_ctx=N_CTX) for at in range(company)]
        return draw([(each, each.select(row), position + 3 * at) for at, each in enumerate(crowd)])[0]

    for position in (0, 5, 63, 64, 1000):
        assert len({drawn(company, position) for company in (0, 1, 5, 17)}) == 1
    assert len({drawn(0, position) for position in range(50)}) > 5


def test_k5_numbers_are_the_same_in_any_order_and_do_not_repeat() -> None:
    sampler = Sampler(Sampling(seed=3), n_ctx=N_CTX)
    forth = [sampler.numbers_at(position).tolist() for position in range(300)]
    back = [sampler.numbers_at(position).tolist() for position in reversed(range(300))][::-1]
    assert forth == back
    flat = [number for each in forth for number in each]
    assert len(set(flat)) == 600
    assert 0 <= min(flat) < 0.05
    assert 0.95 < max(flat) < 1
    assert [sampler.number_at(position) for position in range(300)] == [first for first, _ in forth]
    assert Sampler(Sampling(seed=4), n_ctx=N_CTX).numbers_at(0).tolist() != forth[0]


def test_draws_follow_the_distribution() -> None:
    row = np.full(6000, -30, np.float32)
    row[[5, 600, 5999]] = np.log([0.7, 0.2, 0.1])
    for chosen in (PLAIN, {**PLAIN, "top_k": 40}, {**PLAIN, "top_p": 0.99}):
        sampler = Sampler(Sampling(seed=1, **chosen), n_ctx=N_CTX)
        found = Counter(draw([(sampler, sampler.select(row), position)])[0] for position in range(3000))
        assert set(found) <= {5, 600, 5999}
        assert found[5] == pytest.approx(2100, abs=150)
        assert found[5999] == pytest.approx(300, abs=90)


# All streams of a step at once.


def rows_of(count: int, size: int) -> NDArray[np.float32]:
    """Rows of which some have many equal values."""
    rows = np.array([random_row(seed, size, 3.0) for seed in range(count)])
    rows[1::3] = np.round(rows[1::3])
    return rows


class Certain(Sampler):
    """Draws with the same number at each position. One just below 1 draws the last token that no cut took."""

    number = 0.0

    def numbers_at(self, position: int) -> NDArray[np.float64]:
        return np.full(2, self.number)

    def number_at(self, position: int) -> float:
        return self.number


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.5, 2.0, 4.0]),
    ahead=st.lists(st.floats(0.0, 20.0), max_size=30),
    rounded=st.booleans(),
    banned=st.integers(0, 5),
    chosen=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.3, 0.8, 2.0]),
            "top_k": st.sampled_from([1, 3, 20, 40, 128]),
            "top_p": st.sampled_from([0.0, 0.3, 0.9, 0.95, 0.999, 1.0]),
            "min_p": st.sampled_from([0.0, 1e-6, 0.001, 0.05, 0.5]),
        }
    ),
)
def test_m6_one_stream_draws_what_the_whole_row_gives(
    seed: int, spread: float, ahead: list[float], rounded: bool, banned: int, chosen: dict[str, Any]
) -> None:
    row = random_row(seed, 6000, spread)
    places = np.random.default_rng(seed).permutation(6000)[: len(ahead)]
    row[places] += np.array([3 * spread + each for each in ahead], np.float32)
    row = np.round(row) if rounded else row
    bias = dict.fromkeys(np.argsort(-row)[:banned].tolist(), -math.inf)
    sampler = Certain(Sampling(**chosen, logit_bias=bias, seed=seed), n_ctx=N_CTX)
    rule = CompiledChain.of(sampler)
    assert rule is not None
    for sampler.number in (0.0, 0.3, 0.7, 1 - 1e-12):
        alone = draw_together([(sampler, rule, 0)], row[None])[0]
        assert alone == draw([(sampler, sampler.select(row), 0)])


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"temperature": 0},
        {"top_k": 7, "top_p": 1.0, "min_p": 0.0},
        {"top_p": 0.3},
        {"logit_bias": {0: -math.inf, 9: -math.inf}},
        {"logit_bias": {5: 4.0, 77: -100.0, 299: 2.5}},
    ],
    ids=str,
)
def test_m6_k5_drawn_together_is_what_each_draws_alone(chosen: dict[str, Any]) -> None:
    """Whoever else is in the step: others with the same settings, and with other ones."""
    rows = rows_of(12, 6000)
    streams = []
    for at in range(len(rows)):
        kind = chosen if at % 3 else {"top_k": 3}
        sampler = Sampler(Sampling(seed=at, **kind), n_ctx=N_CTX)
        rule = CompiledChain.of(sampler)
        assert rule is not None
        streams.append((sampler, rule, 11 * at))
    together, _ = draw_together(streams, rows)
    alone = [draw_together([stream], rows[at : at + 1])[0][0] for at, stream in enumerate(streams)]
    by_hand = [
        draw([(sampler, sampler.select(row), position)])[0]
        for (sampler, _, position), row in zip(streams, rows, strict=True)
    ]
    assert together == alone == by_hand


@pytest.mark.parametrize(
    "chosen",
    [
        {"top_k": 0},
        {"typical_p": 0.5},
        {"mirostat": 2},
        {"top_n_sigma": 1.0},
        {"repeat_penalty": 1.2},
        {"dry_multiplier": 0.5},
        {"xtc_probability": 0.5},
        {"logit_bias": dict.fromkeys(range(200), 1.0)},
    ],
    ids=str,
)
def test_who_looks_at_more_than_the_largest_draws_alone(chosen: dict[str, Any]) -> None:
    assert CompiledChain.of(Sampler(Sampling(**chosen), n_ctx=N_CTX)) is None


def test_rows_that_hold_no_numbers_or_nothing_to_draw_are_errors_together_too() -> None:
    sampler = Sampler(Sampling(seed=1), n_ctx=N_CTX)
    rule = CompiledChain.of(sampler)
    assert rule is not None
    rows = rows_of(3, 6000)
    for value, error in ((np.nan, EngineError), (-np.inf, NothingToDraw), (np.inf, EngineError)):
        rows[1] = value
        with pytest.raises(error):
            draw_together([(sampler, rule, 0)] * 3, rows)


@pytest.mark.parametrize("size", [300, 6000])
@pytest.mark.parametrize("shown", [0, 3, 90])
def test_log_probabilities_come_from_the_same_pass_and_are_the_model_s_own(size: int, shown: int) -> None:
    """Before any bias, as a view of the row tells them; for those who asked, and nobody else."""
    rows = rows_of(6, size)
    streams = []
    for at in range(len(rows)):
        sampler = Sampler(Sampling(seed=at, logit_bias={1: 50.0, 2: -math.inf}), n_ctx=N_CTX)
        rule = CompiledChain.of(sampler, shown if at % 2 else None)
        assert rule is not None
        streams.append((sampler, rule, at))
    tokens, found = draw_together(streams, rows)
    assert sorted(found) == [1, 3, 5]
    for at, each in found.items():
        view = LogitsView(rows[at], Step(threading.RLock(), rows))
        assert each.logprob == pytest.approx(view.logprobs([tokens[at]])[0], abs=1e-12)
        assert list(each.best) == (view.top(shown) if shown else [])
    unshown = [(sampler, CompiledChain.of(sampler), at) for sampler, _, at in streams]
    quiet, nothing = draw_together(unshown, rows)  # type: ignore[arg-type]
    assert quiet == tokens
    assert not nothing
