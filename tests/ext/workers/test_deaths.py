"""The engine's process dies, hangs or grows: what that costs whom, and that service comes back by itself."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import perdure
from decode.observed import Seen, alone, check_delivery, outcome, read
from ext.workers.engines import (
    ABORT,
    ABORT_ONCE,
    DEFECT,
    EAT,
    EXIT,
    HANG,
    HOLD,
    LATER,
    QUICK,
    SEGFAULT,
    Hold,
    isolated,
    mark,
    pid,
    remote,
)
from perdure import BusyError, EngineDiedError, EngineError, GrammarError, Reply, Runtime, Stream
from perdure.ext.workers import supervisor as supervisor_module
from perdure.memory import FullAttention

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
LONG: dict[str, Any] = {"max_tokens": 30, **GREEDY}


def toy_alone(prompt: str | list[int], **request: Any) -> Reply:
    return alone(FullAttention, prompt, **request)[0]


def check_serves(rt: Runtime) -> None:
    assert rt.generate("hello", **LONG).tokens == toy_alone("hello", **LONG).tokens
    assert rt.load == (0, 0)
    assert remote(rt).health().state == "ready"


def kill(rt: Runtime) -> None:
    """End the process that serves now."""
    os.kill(pid(rt), signal.SIGKILL)


# One request, and a death.


@pytest.mark.parametrize(
    ("what", "name", "code"),
    [(ABORT, "SIGABRT", None), (SEGFAULT, "SIGSEGV", None), (EXIT, None, 5)],
    ids=["abort", "segfault", "exit"],
)
def test_a_reply_that_was_begun_ends_with_an_honest_error(
    rt: Runtime, hold: Hold, what: int, name: str | None, code: int | None
) -> None:
    """H4, C7: it says what happened and what was kept, and what had come is in the reply."""
    prompt = [65, LATER + HOLD, LATER + what]
    job = rt.submit(prompt, **LONG)
    hold.reached()
    first = next(iter(job))
    hold.go()
    seen = read(job)
    seen.deltas.insert(0, first)
    (reply,) = outcome(job)
    assert isinstance(seen.error, EngineDiedError)
    assert (seen.error.signal, seen.error.code, seen.error.kept) == (name, code, len(reply.tokens))
    assert (name or "code 5") in str(seen.error)
    assert f"{len(reply.tokens)} tokens of the reply had come, the rest is lost" in str(seen.error)
    assert seen.reasons == ["error"]
    assert 0 < len(reply.tokens) < 30
    assert reply.tokens == toy_alone(prompt, **LONG).tokens[: len(reply.tokens)]
    check_delivery(seen.deltas, [reply], rt.model)
    check_serves(rt)
    health = remote(rt).health()
    assert health.restarts == 1
    assert health.last_death is not None
    assert (name or "code 5") in health.last_death
    assert health.uptime is not None
    assert health.rss is None or health.rss > 1 << 20


@pytest.mark.parametrize(
    "request_", [LONG, {"max_tokens": 30, "seed": 5}, {"max_tokens": 9, "n": 3, "seed": 5}]
)
def test_a_request_of_which_nothing_had_come_is_tried_again_unseen(
    rt: Runtime, request_: dict[str, Any]
) -> None:
    """H4: once, and nobody can tell."""
    prompt = [65, ABORT_ONCE]
    job = rt.submit(prompt, **request_)
    deltas = list(job)
    replies = job.replies()
    assert [reply.tokens for reply in replies] == [
        reply.tokens for reply in alone(FullAttention, prompt, **request_)
    ]
    check_delivery(deltas, replies, rt.model)
    assert remote(rt).health().restarts == 1


def test_a_reply_cut_short_tells_the_seed_it_was_drawn_with(rt: Runtime, hold: Hold) -> None:
    """C7: though none was given, and the process that drew cannot be asked any more."""
    prompt = [65, LATER + HOLD]
    job = rt.submit(prompt, max_tokens=30, temperature=1.5, ignore_eos=True)
    hold.reached()
    kill(rt)
    (reply,) = outcome(job)
    whole = toy_alone(prompt, max_tokens=30, temperature=1.5, ignore_eos=True, seed=reply.seed)
    assert reply.finish_reason == "error"
    assert len(reply.tokens) > 5
    assert reply.tokens == whole.tokens[: len(reply.tokens)]


def test_a_request_that_kills_every_engine_is_given_up(rt: Runtime) -> None:
    """H4: poison is tried twice, not for ever, and others are served after it."""
    with pytest.raises(EngineDiedError, match="in 2 tries") as raised:
        rt.generate([65, ABORT], **LONG)
    assert (raised.value.signal, raised.value.kept) == ("SIGABRT", 0)
    check_serves(rt)
    assert remote(rt).health().restarts == 2


def test_samples_that_were_finished_at_a_death_stay_finished(rt: Runtime, hold: Hold) -> None:
    """C7: each sample has a true reason of its own."""
    request: dict[str, Any] = {"max_tokens": 30, "n": 3, "seed": 4}
    job = rt.submit([65, LATER + HOLD], **request)
    hold.reached()
    kill(rt)
    seen, replies = read(job), outcome(job)
    assert isinstance(seen.error, EngineDiedError)
    check_delivery(seen.deltas, replies, rt.model)
    for reply, whole in zip(replies, alone(FullAttention, [65, LATER + HOLD], **request), strict=True):
        assert reply.tokens == whole.tokens[: len(reply.tokens)]
        if reply.finish_reason != "error":
            assert reply.tokens == whole.tokens


def test_a_request_cancelled_before_the_death_ends_as_cancelled(rt: Runtime, hold: Hold) -> None:
    job = rt.submit([65, HOLD], **LONG)
    hold.reached()
    job.cancel()
    kill(rt)
    assert outcome(job)[0].finish_reason == "cancelled"
    check_serves(rt)


def test_a_call_that_meets_a_death_is_made_again_once(rt: Runtime) -> None:
    record = rt.cache.warm([65, 66, ABORT_ONCE], labels=["a"])
    assert record.labels == {"a"}
    assert rt.cache.records() == [record]
    with pytest.raises(EngineDiedError):
        rt.cache.warm([65, 66, ABORT])
    check_serves(rt)


def test_a_defect_that_ends_the_engine_thread_ends_the_process_and_nobody_else(rt: Runtime) -> None:
    """H4: what was served is told; what comes next is served by a new process, not refused by the old."""
    with pytest.raises(EngineError, match="planted"):
        rt.generate([65, DEFECT], **LONG)
    check_serves(rt)
    assert "code 70" in (remote(rt).health().last_death or "")


# While it is gone.


def test_requests_wait_for_the_engine_in_order_and_within_the_limit(hold: Hold) -> None:
    """H3, H4, H7: with their own time limits, and room for as many as could wait in process."""
    restart_policy = replace(QUICK, attempts=10_000)
    with isolated("often_stillborn", restart_policy=restart_policy, queue=2, slots=2) as rt:
        first = pid(rt)
        mark().touch()
        held = rt.submit([65, HOLD], **LONG)
        hold.reached()
        os.kill(first, signal.SIGKILL)
        await_state(rt, "restarting")
        # As tokens: a text is the engine's to cut up.
        impatient = rt.submit([65], timeout=0.05, **LONG)
        assert outcome(impatient)[0].finish_reason == "cancelled"
        unsure = rt.submit([65], **LONG)
        unsure.cancel()
        assert outcome(unsure)[0].finish_reason == "cancelled"
        jobs = [rt.submit([65, 66 + at], **LONG) for at in range(2)]
        wrong = rt.submit([65], regex="(")
        with pytest.raises(BusyError) as raised:
            rt.submit([65], **LONG)
        assert (raised.value.waiting, raised.value.limit) == (4, 4)
        mark().unlink()
        hold.reached()
        hold.go()
        assert held.reply().tokens == toy_alone([65, HOLD], **LONG).tokens
        for at, job in enumerate(jobs):
            assert job.reply().tokens == toy_alone([65, 66 + at], **LONG).tokens
        with pytest.raises(GrammarError):
            wrong.reply()
        check_serves(rt)


def await_state(rt: Runtime, *states: str) -> None:
    """Wait until the process is in one of these states."""
    until = time.monotonic() + 60
    while remote(rt).health().state not in states:
        assert time.monotonic() < until, remote(rt).health()
        os.sched_yield()


def test_an_engine_that_cannot_start_again_is_told_and_tried_at_the_next_request(hold: Hold) -> None:
    """H4: nobody waits for ever, and nobody has to do anything once the cause is gone."""
    with isolated("often_stillborn", restart_policy=replace(QUICK, attempts=2)) as rt:
        serving = pid(rt)
        mark().touch()
        job = rt.submit([65, HOLD], **LONG)
        hold.reached()
        os.kill(serving, signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="could not be started 2 times in a row") as raised:
            job.reply()
        assert raised.value.code == 9
        assert remote(rt).health().state == "failed"
        with pytest.raises(EngineDiedError):
            rt.generate([65], **LONG)
        mark().unlink()
        check_serves(rt)


def test_a_model_that_was_changed_meanwhile_is_not_taken_for_the_same(hold: Hold) -> None:
    """C11."""
    with isolated("changing", restart_policy=replace(QUICK, attempts=1)) as rt:
        kill(rt)
        with pytest.raises(EngineDiedError, match="was changed"):
            rt.generate("abc", **LONG)


def test_close_does_not_wait_for_an_engine_that_is_gone(hold: Hold) -> None:
    """B4."""
    rt = isolated("often_stillborn", restart_policy=replace(QUICK, attempts=10_000))
    mark().touch()
    kill(rt)
    await_state(rt, "restarting")
    job = rt.submit([65, 66], **LONG)
    rt.close()
    assert outcome(job)[0].finish_reason == "cancelled"
    assert remote(rt).health().state == "closed"


# Hangs and memory.


def test_an_engine_that_hangs_is_replaced(hold: Hold) -> None:
    """H4, H7: the request in it is told why."""
    with isolated(restart_policy=replace(QUICK, hang_timeout=2.0)) as rt:
        with pytest.raises(EngineDiedError, match="no step ended within") as raised:
            rt.generate([65, LATER + HANG], **LONG)
        assert raised.value.kept > 0
        check_serves(rt)


def test_a_stopped_process_is_replaced_too(hold: Hold) -> None:
    with isolated(restart_policy=replace(QUICK, hang_timeout=2.0)) as rt:
        job = rt.submit([65, HOLD], **LONG)
        hold.reached()
        os.kill(pid_now(rt), signal.SIGSTOP)
        hold.reached()
        hold.go()
        assert job.reply().tokens == toy_alone([65, HOLD], **LONG).tokens
        assert "no step ended" in (remote(rt).health().last_death or "")


def test_x22_an_idle_process_that_is_stopped_is_told_of_and_replaced(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X22: nobody asked anything of it when it was stopped, and the first call is one for its tokenizer."""
    monkeypatch.setattr(supervisor_module, "UNRESPONSIVE", 1.0)
    with isolated(restart_policy=replace(QUICK, hang_timeout=2.0)) as rt:
        check_serves(rt)
        os.kill(pid_now(rt), signal.SIGSTOP)
        end = time.monotonic() + 60
        while (state := remote(rt).health().state) == "ready" and time.monotonic() < end:
            threading.Event().wait(0.01)
        assert state in ("unresponsive", "restarting")
        assert rt.model.tokenize("a" * 20000)
        assert "it was idle" in (remote(rt).health().last_death or "")
        check_serves(rt)


