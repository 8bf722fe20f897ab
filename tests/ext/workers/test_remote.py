"""A backend in another process gives what one in this process gives."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perdure
from decode.observed import check_delivery, open_toy, outcome, read
from ext.workers.engines import HOLD, LATER, QUICK, Hold, isolated, pid, remote
from perdure import (
    BusyError,
    ClosedError,
    ContextOverflow,
    GrammarError,
    InvalidInputError,
    OutOfMemoryError,
    Reply,
    Runtime,
    StoreLockedError,
    TokenError,
)
from perdure.cache.prefix_cache import PrefixCache
from perdure.cache.tiers.disk import DiskTier
from perdure.ext.workers import remote as module
from perdure.ext.workers.remote import RemotePrefixCache
from perdure.memory import MEMORY_KINDS, MemorySpec
from perdure.restart_policy import RestartPolicy
from perdure.testing.toy import ToyModel

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "seed": 0}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 40, **GREEDY},
    "seeded": {"max_tokens": 40, "seed": 7, "temperature": 0.8},
    "penalised": {"max_tokens": 40, "seed": 7, "repeat_penalty": 1.3},
    "several": {"max_tokens": 20, "n": 3, "seed": 3},
    "to the end": {"seed": 1},
    "stopped": {"max_tokens": 200, "stop": ["a", "bc"], **GREEDY},
    "logprobs": {"max_tokens": 10, "logprobs": 3, **GREEDY},
    "scored": {"max_tokens": 1, "prompt_logprobs": 2, **GREEDY},
    "schema": {"schema": {"type": "object", "properties": {"a": {"type": "integer"}}}, "seed": 2},
    "regex": {"regex": "[a-c]{5,9}", "seed": 2},
    "biased": {"max_tokens": 20, "logit_bias": {65: 100.0}, **GREEDY},
}


def untimed(replies: list[Reply]) -> list[Reply]:
    return [replace(reply, timings=replies[0].timings) for reply in replies]


def same(one: list[Reply], other: list[Reply]) -> bool:
    return untimed(one) == [replace(reply, timings=one[0].timings) for reply in other]


@pytest.mark.parametrize("kind", MEMORY_KINDS, ids=lambda kind: kind.name)
def test_replies_are_equal_to_those_in_process_whatever_is_asked(kind: type[MemorySpec]) -> None:
    """C10, K5: text, tokens, reasons, log probabilities, usage, reuse and seeds, one after the other."""
    with isolated(kind.name) as there, open_toy(kind) as here:
        for request in REQUESTS.values():
            prompt = "Once upon a time"
            job = there.submit(prompt, **request)
            deltas = list(job)
            replies = job.replies()
            assert same(replies, here.submit(prompt, **request).replies())
            check_delivery(deltas, replies, here.model, request.get("stop", ()))


def test_replies_of_the_real_engine_are_equal_too(zoo_path: Callable[[str], Path]) -> None:
    settings: dict[str, Any] = {"n_ctx": 256, "slots": 2, "threads": 1}
    with (
        perdure.open(zoo_path("llama"), isolated=True, **settings) as there,
        perdure.open(zoo_path("llama"), **settings) as here,
    ):
        for request in REQUESTS.values():
            asked = {"max_tokens": 30, **request}
            assert same(
                there.submit("hello there", **asked).replies(), here.submit("hello there", **asked).replies()
            )
        assert there.model.digest == here.model.digest
        assert dict(there.model.metadata) == dict(here.model.metadata)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ({"prompt": ""}, TokenError),
        ({"prompt": [261]}, TokenError),
        ({"prompt": [1.5]}, TokenError),
        ({"prompt": [[1], [2, 3]]}, TokenError),
        ({"prompt": [2**70]}, TokenError),
        ({"prompt": [None]}, TokenError),
        ({"prompt": b"abc"}, TokenError),
        ({"prompt": np.zeros((2, 2), np.int32)}, TokenError),
        ({"prompt": "\ud800"}, InvalidInputError),
        ({"max_tokens": 0}, InvalidInputError),
        ({"max_tokens": 255}, ContextOverflow),
        ({"prompt": [1] * 257}, ContextOverflow),
        ({"timeout": 0}, InvalidInputError),
        ({"regex": "("}, GrammarError),
        ({"schema": {"type": "nonsense"}}, GrammarError),
        ({"logit_bias": {9999: 1.0}}, TokenError),
        ({"temperature": -1}, perdure.SamplingError),
        ({"colour": "red"}, InvalidInputError),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else None,
)
def test_bad_input_is_refused_as_in_process(
    shared: Runtime, request_: dict[str, Any], error: type[Exception]
) -> None:
    """C3: the same error with the same words and figures, from submit and before any work."""
    told = []
    with open_toy() as here:
        for rt in (here, shared):
            with pytest.raises(error) as raised:
                rt.submit(**{"prompt": "abc", **request_})
            told.append((type(raised.value), str(raised.value), vars(raised.value)))
    assert told[0] == told[1]
    assert shared.load == (0, 0)


def test_processors_are_refused_with_the_reason(shared: Runtime) -> None:
    with pytest.raises(InvalidInputError, match="without isolated"):
        shared.submit("abc", processors=[lambda tokens, logits: logits.copy()])


def test_what_cannot_be_sent_is_refused(shared: Runtime) -> None:
    with pytest.raises(InvalidInputError, match="plain data"):
        shared.submit([lambda: 1])  # type: ignore[list-item]


def test_a_loaded_model_cannot_be_isolated() -> None:
    with pytest.raises(InvalidInputError, match="file or its name"):
        perdure.open(ToyModel(), isolated=True)


# The vocabulary.


def test_the_vocabulary_is_that_of_the_model(shared: Runtime) -> None:
    here, there = ToyModel(), shared.model
    text = "héllo <|im_end|> 🙂"
    for special in (False, True):
        ids = there.tokenize(text, special=special)
        assert ids == here.tokenize(text, special=special)
        assert there.detokenize(iter(ids), special=special) == here.detokenize(ids, special=special)
        assert [there.piece(i, special=special) for i in range(here.n_vocab)] == [
            here.piece(i, special=special) for i in range(here.n_vocab)
        ]
    assert [there.is_end(i) for i in range(here.n_vocab)] == [here.is_end(i) for i in range(here.n_vocab)]
    assert [there.is_control(i) for i in range(here.n_vocab)] == [
        here.is_control(i) for i in range(here.n_vocab)
    ]
    assert (there.n_vocab, there.memory, there.digest) == (here.n_vocab, here.memory, here.digest)
    assert dict(there.metadata) == dict(here.metadata)
    assert (shared.n_ctx, shared.slots) == (256, 2)


@pytest.mark.parametrize("token", [-1, 261, True, "a", 1.0])
def test_a_token_that_is_none_is_refused_as_in_process(shared: Runtime, token: Any) -> None:
    for ask in ("piece", "is_end", "is_control"):
        with pytest.raises(TokenError) as there:
            getattr(shared.model, ask)(token)
        with pytest.raises(TokenError) as here:
            getattr(ToyModel(), ask)(token)
        assert str(there.value) == str(here.value)


# The cache.


def test_the_cache_is_warmed_told_and_cleared_from_here() -> None:
    """P3, P4: through the worker as in process."""
    prompt = list(range(40, 140))
    with isolated("full") as there, open_toy() as here:
        books = [there.cache, here.cache]
        for book in books:
            book.warm(prompt, labels=(name for name in ["a", "b"]))
            book.warm("another prefix", labels="c", namespace="mine")
        assert books[0].records() == books[1].records()
        assert books[0].records(["a"]) == books[1].records(["a"])
        assert books[0].stats() == books[1].stats()
        assert same(
            there.submit([*prompt, 1], max_tokens=4, **GREEDY).replies(),
            here.submit([*prompt, 1], max_tokens=4, **GREEDY).replies(),
        )
        assert there.generate([*prompt, 2], max_tokens=4).reuse.reused == 100
        assert books[0].clear(["a"]) == books[1].clear(["a"]) == 1
        assert books[0].records() == books[1].records()
        assert books[0].clear() == 1
        with pytest.raises(TokenError):
            there.cache.warm([])


def test_state_is_planned_put_to_sleep_woken_and_taken_elsewhere_through_the_worker(tmp_path: Path) -> None:
    """S8: whatever a book can do, by name."""
    prompt = list(range(40, 140))
    with isolated("full", store=tmp_path / "there") as there, open_toy(store=tmp_path / "here") as here:
        for rt in (there, here):
            rt.cache.warm(prompt)
        assert there.cache.plan(prompt) == here.cache.plan(prompt)
        for rt in (there, here):
            rt.cache.save(prompt)
            rt.cache.sleep(prompt)
        assert there.cache.wake(iter(prompt)) == here.cache.wake(prompt)
        identity, blocks = there.cache.pack(prompt)
        assert identity == here.cache.pack(prompt)[0]
        with isolated("full") as elsewhere:
            assert elsewhere.cache.unpack(identity, blocks) == here.cache.unpack(identity, blocks)


def test_the_cache_has_the_methods_of_a_prefix_cache_and_no_others() -> None:
    here, there = (
        {
            name: list(inspect.signature(call).parameters)
            for name, call in vars(kind).items()
            if callable(call) and not name.startswith("_")
        }
        for kind in (PrefixCache, RemotePrefixCache)
    )
    assert there == here


def test_a_store_is_the_childs_alone_and_outlives_it(tmp_path: Path) -> None:
    prompt = list(range(40, 140))
    with isolated("full", store=tmp_path) as first:
        first.cache.warm(prompt, labels=["kept"])
        with pytest.raises(StoreLockedError):
            DiskTier(tmp_path, budget=0)
        # Who opens it too uses the same engine.
        with isolated("full", store=tmp_path) as guest:
            assert guest.generate([*prompt, 1], max_tokens=2).reuse.tiers == {"memory": 100}
    with isolated("full", store=tmp_path) as second:
        assert [record.labels for record in second.cache.records()] == [{"kept"}]
        assert second.generate([*prompt, 1], max_tokens=2).reuse.tiers == {"disk": 100}


# Opening.


def test_what_is_wrong_with_the_settings_is_raised_by_open(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="n_ctx"):
        isolated("full", n_ctx=0)
    with pytest.raises(OutOfMemoryError):
        isolated("no_memory")
    with pytest.raises(InvalidInputError, match="makes a model"):
        isolated("nothing_of_that_name")
    with pytest.raises(InvalidInputError, match="no option 'colour'"):
        isolated("full", colour="red")
    with pytest.raises(InvalidInputError, match="plain data"):
        isolated("full", trace=lambda: 1)
    with pytest.raises(perdure.ModelNotFoundError):
        perdure.open(tmp_path / "none.gguf", isolated=True)


def test_a_child_that_dies_at_its_start_is_told_with_its_last_words() -> None:
    with pytest.raises(perdure.EngineDiedError) as raised:
        isolated("stillborn")
    assert raised.value.signal == "SIGABRT"
    assert "could not be started" in str(raised.value)
    assert "a last word on stdout" in str(raised.value)


def test_what_the_child_logs_is_in_the_parents_log(caplog: pytest.LogCaptureFixture) -> None:
    with isolated("chatty"):
        pass
    assert [(record.name, record.levelno, record.message) for record in caplog.records] == [
        ("perdure.chatty", logging.WARNING, "2 words")
    ]


@pytest.mark.parametrize(
    "setting",
    [{"backoff": 0}, {"hang_timeout": "1"}, {"attempts": 0}, {"memory_limit": 1.5}, {"grace": True}],
)
def test_care_that_makes_no_sense_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(setting))):
        RestartPolicy(**setting)


# Waiting, cancelling, leaving.


def test_submit_does_not_wait_for_a_child_that_does_not_answer(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H7: a server's loop is not held up; what is wrong is then told by the job."""
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    with isolated() as rt:
        child = pid(rt)
        os.kill(child, signal.SIGSTOP)
        good, bad = rt.submit([65, 66], max_tokens=5, **GREEDY), rt.submit([65, 66], regex="(")
        assert not good.done
        os.kill(child, signal.SIGCONT)
        assert good.reply().finish_reason == "length"
        with pytest.raises(GrammarError):
            bad.reply()
        assert rt.load == (0, 0)


