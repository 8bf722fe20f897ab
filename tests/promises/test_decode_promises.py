"""C7, C9, C10, K3, K5, B5, B6 and H7 as the decode loop keeps them."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import perdure
import subjects
import zoo
from decode.observed import (
    Clock,
    Turnstile,
    alone,
    check_delivery,
    check_idle,
    check_ledger,
    open_toy,
    outcome,
    read,
    trouble,
)
from inside import inside
from perdure import (
    ClosedError,
    EngineError,
    GrammarError,
    InvalidInputError,
    LogitsView,
    Model,
    Runtime,
    Stream,
)
from perdure.decode import engine_loop as module
from perdure.decode.request import Processor
from perdure.engine.contract import Outcome
from perdure.memory import MEMORY_KINDS, FullAttention, MemorySpec

OpenModel = Callable[[str], Model]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SEEDED: dict[str, Any] = {"temperature": 0.8, "repeat_penalty": 1.3, "seed": 7, "ignore_eos": True}
HARD = "é 한국어 각 🙂 👩‍👩‍👧‍👦 🇳🇱 e\u0301 \u200b ffi naïve \r\n\t \ufffd end"

every_kind = pytest.mark.parametrize("kind_", MEMORY_KINDS, ids=lambda kind: f"toy-{kind.name}")
every_model = pytest.mark.parametrize(
    "name",
    subjects.every([*zoo.names(), *subjects.MLX]),
)


def words(count: int, salt: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng([salt, count]).integers(0, 256, count)]


def opened(model: Model, **settings: Any) -> Runtime:
    return perdure.open(model, **{"n_ctx": 256, "slots": 4, "threads": 1, **settings})


def says(tokens: Sequence[int]) -> Processor:
    """Makes a reply of exactly these tokens."""
    left = iter(tokens)

    def choose(script: Sequence[int], logits: LogitsView) -> NDArray[np.float32]:
        row = np.full(logits.size, -np.inf, np.float32)
        row[next(left)] = 0
        return row

    return choose


def goes_on_once(condition: Callable[[], bool]) -> Processor:
    """Holds a reply after its first token until `condition` is true, however busy the machine is."""
    drawn = itertools.count()

    def wait(script: Sequence[int], logits: LogitsView) -> NDArray[np.float32]:
        if next(drawn):
            while not condition():
                os.sched_yield()
        return logits.copy()

    return wait


# C7: every reply ends with a true reason.


@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
def test_c7_each_reason_is_reached_and_true(llama: Model, exact: bool) -> None:
    """C7. `tool_calls` is the chat's own reason; the decode loop has all the others."""
    eos = llama.eos
    assert eos is not None
    with opened(llama, slots=1, exact=exact) as rt:
        by_token = rt.generate("Hi", temperature=0, logit_bias={eos: 100.0}, max_tokens=9)
        assert (by_token.finish_reason, by_token.end, by_token.tokens) == ("stop", eos, ())

        text = [*b"so it ENDs here"]
        by_string = rt.generate("Hi", processors=[says(text)], stop=["END"], max_tokens=40)
        assert (by_string.finish_reason, by_string.text, by_string.stop) == ("stop", "so it ", "END")
        assert by_string.tokens == tuple(text[: text.index(ord("D")) + 1])

        by_grammar = rt.generate("Hi", regex="yes|no", temperature=0)
        assert by_grammar.finish_reason == "stop"
        assert by_grammar.text in ("yes", "no")

        by_length = rt.generate("Hi", max_tokens=5, **GREEDY)
        assert (by_length.finish_reason, len(by_length.tokens)) == ("length", 5)
        by_room = rt.generate(words(250), **GREEDY)
        assert (by_room.finish_reason, len(by_room.tokens)) == ("length", 7)

        ended = threading.Event()
        job = rt.submit("Hi", processors=[goes_on_once(ended.is_set)], **GREEDY)
        next(iter(job))
        job.cancel()
        ended.set()
        assert job.reply().finish_reason == "cancelled"

        late = rt.submit("Hi", timeout=1e-9, **GREEDY)
        assert late.reply().finish_reason == "cancelled"

        failing = rt.submit("Hi", processors=[says([])], max_tokens=5)
        seen = read(failing)
        assert (seen.reasons, type(seen.error)) == (["error"], InvalidInputError)
        dead = rt.submit(
            "Hi", regex="[0-9]", logit_bias=dict.fromkeys(range(ord("0"), ord("9") + 1), -np.inf)
        )
        assert isinstance(read(dead).error, GrammarError)

        engine_loop = inside(rt).engine_loop
        closing = rt.submit("Hi", processors=[goes_on_once(lambda: engine_loop._closing)], **GREEDY)
        next(iter(closing))
        rt.close()
        assert closing.reply().finish_reason == "cancelled"
        with pytest.raises(ClosedError):
            rt.submit("Hi")


