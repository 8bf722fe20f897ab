"""The loop: who is served when, what a fault costs whom, and that nothing is left behind."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from decode.observed import (
    Clock,
    Turnstile,
    alone,
    check_delivery,
    check_idle,
    open_toy,
    outcome,
    read,
    trouble,
)
from inside import inside, thread_of
from perdure import (
    BusyError,
    ClosedError,
    ContextOverflow,
    DecodeError,
    EngineError,
    InvalidInputError,
    LogitsView,
    Runtime,
    TokenError,
    system,
)
from perdure.decode import engine_loop as module
from perdure.decode import executor
from perdure.decode.engine_loop import CHUNK, EngineLoop
from perdure.decode.request import Reply, Request
from perdure.decode.scheduler import admit
from perdure.decode.sequence import TokenSequence
from perdure.decode.stream import Stream, one_request
from perdure.engine.contract import Outcome
from perdure.memory import MEMORY_KINDS, FullAttention, MemorySpec
from perdure.request_options import MAX_SAMPLES
from perdure.testing.toy import Faults, PlannedFault, ToyCore, ToyModel

KINDS = MEMORY_KINDS
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
both_modes = pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


# What is refused, before any work.


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ({"prompt": ""}, TokenError),
        ({"prompt": []}, TokenError),
        ({"prompt": [261]}, TokenError),
        ({"prompt": [-1]}, TokenError),
        ({"prompt": [1.5]}, TokenError),
        ({"prompt": [[1], [2]]}, TokenError),
        ({"prompt": [[1], [2, 3]]}, TokenError),
        ({"prompt": [True]}, TokenError),
        ({"prompt": [2**70]}, TokenError),
        ({"prompt": [None]}, TokenError),
        ({"prompt": 5}, TokenError),
        ({"prompt": b"abc"}, TokenError),
        ({"prompt": np.zeros((2, 2), np.int32)}, TokenError),
        ({"prompt": "\ud800"}, InvalidInputError),
        ({"max_tokens": 0}, InvalidInputError),
        ({"max_tokens": -1}, InvalidInputError),
        ({"max_tokens": 1.5}, InvalidInputError),
        ({"max_tokens": True}, InvalidInputError),
        ({"max_tokens": 254}, ContextOverflow),
        ({"prompt": [1] * 257}, ContextOverflow),
        ({"n": 0}, InvalidInputError),
        ({"n": MAX_SAMPLES + 1}, InvalidInputError),
        ({"logprobs": -1}, InvalidInputError),
        ({"prompt_logprobs": "all"}, InvalidInputError),
        ({"timeout": 0}, InvalidInputError),
        ({"timeout": -1.0}, InvalidInputError),
        ({"timeout": float("nan")}, InvalidInputError),
        ({"timeout": "1"}, InvalidInputError),
        ({"stop": ""}, InvalidInputError),
        ({"stop": ["a", ""]}, InvalidInputError),
        ({"stop": [1]}, InvalidInputError),
        ({"processors": [1]}, InvalidInputError),
    ],
)
def test_a_bad_request_is_a_typed_error_before_any_work(
    request_: dict[str, Any], error: type[Exception]
) -> None:
    with open_toy() as rt:
        with pytest.raises(error):
            rt.submit(**{"prompt": "abcd", **request_})
        assert trouble(rt).n_decodes == 0
        assert rt.load == (0, 0)


@pytest.mark.parametrize("settings", [{"queue": -1}, {"queue": 1.5}, {"queue": True}, {"cache": -1}])
def test_a_bad_setting_of_the_runtime_is_a_typed_error(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        open_toy(**settings)


def test_a_request_that_just_fits_is_served_to_its_last_token() -> None:
    """The last token that is written is never fed, so it needs no room."""
    with open_toy(n_ctx=16) as rt:
        assert len(rt.generate([1] * 16, **GREEDY).tokens) == 1
        assert len(rt.generate([1] * 10, **GREEDY).tokens) == 7
        assert len(rt.generate([1] * 10, max_tokens=7, **GREEDY).tokens) == 7
        with pytest.raises(ContextOverflow) as caught:
            rt.generate([1] * 10, max_tokens=8)
        assert (caught.value.needed, caught.value.fits) == (18, 16)


# The queue.


def test_the_queue_is_bounded_and_says_so() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, slots=2, queue=3) as rt:
        jobs = [rt.submit(f"p{at}", max_tokens=4, **GREEDY) for at in range(5)]
        with pytest.raises(BusyError) as caught:
            rt.submit("one too many")
        assert (caught.value.waiting, caught.value.limit) == (3, 3)
        jobs[4].cancel()
        gate.pass_through(4)
        read(jobs[4])
        late = rt.submit("in its place", max_tokens=4, **GREEDY)
        gate.open()
        assert [read(job).reasons for job in [*jobs[:4], late]] == [["length"]] * 5
        check_idle(rt)


def test_without_a_queue_a_request_is_served_while_a_sequence_is_free() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, slots=1, queue=0) as rt:
        job = rt.submit("a", max_tokens=3, **GREEDY)
        gate.reached.wait()
        with pytest.raises(BusyError):
            rt.submit("b")
        gate.open()
        job.reply()
        assert rt.generate("b", max_tokens=1).finish_reason in ("length", "stop")


def test_requests_are_begun_in_the_order_they_came() -> None:
    gate = Turnstile()
    begun: list[int] = []

    def note(at: int) -> Any:
        def first(tokens: Sequence[int], logits: LogitsView) -> NDArray[np.float32]:
            if at not in begun:
                begun.append(at)
            return logits.copy()

        return first

    with open_toy(gate=gate, slots=1) as rt:
        jobs = [rt.submit(f"p{at}", max_tokens=3, processors=[note(at)], **GREEDY) for at in range(6)]
        gate.open()
        for job in jobs:
            job.reply()
    assert begun == list(range(6))


# Fairness, counted in native steps.


class Steps:
    """The sizes of all native steps, and at which of them a request drew."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        decode = ToyCore.decode

        def counting(core: ToyCore, batch: Any) -> Any:
            self.sizes.append(batch.size)
            return decode(core, batch)

        monkeypatch.setattr(ToyCore, "decode", counting)

    def recorder(self, into: list[int]) -> Any:
        def note(tokens: Sequence[int], logits: LogitsView) -> NDArray[np.float32]:
            into.append(len(self.sizes))
            return logits.copy()

        return note