def test_load_counts_those_who_wait_and_a_full_queue_is_refused(hold: Hold) -> None:
    """H3: as in process, with the figures."""
    with isolated(queue=2, slots=1) as rt:
        held = rt.submit([HOLD, 65], max_tokens=3, **GREEDY)
        hold.reached()
        jobs = [rt.submit([65, 66], max_tokens=3, **GREEDY) for _ in range(2)]
        assert rt.load == (2, 1)
        with pytest.raises(BusyError) as raised:
            rt.submit("one too many")
        assert (raised.value.waiting, raised.value.limit) == (2, 2)
        hold.go()
        assert [job.reply().finish_reason for job in [held, *jobs]] == ["length"] * 3
        assert rt.load == (0, 0)


def test_cancel_reaches_a_reply_that_is_written_and_one_that_waits() -> None:
    """H7, H2: and a job that is dropped is cancelled too."""
    with isolated("slow", slots=1) as rt:
        first = rt.submit("a", max_tokens=200, **GREEDY)
        waiting = rt.submit("b", max_tokens=200, **GREEDY)
        dropped = rt.submit("c", max_tokens=200, **GREEDY)
        output = dropped.output
        next(iter(first))
        waiting.cancel()
        first.cancel()
        del dropped
        gc.collect()
        for job in (first, waiting):
            assert outcome(job)[0].finish_reason == "cancelled"
        assert output.wait(finish=True, timeout=60)
        assert rt.generate("d", max_tokens=2).finish_reason in ("length", "stop")


