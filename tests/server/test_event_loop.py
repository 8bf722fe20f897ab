"""Nothing waits on the event loop: the debug mode that every test of the server runs in."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from perdure.checks import WaitInEventLoopError, check_may_wait, never_waiting
from perdure.server.core.loop_watch import LoopWatch
from perdure.testing.toy import ToyModel
from server.live_server import PATIENCE, live_server, opened


def test_a_store_that_is_touched_on_the_event_loop_is_refused_x7() -> None:
    """Planted: what a route would do that forgot the thread."""
    with opened(ToyModel()) as runtime:

        async def touch() -> None:
            with never_waiting() as refused:
                with pytest.raises(WaitInEventLoopError, match="store"):
                    runtime.sessions.list("")
                assert refused == ["a store was touched"]
                # As routes do it.
                await asyncio.to_thread(runtime.sessions.list, "")
            runtime.sessions.list("")

        asyncio.run(touch())


def test_the_server_of_a_test_is_watched() -> None:
    with opened(ToyModel()) as runtime, live_server(runtime) as server, server.client() as client:
        assert client.get("/health").status_code == 200
        assert isinstance(server.http_server.loop_watch, LoopWatch)
        assert any(thread.name == "perdure-loop-watch" for thread in threading.enumerate())


def test_a_loop_that_is_held_is_told_with_the_line_that_holds_it() -> None:
    """Planted: a callback that computes until it is noticed."""

    async def run() -> LoopWatch:
        watch = LoopWatch(asyncio.get_running_loop())
        until = time.monotonic() + PATIENCE

        def compute() -> None:
            while not watch.held and time.monotonic() < until:
                sum(range(1000))

        with watch.watching():
            asyncio.get_running_loop().call_soon(compute)
            while not watch.held and time.monotonic() < until:
                await asyncio.sleep(0)
        return watch

    watch = asyncio.run(run())
    assert len(watch.held) == 1
    assert "in compute" in watch.held[0]


def test_other_threads_may_wait_while_one_may_not() -> None:
    refused: list[BaseException] = []

    def other() -> None:
        try:
            check_may_wait("a disk was waited for")
        except BaseException as error:
            refused.append(error)

    with never_waiting():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(PATIENCE)
        with pytest.raises(WaitInEventLoopError):
            check_may_wait("a disk was waited for")
    check_may_wait("a disk was waited for")
    assert refused == []
