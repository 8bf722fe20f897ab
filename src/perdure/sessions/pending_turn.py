"""A turn in the making: what it goes on from, what it may have besides messages, and who has the session."""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from perdure.chat.message import Message
from perdure.chat.reply import ChatReply
from perdure.chat.transcript import Transcript
from perdure.errors import TurnKeptError
from perdure.sessions.fold import TurnStream
from perdure.sessions.history import History
from perdure.sessions.info import SessionInfo
from perdure.sessions.turn import Turn, plain_settings, portable_settings

_KEY = "idempotency_key"
"""Among the settings of a turn: the digest of the key of its request."""
_REMEMBERED = 16
"""Turns from the last on whose keys are looked at: a request is sent again soon, or not at all."""


class Follower(Protocol):
    """A session that goes on with a turn of another: `Session` is the only one."""

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
    follower: Follower | None = None
    """A session that stands where this one does, and is to go on with the same turn."""
    date: str | None = None
    """What the template is told where the history has no date; None for the clock's."""
    idempotency_key: str | None = None
    """What the request is known by that asks for the turn: a second one with the same key makes none."""
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
    let_go: Callable[[], None]
    said: Sequence[Message] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    deadline: float | None = None
    keep_partial: bool = False
    extra: TurnExtra = field(default_factory=TurnExtra)
    stream: weakref.ref[TurnStream] | None = None
    """None while it is being prepared. Weak: a stream that nobody holds any more is cancelled."""
    ended: bool = False

    def release(self) -> None:
        """Let other processes have the session again. Only the first time does something."""
        if not self.ended:
            self.ended = True
            self.let_go()

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