def test_a_timeout_ends_a_request_wherever_it_is() -> None:
    """H7."""
    with isolated("slow", slots=1) as rt:
        jobs = [rt.submit("a", timeout=0.2, **GREEDY) for _ in range(2)]
        for job in jobs:
            (reply,) = outcome(job)
            assert reply.finish_reason == "cancelled"


def test_close_ends_what_runs_as_cancelled_and_later_use_is_refused() -> None:
    """B4."""
    rt = isolated("slow", slots=1)
    running, waiting = (rt.submit("a", max_tokens=200, **GREEDY) for _ in range(2))
    next(iter(running))
    rt.close()
    rt.close()
    for job in (running, waiting):
        assert outcome(job)[0].finish_reason == "cancelled"
    health = remote(rt).health()
    assert (health.state, health.pid, health.last_death) == ("closed", None, None)
    for use in (
        lambda: rt.submit([65]),
        lambda: rt.model.tokenize("a"),
        lambda: rt.cache.stats(),
    ):
        with pytest.raises(ClosedError):
            use()


def test_a_close_that_the_engine_does_not_follow_is_made(hold: Hold) -> None:
    """B4: an engine that hangs cannot keep a program from ending."""
    rt = isolated(restart_policy=replace(QUICK, grace=0.5))
    job = rt.submit([HOLD, 65], max_tokens=3, **GREEDY)
    hold.reached()
    rt.close()
    assert outcome(job)[0].finish_reason == "cancelled"