def serve_with_a_long_prompt(rt: Runtime, steps: Steps, gate: Turnstile) -> list[int]:
    """The steps at which a running reply drew, while a prompt of 15 chunks arrived."""
    draws: list[int] = []
    running = rt.submit("hi", max_tokens=60, processors=[steps.recorder(draws)], **GREEDY)
    gate.pass_through(5)
    long = rt.submit([1 + at % 200 for at in range(15 * CHUNK)], max_tokens=2, **GREEDY)
    gate.open()
    running.reply()
    long.reply()
    return draws


def test_a_long_prompt_holds_a_running_reply_up_by_one_chunk_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, gate = Steps(monkeypatch), Turnstile()
    with open_toy(gate=gate, n_ctx=1024) as rt:
        draws = serve_with_a_long_prompt(rt, steps, gate)
    assert np.diff(draws).tolist() == [1] * 59
    assert CHUNK < max(steps.sizes[draws[0] : draws[-1]]) <= CHUNK + 1


def test_in_exact_mode_too_a_running_reply_waits_for_one_chunk_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, gate = Steps(monkeypatch), Turnstile()
    with open_toy(gate=gate, n_ctx=1024, exact=True) as rt:
        draws = serve_with_a_long_prompt(rt, steps, gate)
    assert max(np.diff(draws)) == 2
    assert max(steps.sizes) == CHUNK