def pid_now(rt: Runtime) -> int:
    found = remote(rt).health().pid
    assert found is not None
    return found


@contextmanager
def memory_group(process: int, limit: int) -> Iterator[None]:
    """A control group in which the system kills a process that takes more memory than this."""
    for root, most in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"perdure-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / most).write_text(str(limit))
            (group / "cgroup.procs").write_text(str(process))
        except OSError:
            group.rmdir()
            continue
        try:
            yield
        finally:
            while (group / "cgroup.procs").read_text():
                pass
            group.rmdir()
        return
    pytest.skip("no control group can be made here")


def test_an_engine_that_the_system_kills_for_its_memory_is_told_of_and_replaced(hold: Hold) -> None:
    """Class 4: the OOM killer, by a limit of a control group."""
    with isolated(restart_policy=QUICK) as rt:
        check_serves(rt)
        with memory_group(pid_now(rt), 64 << 20), pytest.raises(EngineDiedError) as raised:
            rt.generate([65, LATER + EAT], **LONG)
        assert raised.value.signal == "SIGKILL"
        assert raised.value.kept > 0
        check_serves(rt)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell")
def test_an_engine_above_its_memory_limit_is_replaced(hold: Hold) -> None:
    limit = 500 << 20
    with isolated(restart_policy=replace(QUICK, memory_limit=limit)) as rt:
        check_serves(rt)
        with pytest.raises(EngineDiedError, match=f"{limit} are allowed"):
            rt.generate([65, EAT], **LONG)
        check_serves(rt)
        health = remote(rt).health()
        assert health.rss is not None
        assert health.rss < limit