def test_c7_ignoring_the_end_token_means_that_it_is_never_drawn(llama: Model) -> None:
    eos = llama.eos
    assert eos is not None
    with opened(llama) as rt:
        reply = rt.generate("Hi", temperature=0, logit_bias={eos: 100.0}, ignore_eos=True, max_tokens=9)
        assert (reply.finish_reason, len(reply.tokens), reply.end) == ("length", 9, None)
        assert eos not in reply.tokens


# C9: any Unicode round-trips.


@pytest.mark.parametrize("merged", [False, True], ids=["bytes", "tokens"])
@pytest.mark.parametrize("crowd", [1, 3])
def test_c9_any_unicode_comes_out_whole_in_any_cutting(llama: Model, merged: bool, crowd: int) -> None:
    """C9: characters of up to 4 bytes, one token each byte, streamed to several readers at once."""
    tokens = llama.tokenize(HARD) if merged else list(HARD.encode())
    with opened(llama) as rt:
        jobs = [
            rt.submit("Say", processors=[says(tokens)], max_tokens=len(tokens), ignore_eos=True)
            for _ in range(crowd)
        ]
        for job in jobs:
            seen = read(job)
            assert seen.text == job.reply().text == HARD
            assert all(delta.text == "" or delta.text in HARD for delta in seen.deltas)
            check_delivery(seen.deltas, job.replies(), llama)


def test_c9_a_stop_of_several_bytes_never_leaks(llama: Model) -> None:
    with opened(llama) as rt:
        for stop in ("🙂", "👩‍👩‍👧‍👦", "한국어", "e\u0301", "\ufffd"):
            tokens = list(HARD.encode())
            job = rt.submit("Say", processors=[says(tokens)], max_tokens=len(tokens), stop=stop)
            seen = read(job)
            assert seen.text == HARD[: HARD.index(stop)]
            assert (seen.reasons, job.reply().stop) == (["stop"], stop)


# C10: nobody ends another, and nobody changes another's answer.


@every_model
def test_c10_answers_do_not_depend_on_who_else_is_served(name: str, open_model: OpenModel) -> None:
    """C10 in exact mode: bit for bit, greedy and seeded, whatever comes and goes meanwhile."""
    model = open_model(name)
    asked: list[tuple[list[int], dict[str, Any]]] = [
        (words(70), GREEDY),
        (words(9, salt=1), SEEDED),
        (words(130, salt=2), {**GREEDY, "logprobs": 2}),
        (words(1, salt=3), {**SEEDED, "n": 2}),
    ]
    apart = []
    for prompt, settings in asked:
        with opened(model, exact=True, slots=1) as rt:
            apart.append(rt.submit(prompt, max_tokens=10, **settings).replies())
    with opened(model, exact=True, slots=3) as rt:
        passing = [rt.submit(words(40, salt=9 + at), **GREEDY) for at in range(2)]
        jobs = [rt.submit(prompt, max_tokens=10, **settings) for prompt, settings in asked]
        for job in passing:
            job.cancel()
        together = [job.replies() for job in jobs]
    for one, other in zip(apart, together, strict=True):
        assert [reply.tokens for reply in one] == [reply.tokens for reply in other]
        assert [reply.logprobs for reply in one] == [reply.logprobs for reply in other]
        assert {reply.finish_reason for reply in other} == {"length"}


@every_kind
def test_c10_a_new_request_never_ends_another(kind_: type[MemorySpec]) -> None:
    """C10 in the default mode, on an engine that does not round: all tokens, and the same ones."""
    gate = Turnstile()
    with open_toy(kind_, gate=gate, slots=2) as rt:
        first = rt.submit("the first", max_tokens=60, **GREEDY)
        gate.pass_through(20)
        others = [rt.submit(f"another {at}", max_tokens=7, **GREEDY) for at in range(9)]
        gate.open()
        assert first.reply().tokens == alone(kind_, "the first", max_tokens=60, **GREEDY)[0].tokens
        for at, job in enumerate(others):
            assert job.reply().tokens == alone(kind_, f"another {at}", max_tokens=7, **GREEDY)[0].tokens


# K3: a prompt that is wholly in the cache.


@every_kind
def test_k3_the_same_prompt_four_times_is_one_answer(kind_: type[MemorySpec]) -> None:
    """K3: from the second time on all but the last token is reused, and the row is its own."""
    with open_toy(kind_) as rt:
        replies = [rt.generate("the same prompt again", max_tokens=20, **GREEDY) for _ in range(4)]
    assert {reply.tokens for reply in replies} == {replies[0].tokens}
    assert replies[0].tokens == alone(kind_, "the same prompt again", max_tokens=20, **GREEDY)[0].tokens
    assert [reply.usage.cached_tokens for reply in replies] == [0, 20, 20, 20]


