"""The settings of a draw: what is refused, what the chain is, and what it does to a row of the engine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import perdure
from decode.observed import check_delivery, outcome, read
from perdure import (
    InvalidInputError,
    LogitsView,
    Model,
    Reply,
    Runtime,
    Sampling,
    SamplingError,
    StaleViewError,
    TokenError,
)
from perdure.decode.request import Processor
from perdure.decode.sampling.repetition import BreakerTable
from perdure.decode.sampling.sampler import Sampler, draw

Row = NDArray[np.float32]
PLAIN: Mapping[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Draws from the distribution as it is."""


@pytest.fixture(scope="module")
def model(zoo_path: Callable[[str], Path]) -> Iterator[Model]:
    with Model(zoo_path("llama")) as model:
        yield model


@pytest.fixture(scope="module")
def rt(model: Model) -> Iterator[Runtime]:
    with perdure.open(model, n_ctx=256, slots=2, threads=1) as runtime:
        yield runtime


class Bowl:
    """Draws from a row that a test lays out: `odds` are probabilities, all other tokens have none."""

    def __init__(self, model: Model) -> None:
        self.n_vocab = model.n_vocab
        self._breakers = BreakerTable(model)

    def draws(
        self, odds: Mapping[int, float], count: int = 300, after: Sequence[int] = (), **settings: Any
    ) -> Counter[int]:
        return Counter(self.sequence(odds, count, after, **settings))

    def sequence(
        self, odds: Mapping[int, float], count: int, after: Sequence[int] = (), **settings: Any
    ) -> list[int]:
        sampling = Sampling(**{**PLAIN, "seed": 1, **settings}).seeded()
        sampler = Sampler(sampling, n_ctx=256, breakers=self._breakers.find)
        sampler.prime(after)
        row: Row = np.full(self.n_vocab, -60, np.float32)
        for token, chance in odds.items():
            row[token] = math.log(chance)
        return [draw([(sampler, sampler.select(row), position)])[0] for position in range(count)]


@pytest.fixture(scope="module")
def bowl(model: Model) -> Bowl:
    return Bowl(model)


# What is refused.

NAN, INF = math.nan, math.inf
BAD: dict[str, list[Any]] = {
    "temperature": [-0.1, 100.1, 1e-7, 5e-324, NAN, INF, -INF, "1", None, True, 1j],
    "top_p": [-0.1, 1.1, NAN, INF, "1", None, True],
    "min_p": [-0.1, 1.1, NAN, INF, "1", None, True],
    "typical_p": [-0.1, 1.1, NAN, INF, "1", None, True],
    "top_n_sigma": [-0.1, 1e7, NAN, INF, "1", None, True],
    "repeat_penalty": [0.0, -1.0, 1e7, NAN, INF, "1", None, True],
    "frequency_penalty": [-1e7, 1e7, NAN, INF, "1", None, True],
    "presence_penalty": [-1e7, 1e7, NAN, INF, "1", None, True],
    "dry_multiplier": [-0.1, 1e7, NAN, INF, "1", None, True],
    "dry_base": [0.9, 1e7, NAN, INF, "1", None, True],
    "xtc_probability": [-0.1, 1.1, NAN, INF, "1", None, True],
    "xtc_threshold": [-0.1, 1.1, NAN, INF, "1", None, True],
    "mirostat_tau": [0.0, -1.0, 1e7, NAN, INF, "1", None, True],
    "mirostat_eta": [0.0, -1.0, 1e7, NAN, INF, "1", None, True],
    "top_k": [-1, 2**31, 1.5, NAN, "1", None, True],
    "penalty_last_n": [-2, 2**31, 1.5, NAN, "1", None, True],
    "dry_allowed_length": [0, -1, 2**31, 1.5, "1", None, True],
    "dry_last_n": [-2, 2**31, 1.5, "1", None, True],
    "mirostat": [3, -1, 0.5, "1", None],
    "seed": [-1, 2**32 - 1, 2**32, 1.5, "1", True],
    "dry_breakers": [["a"], "a", None, (1,), ("",), ("\0",), ("\ud800",)],
    "logit_bias": [
        {1: NAN},
        {1: INF},
        {1: 1e39},
        {1: -1e39},
        {1: "1"},
        {"1": 1.0},
        {1.0: 1.0},
        {True: 1.0},
        None,
        [(1, 2.0)],
        5,
    ],
}
GOOD: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 1e-6, 1, 100],
    "top_p": [0, 0.5, 1],
    "min_p": [0, 0.5, 1],
    "typical_p": [0, 0.5, 1],
    "top_n_sigma": [0, 1.5, 1e6],
    "repeat_penalty": [1e-6, 1, 1e6],
    "frequency_penalty": [-1e6, 0, 1e6],
    "presence_penalty": [-1e6, 0, 1e6],
    "dry_multiplier": [0, 0.8, 1e6],
    "dry_base": [1, 1.75, 1e6],
    "xtc_probability": [0, 0.5, 1],
    "xtc_threshold": [0, 0.5, 1],
    "mirostat_tau": [1e-6, 5, 1e6],
    "mirostat_eta": [1e-6, 0.1, 1e6],
    "top_k": [0, 1, 384, 2**31 - 1],
    "penalty_last_n": [-1, 0, 64, 2**31 - 1],
    "dry_allowed_length": [1, 2, 2**31 - 1],
    "dry_last_n": [-1, 0, 64, 2**31 - 1],
    "mirostat": [0, 1, 2],
    "seed": [None, 0, 2**32 - 2],
    "dry_breakers": [(), ("\n",), ("é🙂", "x" * 500)],
    "logit_bias": [{}, {0: -INF}, {383: 1e6}, {1: -1e6, 2: 3}],
}


