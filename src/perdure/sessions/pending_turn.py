"""A turn in the making: the history before it, its options, the lease of its session, and what is written
down of it before it is answered, and until it is part of its session."""

from __future__ import annotations

import base64
import hashlib
import logging
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from perdure.chat.message import Message
from perdure.chat.reply import ChatReply
from perdure.chat.transcript import Transcript
from perdure.decode.output_queue import OutputQueue
from perdure.decode.request import Request
from perdure.errors import PerdureError, SessionNotFoundError, TurnKeptError
from perdure.events.background import BackgroundThread
from perdure.request_options import Sampling, draw_seed
from perdure.sessions.history import History
from perdure.sessions.info import Record, SessionInfo
from perdure.sessions.turn import Turn, plain_settings, portable_settings

if TYPE_CHECKING:
    from perdure.sessions.fold import TurnStream
    from perdure.sessions.store.base import SessionStore

_KEY = "idempotency_key"
"""Among the settings of a turn: the digest of the key of its request."""
_REMEMBERED = 16
"""Turns from the last on whose keys are looked at: a request is sent again soon, or not at all."""


class TurnFollower(Protocol):
    """A session that continues with a turn of another: `Session` is the only one."""

    @property
    def info(self) -> SessionInfo: ...
    def _wait_for(self, pending: PendingTurn) -> None: ...
    def _follow(self, history: History, pending: PendingTurn) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnExtra:
    """What a turn may have besides its messages and settings."""

    preamble: Sequence[Message] = ()
    """Said before all of the history, for this turn alone."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Written down with the turn's settings, as they are when it is kept."""
    follower: TurnFollower | None = None
    """A session that stands where this one does, and is to go on with the same turn."""
    date: str | None = None
    """The date that the template reads where the history has none; None for the clock's."""
    idempotency_key: str | None = None
    """What the request is known by that asks for the turn: a second one with the same key makes none."""
    head: int | None = None
    """The turn that it goes on from: refused where the session stands at another; None: wherever it is."""
    prompt_notes: Sequence[str] = ()
    """What the answer says of how its messages were made, besides what the template does with them."""
    call_ids: str = ""
    """What the ids of its calls are made of, so that a turn that is made again has the same; empty: they are
    drawn."""