@every_model
@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
def test_k3_holds_on_every_architecture(name: str, exact: bool, open_model: OpenModel) -> None:
    """K3: the same tokens in exact mode; in the default mode the same first row, but for rounding."""
    with opened(open_model(name), exact=exact) as rt:
        replies = [rt.generate(words(80), max_tokens=12, logprobs=1, **GREEDY) for _ in range(4)]
    firsts = [reply.logprobs[0].top[0].logprob for reply in replies if reply.logprobs]
    assert len(firsts) == 4
    assert max(firsts) - min(firsts) <= (0.0 if exact else 0.05)
    if exact:
        assert {reply.tokens for reply in replies} == {replies[0].tokens}


# K5: sampler settings act the same on every path.


@every_kind
def test_k5_penalty_and_seed_give_the_same_tokens_warm_and_cold(kind_: type[MemorySpec]) -> None:
    """K5: fresh, on a used runtime, from the cache, in a crowd, and as one of several samples."""
    prompt = "penalties look back at this prompt, look back at this prompt"
    cold = alone(kind_, prompt, max_tokens=30, **SEEDED)[0].tokens
    with open_toy(kind_, slots=3) as rt:
        for _ in range(3):
            assert rt.generate(prompt, max_tokens=30, **SEEDED).tokens == cold
        rt.generate(prompt + " and more of it", max_tokens=5)
        crowd = [rt.submit(f"somebody {at}", max_tokens=40) for at in range(4)]
        assert rt.generate(prompt, max_tokens=30, **SEEDED).tokens == cold
        samples = rt.submit(prompt, n=4, max_tokens=30, **{**SEEDED, "seed": 5}).replies()
        assert samples[2].tokens == cold
        for job in crowd:
            job.reply()


def test_k5_the_penalty_matters(llama: Model) -> None:
    """Without this the tests above and below could pass with penalties that do nothing."""
    with opened(llama, exact=True) as rt:
        plain = rt.generate(words(60), max_tokens=30, **{**SEEDED, "repeat_penalty": 1.0})
        assert rt.generate(words(60), max_tokens=30, **SEEDED).tokens != plain.tokens


@every_model
def test_k5_holds_on_every_architecture_in_exact_mode(name: str, open_model: OpenModel) -> None:
    """K5: a fresh runtime, a used one, and a crowd."""
    model = open_model(name)
    with opened(model, exact=True, slots=1) as rt:
        fresh = rt.generate(words(90), max_tokens=16, **SEEDED).tokens
    with opened(model, exact=True, slots=3) as rt:
        rt.generate(words(90), max_tokens=5)
        assert rt.generate(words(90), max_tokens=16, **SEEDED).tokens == fresh
        crowd = [rt.submit(words(70, salt=at), max_tokens=20) for at in range(4)]
        assert rt.generate(words(90), max_tokens=16, **SEEDED).tokens == fresh
        for job in crowd:
            job.cancel()


# B5: safe from several threads.


