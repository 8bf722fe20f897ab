"""What the process with the engine says, read in a thread or in an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from perdure.worker.connection import Connection


class MessageReader:
    """Reads one connection after another, and has messages handled, all that are there at once.

    The thread that calls `read_all` reads, until an event loop asks for it with `read_in`: tokens for tasks
    of that loop then wake one thread and not two. A loop that does not get to it loses it to the thread.

    Always holds: messages are handled in the order in which they came, one at a time, with `handling` held.
    """

    def __init__(self) -> None:
        self.handling = threading.RLock()
        self._changed = threading.Event()
        self._wanted_by: asyncio.AbstractEventLoop | None = None
        self._asked = False
        self.lent: Loan | None = None
        """What an event loop reads now."""
        self._error: Exception | None = None

    # In the thread that looks after the connection.

    def read_all(
        self,
        connection: Connection,
        handle: Callable[[Iterable[Any]], None],
        look_after: Callable[[], None],
        *,
        seconds: float,
    ) -> None:
        """Return when the other side is gone. `look_after` is called every so many seconds."""
        self._error = None
        self._ask_loop()
        due = time.monotonic() + seconds
        try:
            while True:
                self._read(connection, handle, max(0.0, due - time.monotonic()))
                if time.monotonic() >= due:
                    with self.handling:
                        look_after()
                    due = time.monotonic() + seconds
        except EOFError:
            return
        finally:
            self.take_back()

    def _read(self, connection: Connection, handle: Callable[[Iterable[Any]], None], timeout: float) -> None:
        if self._error is not None:
            raise self._error
        loop = self._wanted_by
        if loop is not None and self._asked:
            self._asked = False
            self._lend(Loan(self, loop, connection, handle))
        loan = self.lent
        if loan is None:
            with suppress(TimeoutError):
                message = connection.receive(timeout)
                with self.handling:
                    handle([message])
            return
        before = loan.reads
        if not self._changed.wait(timeout) and loan.reads == before and connection.readable():
            self.take_back()
            self._ask_loop()
        self._changed.clear()

    def _lend(self, loan: Loan) -> None:
        with self.handling:
            self.lent = loan
        try:
            loan.loop.call_soon_threadsafe(loan.begin)
        except RuntimeError:
            self.take_back()

    # From any thread.

    def read_in(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Read in `loop` from the next message on, or with None in the thread again."""
        self._wanted_by = loop
        self.take_back()
        self._ask_loop()

    def about_to_wait(self) -> None:
        """The calling thread waits for a message: if it is the loop's, another one has to read it."""
        loan = self.lent
        if loan is not None and loan.thread == threading.get_ident():
            self.take_back()
            self._ask_loop()

    def _ask_loop(self) -> None:
        """Have the loop say that it can read, once it gets to it."""
        if (loop := self._wanted_by) is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._ask)

    def _ask(self) -> None:
        self._asked = True

    def take_back(self, loan: Loan | None = None, error: Exception | None = None) -> None:
        """Have the thread read again: what `loan` names, or whatever is lent."""
        with self.handling:
            found = self.lent
            if found is None or loan not in (None, found):
                return
            self.lent = None
            self._error = error
            self._changed.set()
        found.end()


class Loan:
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
        # One of its own: the loop may look at it for a moment longer than the connection is open.
        self._descriptor: int | None = connection.duplicate()

    def begin(self) -> None:
        with self._reader.handling:
            if self._reader.lent is not self:
                return
            self.thread = threading.get_ident()
            assert self._descriptor is not None
            self.loop.add_reader(self._descriptor, self._read)
            # Something may have been left over in the connection.
            self._read()

    def end(self) -> None:
        """Have the loop forget it, in the loop's own thread. Called once, when it is not lent any more."""
        if self.thread is not None and self.thread != threading.get_ident():
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._forget)
                return
        self._forget()

    def _read(self) -> None:
        with self._reader.handling:
            if self._reader.lent is not self:
                return
            self.reads += 1
            try:
                self._handle(self._connection.take())
            except Exception as error:
                self._reader.take_back(self, error)

    def _forget(self) -> None:
        found, self._descriptor = self._descriptor, None
        if found is not None:
            if self.thread is not None and not self.loop.is_closed():
                self.loop.remove_reader(found)
            os.close(found)

    def __del__(self) -> None:
        # A loop that was closed just then has dropped what it was to do.
        if self._descriptor is not None:
            os.close(self._descriptor)