def test_the_count_would_show_a_prompt_that_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above have teeth: a chunk as long as the prompt is seen."""
    steps, gate = Steps(monkeypatch), Turnstile()
    with open_toy(gate=gate, n_ctx=1024, n_batch=1024) as rt:
        inside(rt).engine_loop.pacer.chunk = 1024
        draws = serve_with_a_long_prompt(rt, steps, gate)
    assert max(steps.sizes[draws[0] : draws[-1]]) > 10 * CHUNK


def test_long_prompts_take_turns_so_that_a_short_one_behind_them_is_soon_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, gate = Steps(monkeypatch), Turnstile()
    first: dict[str, list[int]] = {"long": [], "longer": [], "short": []}
    with open_toy(gate=gate, n_ctx=2048, slots=3) as rt:
        jobs = [
            rt.submit(prompt, max_tokens=1, processors=[steps.recorder(first[name])], **GREEDY)
            for name, prompt in (
                ("long", [1] * 10 * CHUNK),
                ("longer", [2] * 20 * CHUNK),
                ("short", [3] * CHUNK),
            )
        ]
        gate.open()
        for job in jobs:
            job.reply()
    assert first["short"][0] <= 5
    assert first["long"][0] < first["longer"][0]


def test_rows_are_drawn_from_in_the_order_of_the_engines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another order they are no table there, and all of them would be copied at every step."""
    drawn: list[list[int]] = []
    rows = ToyCore.rows

    def noting(core: ToyCore, indices: Sequence[int]) -> NDArray[np.float32]:
        drawn.append(list(indices))
        return rows(core, indices)

    monkeypatch.setattr(ToyCore, "rows", noting)
    gate = Turnstile()
    with open_toy(gate=gate, slots=3) as rt:
        first = rt.submit("a", max_tokens=2, **GREEDY)
        rest = [rt.submit("b", max_tokens=12, **GREEDY), rt.submit("c", max_tokens=12, **GREEDY)]
        gate.open()
        first.reply()
        # It gets the first sequence, and is the last to be served.
        rest.append(rt.submit("d", max_tokens=12, **GREEDY))
        for prompt, job in zip("bcd", rest, strict=True):
            assert job.reply().tokens == alone(FullAttention, prompt, max_tokens=12, **GREEDY)[0].tokens
    assert max(map(len, drawn)) == 3
    assert all(indices == sorted(indices) for indices in drawn)


def test_what_was_drawn_is_delivered_while_the_next_step_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that computes in the background does not wait for text, and readers get all of it, whatever
    becomes of that step."""
    order = _noted(monkeypatch)
    with open_toy() as rt:
        context = inside(rt).context
        context.capabilities = dataclasses.replace(context.capabilities, asynchronous=True)
        reply = rt.generate("hello", max_tokens=6, **GREEDY)
        assert order == ["step", *["step", "text"] * 5]
        _check_failing(rt, reply)


def _check_failing(rt: Runtime, reply: Reply) -> None:
    """The same again with a step that fails: readers get all that was drawn before."""
    assert reply.tokens == alone(FullAttention, "hello", max_tokens=6, **GREEDY)[0].tokens
    trouble(rt).fail_decode(ahead=4)
    job = rt.submit("hello", max_tokens=6, **GREEDY)
    seen = read(job)
    assert seen.reasons == ["error"]
    check_delivery(seen.deltas, outcome(job), rt.model)
    assert outcome(job)[0].tokens == reply.tokens[:3]


def _noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps from now on, and when text is delivered."""
    order: list[str] = []
    decode, deliver = ToyCore.decode, TokenSequence.deliver

    def decoding(core: ToyCore, batch: Any) -> Any:
        order.append("step")
        return decode(core, batch)

    def delivering(sequence: TokenSequence) -> None:
        if sequence.undelivered:
            order.append("text")
        deliver(sequence)

    monkeypatch.setattr(ToyCore, "decode", decoding)
    monkeypatch.setattr(TokenSequence, "deliver", delivering)
    return order


