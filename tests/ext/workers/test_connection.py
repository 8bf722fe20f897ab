"""Frames over a socket: whole, in order, and never waited for."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from perdure.events.background import FAILURES
from perdure.ext.workers.connection import Connection, pack


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    one, other = map(Connection, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_messages_of_any_size_come_whole_and_in_order(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    messages = [b"", b"x", b"y" * (5 << 20), {"z": [1, 2]}, b"w" * 70_000]
    for message in messages:
        here.send(message)
    assert [there.receive() for _ in messages] == messages


def test_what_is_here_is_taken_however_it_was_cut() -> None:
    """One message, several, and parts of them: each is taken once, whole and in order."""
    raw, end = socket.socketpair()
    messages = [b"", b"x", {"z": [1, 2]}, b"w" * 300]
    stream = b"".join(len(data).to_bytes(8, "little") + data for data in map(pack, messages))
    with raw:
        there = Connection(end)
        for size in (1, 7, 9, 50, len(stream)):
            taken: list[object] = []
            for at in range(0, len(stream), size):
                raw.sendall(stream[at : at + size])
                taken += there.take()
            assert taken == messages
        for message in messages:
            raw.sendall(len(pack(message)).to_bytes(8, "little") + pack(message))
            assert list(there.take()) == [message]
        assert list(there.take()) == []
    with pytest.raises(EOFError):
        there.take()
    there.close()


def test_a_sender_does_not_wait_for_a_reader(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    for number in range(2000):
        here.send((number, b"x" * 1000))
    assert [there.receive()[0] for _ in range(2000)] == list(range(2000))


def test_many_senders_do_not_mix_their_messages(ends: tuple[Connection, Connection]) -> None:
    here, there = ends

    def talk(name: int) -> None:
        for at in range(200):
            here.send((name, at, b"x" * 3000))

    threads = [threading.Thread(target=talk, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = {}
    for _ in range(800):
        name, at, _ = there.receive()
        seen.setdefault(name, []).append(at)
    assert seen == {name: list(range(200)) for name in range(4)}
    for thread in threads:
        thread.join()


def test_a_reader_learns_that_nothing_came_or_that_the_other_side_is_gone(
    ends: tuple[Connection, Connection],
) -> None:
    here, there = ends
    with pytest.raises(TimeoutError):
        there.receive(0.0)
    here.send("last words")
    here.close()
    assert there.receive() == "last words"
    with pytest.raises(EOFError):
        there.receive()


def test_what_is_sent_over_a_wire_that_is_cut_is_dropped(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    for _ in range(1000):
        here.send(b"x" * 1000)
    there.close()
    here.send("nobody hears this")
    here.flush(60)
    here.close()
    here.send("nor this")


def test_what_no_flush_had_the_time_for_goes_out_all_the_same(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    sent = [b"x" * (4 << 20), "after it"]
    # As a flush finds it that comes between a sender and the thread which is to wait in its place.
    with here._sending:
        for each in sent:
            here.send(each)
    here.flush(0)
    assert [there.receive(60) for _ in sent] == sent


def test_flush_returns_when_all_is_out(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    here.send(b"x" * (4 << 20))
    reader = threading.Thread(target=there.receive)
    reader.start()
    here.flush(60)
    here.close()
    reader.join()


def test_what_a_sender_left_is_sent_by_the_next(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that waits for room in its place failed: the lock is free, and no frame is lost."""
    here, there = ends
    poll, left = select.poll, [SystemExit(1)]

    def fail_once() -> select.poll:
        if left:
            raise left.pop()
        return poll()

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(select, "poll", fail_once)
    before = FAILURES["perdure-connection"]
    here.send(b"x" * (8 << 20))
    while FAILURES["perdure-connection"] == before:
        os.sched_yield()
    FAILURES["perdure-connection"] = before
    here.send(b"y")
    assert [there.receive() for _ in range(2)] == [b"x" * (8 << 20), b"y"]
