"""What is written down of a pending turn: what was asked before its first step, and what was answered so far.

    {"messages": [{"role": "user", "content": "Tell me of the sea."}], "settings": {"max_tokens": 400, …},
     "seed": 4711, "depth": 2, "digest": "9f2c…", "tokens": "AAEAAL…", "reply": {"content": "The sea is"}, …}

The record goes in the transaction that makes the turn part of its session. Where that never happens it stays,
and the session shows it (`Session.pending`): it is resumed, or discarded, or settled by the next turn.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from perdure.chat.message import Message
from perdure.errors import PerdureError, SessionNotFoundError
from perdure.events.background import BackgroundThread
from perdure.request_options import Sampling
from perdure.sessions.info import Record, SessionInfo
from perdure.sessions.pending_turn import PendingTurn
from perdure.sessions.store.base import SessionStore
from perdure.sessions.turn import plain_settings

log = logging.getLogger("perdure.sessions")

_SECONDS = 1.0
"""Between two looks at what was written."""
_OF_THIS_CALL = frozenset(
    {"observe", "timeout", "deadline", "cache_marks", "pins", "checkpoint_at", "visible_tokens"}
)
"""Settings that change no token of the reply."""
_CODE = frozenset({"processors", "grammar"})
"""Settings that are no values."""


def _stored_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The settings of a turn as they can be written down, and the names of those that cannot."""
    known = {name: value for name, value in settings.items() if name not in _OF_THIS_CALL}
    if isinstance(sampling := known.pop("sampling", None), Sampling):
        known |= {each.name: getattr(sampling, each.name) for each in fields(sampling)}
    if biases := known.get("logit_bias"):
        # As text: JSON has neither numbers for names nor infinity.
        known["logit_bias"] = {str(token): str(bias) for token, bias in biases.items()}
    plain = plain_settings({name: value for name, value in known.items() if name not in _CODE})
    return plain, sorted(name for name in known.keys() - plain.keys() if known[name] is not None)


class PendingTurns:
    """Pending turns as they are written down. Safe from any thread.

    A turn is written before its first step. While any is answered, one thread writes about once a second what
    has come of each.
    """

    def __init__(self, store: SessionStore, part: Callable[[Sequence[int]], Message]) -> None:
        """`part` shows the tokens of a reply as a message."""
        self._store = store
        self._part = part
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._running: dict[PendingTurn, int] = {}
        """Each with how many tokens of it are written."""
        self._thread: BackgroundThread | None = None
        self._closed = False

    def write(self, session: SessionInfo, pending: PendingTurn, model: str) -> None:
        """Write down what is asked of a session. Where that fails, nothing is asked."""
        extra, base = pending.extra, pending.base
        settings, missing = _stored_settings(pending.drawn)
        body = {
            "messages": [message.to_dict() for message in pending.said],
            "settings": settings,
            "missing": missing,
            "depth": len(base),
            "digest": base.place.digest.hex(),
            "preamble": [message.to_dict() for message in extra.preamble],
            "notes": plain_settings(extra.notes),
            "call_ids": extra.call_ids,
            "keep_partial": pending.keep_partial,
            "model": model,
            "started": time.time(),
        }
        pending.record = self._store.pend(session, {**body, **self._answered(pending)})
        with self._lock:
            self._running[pending] = len(pending.known)
            if self._thread is None and not self._closed:
                self._thread = BackgroundThread(self._follow, name="perdure-pending", restart=True)
                self._thread.start()

    def refused(self, session: SessionInfo, pending: PendingTurn) -> None:
        """It was not accepted: what was written down before it is so again."""
        self._leave_off(pending)
        with suppress(PerdureError):
            self._store.pend(session, pending.replaced)

    def update(self, pending: PendingTurn, *, ended: str = "") -> None:
        """Write down what there is of it. A record that is gone is not missed: another turn took its
        place."""
        if (record := pending.record) is not None:
            with suppress(SessionNotFoundError):
                pending.record = self._store.note(
                    record, {**record.origin, **self._answered(pending, ended)}, bounded=False
                )

    def latest(self, record: Record, pending: PendingTurn) -> Record:
        """What is written down of a turn of this process, with what has come of it since."""
        return replace(record, origin={**record.origin, **self._answered(pending, pending.why_left)})

    def leave(self, pending: PendingTurn, ended: str) -> None:
        """It has ended, and is no part of its session: it stays written down, with what there is of it."""
        self._leave_off(pending)
        try:
            self.update(pending, ended=ended)
        except PerdureError as error:
            log.warning("the last of an interrupted turn could not be written down: %s", error)

    def forget(self, pending: PendingTurn) -> None:
        """Its caller wants it no more, or it is part of its session."""
        self._leave_off(pending)
        if pending.record is not None:
            with suppress(PerdureError):
                self._store.delete(pending.record)

    def done(self, pending: PendingTurn) -> None:
        """It is part of its session, and its record is gone."""
        self._leave_off(pending)

    def close(self) -> None:
        """Write down what there is of all that are not done."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._look(closing=True)

    def _leave_off(self, pending: PendingTurn) -> None:
        with self._lock:
            self._running.pop(pending, None)

    def _follow(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, _SECONDS)
                if self._closed or not self._running:
                    self._thread = None
                    return
            self._look()

    def _look(self, *, closing: bool = False) -> None:
        with self._lock:
            running = list(self._running.items())
        for pending, written in running:
            count = len(pending.part)
            try:
                if pending.is_cancelled and (closing or not pending.keep_partial):
                    self.forget(pending)
                elif pending.is_left and not pending.is_running:
                    # Nobody may ask for its reply any more.
                    self.update(pending, ended=pending.why_left)
                elif count > written:
                    self.update(pending)
            except PerdureError as error:
                log.warning("what was written of a pending turn is not on the disk: %s", error)
            with self._lock:
                if pending in self._running:
                    self._running[pending] = count
                    if not pending.is_running:
                        del self._running[pending]

    def _answered(self, pending: PendingTurn, ended: str = "") -> dict[str, Any]:
        tokens = array("i", pending.part)
        reply = {"role": "assistant", "content": ""}
        if tokens:
            try:
                reply = self._part(tokens).to_dict()
            except PerdureError:
                # The model is closed already. Its tokens are what counts.
                reply = pending.record.origin["reply"] if pending.record is not None else reply
        return {
            "tokens": base64.b64encode(tokens.tobytes()).decode(),
            "reply": reply,
            "fold": pending.fold.to_json() if pending.fold is not None else None,
            "ended": ended,
        }