@pytest.mark.parametrize(
    ("cores", "frame", "expected"),
    [
        (1, 60.0, ["step", "text", "step", *["step", "text"] * 4]),
        (1, 0.0, ["step", *["text", "step"] * 5]),
        (2, 60.0, ["step", *["text", "step"] * 5]),
    ],
    ids=["short", "long", "cores-to-spare"],
)
def test_where_steps_need_all_cores_and_are_short_readers_are_told_between_them(
    monkeypatch: pytest.MonkeyPatch, cores: int, frame: float, expected: list[str]
) -> None:
    """First tokens never wait, and the last comes with the end, whatever becomes of the step between."""
    monkeypatch.setattr(system, "usable_cores", lambda: cores)
    monkeypatch.setattr(executor, "FRAME", frame)
    order = _noted(monkeypatch)
    with open_toy() as rt:
        reply = rt.generate("hello", max_tokens=6, **GREEDY)
        assert order == expected
        _check_failing(rt, reply)


def test_what_was_drawn_waits_for_no_call_no_other_request_and_no_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(system, "usable_cores", lambda: 1)
    monkeypatch.setattr(executor, "FRAME", 60.0)
    order = _noted(monkeypatch)
    decode = ToyCore.decode
    came: list[Any] = []

    def interrupted(core: ToyCore, batch: Any) -> Any:
        found = decode(core, batch)
        steps = order.count("step")
        if steps == 3:
            came.append(inside(rt).engine_loop.post(lambda: order.append("call")))
        if steps == 5:
            # Longer than a chunk, so that it is read in two steps.
            came.append(rt.submit([1] * (CHUNK + 30), max_tokens=1, **GREEDY))
        return found

    def admitting(*args: Any) -> Any:
        order.append("admit")
        return admit(*args)

    monkeypatch.setattr(ToyCore, "decode", interrupted)
    monkeypatch.setattr(module, "admit", admitting)
    monkeypatch.setattr(EngineLoop, "check_thread", lambda loop: None)
    with open_toy() as rt:
        rt.generate("hello", max_tokens=9, **GREEDY)
        came[1].reply()
    told = ["admit", "step", "text", "step"]
    told += ["step", "text", "text", "call"]
    told += ["step", "step", "text", "text", "admit"]
    told += ["step", "text", "step"]
    assert order[: len(told)] == told


# Samples.


@every_kind
@both_modes
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_samples_of_one_prompt_are_what_each_seed_gives_alone(
    kind: type[MemorySpec], exact: bool, slots: int
) -> None:
    """n below, at and above the number of sequences; the prompt is read once."""
    settings: dict[str, Any] = {"max_tokens": 9, "temperature": 1.0}
    prompt = [1 + at % 90 for at in range(50)]
    expected = [alone(kind, prompt, seed=7 + index, **settings)[0].tokens for index in range(5)]
    with open_toy(kind, slots=slots, exact=exact) as rt:
        job = rt.submit(prompt, n=5, seed=7, **settings)
        seen = read(job)
        replies = job.replies()
        assert [reply.tokens for reply in replies] == expected
        assert [reply.seed for reply in replies] == [7, 8, 9, 10, 11]
        check_delivery(seen.deltas, replies, rt.model)
        check_idle(rt)


def test_the_prompt_of_many_samples_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    with open_toy(slots=2) as rt:
        rt.submit([1] * 100, n=6, seed=1, max_tokens=3, ignore_eos=True).replies()
    assert sum(steps.sizes) == 100 + 6 * 2


def test_samples_stay_in_the_namespace_of_their_request() -> None:
    """Another's sample leaves state in a sequence, and nobody else may find it there."""
    prompt = [1 + at % 90 for at in range(80)]
    with open_toy(slots=3) as rt:
        rt.submit(prompt, n=3, seed=1, max_tokens=4, namespace="a").replies()
        assert rt.generate(prompt, max_tokens=1, namespace="b").usage.cached_tokens == 0
        assert rt.generate(prompt, max_tokens=1).usage.cached_tokens == 0
        assert rt.generate(prompt, max_tokens=1, namespace="a").usage.cached_tokens == 79


# Faults.


