"""What one request costs the engine's process is that request's alone (S6, C4, C5)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from typing import Any

import pytest

from decode.observed import outcome
from decode.unexpected import ERRORS, PLACES
from ext.workers.engines import SENDING, Hold, isolated, mark, pid, remote
from perdure import PerdureError
from perdure.decode.output_queue import OutputQueue, notify
from perdure.decode.request import Delta
from perdure.events.subscription import Subscription
from perdure.ext.workers import service
from perdure.ext.workers.connection import Connection
from perdure.ext.workers.protocol import RequestId
from perdure.ext.workers.service import OutputSender

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


def test_a_long_text_keeps_nobody_else_waiting_c4(hold: Hold) -> None:
    """C4: it is tokenised in a separate thread, not where everybody's messages are read."""
    with isolated("reading") as rt:
        found: list[list[int]] = []
        reading = threading.Thread(target=lambda: found.append(rt.model.tokenize("x" * (1 << 17))))
        reading.start()
        hold.reached()
        assert rt.model.tokenize("short")
        assert len(rt.generate("Hi", **GREEDY).tokens) == 4
        hold.go()
        reading.join()
        assert len(found[0]) >= 1 << 17


def test_a_thread_that_cannot_be_started_costs_one_request_s6(hold: Hold) -> None:
    """S6: the process lives on, and so does everybody else's work."""
    with isolated("short_of_threads") as rt:
        before = pid(rt)
        assert rt.cache.stats()
        mark().touch()
        for work in (rt.cache.stats, lambda: rt.generate("a", regex="[ab]+", **GREEDY)):
            with pytest.raises((PerdureError, RuntimeError), match="can't start new thread"):
                work()
        assert len(rt.generate("Hi", **GREEDY).tokens) == 4
        mark().unlink()
        assert rt.cache.stats()
        assert rt.generate("a", regex="[ab]{4}", **GREEDY).text
        assert (pid(rt), remote(rt).health().restarts) == (before, 0)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("place", [*PLACES, *SENDING])
def test_an_unexpected_error_costs_one_request_and_no_process_s6(hold: Hold, place: str, kind: str) -> None:
    """S6: also MemoryError, in what the engine thread does and in what it sends."""
    with isolated("failing") as rt:
        before = pid(rt)
        expected = rt.generate("Somebody else", **GREEDY).tokens
        mark().write_text(f"{place}: {kind}")
        for reply in outcome(rt.submit("Hello", n=3 if "samples" in place else 1, **GREEDY)):
            # Where there is none, only state was lost, or nothing.
            assert str(reply.error) == str(ERRORS[kind]) if reply.error else len(reply.tokens) == 4
        assert not mark().exists(), "it happened"
        # As many as have slots, and then as many again.
        jobs = [rt.submit(f"another prompt, number {number}", **GREEDY) for number in range(2 * rt.slots)]
        assert [len(job.reply(timeout=60).tokens) for job in jobs] == [4] * len(jobs)
        assert rt.generate("Somebody else", **GREEDY).tokens == expected
        assert (pid(rt), remote(rt).health().restarts) == (before, 0)


def test_an_engine_that_crashes_leaves_no_image_of_what_was_said_s9(hold: Hold) -> None:
    """S9: a core file has all of it, and each would take as much disk as the engine has memory."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        if before[1] == 0:
            pytest.skip("none may be written here at all")
        with isolated("telling_limits"):
            assert mark().read_text() == "0"
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


@pytest.mark.parametrize("call", ["agenerate", "achat", "astream", "achat_stream"])
def test_the_event_loop_goes_on_while_the_engine_is_started_again_c5(hold: Hold, call: str) -> None:
    """C5: the loop itself lets the engine start, so a loop that waits for it waits in vain."""
    with isolated("often_stillborn") as rt:
        if call.startswith("achat"):
            # Its template is asked for once, which needs the engine.
            assert rt.chat_format
        given = "Hi" if call in ("agenerate", "astream") else [{"role": "user", "content": "Hi"}]

        async def read() -> int:
            if call in ("agenerate", "achat"):
                return len((await getattr(rt, call)(given, **GREEDY)).tokens)
            return sum([len(delta.tokens) async for delta in getattr(rt, call)(given, **GREEDY)])

        async def go() -> int:
            mark().touch()
            os.kill(pid(rt), signal.SIGKILL)
            while remote(rt).health().state == "ready":
                await asyncio.sleep(0.01)
            work = asyncio.ensure_future(read())
            for _ in range(10):
                await asyncio.sleep(0)
            assert not work.done()
            mark().unlink()
            return await work

        assert asyncio.run(go()) == 4


def test_after_the_error_of_its_output_a_request_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = map(Connection, socket.socketpair())
    output, told = OutputQueue(), RequestId(1)
    ended = list[RequestId]()
    OutputSender(here, ended.append, Subscription()).watch(told, output)
    with monkeypatch.context() as planted:
        planted.setattr(service, "_new_output", None)
        output.push([Delta("lost")])
        notify([output])
    answer = there.receive(timeout=60)
    assert (answer.id, type(answer.error), ended) == (told, TypeError, [told])
    output.push([Delta("more")])
    notify([output])
    output.finish([])
    assert not there.readable()
    here.close()
    there.close()