def test_every_setting_is_in_both_tables() -> None:
    assert set(Sampling.__dataclass_fields__) == set(BAD) == set(GOOD)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name]])
def test_a_setting_out_of_range_is_a_typed_error(name: str, value: Any) -> None:
    with pytest.raises(SamplingError, match=name if name != "logit_bias" else "bias"):
        Sampling(**{name: value})


COMPANY: dict[str, Mapping[str, Any]] = {
    "dry_base": {"dry_multiplier": 1.0},
    "dry_allowed_length": {"dry_multiplier": 1.0},
    "dry_last_n": {"dry_multiplier": 1.0},
    "dry_breakers": {"dry_multiplier": 1.0},
    "penalty_last_n": {"repeat_penalty": 1.3},
    "xtc_threshold": {"xtc_probability": 1.0},
    "mirostat_tau": {"mirostat": 1},
    "mirostat_eta": {"mirostat": 2},
}
"""What must be on for a setting to reach the engine."""


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in GOOD for value in GOOD[name]])
def test_a_setting_at_the_edge_of_its_range_draws_real_tokens(name: str, value: Any, bowl: Bowl) -> None:
    drawn = bowl.draws({5: 0.7, 6: 0.3}, 20, (5, 6, 5, 6, 5), **{**COMPANY.get(name, {}), name: value})
    assert drawn.total() == 20
    assert set(drawn) <= ({5, 6, 383} if name == "logit_bias" else set(range(384)))


@pytest.mark.parametrize("settings", [{}, {"mirostat": 1}, {"mirostat": 2}, {"xtc_probability": 1.0}])
@pytest.mark.parametrize("temperature", [1e-6, 1.0, 100.0])
def test_the_strongest_settings_together_still_draw_what_is_possible(
    settings: Mapping[str, Any], temperature: float, bowl: Bowl
) -> None:
    strong = {"logit_bias": {7: 1e6, 8: -1e6, 9: -INF}, "frequency_penalty": 1e6, "repeat_penalty": 1e6}
    drawn = bowl.draws({7: 0.5, 9: 0.5}, 20, (9,), temperature=temperature, **strong, **settings)
    assert drawn.total() == 20
    assert 9 not in drawn


def test_a_biased_token_outside_the_vocabulary_is_refused_when_the_request_is_made(rt: Runtime) -> None:
    for token in (384, -1):
        with pytest.raises(TokenError, match=str(token)):
            rt.submit("a", logit_bias={token: 1.0})