@dataclass(slots=True, eq=False, kw_only=True)
class PendingTurn:
    """A turn in the making, or a fold: nobody else changes the session meanwhile."""

    base: History
    """What it goes on from."""
    head: int
    """The turn at which the session stood when it began."""
    unlock: Callable[[], None]
    """Lets other processes have the session again."""
    said: Sequence[Message] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    deadline: float | None = None
    keep_partial: bool = False
    extra: TurnExtra = field(default_factory=TurnExtra)
    stream: weakref.ref[TurnStream] | None = None
    """None while it is being prepared. Weak: a stream that nobody holds any more is cancelled."""
    ended: bool = False
    known: Sequence[int] = ()
    """Tokens of its reply that were written before it was interrupted."""
    fold: Turn | None = None
    """The fold that makes room for it."""
    seed: int = field(default_factory=draw_seed)
    """What its reply is drawn with, where its settings name no seed."""
    record: Record | None = None
    """Where it is written down, once it was submitted."""
    may_replace: bool = True
    """Whether its session may have a pending turn already: as the store said when the session was taken."""
    replaced: Mapping[str, Any] | None = None
    """The pending turn in whose place it is, as it is written down."""
    output: OutputQueue | None = None
    """Of its latest request."""
    answering: bool = False
    """Whether its next request is for the reply: a summary may come first."""
    failed: str = ""
    """The error that ended it."""
    _before: Sequence[int] = ()
    """Tokens of the reply before its latest request."""
    _prompt: int = 0
    """Tokens before the reply."""

    def submitted(self, request: Request, output: OutputQueue) -> None:
        """Its next request is being served."""
        if self.answering:
            prefix = request.reply_prefix
            self._prompt = self._prompt or len(request.prompt) - len(prefix)
            self._before = tuple(prefix or request.prompt[self._prompt :])
        self.output = output

    @property
    def part(self) -> Sequence[int]:
        """The tokens of its reply so far, but for those that end it: who goes on from here draws these
        again, and comes to the same end."""
        output = self.output
        if not self.answering or output is None:
            return self.known
        return (*self._before, *output.tokens[: len(output.tokens) - output.last_tokens])

    @property
    def why_left(self) -> str:
        """By what it was interrupted; empty where its caller, or a deadline, has ended it."""
        return self.failed or (self.output.interrupted if self.output is not None else "")

    @property
    def is_interrupted(self) -> bool:
        """Whether it ended by something that its caller did not ask for: it can be resumed."""
        output = self.output
        return bool(self.why_left) or (output is not None and not output.cancelled)

    @property
    def is_left(self) -> bool:
        """Whether it was interrupted, or may have been, as a cancelled turn that is to be kept so far."""
        return bool(self.why_left)

    def writes(self, record: Record) -> bool:
        """Whether that is where it is written down."""
        return self.record is not None and self.record.number == record.number

    @property
    def is_cancelled(self) -> bool:
        """Whether its caller has cancelled it, or holds its stream no more."""
        output = self.output
        if output is None or self.why_left or self.stream is None:
            return False
        stream = self.stream()
        return stream is None or stream.cancelled

    @property
    def drawn(self) -> dict[str, Any]:
        """Its settings, with the seed that its reply is drawn with."""
        sampling = self.settings.get("sampling")
        if isinstance(sampling, Sampling):
            seed = self.seed if sampling.seed is None else sampling.seed
            return {**self.settings, "sampling": replace(sampling, seed=seed)}
        given = self.settings.get("seed")
        return {**self.settings, "seed": self.seed if given is None else given}

    def release(self) -> None:
        """Let other processes have the session again. Only the first time does something."""
        if not self.ended:
            self.ended = True
            self.unlock()

    @property
    def is_running(self) -> bool:
        """Whether its reply is still being made, or prepared."""
        if self.ended or self.stream is None:
            return not self.ended
        stream = self.stream()
        return stream is not None and not (stream.done or stream.cancelled)

    def refuse_kept(self, session: str) -> None:
        """Refuse a request that is one of the last turns already. Nobody can add that turn between here and
        the commit: the session is taken, and a lease that was lost meanwhile cannot commit."""
        key = self.extra.idempotency_key
        if key is None:
            return
        base, digest = self.base, hashlib.sha256(key.encode()).hexdigest()[:32]
        for number in range(len(base), max(0, len(base) - _REMEMBERED), -1):
            if base.first(number).last.settings.get(_KEY) == digest:
                raise TurnKeptError(
                    f"this request was answered before: it is turn {number} of session {session!r}, which "
                    f"has its reply (GET /v1/sessions/NAME/turns?after={number - 1})",
                    turn=number,
                )
        self.extra = replace(self.extra, notes={**self.extra.notes, _KEY: digest})

    def answered(
        self,
        reply: ChatReply,
        keep: tuple[int, int],
        more: Transcript,
        before: bytes,
        *,
        digest: str,
        model: str,
    ) -> Turn:
        """The turn that comes of the reply, by a model of this digest and name."""
        return Turn(
            kind="turn",
            # A beginning that the caller wrote is part of the reply.
            messages=tuple(self.said if reply.prefill is None else self.said[:-1]),
            reply=reply.whole,
            keep=keep,
            added=more,
            settings=portable_settings(plain_settings({**self.settings, **self.extra.notes})),
            seed=reply.seed,
            finish_reason=reply.finish_reason,
            usage=_usage(reply, model),
            dropped=reply.dropped,
            model=digest,
            created=time.time(),
            before=before,
        )


def _usage(reply: ChatReply, model: str) -> dict[str, int | str]:
    """What a turn says later of how its reply came about: tokens and times, by tier too, why not more was
    reused, and by which model."""
    timings = reply.timings
    return {
        "prompt_tokens": reply.usage.prompt_tokens,
        "completion_tokens": reply.usage.completion_tokens,
        "cached_tokens": reply.usage.cached_tokens,
        "reasoning_tokens": reply.usage.reasoning_tokens,
        **{f"{tier}_tokens": count for tier, count in reply.reuse.tiers.items()},
        **{f"{tier}_us": round(1e6 * took) for tier, took in reply.reuse.seconds.items()},
        "computed_us": round(1e6 * timings.prefill),
        "first_token_ms": round(1000 * (timings.queued + timings.prefill)),
        "decode_ms": round(1000 * timings.decode),
        "why": reply.reuse.why,
        **({"model": model} if model else {}),
    }


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