@every_kind
@both_modes
@pytest.mark.parametrize("result", [Outcome.FAILED, Outcome.ABORTED, Outcome.FULL, Outcome.REJECTED])
def test_a_step_that_fails_for_all_is_done_again_for_each(
    kind: type[MemorySpec], exact: bool, result: Outcome
) -> None:
    """One failure in a crowd costs nobody anything; alone it is an honest error (B6)."""
    gate = Turnstile()
    prompts = [f"prompt number {at} of three" for at in range(3)]
    with open_toy(kind, gate=gate, slots=3, exact=exact, cache=0) as rt:
        jobs = [rt.submit(prompt, max_tokens=12, **GREEDY) for prompt in prompts]
        gate.pass_through(80)
        # Each failure of a crowd is followed by three steps of one.
        for ahead in (1, 5, 9):
            trouble(rt).fail_decode(result, after=1, ahead=ahead)
        gate.open()
        for prompt, job in zip(prompts, jobs, strict=True):
            seen = read(job)
            check_delivery(seen.deltas, outcome(job), rt.model)
            tokens = alone(kind, prompt, max_tokens=12, **GREEDY)[0].tokens
            if exact and result is not Outcome.ABORTED and seen.reasons == ["error"]:
                assert isinstance(seen.error, (DecodeError, ContextOverflow))
                assert outcome(job)[0].tokens == tokens[: len(outcome(job)[0].tokens)]
            else:
                assert seen.reasons == ["length"]
                assert outcome(job)[0].tokens == tokens
        check_idle(rt)


@every_kind
def test_a_fault_that_persists_ends_the_one_it_hits_and_no_other(kind: type[MemorySpec]) -> None:
    gate = Turnstile()
    with open_toy(kind, gate=gate, slots=3, cache=0) as rt:
        jobs = [rt.submit(f"p{at}", max_tokens=8, **GREEDY) for at in range(3)]
        gate.pass_through(14)
        # The step of all three, and the first of the three that are tried again.
        trouble(rt).fail_decode(ahead=1)
        trouble(rt).fail_decode(ahead=2)
        gate.open()
        seen = [read(job) for job in jobs]
        assert sorted(reason for each in seen for reason in each.reasons) == ["error", "length", "length"]
        for at, job in enumerate(jobs):
            tokens = outcome(job)[0].tokens
            assert tokens == alone(kind, f"p{at}", max_tokens=8, **GREEDY)[0].tokens[: len(tokens)]
        check_idle(rt)


@every_kind
@both_modes
def test_an_error_while_the_prompt_is_read_ends_all_its_samples(kind: type[MemorySpec], exact: bool) -> None:
    faults = Faults(decodes={2: PlannedFault(Outcome.FAILED, 1)})
    with open_toy(kind, faults=faults, slots=2, exact=exact, n_batch=8, cache=0) as rt:
        job = rt.submit([1] * 20, n=4, max_tokens=3, **GREEDY)
        seen = read(job)
        assert seen.reasons == ["error"] * 4
        assert isinstance(seen.error, EngineError)
        check_delivery(seen.deltas, outcome(job), rt.model)
        check_idle(rt)