def test_ruling_out_every_token_is_refused_when_the_request_is_made(rt: Runtime) -> None:
    with pytest.raises(SamplingError, match="every token"):
        rt.submit("a", logit_bias=dict.fromkeys(range(384), -INF))


def test_a_setting_that_does_not_exist_is_refused_by_name(rt: Runtime) -> None:
    with pytest.raises(InvalidInputError, match="did you mean 'temperature'"):
        rt.submit("a", temprature=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidInputError, match="not both"):
        rt.submit("a", sampling=Sampling(), top_k=4)


def test_tokens_are_ruled_out_beside_as_many_biases_as_a_client_may_send() -> None:
    """`ignore_eos` and `tool_choice="none"` rule out tokens of their own."""
    full = Sampling(logit_bias=dict.fromkeys(range(1024), 1.0))
    assert full.without([5000, 5001]).banned == [5000, 5001]


def test_a_changed_dictionary_does_not_change_settings_that_were_checked() -> None:
    bias = {1: 1.0}
    sampling = Sampling(logit_bias=bias)
    bias[2] = INF
    assert sampling.logit_bias == {1: 1.0}


# How far it looks back.


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0),
        ({"repeat_penalty": 1.1}, 64),
        ({"repeat_penalty": 1.1, "penalty_last_n": 10}, 10),
        ({"presence_penalty": 0.1, "penalty_last_n": -1}, 256),
        ({"dry_multiplier": 1.0, "dry_last_n": 100, "frequency_penalty": 1.0}, 100),
        ({"dry_multiplier": 1.0}, 256),
    ],
)
def test_a_chain_knows_how_far_it_looks_back(settings: Mapping[str, Any], expected: int) -> None:
    assert Sampler(Sampling(**settings), n_ctx=256).span == expected


# What the chain does.


def test_plain_draws_follow_the_distribution(bowl: Bowl) -> None:
    drawn = bowl.draws({5: 0.7, 6: 0.2, 7: 0.1}, 3000)
    assert set(drawn) == {5, 6, 7}
    assert drawn[5] == pytest.approx(2100, abs=150)
    assert drawn[7] == pytest.approx(300, abs=90)


def test_temperature_0_and_top_k_1_give_the_likeliest_token(bowl: Bowl) -> None:
    odds = {5: 0.30, 6: 0.31, 7: 0.29}
    assert set(bowl.draws(odds, temperature=0)) == {6}
    assert set(bowl.draws(odds, top_k=1)) == {6}
    assert set(bowl.draws(odds, top_p=0.0)) == {6}
    assert set(bowl.draws(odds, min_p=1.0)) == {6}


def test_temperature_sharpens_and_flattens(bowl: Bowl) -> None:
    odds = {5: 0.7, 6: 0.3}
    cold, plain, hot = (bowl.draws(odds, 1000, temperature=t)[5] for t in (0.3, 1.0, 3.0))
    assert cold > plain > hot > 450


def test_top_k_top_p_and_min_p_cut_the_tail_and_nothing_else(bowl: Bowl) -> None:
    odds = {5: 0.5, 6: 0.3, 7: 0.15, 8: 0.05}
    assert set(bowl.draws(odds)) == {5, 6, 7, 8}
    assert set(bowl.draws(odds, top_k=3)) == {5, 6, 7}
    assert set(bowl.draws(odds, top_p=0.75)) == {5, 6}
    assert set(bowl.draws(odds, min_p=0.2)) == {5, 6, 7}


def test_typical_leaves_out_what_is_too_likely_or_too_unlikely(bowl: Bowl) -> None:
    odds = {5: 0.6, **dict.fromkeys(range(10, 18), 0.05)}
    assert 5 in bowl.draws(odds)
    # Entropy 1.5 nats: 0.6 carries 0.5 of them, 0.05 carries 3.0. The likely one is nearer.
    assert set(bowl.draws(odds, typical_p=0.3)) == {5}
    flat = {5: 0.5, **dict.fromkeys(range(10, 15), 0.1)}
    # Entropy 1.5 nats: 0.5 carries 0.69, 0.1 carries 2.3: equally far but for a hair.
    near = {5: 0.42, **dict.fromkeys(range(10, 14), 0.145)}
    assert set(bowl.draws(near, typical_p=0.4)) == {10, 11, 12}
    assert set(bowl.draws(flat, typical_p=1.0)) == set(flat)


