"""A backend on the engine of another process that has the store."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure import ClosedError, EngineError, PerdureError, StoreLockedError
from perdure.ext.workers.connection import Connection
from perdure.ext.workers.process import UNRESPONSIVE, ExitInfo
from perdure.ext.workers.protocol import GREETING, Leaving, Welcome
from perdure.ext.workers.remote import BackendClient
from perdure.spi.base import processes
from perdure.spi.runtime import (
    Backend,
    BackendState,
    BackgroundThread,
    BlockStorage,
    Health,
    Listener,
    StoreLock,
    StoreOwner,
    read_owner,
)

log = logging.getLogger("perdure.store")

_NAP = 0.05
_TICK = 1.0
_UNKNOWN = 2.0
"""Seconds for a process that has just locked a store to write its name."""
_START = 300.0
"""Seconds for it to have its model loaded."""
_QUEUE = 256
"""Requests that may wait while there is no engine."""
_SILENT = 30.0
"""Seconds of silence after which it is taken to be stopped: nobody waits for its tokenizer any longer."""
_PATIENCE = 10.0
"""Seconds for it to answer once it is connected, and for what it leaves behind to be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection to the process that has a store, and what that one has said first."""

    connection: Connection
    welcome: Welcome
    holder: StoreOwner


Check = Callable[[str | None, str, StoreOwner], None]
"""Of the other end: its model's file and digest, and its process. Raises `StoreLockedError` unless wanted."""


def lock_or_attach(
    folder: Path,
    check: Check,
    build: Callable[[int], Backend],
    settings: Mapping[str, Any],
    n_ctx: int | None,
) -> StoreLock | AttachedBackend:
    """The right to run the engine of a store, or where another process has it, a backend on that one's.

    `build` makes a backend of this process, for requests of at least so many tokens, when its turn comes;
    `settings` are those that other processes get then. An engine of another process must have them too, and
    room for `n_ctx` if that is given.
    """
    link = _find(folder)
    if isinstance(link, StoreLock):
        return link

    def check_link(link: Link) -> None:
        check(link.welcome.ready.path, link.welcome.ready.digest, link.holder)
        check_settings(link, folder, settings, n_ctx)

    try:
        check_link(link)
    except BaseException:
        link.connection.close()
        raise
    return AttachedBackend(folder, link, check_link, build, settings)