@every_kind
@pytest.mark.parametrize("cache", [0, 1 << 20])
def test_whatever_native_call_fails_each_reply_is_right_or_says_error(
    kind: type[MemorySpec], cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B6: a fault at every single native call in turn, with samples that fork, checkpoint and restore."""
    monkeypatch.setattr(ToyCore, "remove", _remove)
    prompt, other = "the samples of this prompt", "somebody else"
    settings: dict[str, Any] = {"max_tokens": 4, "temperature": 1.0, "ignore_eos": True}
    expected = [alone(kind, prompt, seed=3 + index, **settings)[0].tokens for index in range(4)]
    theirs = alone(kind, other, seed=9, **settings)[0].tokens
    with open_toy(kind, slots=2, cache=cache) as rt:
        rt.generate("warm", max_tokens=1)
        rt.submit(prompt, n=4, seed=3, **settings).replies()
        calls = trouble(rt).n_calls
    errors = 0
    for call in range(1, calls + 12):
        with open_toy(kind, slots=2, cache=cache, faults=Faults(calls=frozenset({call}))) as rt:
            jobs = [
                rt.submit("warm", max_tokens=1),
                rt.submit(prompt, n=4, seed=3, **settings),
                rt.submit(other, seed=9, **settings),
            ]
            wanted = [None, expected, [theirs]]
            for job, tokens in zip(jobs, wanted, strict=True):
                seen = read(job)
                replies = outcome(job)
                check_delivery(seen.deltas, replies, rt.model)
                for reply, right in zip(replies, tokens or [reply.tokens for reply in replies], strict=True):
                    if reply.finish_reason == "error":
                        errors += 1
                        assert isinstance(reply.error, EngineError)
                        assert reply.tokens == right[: len(reply.tokens)]
                    else:
                        assert reply.finish_reason in ("length", "stop")
                        assert reply.tokens == right
            trouble(rt).forget()
            assert rt.generate(other, seed=9, **settings).tokens == theirs
            check_idle(rt)
    assert errors < calls * 2


def _remove(core: ToyCore, seq: int, start: int) -> None:
    """A cut that was ignored cannot be seen where the part that reports positions was just written anew."""
    held = core._at(seq)
    if not core.faults.strikes() or start:
        held.remove(start)


def test_a_broken_loop_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of our own: every request gets an error, and the runtime says that it is over."""
    gate = Turnstile()
    caught: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", caught.append)
    with open_toy(gate=gate, slots=1) as rt:
        jobs = [rt.submit(f"p{at}", max_tokens=5, temperature=0) for at in range(3)]
        gate.reached.wait()

        def broken(group: Any) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr(inside(rt).engine_loop, "_collect", broken)
        gate.open()
        for job in jobs:
            seen = read(job)
            assert seen.reasons == ["error"]
            assert isinstance(seen.error, EngineError)
        with pytest.raises(ClosedError):
            rt.submit("more")
        thread_of(inside(rt).engine_loop).join()
    assert len(caught) == 1


# Readers that are slow, or gone.


def test_a_dropped_job_is_cancelled_and_its_sequence_is_free() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, slots=1) as rt:
        job = rt.submit("a", max_tokens=200, **GREEDY)
        other = rt.submit("b", max_tokens=3, **GREEDY)
        gate.pass_through(5)
        del job
        gc.collect()
        gate.open()
        assert other.reply().finish_reason == "length"
        check_idle(rt)
        assert trouble(rt).n_decodes < 20


def test_a_reader_that_never_reads_holds_nobody_up() -> None:
    with open_toy(slots=2) as rt:
        idle = rt.submit("a", max_tokens=200, **GREEDY)
        assert rt.generate("b", max_tokens=200, **GREEDY).finish_reason == "length"
        replies = idle.replies()
        check_delivery(read(idle).deltas, replies, rt.model)