# Under load.


@dataclass
class ConcurrentReaders:
    """Readers of many requests, and a killer that strikes after certain numbers of tokens."""

    rt: Runtime
    strikes: list[int]
    results: list[tuple[Any, dict[str, Any], Seen, list[Reply]]] = field(default_factory=list)
    refusals: list[EngineDiedError] = field(default_factory=list)
    seen: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, job: Stream[Any, Any]) -> Seen:
        seen = Seen()
        try:
            for delta in job:
                seen.deltas.append(delta)
                self.count(len(delta.tokens))
        except Exception as error:
            seen.error = error
        return seen

    def count(self, tokens: int) -> None:
        with self.lock:
            self.seen += tokens
            strike = bool(self.strikes) and self.seen >= self.strikes[0]
            if strike:
                self.strikes.pop(0)
        victim = remote(self.rt).health().pid
        if strike and victim is not None:
            os.kill(victim, signal.SIGKILL)

    def serve(self, requests: list[tuple[Any, dict[str, Any]]]) -> None:
        for prompt, settings in requests:
            try:
                job = self.rt.submit(prompt, **settings)
            except EngineDiedError as error:
                # It died twice while the prompt was tokenised: the request was never taken.
                self.refusals.append(error)
                continue
            seen = self.read(job)
            self.results.append((prompt, settings, seen, outcome(job)))


