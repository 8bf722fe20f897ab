"""HTTP server: the application on a socket, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import anyio.to_thread
import uvicorn
from h11 import Request
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from perdure import system
from perdure.checks import never_waiting
from perdure.errors import InvalidInputError
from perdure.events.background import BackgroundThread
from perdure.extension import brought
from perdure.server import direct_write
from perdure.server.app import rejecting, served
from perdure.server.core.server_state import ServerState
from perdure.server.core.settings import Limits
from perdure.server.tls import LOOK, Certificate
from perdure.system import processes

log = logging.getLogger("perdure.server")

_LEEWAY = 5
"""Seconds for answers to be sent after their replies were ended."""
_IDLE = 30
"""Seconds that a connection may be idle between two requests."""
AGAIN = 5
"""Seconds until a task that failed is begun again."""


def check_address(host: str, keys: int) -> None:
    """Refuse to be reached from other machines by people without a key."""
    if keys or _is_loopback(host):
        return
    raise InvalidInputError(
        f"{host} can be reached from other machines, and there are no keys: anybody there could use the "
        "model and read every session. Give --keys FILE (`perdure keys add NAME` makes a key), or "
        "listen on 127.0.0.1"
    )


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens. The port 0 takes a free one."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        raise InvalidInputError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}. Is another server running "
            "there? --port chooses another one"
        ) from None
    return listening


def bind_path(path: Path) -> socket.socket:
    """A Unix socket that listens, for programs of this user. One that an ended server left is replaced."""
    if not system.LOCAL_SOCKETS:
        raise InvalidInputError("this system has no Unix sockets: leave --socket out, and listen on a port")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()
        listening.bind(str(path))
        # Nobody can connect before it listens.
        path.chmod(0o600)
    except OSError as error:
        listening.close()
        raise InvalidInputError(
            f"cannot listen on {path}: {error.strerror or error}. Give --socket a path of at most 100 bytes, "
            "in a folder that is there, where no file is and no other server listens"
        ) from None
    return listening


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
        return True


async def _lasting(task: Callable[[ServerState], Coroutine[Any, Any, None]], state: ServerState) -> None:
    """A task of an extension, begun again where it fails."""
    while True:
        try:
            return await task(state)
        except Exception:
            log.exception("what runs beside the server failed and begins again")
            await asyncio.sleep(AGAIN)


class HttpServer(uvicorn.Server):
    """A server that stops in order: it takes no more connections, lets replies finish for a while, ends
    those that are left with an honest error, and only then returns. Signals ask for that; they never end
    the process by themselves.
    """

    def __init__(
        self,
        state: ServerState,
        *,
        read_settings: Callable[[], None] | None = None,
        certificate: Certificate | None = None,
    ) -> None:
        """`read_settings` has the app state changed to what the config file says now. With a `certificate`,
        ports speak TLS; Unix sockets, which only this user's programs reach, do not."""
        limits = state.limits
        super().__init__(
            uvicorn.Config(
                direct_write.released(served(state)),
                http=_protocol(limits, direct_write.released(rejecting(state))),
                ws="websockets-sansio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_IDLE,
                h11_max_incomplete_event_size=64 << 10,
            )
        )
        self._state = state
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching = contextlib.ExitStack()
        self.loop_watch: LoopWatch | None = None
        """Debug mode, while it is on."""
        self._read_settings = read_settings
        self._certificate = certificate
        self._take_limits()
        self._ends_with_terminal = False
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if self._state.debug:
            self.loop_watch = LoopWatch(self._loop)
            self._watching.enter_context(self.loop_watch.watching())
        self._state.models.attach_loop(self._loop)
        # What the first call in a thread imports, and that thread: not while the first client waits.
        await anyio.to_thread.run_sync(lambda: None)
        await self._listen(sockets or [])
        if self._state.models.is_loaded(self._state.models.first):
            self._state.models.warm_up()
        self._tasks = [asyncio.create_task(_lasting(each, self._state)) for each in brought("tasks")]
        if self._certificate is not None:
            self._tasks.append(asyncio.create_task(self._renew(self._certificate)))

    async def _listen(self, sockets: list[socket.socket]) -> None:
        if self._certificate is None:
            await super().startup(sockets)
            return
        local = [each for each in sockets if is_local(each)]
        await super().startup(local)
        listeners = self.servers
        self.config.ssl = self._certificate.context
        await super().startup([each for each in sockets if each not in local])
        self.servers = [*listeners, *self.servers]

    async def _renew(self, certificate: Certificate) -> None:
        while True:
            await asyncio.sleep(LOOK)
            certificate.renew()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._drain()
        loop, grace = asyncio.get_running_loop(), self._state.limits.grace_seconds
        until = loop.time() + grace + _LEEWAY
        ending = loop.call_later(grace, self._state.end)
        self._state.end_waiting()
        for each in self._tasks:
            each.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await super().shutdown(sockets)
            await self._state.finish(until - loop.time())
        finally:
            ending.cancel()
            await self._state.work(self._state.save)
            self._state.models.attach_loop(None)
            self._watching.close()

    async def _drain(self) -> None:
        """Answer as ever but for `/ready`, until routers have noticed. A second signal ends it."""
        state, seconds = self._state, self._state.limits.drain_seconds
        drain = state.drain
        state.draining = True
        drain.begin(seconds)
        while not drain.is_over(seconds) and not state.stopping and not self.force_exit:
            await asyncio.sleep(0.05)

    def stop(self, *, now: bool = False) -> None:
        """Have it stop, from any thread; `now` without waiting for replies."""
        if now and self._loop is not None:
            # One that is closed has ended everything already.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._state.end)
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self._signalled) for each in (signal.SIGINT, signal.SIGTERM)}
        for each in processes.reload_signals():
            before[each] = signal.signal(each, self._hung_up)
            # A parent that has it ignored, such as nohup, wants the server to go on without the terminal.
            self._ends_with_terminal = before[each] is not signal.SIG_IGN and processes.has_terminal()
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def reload(self) -> None:
        """Read the keys and the settings again. Requests that are running go on; the next ones are met by
        what was read. Where something is wrong with a file, what it says stays as it was."""
        if self._certificate is not None:
            self._certificate.renew()
        try:
            self._state.keys.reload()
            self._state.limit_namespaces()
            log.info("the keys were read again: %d", len(self._state.keys))
        except InvalidInputError as error:
            log.error("the keys are as they were: %s", error)
        if self._read_settings is None:
            return
        try:
            self._read_settings()
        except InvalidInputError as error:
            log.error("the settings are as they were: %s", error)
        self._take_limits()

    def _take_limits(self) -> None:
        """Those that are read where connections are made and ended."""
        limits = self._state.limits
        self.config.ws_max_size = limits.body_bytes
        self.config.timeout_graceful_shutdown = int(limits.grace_seconds) + _LEEWAY

    def _hung_up(self, number: int, frame: FrameType | None) -> None:
        """A closed window gives the same signal: a server that was started in it ends with it."""
        if self._ends_with_terminal and not processes.has_terminal():
            self.stop()
        elif self._loop is not None:
            # Between two steps of the loop: the signal may have come in the middle of a line of the log.
            self._loop.call_soon_threadsafe(self.reload)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        # An operator who asks twice does not want to wait for replies.
        self.stop(now=self.should_exit)