def test_a_bias_moves_a_token_as_far_as_it_says(bowl: Bowl) -> None:
    even = {5: 0.5, 6: 0.5}
    assert set(bowl.draws(even, logit_bias={200: 100.0})) == {200}
    assert set(bowl.draws(even, logit_bias={5: -INF})) == {6}
    assert set(bowl.draws(even, logit_bias={5: -100.0})) == {6}
    assert set(bowl.draws(even, temperature=0, logit_bias={6: 0.1})) == {6}
    tripled = bowl.draws(even, 2000, logit_bias={5: math.log(3)})
    assert tripled[5] == pytest.approx(1500, abs=100)


def test_penalties_weigh_on_what_was_accepted_within_their_span(bowl: Bowl) -> None:
    odds = {5: 0.55, 6: 0.45}
    strong: Mapping[str, Any] = {"temperature": 0, "repeat_penalty": 2.0}
    assert bowl.sequence(odds, 1, (5,), **strong) == [6]
    assert bowl.sequence(odds, 1, (), **strong) == [5]
    assert bowl.sequence(odds, 1, (5, 100, 101), penalty_last_n=2, **strong) == [5]
    assert bowl.sequence(odds, 1, (5, 100, 101), penalty_last_n=3, **strong) == [6]
    assert bowl.sequence(odds, 1, (5, *range(100, 200)), penalty_last_n=-1, **strong) == [6]


def test_a_frequency_penalty_counts_and_a_presence_penalty_does_not(bowl: Bowl) -> None:
    odds = {5: 0.6, 6: 0.4}  # 0.41 nats between them
    assert bowl.sequence(odds, 1, (5,), temperature=0, frequency_penalty=0.25) == [5]
    assert bowl.sequence(odds, 1, (5, 5), temperature=0, frequency_penalty=0.25) == [6]
    assert bowl.sequence(odds, 1, (5, 5, 5), temperature=0, presence_penalty=0.25) == [5]
    assert bowl.sequence(odds, 1, (5,), temperature=0, presence_penalty=0.5) == [6]


def test_tokens_drawn_count_for_the_penalties_too(bowl: Bowl) -> None:
    odds = {5: 0.4, 6: 0.35, 7: 0.25}
    drawn = bowl.sequence(odds, 3, temperature=0, presence_penalty=5.0)
    assert drawn == [5, 6, 7]


def test_dry_breaks_a_loop_of_several_tokens(bowl: Bowl, model: Model) -> None:
    odds = {13: 0.9, 6: 0.1}
    loop = (11, 12, 13, 11, 12, 13, 11, 12)
    dry: Mapping[str, Any] = {"temperature": 0, "dry_multiplier": 5.0}
    assert bowl.sequence(odds, 1, loop, temperature=0) == [13]
    assert bowl.sequence(odds, 1, loop, **dry) == [6]
    assert bowl.sequence(odds, 1, loop, dry_allowed_length=20, **dry) == [13]
    assert bowl.sequence(odds, 1, loop, dry_last_n=2, **dry) == [13]
    breaker = model.piece(12).decode()
    assert bowl.sequence(odds, 1, loop, dry_breakers=(breaker,), **dry) == [13]


