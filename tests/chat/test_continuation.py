"""A reply that goes on in another request: one deadline for all of it, and one cancel (H7)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import perdure
from decode.observed import Clock
from perdure import Runtime
from perdure.chat.plans import ContextWindow
from perdure.chat.reply import ReplyReader
from perdure.decode import engine_loop as loop_module
from perdure.decode import request as request_module
from perdure.decode.request import Request
from perdure.testing.toy import ToyModel

SAID = [{"role": "user", "content": "Hi"}]
ENDLESS: dict[str, Any] = {"overflow": "shift", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
N_CTX = 128


@pytest.fixture
def rt() -> Any:
    with perdure.open(ToyModel(), n_ctx=N_CTX, slots=1) as runtime:
        yield runtime


def before_going_on(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Have something happen between the first request of a reply and the next."""
    shifted = ContextWindow.shifted

    def going_on(window: ContextWindow, request: Request, reader: ReplyReader) -> Request:
        act()
        return shifted(window, request, reader)

    monkeypatch.setattr(ContextWindow, "shifted", going_on)


def test_going_on_does_not_start_the_time_anew_h7(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """H7: 6 seconds in the first request and 6 in the next are more than 10."""
    clock = Clock()
    for module in (loop_module, request_module):
        monkeypatch.setattr(module, "time", clock)
    job = rt.submit_chat(SAID, timeout=10.0, **ENDLESS)
    read = 0
    for delta in job:
        if not read or read < N_CTX <= read + len(delta.tokens):
            clock.now += 6
        read += len(delta.tokens)
    reply = job.reply()
    assert reply.finish_reason == "cancelled"
    assert N_CTX <= len(reply.tokens) < 400


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_cancel_between_two_requests_is_not_lost_h7(
    rt: Runtime, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = rt.submit_chat(SAID, **ENDLESS)
    before_going_on(monkeypatch, job.cancel)
    reply = asyncio.run(job.areply()) if asynchronous else job.reply()
    assert reply.finish_reason == "cancelled"
    assert len(reply.tokens) < 400


def test_the_event_loop_does_not_wait_for_the_next_request_to_be_queued(
    rt: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    job = rt.submit_chat(SAID, **ENDLESS)
    before_going_on(monkeypatch, lambda: threads.append(threading.current_thread()))
    assert asyncio.run(job.areply()).finish_reason == "length"
    assert threads
    assert threading.current_thread() not in threads