@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
def test_b5_eight_threads_get_what_one_would(llama: Model, exact: bool) -> None:
    """B5: each thread asks for several replies; in exact mode they are those of a serial run."""
    prompts = [words(5 + 9 * at, salt=at) for at in range(8)]

    def ask(rt: Runtime, at: int) -> list[tuple[int, ...]]:
        return [
            rt.generate(prompts[at], max_tokens=6, **GREEDY).tokens,
            rt.generate(prompts[at], max_tokens=6, **{**SEEDED, "seed": at}).tokens,
            tuple(
                token for delta in rt.stream(prompts[at], max_tokens=4, **GREEDY) for token in delta.tokens
            ),
        ]

    with opened(llama, exact=True, slots=1) as rt:
        serial = [ask(rt, at) for at in range(8)]
    found: dict[int, list[tuple[int, ...]]] = {}
    with opened(llama, exact=exact, slots=3) as rt:
        threads = [threading.Thread(target=lambda at=at: found.update({at: ask(rt, at)})) for at in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert rt.load == (0, 0)
    assert set(found) == set(range(8))
    if exact:
        assert [found[at] for at in range(8)] == serial
    else:
        assert [[len(tokens) for tokens in found[at]] for at in range(8)] == [[6, 6, 4]] * 8


# B6: after a failure the ledger is true.


@every_kind
@pytest.mark.parametrize("cache", [0, 1 << 20])
@pytest.mark.parametrize("result", [Outcome.FAILED, Outcome.FULL])
def test_b6_a_prompt_that_fails_at_any_chunk_is_answered_right_the_next_time(
    kind_: type[MemorySpec], cache: int, result: Outcome
) -> None:
    """B6: fail at chunk k of n for every k, then ask again and ask for more of the same."""
    prompt = "a prompt of several chunks, each of which fails in its turn"
    right = alone(kind_, prompt, max_tokens=5, **GREEDY)[0].tokens
    longer = alone(kind_, prompt + " and more", max_tokens=5, **GREEDY)[0].tokens
    for chunk in range(1, 9):
        with open_toy(kind_, n_batch=8, cache=cache) as rt:
            trouble(rt).fail_decode(result, after=3, ahead=chunk)
            seen = read(rt.submit(prompt, max_tokens=5, **GREEDY))
            assert isinstance(seen.error, (EngineError, perdure.ContextOverflow))
            check_ledger(rt)
            assert rt.generate(prompt, max_tokens=5, **GREEDY).tokens == right
            assert rt.generate(prompt + " and more", max_tokens=5, **GREEDY).tokens == longer
            check_idle(rt)


# H7: cancellation and deadlines reach every phase.


class Phases:
    """A request held in one of its phases, ready to be ended there."""

    def __init__(self, kind: type[MemorySpec], *, exact: bool) -> None:
        self.gate = Turnstile()
        self.rt = open_toy(kind, gate=self.gate, slots=1, exact=exact, n_batch=16)
        self.other: Stream[Any, Any] | None = None

    def queued(self, **request: Any) -> Stream[Any, Any]:
        self.other = self.rt.submit("in front", max_tokens=5, **GREEDY)
        self.gate.reached.wait()
        return self.rt.submit("behind", max_tokens=50, **GREEDY, **request)

    def reading(self, **request: Any) -> Stream[Any, Any]:
        job = self.rt.submit(words(200), max_tokens=50, **GREEDY, **request)
        self.gate.pass_through(70)
        return job

    def writing(self, **request: Any) -> Stream[Any, Any]:
        job = self.rt.submit(words(20), max_tokens=100, **GREEDY, **request)
        self.gate.pass_through(50)
        return job

    def between_samples(self, **request: Any) -> Stream[Any, Any]:
        """The first of three samples is done, the second is being written."""
        job = self.rt.submit(words(20), max_tokens=10, n=3, **GREEDY, **request)
        self.gate.pass_through(33)
        return job


PHASES = {
    "queued": ["cancelled"],
    "reading": ["cancelled"],
    "writing": ["cancelled"],
    "between_samples": ["length", "cancelled", "cancelled"],
}


@every_kind
@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
@pytest.mark.parametrize("by", ["user", "deadline", "drop"])
@pytest.mark.parametrize("phase", PHASES)
def test_h7_a_request_can_be_ended_in_each_phase_within_one_step(
    kind_: type[MemorySpec], exact: bool, by: str, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H7, library side: a step in flight for nobody else is stopped in the middle."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    held = Phases(kind_, exact=exact)
    with held.rt as rt:
        job = getattr(held, phase)(timeout=10.0 if by == "deadline" else None)
        steps = trouble(rt).n_decodes
        output = job.output
        if by == "user":
            job.cancel()
        elif by == "deadline":
            clock.now += 11
        else:
            del job
        held.gate.open()
        output.wait(finish=True)
        assert [reply.finish_reason for reply in output.replies] == PHASES[phase]
        if phase != "queued":
            assert trouble(rt).n_decodes - steps <= 1
        check_delivery(list(output.deltas), output.replies, rt.model)
        if held.other is not None:
            assert held.other.reply().finish_reason == "length"
        check_idle(rt)
        assert rt.generate("after", max_tokens=5, **GREEDY).tokens == (
            alone(kind_, "after", max_tokens=5, **GREEDY)[0].tokens
        )


def test_h7_the_one_who_is_not_cancelled_loses_nothing() -> None:
    """H7: a step that serves others too goes on for them."""
    gate = Turnstile()
    with open_toy(gate=gate, slots=3) as rt:
        jobs = [rt.submit(f"request {at}", max_tokens=20, **GREEDY) for at in range(3)]
        gate.pass_through(40)
        jobs[1].cancel()
        gate.open()
        reasons = [outcome(job)[0].finish_reason for job in jobs]
        assert reasons == ["length", "cancelled", "length"]
        for at in (0, 2):
            right = alone(FullAttention, f"request {at}", max_tokens=20, **GREEDY)[0].tokens
            assert jobs[at].reply().tokens == right
        check_idle(rt)


def test_h7_cancelling_twice_or_after_the_end_is_nothing() -> None:
    with open_toy() as rt:
        job = rt.submit("a", max_tokens=3, **GREEDY)
        reply = job.reply()
        job.cancel()
        job.cancel()
        assert job.reply() is reply
        check_idle(rt)