def test_xtc_drops_the_likeliest_where_others_are_likely_enough(bowl: Bowl) -> None:
    odds = {5: 0.5, 6: 0.3, 7: 0.2}
    assert set(bowl.draws(odds, xtc_probability=1.0, xtc_threshold=0.15)) == {7}
    assert set(bowl.draws(odds, xtc_probability=1.0, xtc_threshold=0.25)) == {6, 7}
    assert set(bowl.draws(odds, xtc_probability=1.0, xtc_threshold=0.4)) == {5, 6, 7}
    assert set(bowl.draws(odds, xtc_probability=0.0, xtc_threshold=0.15)) == {5, 6, 7}


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_keeps_the_surprise_near_its_target(version: int, bowl: Bowl) -> None:
    odds = dict.fromkeys(range(256), 1 / 256)
    odds[5] = 0.9
    low = bowl.draws(odds, 400, mirostat=version, mirostat_tau=0.5, mirostat_eta=0.1)
    high = bowl.draws(odds, 400, mirostat=version, mirostat_tau=9.0, mirostat_eta=0.1)
    assert low[5] > high[5]
    assert len(high) > len(low)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7, "top_k": 5, "repeat_penalty": 1.2},
        {"mirostat": 1},
        {"mirostat": 2},
        {"xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"typical_p": 0.6},
    ],
)
def test_the_same_seed_draws_the_same_tokens_and_another_does_not(
    settings: Mapping[str, Any], bowl: Bowl
) -> None:
    """K5"""
    odds = dict.fromkeys(range(64), 1 / 64)
    first = bowl.sequence(odds, 40, **{**settings, "seed": 7})
    assert bowl.sequence(odds, 40, **{**settings, "seed": 7}) == first
    assert bowl.sequence(odds, 40, **{**settings, "seed": 8}) != first


def test_a_reply_says_which_seed_was_drawn_for_it_and_that_seed_repeats_it(rt: Runtime) -> None:
    settings: Mapping[str, Any] = {"max_tokens": 12, "temperature": 1.5, "ignore_eos": True}
    first = rt.generate("Say", **settings)
    assert rt.generate("Say", seed=first.seed, **settings).tokens == first.tokens
    assert len({rt.generate("Say", **settings).tokens for _ in range(3)}) == 3


def test_samples_of_one_prompt_differ_and_each_can_be_had_by_its_own_seed(rt: Runtime) -> None:
    settings: Mapping[str, Any] = {"max_tokens": 8, "temperature": 1.5, "ignore_eos": True}
    replies = rt.submit("Say", n=3, seed=2**32 - 3, **settings).replies()
    assert [reply.seed for reply in replies] == [2**32 - 3, 2**32 - 2, 0]
    assert [reply.index for reply in replies] == [0, 1, 2]
    assert len({reply.tokens for reply in replies}) == 3


# Processors.


def generate(rt: Runtime, *processors: Processor, **settings: Any) -> Reply:
    return rt.generate(
        "Hello there", processors=processors, **{"max_tokens": 5, "temperature": 0, **settings}
    )


def only(token: int) -> Processor:
    def keep(tokens: Sequence[int], logits: LogitsView) -> Row:
        changed = np.full(logits.size, -np.inf, np.float32)
        changed[token] = logits[token]
        return changed

    return keep


def test_a_processor_sees_the_script_so_far_and_the_logits_of_the_model(rt: Runtime, model: Model) -> None:
    seen: list[list[int]] = []
    best: list[int] = []

    def look(tokens: Sequence[int], logits: LogitsView) -> Row:
        seen.append(list(tokens))
        best.append(logits.argmax())
        assert tokens[-1] == seen[-1][-1]
        assert logits.size == model.n_vocab
        return logits.copy()

    reply = generate(rt, look)
    prompt = model.tokenize("Hello there")
    assert best == list(reply.tokens)
    assert seen == [[*prompt, *reply.tokens[:count]] for count in range(5)]
    assert reply.tokens == generate(rt).tokens


def test_processors_and_bias_and_grammar_all_apply_together(rt: Runtime) -> None:
    """A binding that drops the one where the other is given would draw 66 or 65 here."""

    def two(tokens: Sequence[int], logits: LogitsView) -> Row:
        changed = np.full(logits.size, -np.inf, np.float32)
        changed[[65, 66, 67]] = [3.0, 2.0, 1.0]
        return changed

    assert generate(rt, two).text == "AAAAA"
    assert generate(rt, two, logit_bias={65: -10.0}).text == "BBBBB"
    assert generate(rt, two, logit_bias={65: -INF, 66: -5.0}).text == "CCCCC"
    assert generate(rt, two, regex="[BC]{5}").text == "BBBBB"
    assert generate(rt, two, regex="[BC]{5}", logit_bias={66: -INF}).text == "CCCCC"