def test_an_engine_that_an_event_loop_reads_answers_there_and_where_the_loop_itself_waits_w1(
    shared: Runtime,
) -> None:
    """W1: a call that holds the loop up is answered all the same."""
    asked: dict[str, Any] = {**GREEDY, "max_tokens": 8}
    expected = shared.generate("Hello", **asked).tokens

    async def main() -> None:
        remote(shared).attach_loop(asyncio.get_running_loop())
        try:
            for _ in range(3):
                assert (await shared.agenerate("Hello", **asked)).tokens == expected
                assert shared.generate("Hello", **asked).tokens == expected
                assert shared.model.tokenize("Hello") == ToyModel().tokenize("Hello")
        finally:
            remote(shared).attach_loop(None)

    asyncio.run(main())
    assert shared.generate("Hello", **asked).tokens == expected


def test_asyncio_readers_are_served() -> None:
    async def main() -> None:
        with isolated("full") as rt, open_toy() as here:
            texts = await asyncio.gather(
                *(rt.agenerate(f"prompt {i}", max_tokens=30, **GREEDY) for i in range(6))
            )
            for i, reply in enumerate(texts):
                assert reply.tokens == here.generate(f"prompt {i}", max_tokens=30, **GREEDY).tokens
            said = [delta.text async for delta in rt.astream("prompt 0", max_tokens=30, **GREEDY)]
            assert "".join(said) == texts[0].text
        # Long enough that a machine with much else to do cancels it before its end.
        with isolated("slow", slots=1, n_ctx=4096) as rt:
            job = rt.submit("a", max_tokens=4000, **GREEDY)
            task = asyncio.create_task(job.areply())
            async for _ in job:
                break
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await asyncio.to_thread(outcome, job))[0].finish_reason == "cancelled"

    asyncio.run(main())


def test_two_isolated_runtimes_live_side_by_side() -> None:
    with isolated("full") as one, isolated("recurrent") as other:
        assert remote(one).health().pid != remote(other).health().pid
        assert one.generate("hello", max_tokens=20, **GREEDY).text == "".join(
            delta.text for delta in one.stream("hello", max_tokens=20, **GREEDY)
        )
        one.close()
        assert other.generate("hello", max_tokens=20, **GREEDY).finish_reason == "length"


def test_a_step_held_in_one_request_shows_what_others_had_before(rt: Runtime, hold: Hold) -> None:
    """C10: what a step brought is sent with the step, not with the next one."""
    job = rt.submit([65, HOLD + LATER], max_tokens=30, **GREEDY)
    reader = iter(job)
    hold.reached()
    before = [next(reader) for _ in range(9)]
    hold.go()
    after = read(job)
    assert len([*before, *after.deltas]) == 30


def test_it_is_told_how_far_a_prompt_is_read() -> None:
    with isolated("slow", slots=1, n_ctx=2048) as rt:
        job = rt.submit([65] * 1000, max_tokens=1)
        while not (read_so_far := job.prompt_read) and not job.done:
            job.output.wait(timeout=0.05)
        assert 0 < read_so_far < 1000
        job.cancel()


def test_the_child_has_no_garbage_collected_that_was_there_at_its_start() -> None:
    """Its modules alone are a hundred thousand objects: to look through them would stop every reply."""
    with isolated("frozen") as rt:
        assert int(rt.model.metadata["test.frozen"]) > 10_000
