"""Messages over a socket, whole and in order. Only ever between two processes of ours: they are pickles."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from perdure.spi.runtime import BackgroundThread

_HEAD = struct.Struct("<Q")
_READ = 1 << 18
_LOOK = 500
"""Milliseconds after which a thread that waits for room looks whether the connection was cut meanwhile."""


class Connection:
    """One end of a socket pair.

    Always holds: `send` waits for nobody, neither for the other side nor for another sender, so the engine
    thread may call it. Messages to a connection that is cut are dropped: the reader learns of the cut.
    One thread at a time receives.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._frames: deque[bytes | memoryview] = deque()
        self._sending = threading.Lock()
        self._cut = False
        self._received = bytearray()
        self._room = memoryview(bytearray(_READ))
        """Where what comes is put first: memory that is taken anew for it is felt at every token."""
        self._readable = select.poll()
        self._readable.register(end.fileno(), select.POLLIN)

    def send(self, message: object) -> None:
        self.send_packed(pack(message))

    def send_packed(self, data: bytes) -> None:
        """Send what `pack` made."""
        self._frames.append(_HEAD.pack(len(data)) + data)
        self._send_what_is_left()

    def receive(self, timeout: float | None = None) -> Any:
        """The next message. EOFError where the other side is gone, TimeoutError where none came in time."""
        while not (end := self._end_of_message()):
            if not self.readable(timeout):
                raise TimeoutError
            self._read()
        return self._message(end)

    def take(self) -> Iterable[Any]:
        """The messages that are here by now, without waiting. EOFError where the other side is gone."""
        if not self._received:
            size = self._receive()
            if size > _HEAD.size and _HEAD.unpack_from(self._room)[0] == size - _HEAD.size:
                # At every token: mostly one message has come, and all of it.
                return (pickle.loads(self._room[_HEAD.size : size]),)
            self._received += self._room[:size]
        elif not self._end_of_message():
            self._read()
        return self._messages()

    def readable(self, timeout: float | None = 0.0) -> bool:
        """Whether there is something to read, or the end, within so many seconds."""
        return bool(self._readable.poll(None if timeout is None else max(0.0, timeout) * 1000))

    def duplicate(self) -> int:
        """A descriptor of the same socket, for a selector; the caller closes it."""
        return os.dup(self._socket.fileno())

    def flush(self, timeout: float) -> None:
        """Wait until all that was sent is out of this process, at most so long."""
        end = time.monotonic() + timeout
        if self._sending.acquire(timeout=timeout):
            try:
                while not self._push() and time.monotonic() < end:
                    self._await_room()
            finally:
                self._sending.release()
            # Frames that had no room in time, or that other senders left while it was locked.
            self._send_what_is_left()

    def cut(self) -> None:
        """End the connection from any thread: both sides read its end. The thread that receives closes it."""
        self._cut = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut the connection and give it back; for the thread that receives."""
        self.cut()
        with self._sending:
            self._socket.close()

    def _end_of_message(self) -> int:
        """Where the first message ends in what was received; 0 where it is not whole."""
        if len(self._received) < _HEAD.size:
            return 0
        end: int = _HEAD.size + _HEAD.unpack_from(self._received)[0]
        return end if len(self._received) >= end else 0

    def _messages(self) -> Iterator[Any]:
        while end := self._end_of_message():
            yield self._message(end)

    def _message(self, end: int) -> Any:
        with memoryview(self._received) as view, view[_HEAD.size : end] as data:
            message = pickle.loads(data)
        del self._received[:end]
        return message

    def _read(self) -> None:
        size = self._receive()
        self._received += self._room[:size]

    def _receive(self) -> int:
        """Bytes that have come into the room, perhaps none. EOFError where the other side is gone."""
        try:
            size = self._socket.recv_into(self._room)
        except BlockingIOError:
            return 0
        except OSError:
            size = 0
        if not size:
            raise EOFError
        return size

    def _send_what_is_left(self) -> None:
        """Unless a thread does already. The thread with the lock sends all that others left here: another
        one, or this one, where the garbage collector runs a finaliser that sends in the middle of a send."""
        while self._frames and self._sending.acquire(blocking=False):
            handed_on = False
            try:
                handed_on = not self._push() and self._hand_on()
            finally:
                if not handed_on:
                    self._sending.release()

    def _hand_on(self) -> bool:
        """Have a thread wait in the sender's place: whether it has the lock now."""
        try:
            BackgroundThread(self._drain, name="perdure-connection").start()
        except RuntimeError:
            # No thread is to be had: better to wait here than to lose what was said.
            while not self._push():
                self._await_room()
            return False
        return True

    def _drain(self) -> None:
        """Wait in the senders' place. It has the lock from the sender that started it."""
        has_lock = True
        while has_lock:
            try:
                while not self._push():
                    self._await_room()
            finally:
                self._sending.release()
            # Another sender may have left a frame meanwhile, and found it locked.
            has_lock = bool(self._frames) and self._sending.acquire(blocking=False)

    def _push(self) -> bool:
        """Send what is left here, as far as the other side takes it: whether that is all. With the lock."""
        while self._frames:
            frame = self._frames[0]
            try:
                sent = self._socket.send(frame)
            except BlockingIOError:
                if not self._cut:
                    return False
                sent = len(frame)
            except OSError:
                self._cut = True
                sent = len(frame)
            if sent < len(frame):
                self._frames[0] = memoryview(frame)[sent:]
            else:
                self._frames.popleft()
        return True

    def _await_room(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            room = select.poll()
            room.register(self._socket.fileno(), select.POLLOUT)
            room.poll(_LOOK)


pack: Callable[[object], bytes] = functools.partial(pickle.dumps, protocol=pickle.HIGHEST_PROTOCOL)
"""A message as it travels. Raises whatever pickle raises for what cannot travel."""