def test_each_processor_gets_what_the_one_before_it_made(rt: Runtime) -> None:
    def more(tokens: Sequence[int], logits: LogitsView) -> Any:
        return logits + np.float32(1)

    def check(tokens: Sequence[int], logits: LogitsView) -> Any:
        assert logits.max() == 100
        return logits

    def hundred(tokens: Sequence[int], logits: LogitsView) -> Any:
        return np.full(logits.size, 99.0)

    assert generate(rt, hundred, more, check).finish_reason == "length"


@pytest.mark.parametrize(
    "result",
    [
        None,
        "no",
        [1.0, 2.0],
        np.zeros((384, 1), np.float32),
        np.zeros(383, np.float32),
        np.zeros(385, np.float32),
        np.full(384, np.nan, np.float32),
        np.full(384, -np.inf, np.float32),
        np.full(384, np.inf, np.float32),
        np.array([np.nan] + [0.0] * 383, np.float32),
    ],
)
def test_a_processor_that_returns_nonsense_ends_its_own_request_only(rt: Runtime, result: Any) -> None:
    other = rt.submit("Bye", max_tokens=20, temperature=0, ignore_eos=True)
    with pytest.raises(ValueError):
        generate(rt, lambda tokens, logits: result)
    assert other.reply().finish_reason == "length"


class Oops(Exception):
    pass


@pytest.mark.parametrize(
    "error", [Oops("mine"), SystemExit(3), KeyboardInterrupt(), MemoryError(), StopIteration()]
)
def test_a_processor_that_raises_ends_its_own_request_only(rt: Runtime, error: BaseException) -> None:
    def fails(tokens: Sequence[int], logits: LogitsView) -> Row:
        if len(tokens) > 4 + len("Hello there"):
            raise error
        return logits.copy()

    other = rt.submit("Bye", max_tokens=20, temperature=0, ignore_eos=True)
    job = rt.submit("Hello there", processors=[fails], max_tokens=50, temperature=0, ignore_eos=True)
    seen = read(job)
    assert type(seen.error) is (type(error) if isinstance(error, (Oops, MemoryError)) else InvalidInputError)
    check_delivery(seen.deltas, outcome(job), rt.model)
    assert other.reply().finish_reason == "length"


def test_a_view_that_a_processor_keeps_is_stale_and_holds_up_nobody(rt: Runtime) -> None:
    kept: list[LogitsView] = []
    arrays: list[Row] = []

    def keeps(tokens: Sequence[int], logits: LogitsView) -> Row:
        kept.append(logits)
        with logits.borrow() as row:
            arrays.append(row[3:5])
        return logits.copy()

    other = rt.submit("Bye", max_tokens=20, temperature=0, ignore_eos=True)
    with pytest.raises(perdure.PinnedError):
        generate(rt, keeps)
    assert other.reply().finish_reason == "length"
    assert generate(rt).finish_reason == "length"
    with pytest.raises(StaleViewError):
        kept[0][0]


def test_an_array_that_a_processor_returns_stays_its_own(rt: Runtime) -> None:
    buffer = np.zeros(384, np.float32)
    buffer[65] = 5

    def same(tokens: Sequence[int], logits: LogitsView) -> Row:
        return buffer

    assert generate(rt, same, same, logit_bias={65: -INF, 66: 1.0}).text == "BBBBB"
    buffer[0] = 1
    assert buffer[65] == 5


def test_ruling_out_every_token_between_them_is_an_error_and_not_a_wrong_token(rt: Runtime) -> None:
    with pytest.raises(InvalidInputError, match="rule out every token"):
        generate(rt, only(65), logit_bias={65: -INF})
    with pytest.raises(InvalidInputError, match="rule out every token"):
        generate(rt, only(65), regex="B+")