def _protocol(limits: Limits, rejecting: ASGIApp) -> type[H11Protocol]:
    """HTTP for clients that have to send their headers within a time: a connection that stays silent is
    closed. One that comes when all connections are taken is answered by `rejecting`; those that were there
    before go on."""

    class Protocol(H11Protocol):
        _idle_timer: asyncio.TimerHandle | None = None
        """Closes the connection, unless a request's headers come first."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._idle_timer = self.loop.call_later(limits.head_seconds, self._close_idle)
            if len(self.connections) > limits.connections:
                self.app = rejecting

        def handle_events(self) -> None:
            before = self.cycle
            super().handle_events()
            if self.cycle is not before and self.cycle is not None:
                # Before the application has it: its task begins later.
                direct_write.attach(self.cycle, self.loop)
                self._stop_timer()

        def handle_websocket_upgrade(self, event: Request) -> None:
            # The headers are there, and from now on the connection is another protocol's.
            self._stop_timer()
            super().handle_websocket_upgrade(event)

        def on_response_complete(self) -> None:
            before = self.cycle
            direct_write.flush(self.cycle)
            super().on_response_complete()
            # A next request that was sent ahead is being served already.
            if self.cycle is before and self._idle_timer is None:
                self._idle_timer = self.loop.call_later(_IDLE + limits.head_seconds, self._close_idle)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _stop_timer(self) -> None:
            if self._idle_timer is not None:
                self._idle_timer.cancel()
                self._idle_timer = None

        def _close_idle(self) -> None:
            self._idle_timer = None
            if not self.transport.is_closing():
                self.transport.close()

    return Protocol


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local(listening: socket.socket) -> bool:
    """Whether it is a Unix socket."""
    return listening.family not in (socket.AF_INET, socket.AF_INET6)


def address(listening: socket.socket, *, tls: bool = False) -> str:
    """Where a socket can be reached."""
    if is_local(listening):
        return f"unix:{listening.getsockname()}"
    scheme = "https" if tls else "http"
    host, port = listening.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


# Loop watch: the debug mode of the server. Nothing waits on the event loop, which serves everybody.
#
# A store that is touched in the loop's thread raises `WaitInEventLoopError` there and then. A loop that is
# held for 100 ms is logged with the line that holds it. That is measured in CPU time of its thread, so that a
# busy machine is not taken for a defect; what only waits is found by the first rule. Python's garbage
# collection runs in whatever thread allocates: its time is not counted.
#
# It is on under `python -X dev`, and in the tests, where both are failures.

HELD = 0.1
"""Seconds of CPU time for which nobody may hold the loop."""
_PAUSE, _LOOK = 0.05, 0.01


class LoopWatch:
    """Watches one event loop from another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """To be called in the thread of the loop."""
        self._loop = loop
        self._thread = threading.get_ident()
        self._stopped = threading.Event()
        self.held: list[str] = []
        """The stack of each callback that held the loop for too long, once it had."""
        self.refused: list[str] = []
        """Calls that were refused because they may wait."""
        self._collected = 0.0
        """Seconds of CPU time that garbage collection took in the loop's thread."""
        self._collection_began: float | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """To be entered in the thread of the loop."""
        watcher = None
        if hasattr(time, "pthread_getcpuclockid"):
            clock = time.pthread_getcpuclockid(self._thread)
            watcher = BackgroundThread(
                self._watch, lambda: time.clock_gettime(clock), name="perdure-loop-watch", restart=True
            )
            watcher.start()
        gc.callbacks.append(self._collecting)
        try:
            with never_waiting() as self.refused:
                yield
        finally:
            gc.callbacks.remove(self._collecting)
            self._stopped.set()
            if watcher is not None:
                watcher.join()

    def _watch(self, used: Callable[[], float]) -> None:
        while not self._stopped.wait(_PAUSE):
            turned = threading.Event()
            began, reported = used() - self._collected, False
            try:
                self._loop.call_soon_threadsafe(turned.set)
            except RuntimeError:
                return
            while not turned.wait(_LOOK) and not self._stopped.is_set():
                busy = self._collection_began is None and used() - self._collected - began > HELD
                if busy and not reported:
                    reported = True
                    self._report()

    def _collecting(self, phase: str, info: object) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collection_began = time.thread_time()
        elif self._collection_began is not None:
            self._collected += time.thread_time() - self._collection_began
            self._collection_began = None

    def _report(self) -> None:
        frame = sys._current_frames().get(self._thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        self.held.append(stack)
        log.warning("the event loop was held for more than %g s of CPU time:\n%s", HELD, stack)