def test_two_readers_of_one_job_share_its_deltas() -> None:
    with open_toy() as rt:
        job = rt.submit("a", max_tokens=100, **GREEDY)
        parts: list[list[int]] = [[], []]

        def take(into: list[int]) -> None:
            for delta in job:
                into.extend(delta.tokens)

        threads = [threading.Thread(target=take, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(parts[0] + parts[1]) == sorted(job.reply().tokens)


def test_a_stream_is_queued_when_it_is_asked_for_and_cancelled_when_left() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, slots=1) as rt:
        with pytest.raises(InvalidInputError):
            rt.stream("a", max_tokens=0)
        stream = rt.stream("a", max_tokens=200, **GREEDY)
        gate.reached.wait()
        assert sum(rt.load) == 1
        gate.open()
        for _ in stream:
            break
        stream.close()  # type: ignore[attr-defined]
        rt.generate("b", max_tokens=1)
        check_idle(rt)
        never = rt.stream("c", max_tokens=200, **GREEDY)
        del never
        gc.collect()
        rt.generate("b", max_tokens=1)
        check_idle(rt)


def test_waiting_for_a_reply_can_be_given_up_without_ending_it() -> None:
    gate = Turnstile()
    with open_toy(gate=gate) as rt:
        job = rt.submit("a", max_tokens=3, **GREEDY)
        with pytest.raises(TimeoutError):
            job.reply(timeout=0)
        assert not job.done
        gate.open()
        assert job.reply().finish_reason == "length"
        assert job.done


# The end.


@both_modes
def test_closing_ends_all_requests_as_cancelled(exact: bool) -> None:
    gate = Turnstile()
    rt = open_toy(gate=gate, slots=2, exact=exact)
    jobs = [rt.submit(f"p{at}", max_tokens=50, n=2, **GREEDY) for at in range(4)]
    gate.pass_through(6)
    rt.close()
    for job in jobs:
        seen = read(job)
        assert seen.reasons == ["cancelled"] * 2
        check_delivery(seen.deltas, outcome(job), rt.model)
    with pytest.raises(ClosedError):
        rt.submit("more")
    rt.close()


def test_closing_from_many_threads_at_once_is_one_close() -> None:
    rt = open_toy()
    job = rt.submit("a", max_tokens=250, **GREEDY)
    threads = [threading.Thread(target=rt.close) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcome(job)[0].finish_reason in ("cancelled", "length")
    assert not thread_of(inside(rt).engine_loop).is_alive()


# Values that tell.


def test_a_reply_counts_its_tokens_and_times_its_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_toy() as rt:
        reply = rt.generate("a prompt", max_tokens=5, **GREEDY)
        again = rt.generate("a prompt", max_tokens=5, **GREEDY)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.cached_tokens) == (8, 5, 0)
    assert again.usage.cached_tokens == 7
    times = reply.timings
    assert min(times.queued, times.prefill, times.decode) >= 0
    assert (times.prefilled_tokens, times.decoded_tokens) == (8, 5)
    assert times.prefill_speed > 0
    assert times.decode_speed > 0


def test_the_clock_of_deadlines_is_the_engine_loops_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests of deadlines lean on."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    gate = Turnstile()
    with open_toy(gate=gate, slots=1) as rt:
        job = rt.submit("a", max_tokens=100, timeout=5.0, **GREEDY)
        gate.pass_through(20)
        clock.now += 6
        gate.open()
        assert outcome(job)[0].finish_reason == "cancelled"
        assert 0 < len(outcome(job)[0].tokens) < 30


def test_each_request_ends_at_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    gate = Turnstile()
    with open_toy(gate=gate, slots=2) as rt:
        late, early = (rt.submit("a", max_tokens=200, timeout=each, **GREEDY) for each in (50.0, 5.0))
        gate.pass_through(10)
        clock.now += 6
        gate.pass_through(10)
        assert (outcome(early)[0].finish_reason, late.done) == ("cancelled", False)
        clock.now += 45
        gate.open()
        assert outcome(late)[0].finish_reason == "cancelled"


def test_an_engine_loop_works_on_a_bare_context_without_a_cache() -> None:
    model = ToyModel()
    with model.context(n_ctx=64, n_seq=2) as context:
        loop = EngineLoop(model, context)
        job = Stream(one_request(Request(prompt=[1, 2, 3], max_tokens=4)), loop.submit)
        assert len(job.reply().tokens) <= 4
        loop.close()


def test_what_waits_for_quiet_comes_after_all_requests_and_harms_none() -> None:
    """The latest of a kind only, one after another, and not while somebody is served."""
    gate = Turnstile()
    with open_toy(gate=gate) as rt:
        loop, done, last = inside(rt).engine_loop, [], threading.Event()
        job = rt.submit([1, 2, 3], max_tokens=4, ignore_eos=True)
        loop.post_in_quiet("a", lambda: done.append("never"))
        loop.post_in_quiet("b", lambda: 1 / 0)
        loop.post_in_quiet("a", lambda: done.append("a"))
        loop.post_in_quiet("c", last.set)
        gate.admit(4)
        assert not done
        assert not last.is_set()
        gate.open()
        assert len(job.reply().tokens) == 4
        assert last.wait(60)
        assert done == ["a"]
        assert len(rt.generate([1, 2, 3], max_tokens=2, ignore_eos=True).tokens) == 2