def run_concurrently(
    rt: Runtime, answer: Callable[..., list[Reply]], *, readers: int, each: int, strikes: int
) -> None:
    dice = random.Random(11)
    total = readers * each * 20
    crowd = ConcurrentReaders(rt, sorted(dice.randrange(1, total // 2) for _ in range(strikes)))
    plans = [
        [
            (
                f"prompt {dice.randrange(9)}",
                {"max_tokens": 20, "ignore_eos": True} | dice.choice([{"temperature": 0}, {"seed": 3}]),
            )
            for _ in range(each)
        ]
        for _ in range(readers)
    ]
    threads = [threading.Thread(target=crowd.serve, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(crowd.results) + len(crowd.refusals) == readers * each
    assert all("twice during" in str(error) for error in crowd.refusals)
    told = 0
    for prompt, settings, seen, replies in crowd.results:
        whole = answer(prompt, **settings)[0]
        (reply,) = replies
        if seen.error is None:
            check_delivery(seen.deltas, replies, rt.model)
            assert reply.tokens == whole.tokens
        else:
            told += 1
            assert isinstance(seen.error, EngineDiedError)
            assert reply.tokens == whole.tokens[: len(reply.tokens)]
            assert seen.error.kept == len(reply.tokens)
            assert reply.tokens == tuple(token for delta in seen.deltas for token in delta.tokens)
            # Half a character was held back where it is now lost.
            assert reply.text == "".join(delta.text for delta in seen.deltas)
            assert whole.text.startswith(reply.text)
            assert seen.reasons == [reply.finish_reason] == ["error"]
    assert told > 0, "the killer never struck anyone"
    assert not crowd.strikes
    prompt, chosen = plans[0][0]
    repeated: dict[str, Any] = chosen
    assert rt.generate(prompt, **repeated).tokens == answer(prompt, **repeated)[0].tokens
    assert rt.load == (0, 0)


def test_kills_at_any_moment_cost_an_honest_error_at_most() -> None:
    """H4, C10: kill -9 under load; each reply is right or says what happened, and service is back."""
    # Slow, so that replies are on their way when it dies.
    with isolated("slow", slots=4) as rt:
        run_concurrently(rt, lambda *a, **k: alone(FullAttention, *a, **k), readers=6, each=5, strikes=4)
        assert 1 <= remote(rt).health().restarts <= 4


def test_kills_at_any_moment_on_the_real_engine(zoo_path: Callable[[str], Path]) -> None:
    """H4, C10: with a store, whose lock the next process takes again."""
    path = zoo_path("llama")
    settings: dict[str, Any] = {"n_ctx": 256, "threads": 1}
    with perdure.open(path, slots=1, cache=0, exact=True, **settings) as reference:

        def answer(prompt: str, **request: Any) -> list[Reply]:
            return reference.submit(prompt, **request).replies()

        with perdure.open(path, slots=3, exact=True, isolated=QUICK, **settings) as rt:
            run_concurrently(rt, answer, readers=4, each=4, strikes=3)


def test_what_was_kept_on_disk_is_there_after_a_death(tmp_path: Path) -> None:
    """H4: the next process takes the store's lock again."""
    prompt = list(range(40, 140))
    with isolated("full", store=tmp_path) as rt:
        record = rt.cache.warm(prompt, labels=["kept"])
        kill(rt)
        assert rt.cache.records() == [record]
        reply = rt.generate([*prompt, 1], max_tokens=4, **GREEDY)
        assert reply.reuse.tiers == {"disk": 100}
        assert reply.tokens == toy_alone([*prompt, 1], max_tokens=4, **GREEDY).tokens


def test_a_conversation_goes_on_after_a_death(tmp_path: Path) -> None:
    """H4: committed turns are there, and what is said next is what would have been said."""
    said = []
    for factory, dies in (("full", False), ("full", True)):
        with isolated(factory, n_ctx=1024, store=tmp_path / str(dies)) as rt:
            session = rt.session("alice", system="You are terse.")
            first = session.say("Hello", max_tokens=12, temperature=0)
            if dies:
                kill(rt)
            second = session.say("And then?", max_tokens=12, temperature=0)
            said.append((first.text, second.text))
    assert said[0] == said[1]


# Nothing is left behind.


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not tell")
def test_deaths_leave_no_zombie_no_descriptor_and_no_thread() -> None:
    # What earlier tests left to the collector would go while it counts.
    gc.collect()
    with isolated("full") as rt:
        pid(rt)
        before, threads = descriptors(), set(threading.enumerate())
        dead = []
        for _ in range(4):
            dead.append(pid(rt))
            os.kill(dead[-1], signal.SIGKILL)
        pid(rt)
        assert len(set(dead)) == 4
        assert remote(rt).health().restarts == 4
        assert descriptors() == before
        assert not set(threading.enumerate()) - threads
        for each in dead:
            assert not Path(f"/proc/{each}").exists()