class AttachedBackend(BackendClient):
    """The engine of another process. When that one leaves or dies, the next one has the store: this process,
    with a new engine, or another one that waited too.

    Requests of which nothing had come are asked again there; others end with an error that says so.
    """

    is_attached = True

    no_processors = "stop the process that has the store, or use another store"

    def __init__(
        self,
        folder: Path,
        link: Link,
        check: Callable[[Link], None],
        build: Callable[[int], Backend],
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__(_QUEUE)
        self._folder = folder
        self.storage = BlockStorage(folder=folder)
        self._settings = settings
        self._check = check
        self._build = build
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._wanted = False
        self._state: BackendState = "ready"
        self._moves = 0
        self._last_death: str | None = None
        self._since = time.monotonic()
        self._held: tuple[StoreLock, Backend, Listener] | None = None
        self._link = link
        self._handshake(link.welcome.ready)
        self._pending.connect(link.connection, self.slots, self._handle_other)
        self._thread = BackgroundThread(self._run, name="perdure-attached")
        self._thread.start()

    @property
    def holder(self) -> StoreOwner | None:
        """The process whose engine this is; None where it is this one's own by now."""
        return None if self._held is not None else self._link.holder

    @property
    def load(self) -> tuple[int, int]:
        """Requests waiting, and being served, of all processes that use the engine."""
        answer = self._pending.ask("backend", "load", (), {})
        self._reader.detach_waiting_loop()
        try:
            waiting, served = answer.result(_TICK)
            return waiting, served
        except (TimeoutError, PerdureError):
            answer.cancel()
            return self._pending.load

    def health(self) -> Health:
        with self._changed:
            return Health(
                state=self._shown_state(),
                restarts=self._moves,
                last_death=self._last_death,
                pid=self._link.holder.pid,
                rss=None,
                uptime=time.monotonic() - self._since if self._state == "ready" else None,
            )

    def _shown_state(self) -> BackendState:
        if self._state != "ready" or self._pending.silence < UNRESPONSIVE:
            return self._state
        return "unresponsive"

    def close(self) -> None:
        """End what is running as cancelled. An engine of this process is left to nobody."""
        self._pending.shut()
        self._reader.attach_loop(None)
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
            self._link.connection.cut()
        self._thread.join()
        self.events.close()
        if self._held is not None:
            lock, backend, listener = self._held
            listener.close()
            backend.close()
            lock.release()

    def start(self) -> None:
        if self._state == "failed":
            with self._changed:
                self._wanted = True
                self._changed.notify_all()

    # The thread.

    def _run(self) -> None:
        error: Exception | None = None
        try:
            while not self._closing.is_set():
                self._serve(self._link)
                if self._closing.is_set():
                    return
                self._leave(self._link.holder)
                if not self._move():
                    return
        except BaseException as defect:
            # Nobody may be left waiting for a thread that is gone.
            error = EngineError(f"the thread that talks to the engine's process ended: {defect!r}")
            raise
        finally:
            self._link.connection.close()
            self._pending.shut()
            self._pending.end_all(error)
            self._set("closed")

    def _serve(self, link: Link) -> None:
        """Hand on what the other process says until it is gone."""
        self._reader.read_all(link.connection, self._pending.handle, self._end_late, seconds=_TICK)

    def _end_late(self) -> None:
        self._pending.end_overdue()
        self._pending.end_unanswered(_SILENT, lambda: EngineError(_silent(self._link.holder)))

    def _handle_other(self, message: Any) -> None:
        if isinstance(message, Leaving):
            self._pending.pause()

    def _leave(self, holder: StoreOwner) -> None:
        self._link.connection.close()
        self._last_death = f"{holder}, which had the store, has ended"
        log.warning("%s; the next one takes its place", self._last_death)
        self._set("restarting")
        self._pending.disconnect(ExitInfo(reason=self._last_death, signal=None, code=None, said=""))

    def _move(self) -> bool:
        """Have an engine again: of this process or of another one. False where this is closed first."""
        while not self._closing.is_set():
            try:
                link = self._next()
            except Exception as error:
                if self._closing.is_set():
                    return False
                log.error("the engine is gone, and there is no other: %s", error)
                self._last_death = str(error)
                self._give_up(error)
                continue
            with self._changed:
                self._link = link
                self._moves += 1
                self._since = time.monotonic()
                self._ready = link.welcome.ready
                if self._closing.is_set():
                    link.connection.close()
                    return False
            self._set("ready")
            self._pending.connect(link.connection, self.slots, self._handle_other)
            return True
        return False

    def _next(self) -> Link:
        link_or_lock = _find(self._folder, closing=self._closing)
        if isinstance(link_or_lock, Link):
            try:
                self._check(link_or_lock)
                self._check_digest(link_or_lock.welcome.ready.digest, link_or_lock.holder)
            except BaseException:
                link_or_lock.connection.close()
                raise
            return link_or_lock
        log.warning("this process runs the engine of %s from now on", self._folder)
        with ExitStack() as undo:
            undo.callback(link_or_lock.release)
            backend = _built(lambda: self._build(self.n_ctx))
            undo.callback(backend.close)
            self._check_digest(backend.model.digest, link_or_lock.holder)
            listener = Listener(link_or_lock.holder, backend, self._settings)
            undo.callback(listener.close)
            link = _greeted(Connection(listener.connect()), link_or_lock.holder)
            if link is None:
                raise EngineError("the engine of this process does not answer")
            self._held = (link_or_lock, backend, listener)
            undo.pop_all()
        return link

    def _check_digest(self, digest: str, holder: StoreOwner) -> None:
        if digest != self.model.digest:
            raise StoreLockedError(
                f"the store {self._folder} is in use by {holder} with another model now: open the runtime "
                "again once it is free"
            )

    def _give_up(self, error: Exception) -> None:
        """End all waiting requests, and rest until the next one."""
        with self._changed:
            self._wanted = False
            self._state = "failed"
        self._pending.end_all(error)
        with self._changed:
            while not self._wanted and not self._closing.is_set():
                self._changed.wait()
            self._state = "restarting"

    def _set(self, state: BackendState) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()


def _find(folder: Path, closing: threading.Event | None = None) -> StoreLock | Link:
    """The lock of a store, or a connection to its owner. An owner that is still starting is waited for."""
    began = time.monotonic()
    while True:
        try:
            return StoreLock(folder)
        except StoreLockedError as error:
            locked = error
        holder = read_owner(folder)
        if holder is not None and holder.socket and (link := _connected(holder, locked)) is not None:
            return link
        waited = time.monotonic() - began
        if waited > (_START if holder is not None and holder.socket else _UNKNOWN):
            raise locked
        if closing is not None and closing.is_set():
            raise ClosedError("this runtime is closed")
        time.sleep(_NAP)


def _connected(holder: StoreOwner, locked: StoreLockedError) -> Link | None:
    """A connection to a process that has a store; None where it does not listen, or not yet."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.connect(holder.socket)
    except OSError:
        end.close()
        return None
    # What is said is code to Python: only a process that may do anything here anyway is listened to.
    if not processes.is_own_peer(end):
        end.close()
        raise StoreLockedError(f"{locked}. It is of another user, so its engine cannot be shared")
    return _greeted(Connection(end), holder, locked)


def _greeted(
    connection: Connection, holder: StoreOwner, locked: StoreLockedError | None = None
) -> Link | None:
    try:
        greeting = connection.receive(_SILENT)
        if greeting != GREETING:
            connection.close()
            raise StoreLockedError(
                f"{locked}. It runs perdure {greeting[1]} and this is {GREETING[1]}, so its engine cannot be "
                "shared"
            )
        welcome = connection.receive(_START)
    except EOFError:
        connection.close()
        return None
    except TimeoutError:
        connection.close()
        if locked is None:
            return None
        raise StoreLockedError(_silent(holder)) from None
    assert isinstance(welcome, Welcome)
    return Link(connection=connection, welcome=welcome, holder=holder)


def _silent(holder: StoreOwner) -> str:
    return (
        f"{holder}, which has the store, has not answered for {_SILENT:g} seconds: it is stopped or hangs. "
        "Let it go on (kill -CONT), or end it"
    )


def _built(build: Callable[[], Backend]) -> Backend:
    """A backend of this process. What is left of the one before may take a moment to be gone."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return build()
        except StoreLockedError:
            if time.monotonic() > end:
                raise
            time.sleep(_NAP)


def check_settings(link: Link, folder: Path, own_settings: Mapping[str, Any], n_ctx: int | None) -> None:
    """Refuse an engine that was opened with other settings than are asked for here."""
    ready, settings = link.welcome.ready, link.welcome.settings
    has = f"the store {folder} is in use by {link.holder}"
    if n_ctx is not None and n_ctx > ready.n_ctx:
        raise StoreLockedError(
            f"{has} with a context of {ready.n_ctx} tokens, and this asks for {n_ctx}: leave that out, "
            "close that one, or choose another store"
        )
    for name, value in own_settings.items():
        if settings.get(name) != value:
            there = f"{name}={settings[name]!r}" if name in settings else f"the default {name}"
            raise StoreLockedError(
                f"{has} with {there}, and this asks for {name}={value!r}: leave that out, close that one, or "
                "choose another store"
            )
