"""Keeps one process with an engine running."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from perdure import ClosedError, DeadlyFileError, EngineDiedError, EngineError, ModelFileError
from perdure.ext.workers.deadly_files import LoadedTogether, files_of, is_crash
from perdure.ext.workers.message_reader import MessageReader
from perdure.ext.workers.pending_requests import PendingRequests
from perdure.ext.workers.process import UNRESPONSIVE, ExitInfo, Process
from perdure.ext.workers.protocol import Close, Failed, Line, Ready, Setup
from perdure.spi.runtime import (
    BackendState,
    BackgroundThread,
    Health,
    Residence,
    Restarted,
    RestartPolicy,
    split_layers,
)

log = logging.getLogger("perdure.worker")

_TICK = 1.0
_NAP = 0.1
_ROOM = 0.01
"""Seconds between two questions whether there is room for the process."""


class Supervisor:
    """One thread that starts the process, has its messages read, checks its health, waits for its exit, and
    starts the next one.

    Always holds: there is at most one process; requests pending when the process died are retried or failed
    before the next start; nothing waits longer than the starts that may fail in a row.
    """

    def __init__(
        self,
        make_setup: Callable[[], Setup],
        restart_policy: RestartPolicy,
        pending: PendingRequests,
        reader: MessageReader,
        residence: Residence | None = None,
        build: Callable[[], str] = str,
    ) -> None:
        """Nothing is started before `request_start`. `make_setup` is called once, in the thread. `build` says
        which build of the engine it is, once that matters."""
        self._make_setup = make_setup
        self._build = build
        self._setup: Setup | None = None
        self._loaded: LoadedTogether | None = None
        self._suspected = False
        """Whether the last process crashed before anything was computed, so that the next one is to show
        whether the model's files are the cause."""
        self._pulse = min(_TICK, restart_policy.hang_timeout / 4)
        self._policy = restart_policy
        self._pending = pending
        self._reader = reader
        self._changed = threading.Condition()
        self._state: BackendState = "unloaded"
        self._process: Process | None = None
        self._ready_info: Ready | None = None
        self._error: Exception | None = None
        self._ready_at: float | None = None
        self._restarts = 0
        self._last_death: str | None = None
        self._closing = threading.Event()
        self._wanted = False
        self._resting = False
        """Whether the process was unloaded until the next request."""
        self._is_reload = False
        """Whether the next start is one that was asked for, and not a restart."""
        self._rested_at = 0.0
        self.residence = residence or Residence()
        # The system ends the process with the thread that started it, so that is one that lasts.
        self._thread = BackgroundThread(self._run, name="perdure-worker")

    # For callers.

    def wait_ready(self) -> Ready:
        """Return when the engine was ready once; what kept it from that is raised."""
        self.request_start()
        with self._changed:
            while self._state == "starting":
                self._changed.wait(_NAP)
            if self._ready_info is None:
                raise self._error or ClosedError("this runtime is closed")
            return self._ready_info

    def request_start(self) -> None:
        """Start the engine if it was not started yet, was unloaded, or was given up."""
        if self._state in ("failed", "unloading", "unloaded"):
            with self._changed:
                if self._closing.is_set():
                    return
                self._wanted = True
                if self._ready_info is None and self._state == "unloaded":
                    self._state, self._error = "starting", None
                    if not self._thread.is_alive():
                        self._thread.start()
                self._changed.notify_all()

    def unload(self) -> bool:
        """Unload the process until the next request: it writes its state to the disk, and exits. False, and
        nothing done, where a request waits for it just now."""
        with self._changed:
            if self._state != "ready" or self._process is None:
                return self._state in ("unloading", "unloaded")
            if not self._pending.pause_idle():
                return False
            self._resting, self._wanted = True, False
            self._rested_at = time.monotonic()
            self._state = "unloading"
            self._process.connection.send(Close())
            return True

    def health(self) -> Health:
        with self._changed:
            process, ready_at = self._process, self._ready_at
            return Health(
                state=self._shown_state(),
                restarts=self._restarts,
                last_death=self._last_death,
                pid=process.pid if process else None,
                rss=process.rss() if process else None,
                uptime=None if ready_at is None else time.monotonic() - ready_at,
                failed_threads=self._pending.failures,
            )

    def _shown_state(self) -> BackendState:
        if self._state != "ready" or self._pending.engine_works:
            return self._state
        return "unresponsive" if self._pending.silence >= UNRESPONSIVE else "ready"

    def close(self) -> None:
        """Let the process end what is running as cancelled and exit; after a while, make it."""
        self._pending.shut()
        self._reader.attach_loop(None)
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
            process = self._process
            if process is not None and self._state == "ready":
                process.connection.send(Close())
            if not self._thread.is_alive():
                self._state = "closed"
                return
        self._thread.join(self._policy.grace)
        if self._thread.is_alive() and process is not None:
            process.kill(f"it did not close within {self._policy.grace} seconds")
            self._thread.join()

    # The thread.

    def _run(self) -> None:
        try:
            self._keep_alive()
        except BaseException as error:
            # A defect of our own: nobody may be left waiting for a thread that is gone.
            self._error = EngineError(f"the thread that supervises the engine ended: {error!r}")
            raise
        finally:
            self._pending.shut()
            self._pending.end_all(self._error)
            self._set("closed")

    def _keep_alive(self) -> None:
        delay, failures = self._policy.backoff, 0
        while not self._closing.is_set():
            try:
                lived = self._run_once()
                failures = 0
                if self._resting:
                    self._rest()
                    continue
            except Exception as error:
                lived = 0.0
                failures += 1
                if self._closing.is_set():
                    return
                if self._ready_info is None:
                    failures = 0
                    self._report_first(error)
                    continue
                self._last_death = str(error)
                log.warning("%s", error)
                if failures >= self._policy.attempts or isinstance(error, DeadlyFileError):
                    self._give_up(error, failures)
                    delay, failures = self._policy.backoff, 0
                    continue
            if self._closing.is_set():
                return
            delay = self._policy.backoff if lived >= self._policy.healthy else delay
            self._pause(delay)
            delay = min(2 * delay, self._policy.backoff_limit)

    def _run_once(self) -> float:
        """One process from its start to its end: how many seconds it was ready."""
        if self._setup is None:
            try:
                self._setup = replace(self._make_setup(), pulse=self._pulse)
            except Exception:
                raise
            except BaseException as error:
                raise EngineError(f"loading failed: {error!r}") from error
            self._loaded = _loaded(self._setup, self._build)
        assert self._loaded is not None
        # No other model makes room for one that will not be loaded.
        self._loaded.check()
        while not self.residence.enter():
            self._pause(_ROOM)
            if self._closing.is_set():
                raise ClosedError("this runtime is closed")
        process = Process(replace(self._setup, tries_step=self._suspected))
        with self._changed:
            self._process = process
        try:
            self._await_ready(process)
        except EOFError:
            info = self._wait_exit(process)
            if self._judge(info):
                return 0.0
            raise EngineDiedError(
                f"the engine could not be started: {info}", signal=info.signal, code=info.code
            ) from None
        except BaseException:
            process.kill("it was not wanted any more")
            self._wait_exit(process)
            raise
        # One that was tried computes: what another dies of is what it is asked.
        self._pending.computed = self._pending.computed or self._suspected
        self._suspected = False
        began = time.monotonic()
        try:
            self._serve(process)
        except Exception as error:
            log.exception("the engine's process is not understood")
            process.kill(f"its messages could not be read: {error!r}")
        info = self._wait_exit(process)
        if self._resting:
            self._pending.disconnect(info)
        elif not self._closing.is_set():
            self._judge(info)
            self._last_death = str(info)
            # One line: the last output of the process follows at a lower level.
            log.error("%s; it is started again", info.reason)
            if info.said:
                log.info("%s", info.said)
            self._pending.disconnect(info)
        return time.monotonic() - began

    def _judge(self, info: ExitInfo) -> bool:
        """Whether a process that crashed is to be followed by one that shows whether the model's files were
        the cause; where it was that one, they are remembered."""
        assert self._loaded is not None
        counts = not self._pending.computed and not info.killed and is_crash(info.signal, info.said)
        if not counts or not self._loaded.files:
            self._suspected = False
        elif self._suspected:
            self._suspected = False
            self._loaded.remember(str(info.signal))
        else:
            self._suspected = True
        return self._suspected

    def _wait_exit(self, process: Process) -> ExitInfo:
        with self._changed:
            self._process = self._ready_at = None
            self._state = "starting" if self._ready_info is None else "restarting"
            if self._resting:
                self._state = "unloading"
            self._changed.notify_all()
        return process.wait_exit()

    def _await_ready(self, process: Process) -> None:
        end = time.monotonic() + self._policy.start_timeout
        while True:
            try:
                message = process.connection.receive(_NAP)
            except TimeoutError:
                self._pending.end_overdue()
                if self._closing.is_set():
                    raise ClosedError("this runtime is closed") from None
                if time.monotonic() >= end:
                    process.kill(f"it was not ready within {self._policy.start_timeout} seconds")
                continue
            match message:
                case Ready():
                    return self._handshake(message)
                case Failed():
                    raise message.error
                case Line():
                    _log_line(message)

    def _handshake(self, ready: Ready) -> None:
        assert self._setup is not None
        if self._ready_info is None:
            self._ready_info = ready
            # The size that fitted once is the size that all clients know.
            config = self._setup.config
            config = replace(
                config,
                n_ctx=ready.n_ctx if config.n_ctx == "auto" else config.n_ctx,
                slots=ready.slots if config.slots == "auto" else config.slots,
            )
            self._setup = replace(self._setup, config=config)
        elif ready != self._ready_info:
            raise ModelFileError(
                f"the model file {self._setup.model} was changed while the engine was gone: "
                "what was promised of it no longer holds; open the runtime again"
            )
        elif self._is_reload:
            self._is_reload = False
        else:
            self._restarts += 1
            self._pending.events.emit(Restarted, "", self._last_death or "", self._restarts)

    def _serve(self, process: Process) -> None:
        """Hand on what the process says until it is gone."""
        assert self._ready_info is not None
        self._pending.connect(process.connection, self._ready_info.slots, _log_line)
        with self._changed:
            self._state = "ready"
            self._ready_at = time.monotonic()
            self._changed.notify_all()
            if self._closing.is_set():
                process.connection.send(Close())
        self.residence.ready()
        self._reader.read_all(
            process.connection,
            self._pending.handle,
            lambda: self._check_health(process),
            seconds=self._pulse,
        )

    def _check_health(self, process: Process) -> None:
        policy = self._policy
        if self._resting:
            # It writes its state down, and says nothing meanwhile.
            if time.monotonic() - self._rested_at >= policy.grace:
                process.kill(f"it did not close within {policy.grace} seconds")
            return
        working = self._pending.engine_works
        limit = policy.silence_limit(working=working)
        # What it said may wait to be read, where this process was stopped.
        if self._pending.silence >= limit and not process.connection.readable():
            what = "no step ended within" if working else "it was idle and gave no sign of life for"
            process.kill(f"{what} {limit} seconds")
        rss = process.rss() if policy.memory_limit is not None else None
        if rss is not None and policy.memory_limit is not None and rss > policy.memory_limit:
            process.kill(f"it held {rss} bytes of memory, {policy.memory_limit} are allowed")
        process.trim_log()
        self._pending.end_overdue()

    def _report_first(self, error: Exception) -> None:
        """Report the error to the callers that wait for the first start, and rest until the next request."""
        with self._changed:
            self._state, self._error, self._wanted = "unloaded", error, False
            self._changed.notify_all()
        self.residence.failed(error)
        with self._changed:
            while not self._wanted and not self._closing.is_set():
                self._changed.wait()

    def _rest(self) -> None:
        """Wait until a request needs the engine."""
        self.residence.left()
        with self._changed:
            self._state = "unloaded"
            self._changed.notify_all()
            while not self._wanted and not self._pending.waiting and not self._closing.is_set():
                self._changed.wait()
            self._resting, self._is_reload = False, True
            if not self._closing.is_set():
                self._state = "restarting"

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._closing.is_set() and (left := end - time.monotonic()) > 0:
            with self._changed:
                self._changed.wait(min(left, _NAP))
            self._pending.end_overdue()

    def _give_up(self, error: Exception, failures: int) -> None:
        """End all waiting requests, and rest until the next one."""
        self._wanted = False
        self._set("failed")
        self.residence.failed(error)
        signal, code = getattr(error, "signal", None), getattr(error, "code", None)
        if not isinstance(error, DeadlyFileError):
            message = (
                f"the engine could not be started {failures} times in a row; the next request tries again"
            )
            error = EngineDiedError(f"{message}: {error}", signal=signal, code=code)
        self._pending.end_all(error)
        with self._changed:
            while not self._wanted and not self._closing.is_set():
                self._changed.wait()
            if not self._closing.is_set():
                self._state = "restarting"

    def _set(self, state: BackendState) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()


def _loaded(setup: Setup, build: Callable[[], str]) -> LoadedTogether:
    """The files that a process loads with its model, and how."""
    config = setup.config
    adapters = [*(config.adapters or {}), *map(str, (config.adapter_names or {}).values())]
    sources = [setup.model, *(split_layers(each)[0] for each in adapters)]
    sources += [str(each) for each in config.extended.values() if isinstance(each, (str, os.PathLike))]
    # How it serves matters no more than where it stands.
    chosen = [sorted(config.loading.items()), sorted(config.context.items()), config.n_ctx, config.slots]
    return LoadedTogether(files_of(sources), build=lambda: f"{setup.engine} {build()}", chosen=repr(chosen))


def _log_line(message: Any) -> None:
    """What the process says that nobody asked for: lines of its log."""
    if isinstance(message, Line):
        logging.getLogger(message.logger).log(message.level, "%s", message.text)
