"""Large memory that several threads work on is what one thread would make of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from perdure.engine import parallel
from perdure.engine.parallel import assist, joined, spread
from perdure.engine.state import pack, unpack
from perdure.errors import CorruptStateError
from perdure.identity import Identity

LARGE = 9 << 20
HELPERS = parallel.MOST_THREADS - 1


@pytest.fixture(autouse=True)
def several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "threads", lambda: HELPERS + 1)
    # One that assisted in an earlier test may not even be awake yet: nobody waits for them.
    await_idle()


def await_idle() -> None:
    until = time.monotonic() + 60
    while len(parallel.idle_helpers(os.getpid())) < HELPERS:
        assert time.monotonic() < until, "a helper is gone"
        os.sched_yield()


def test_results_come_in_the_order_of_the_items() -> None:
    items = list(range(50))
    assert list(spread(lambda item: item * item, items, LARGE)) == [item * item for item in items]


def test_only_a_few_are_made_ahead_of_what_is_taken() -> None:
    made: list[int] = []
    results = spread(made.append, list(range(100)), LARGE)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert len(made) <= 8


@pytest.mark.parametrize("most", [0, 1, 3, 50])
def test_a_few_threads_assist_and_are_idle_again(most: int) -> None:
    for _ in range(20):
        came = threading.Semaphore(0)
        assist(came.release, most)
        for _ in range(min(most, HELPERS)):
            assert came.acquire(timeout=30)
        assert not came.acquire(blocking=False)
        await_idle()


def test_who_is_busy_does_not_assist_and_is_not_waited_for() -> None:
    leave, came = threading.Event(), threading.Semaphore(0)

    def stay() -> None:
        came.release()
        leave.wait()

    for _ in range(HELPERS):
        assist(stay, 1)
        assert came.acquire(timeout=30)
    assist(came.release, HELPERS)
    leave.set()
    await_idle()
    assert not came.acquire(blocking=False)


def test_without_threads_nobody_assists(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    parallel.idle_helpers.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        assist(lambda: pytest.fail("nobody can"), HELPERS)
    parallel.idle_helpers.cache_clear()


def test_an_error_is_raised_where_its_result_is_taken_and_ends_the_rest() -> None:
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 3:
            raise ValueError("three")
        return item

    with pytest.raises(ValueError, match="three"):
        list(spread(work, list(range(100)), LARGE))
    assert len(begun) < 20


@pytest.mark.parametrize("size", [0, 1, 5000, LARGE, (40 << 20) + 3])
def test_head_and_payload_are_one_object(size: int) -> None:
    payload = np.arange(size, dtype=np.uint64).astype(np.uint8)
    found = joined(lambda: b"head", 4, payload)
    assert type(found) is bytes
    assert found == b"head" + payload.tobytes()


def test_a_large_saved_state_is_read_back_and_every_damage_is_seen(identity: Identity) -> None:
    tokens, payload = np.arange(7, dtype=np.int32), np.arange(LARGE, dtype=np.uint64).astype(np.uint8)
    state = pack(identity, tokens, payload)
    found = unpack(state, lambda _: identity)
    assert found.tokens.tolist() == tokens.tolist()
    assert found.payload.tobytes() == payload.tobytes()
    for place in (40, len(state) // 2, len(state) - 1):
        damaged = bytearray(state)
        damaged[place] ^= 1
        with pytest.raises(CorruptStateError):
            unpack(damaged, lambda _: identity)


@pytest.fixture
def identity() -> Identity:
    fields = {name: name for name in Identity.__dataclass_fields__}
    return Identity(**fields)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_has_threads_of_its_own() -> None:
    """Those of its parent are not there, and nobody would do the work."""
    program = """
import os, threading
from perdure.engine import parallel
parallel.threads = lambda: 4
def work():
    came = threading.Semaphore(0)
    parallel.assist(came.release, 1)
    assert came.acquire(timeout=30)
    assert list(parallel.spread(lambda n: n * n, range(9), 9, large=0)) == [n * n for n in range(9)]
work()
child = os.fork()
work()
if child == 0:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "7"