def test_a_processor_cannot_wait_for_the_runtime_that_waits_for_it(rt: Runtime) -> None:
    def asks(tokens: Sequence[int], logits: LogitsView) -> Row:
        rt.generate("Me", max_tokens=1)
        return logits.copy()

    def closes(tokens: Sequence[int], logits: LogitsView) -> Row:
        rt.close()
        return logits.copy()

    for processor in (asks, closes):
        with pytest.raises(InvalidInputError, match="must not call the runtime"):
            generate(rt, processor)
    assert generate(rt).finish_reason == "length"


# Log probabilities.


def test_log_probabilities_are_those_of_the_model_before_anything_changed_them(
    rt: Runtime, model: Model
) -> None:
    rows: list[Row] = []

    def record(tokens: Sequence[int], logits: LogitsView) -> Row:
        rows.append(logits.copy())
        return logits.copy()

    settings: Mapping[str, Any] = {"logprobs": 4, "ignore_eos": True, "logit_bias": {70: 3.0}}
    # Both read the prompt as a whole: one token of it alone may round otherwise.
    rt.cache.clear()
    reply = generate(rt, record, **settings)
    assert reply.logprobs is not None
    assert len(reply.logprobs) == len(reply.tokens) == 5
    for entry, token, row in zip(reply.logprobs, reply.tokens, rows, strict=True):
        scores = row.astype(np.float64)
        logp = scores - np.log(np.exp(scores).sum())
        assert entry.token == token
        assert entry.logprob == pytest.approx(logp[token], abs=1e-4)
        assert [best.token for best in entry.top] == list(np.argsort(-row, kind="stable")[:4])
        assert [best.logprob for best in entry.top] == pytest.approx(logp[np.argsort(-row)[:4]], abs=1e-4)
    rt.cache.clear()
    held = generate(rt, **settings, regex="[a-z]+")
    assert held.logprobs is not None
    assert all(math.isfinite(entry.logprob) for entry in held.logprobs)
    assert held.logprobs[0].top == reply.logprobs[0].top


def test_a_prompts_own_log_probabilities_are_those_of_drawing_it(rt: Runtime, model: Model) -> None:
    prompt = model.tokenize("The question of the day is this: what shall we do?")
    scored = rt.score(prompt, top=2)
    assert scored.prompt_logprobs is not None
    with model.context(n_ctx=256, threads=1) as ctx:
        ctx.decode(prompt, rows="all")
        for at, entry in enumerate(scored.prompt_logprobs[1:]):
            assert entry is not None
            view = ctx.logits(at)
            assert view.log_softmax() == pytest.approx(view.logprobs(range(model.n_vocab)))
            assert entry.token == prompt[at + 1]
            assert entry.logprob == pytest.approx(float(view.logprobs([entry.token])[0]), abs=0.02)
            assert len(entry.top) == 2
    assert len(scored.prompt_logprobs) == len(prompt)
    assert scored.prompt_logprobs[0] is None
    mean = np.mean([entry.logprob for entry in scored.prompt_logprobs if entry is not None])
    assert scored.perplexity == pytest.approx(math.exp(-mean))


def test_a_prompt_longer_than_the_rows_of_a_step_is_scored_whole(rt: Runtime) -> None:
    prompt = [1 + index % 200 for index in range(200)]
    scored = rt.score(prompt)
    assert scored.prompt_logprobs is not None
    assert [entry and entry.token for entry in scored.prompt_logprobs] == [None, *prompt[1:]]


def test_no_log_probabilities_come_unasked(rt: Runtime) -> None:
    reply = generate(rt)
    assert (reply.logprobs, reply.prompt_logprobs, reply.perplexity) == (None, None, None)
    zero = generate(rt, logprobs=0)
    assert zero.logprobs is not None
    assert all(entry.top == () for entry in zero.logprobs)
    every = generate(rt, logprobs=10_000, max_tokens=1)
    assert every.logprobs is not None
    assert len(every.logprobs[0].top) == 384
