"""Puller: fetches a model in the background, one at a time, and reports its progress."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from perdure import InvalidInputError, PerdureError
from perdure.spi.models import HubSource, Progress, models, resolve
from perdure.spi.runtime import BackgroundThread

log = logging.getLogger("perdure.models")

PullState = Literal["running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """How far fetching a model is, or how it ended."""

    model: str
    state: PullState = "running"
    completed: int = 0
    """Bytes that are here."""
    total: int | None = None
    """Bytes in all; None before that is known."""
    error: str = ""
    """Why it failed; of one that is done, why it is not served."""
    serves: str = ""
    """The name of the model that can be asked for since it is done."""
    started: float = 0.0
    ended: float | None = None


class _CancelledError(Exception):
    """The pull was cancelled."""


class Puller:
    """Fetches models from the hub for others, one at a time. Safe from any thread.

    Always holds: what it fetches is checked as `perdure pull` checks it, and only a whole file gets its name;
    the next pull resumes one that was cancelled.
    """

    def __init__(self, fetch: Callable[[str, Progress], object] = models.pull) -> None:
        self._fetch = fetch
        self.arrived: Callable[[str, str], str] | None = None
        """Has what was pulled under a name served, from where it is: what it is called then."""
        self._changed = threading.Condition()
        self._latest: Pull | None = None
        self._unwanted = False

    @property
    def latest(self) -> Pull | None:
        """The pull that runs, or the last one that did."""
        with self._changed:
            return self._latest

    def start(self, name: str) -> Pull | None:
        """Begin to fetch a model of the catalogue or the hub, or go on with the same. None where another one
        is being fetched. Nothing else is fetched for anybody: no path and no other address."""
        if not isinstance(resolve(name, own=True), HubSource):
            raise InvalidInputError(
                f"{name!r} is not a model of the hub: give a name that `perdure models` shows, owner/repo or "
                "owner/repo:Q4_K_M"
            )
        with self._changed:
            if self._latest is not None and self._latest.state == "running":
                return self._latest if self._latest.model == name and not self._unwanted else None
            self._latest = started = Pull(model=name, started=time.time())
            self._unwanted = False
            BackgroundThread(self._run, name, name="perdure-pull").start()
            return started

    def cancel(self) -> Pull | None:
        """End the pull that runs with its next piece. Gives the latest pull as it is then."""
        with self._changed:
            self._unwanted = True
            self._changed.notify_all()
            return self._latest

    def wait(self, after: Pull, seconds: float) -> Pull | None:
        """The latest pull, as soon as it is further than `after`, or when the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest != after, seconds)
            return self._latest

    def _run(self, name: str) -> None:
        def progress(done: int, total: int | None) -> None:
            with self._changed:
                if self._unwanted:
                    raise _CancelledError
                self._set(completed=done, total=total)

        serves = error_told = ""
        try:
            place = self._fetch(name, progress)
            if self.arrived is not None:
                try:
                    serves = self.arrived(name, str(place))
                except PerdureError as error:
                    error_told = f"the model is here, and is not served: {error}"
                    log.warning("%s: %s", name, error_told)
        except _CancelledError:
            self._end("cancelled")
        except PerdureError as error:
            self._end("failed", str(error))
        except BaseException as error:
            # Whatever it was: the next pull does not wait for a thread that is gone.
            log.exception("a model could not be fetched")
            self._end("failed", f"{type(error).__name__}: the log of the server says more")
        else:
            self._end("done", error_told, serves)

    def _end(self, state: PullState, error: str = "", serves: str = "") -> None:
        with self._changed:
            self._set(state=state, error=error, serves=serves, ended=time.time())

    def _set(self, **changed: object) -> None:
        """With the lock held."""
        assert self._latest is not None
        self._latest = replace(self._latest, **changed)  # type: ignore[arg-type]
        self._changed.notify_all()
