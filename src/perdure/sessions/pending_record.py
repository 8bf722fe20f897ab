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
from dataclasses import dataclass, field, fields, replace
from typing import Any

from perdure.chat.message import Message
from perdure.errors import PerdureError, SessionError, SessionNotFoundError
from perdure.events.background import BackgroundThread
from perdure.request_options import Sampling
from perdure.sessions.info import Record, SessionInfo
from perdure.sessions.pending_turn import PendingTurn, TurnExtra
from perdure.sessions.store.base import SessionStore
from perdure.sessions.turn import Turn, plain_settings

log = logging.getLogger("perdure.sessions")

_SECONDS = 1.0
"""Between two looks at what was written."""
_OF_THIS_CALL = frozenset(
    {"observe", "timeout", "deadline", "cache_marks", "pins", "checkpoint_at", "visible_tokens"}
)
"""Settings that change no token of the reply."""
_CODE = frozenset({"processors", "grammar"})
"""Settings that are no values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingInfo:
    """A turn that was asked of a session and is no part of it: its reply is being written, or was
    interrupted."""

    messages: tuple[Message, ...]
    """What was said."""
    reply: Message
    """What was answered so far. A call of a tool is text in it."""
    tokens: tuple[int, ...]
    """The tokens of that."""
    after: int
    """The number of the turn that it goes on from."""
    started: float
    ended: str
    """Why it ended, where that is known; empty while it is being made, and after a kill."""
    running: bool
    """Whether this process is answering it."""
    record: Record = field(repr=False)

    @classmethod
    def of(cls, record: Record, *, running: bool) -> PendingInfo:
        body = record.origin
        return cls(
            messages=tuple(map(Message.parse, body["messages"])),
            reply=Message.parse(body["reply"]),
            tokens=tuple(array("i", base64.b64decode(body["tokens"]))),
            after=body["depth"],
            started=body["started"],
            ended=body["ended"],
            running=running,
            record=record,
        )

    @property
    def text(self) -> str:
        """What was answered so far, without reasoning."""
        return self.reply.content or ""

    def resume(self, pending: PendingTurn, settings: Mapping[str, Any], *, again: bool, model: str) -> None:
        """Have a turn ask the same: go on behind the tokens that are there, or `again` from the start."""
        body = self.record.origin
        if missing := [name for name in body["missing"] if settings.get(name) is None]:
            raise SessionError(
                f"this turn was asked with {', '.join(missing)}, which no store can keep: give the same again"
            )
        if self.tokens and not again and body["model"] != model:
            raise SessionError(
                "another model has begun this reply, so it cannot be continued by this one: have it answered "
                "again from the start (again=True), or discard it"
            )
        keep = {name: value for name, value in body["settings"].items() if not (again and name == "seed")}
        if biases := keep.get("logit_bias"):
            keep["logit_bias"] = {int(token): float(bias) for token, bias in biases.items()}
        if breakers := keep.get("dry_breakers"):
            keep["dry_breakers"] = tuple(breakers)
        pending.settings = {**keep, **settings}
        pending.said = self.messages
        pending.known = () if again else self.tokens
        pending.keep_partial = body["keep_partial"]
        pending.fold = Turn.from_json(body["fold"], pending.base.place.digest) if body["fold"] else None
        pending.extra = TurnExtra(
            preamble=tuple(map(Message.parse, body["preamble"])),
            notes=body["notes"],
            call_ids=body["call_ids"],
        )

    def as_turns(self, before: bytes, keep: tuple[int, int]) -> list[Turn]:
        """What there is of it as a turn that was cancelled, behind the turn with that digest."""
        body = self.record.origin
        fold = Turn.from_json(body["fold"], before) if body["fold"] else None
        turn = Turn(
            kind="turn",
            messages=self.messages,
            reply=self.reply if self.tokens else None,
            keep=keep if fold is None else (0, 0),
            settings=body["settings"],
            finish_reason="cancelled" if self.tokens else "",
            created=time.time(),
            before=before if fold is None else fold.digest,
        )
        return [turn] if fold is None else [fold, turn]


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
