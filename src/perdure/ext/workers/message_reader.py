"""What the process with the engine says, read in a thread or in an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from perdure.ext.workers.connection import Connection


class MessageReader:
    """Reads one connection after another, and has messages handled, all that are there at once.

    The thread that calls `read_all` reads, until `attach_loop` names an event loop: tokens for tasks of that
    loop then wake one thread and not two. From a loop that does not read, the thread takes over.

    Always holds: messages are handled in the order in which they came, one at a time, with `handling` held.
    """

    def __init__(self) -> None:
        self.handling = threading.RLock()
        self._changed = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_ready = False
        self.attached: LoopReader | None = None
        """How an event loop reads, where one does now."""
        self._error: Exception | None = None

    # In the thread that checks the connection.

    def read_all(
        self,
        connection: Connection,
        handle: Callable[[Iterable[Any]], None],
        check_health: Callable[[], None],
        *,
        seconds: float,
    ) -> None:
        """Return when the other side is gone. `check_health` is called every so many seconds."""
        self._error = None
        self._await_loop()
        due = time.monotonic() + seconds
        try:
            while True:
                self._read(connection, handle, max(0.0, due - time.monotonic()))
                if time.monotonic() >= due:
                    with self.handling:
                        check_health()
                    due = time.monotonic() + seconds
        except EOFError:
            return
        finally:
            self.detach_loop()

    def _read(self, connection: Connection, handle: Callable[[Iterable[Any]], None], timeout: float) -> None:
        if self._error is not None:
            raise self._error
        loop = self._loop
        if loop is not None and self._loop_ready:
            self._loop_ready = False
            self._attach(LoopReader(self, loop, connection, handle))
        attached = self.attached
        if attached is None:
            with suppress(TimeoutError):
                message = connection.receive(timeout)
                with self.handling:
                    handle([message])
            return
        before = attached.reads
        if not self._changed.wait(timeout) and attached.reads == before and connection.readable():
            self.detach_loop()
            self._await_loop()
        self._changed.clear()

    def _attach(self, attached: LoopReader) -> None:
        with self.handling:
            self.attached = attached
        try:
            attached.loop.call_soon_threadsafe(attached.begin)
        except RuntimeError:
            self.detach_loop()

    # From any thread.

    def attach_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Read in `loop` from the next message on, or with None in the thread again."""
        self._loop = loop
        self.detach_loop()
        self._await_loop()

    def detach_waiting_loop(self) -> None:
        """The calling thread waits for a message: if it is the loop's, another one has to read it."""
        attached = self.attached
        if attached is not None and attached.thread == threading.get_ident():
            self.detach_loop()
            self._await_loop()

    def _await_loop(self) -> None:
        """Have the loop say that it can read, once it gets to it."""
        if (loop := self._loop) is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._loop_came)

    def _loop_came(self) -> None:
        self._loop_ready = True

    def detach_loop(self, only: LoopReader | None = None, error: Exception | None = None) -> None:
        """Have the thread read again, where a loop does; with `only`, where that one does."""
        with self.handling:
            attached = self.attached
            if attached is None or only not in (None, attached):
                return
            self.attached = None
            self._error = error
            self._changed.set()
        attached.end()


class LoopReader:
    """A connection while an event loop reads it."""

    def __init__(
        self,
        reader: MessageReader,
        loop: asyncio.AbstractEventLoop,
        connection: Connection,
        handle: Callable[[Iterable[Any]], None],
    ) -> None:
        self.loop = loop
        self.thread: int | None = None
        """The loop's, once it has begun."""
        self.reads = 0
        self._reader = reader
        self._connection = connection
        self._handle = handle
        # A duplicate: the loop may poll it for a moment longer than the connection is open.
        self._descriptor: int | None = connection.duplicate()

    def begin(self) -> None:
        with self._reader.handling:
            if self._reader.attached is not self:
                return
            self.thread = threading.get_ident()
            assert self._descriptor is not None
            self.loop.add_reader(self._descriptor, self._read)
            # Something may have been left over in the connection.
            self._read()

    def end(self) -> None:
        """Have the loop forget it, in the loop's own thread. Called once, when it is detached."""
        if self.thread is not None and self.thread != threading.get_ident():
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._forget)
                return
        self._forget()

    def _read(self) -> None:
        with self._reader.handling:
            if self._reader.attached is not self:
                return
            self.reads += 1
            try:
                self._handle(self._connection.take())
            except Exception as error:
                self._reader.detach_loop(self, error)

    def _forget(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            if self.thread is not None and not self.loop.is_closed():
                self.loop.remove_reader(descriptor)
            os.close(descriptor)

    def __del__(self) -> None:
        # A loop that was closed just then has dropped what it was to do.
        if self._descriptor is not None:
            os.close(self._descriptor)
