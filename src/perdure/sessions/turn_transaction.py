"""A turn as a transaction: asked for, answered, and then part of its session or not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol

from perdure.backend import Backend
from perdure.chat.chat_format import ChatFormat, reply_room
from perdure.chat.message import Message
from perdure.chat.options import ChatOptions
from perdure.chat.plans import SummaryCut
from perdure.chat.prompt_builder import Prompt
from perdure.chat.reply import ChatDelta, ChatReply
from perdure.chat.transcript import Transcript
from perdure.decode.stream import Stream, StreamPlan
from perdure.errors import (
    ContextOverflow,
    InvalidInputError,
    PerdureError,
    SessionError,
    StateError,
    StoreError,
)
from perdure.sessions.fold import FoldPlan, TurnStream, cut_short, foldable, summarised
from perdure.sessions.history import History
from perdure.sessions.store.base import RESPONSE
from perdure.sessions.stored_session import PendingTurn, StoredSession, StoreHost
from perdure.sessions.turn import Turn, added, plain_settings


class TurnHost(StoreHost, Protocol):
    """What a turn needs of those that its session is one of."""

    @property
    def backend(self) -> Backend:
        """Raises where no model was loaded."""
        ...

    @property
    def chat_format(self) -> ChatFormat: ...
    def write_behind(self, tokens: Sequence[int], namespace: str, saved: int) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnExtra:
    """What a turn may have besides its messages and settings."""

    preamble: Sequence[Message] = ()
    """Said before all of the history, for this turn alone."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Written down with the turn's settings, as they are when it is kept."""
    follower: StoredSession | None = None
    """A session that stands where this one does, and is to go on with the same turn."""
    date: str | None = None
    """What the template is told where the history has no date; None for the clock's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTransaction:
    """A turn that is asked for: what is said, and behind which history.

    It is part of the session once its reply is whole and on the disk, and else the session is as it was
    before; `kept` in the reply says which. A fold that makes room for it is stored with it or not at all.
    """

    host: TurnHost
    session: StoredSession
    base: History
    said: list[Message]
    keep_partial: bool
    deadline: float | None
    pending: PendingTurn
    extra: TurnExtra

    def submit(self, settings: dict[str, Any]) -> TurnStream:
        """Have the reply made. What takes time is done here: render and tokenise."""
        return Stream(self._turn(settings), self.host.backend.submit, waits=True)

    def _turn(self, settings: dict[str, Any]) -> StreamPlan[ChatDelta, ChatReply]:
        """A turn as it happens: a summary first where the context is full, the reply, and its commit."""
        if settings.get("date") is None and self.host.chat_format.asks_date:
            settings["date"] = _date(self.base) or self.extra.date or today()
        try:
            fold = (yield from self._folded(settings)) if self._is_full(settings) else None
            messages = self.base.messages if fold is None else fold.messages
            [exchange] = yield from self.host.chat_format.plan(
                (*self.extra.preamble, *messages, *self.said),
                namespace=self.session.namespace,
                known=self.base.transcript_under(self.host.backend.model.digest) if fold is None else None,
                before=self.base.rendering if fold is None else None,
                deadline=self.deadline,
                **settings,
            )
            self.session.last = self._commit(settings, fold, *exchange)
            return [self.session.last]
        except SummaryCut as cut:
            return [cut_short(cut.reply)]
        finally:
            self.pending.release()

    def _commit(
        self,
        settings: dict[str, Any],
        fold: Turn | None,
        prompt: Prompt,
        whole: Transcript,
        reply: ChatReply,
    ) -> ChatReply:
        """Make a turn part of the session, with the fold before it, if it may be."""
        base, session = self.base, self.session
        with session._lock:
            if session._pending is not self.pending:
                return replace(reply, not_kept="another turn began before this one was read to its end")
            session._pending = None
            if reply.finish_reason in ("cancelled", "error") and not (self.keep_partial and reply.raw.tokens):
                return replace(reply, not_kept=f"the turn ended by {reply.finish_reason}")
            keep, more = added(base.transcript if fold is None else Transcript(), whole)
            before = fold.digest if fold is not None else base.place.digest
            turn = self._answered(settings, reply, keep, more, before)
            turns = [turn] if fold is None else [fold, turn]
            follower = self.extra.follower
            try:
                numbers = self.host.store.add(
                    session._info,
                    turns,
                    parent=base.head,
                    expected=self.pending.head,
                    follower=follower.info if follower is not None else None,
                )
            except (StoreError, StateError, SessionError, InvalidInputError) as error:
                # What was said was said: the caller has the reply, and learns that it will not last.
                if session.kind == RESPONSE:
                    with suppress(PerdureError):
                        session.note({"not_kept": str(error)})
                return replace(reply, not_kept=str(error))
            session._history = base.then(numbers, turns, whole, prompt.rendering)
            if follower is not None:
                follower._follow(session._history, self.pending)
            # Going back or branching has others begin where this one was.
            saved = min(_found_kept(reply) if session._saved is None else session._saved, keep[1])
        session._saved = self.host.write_behind(whole.tokens, session.namespace, saved)
        return replace(reply, kept=True)

    def _answered(
        self,
        settings: dict[str, Any],
        reply: ChatReply,
        keep: tuple[int, int],
        more: Transcript,
        before: bytes,
    ) -> Turn:
        """The turn that comes of the reply."""
        return Turn(
            kind="turn",
            # A beginning that the caller wrote is part of the reply.
            messages=tuple(self.said if reply.prefill is None else self.said[:-1]),
            reply=reply.whole,
            keep=keep,
            added=more,
            settings=plain_settings({**settings, **self.extra.notes}),
            seed=reply.seed,
            finish_reason=reply.finish_reason,
            usage=_usage(reply),
            dropped=reply.dropped,
            model=self.host.backend.model.digest,
            created=time.time(),
            before=before,
        )

    # Folding.

    def _is_full(self, settings: dict[str, Any]) -> bool:
        """Whether a turn is to be preceded by a fold."""
        if settings.get("overflow") != "fold" or not len(self.base):
            return False
        needed, _ = self._needed(settings, self.base.messages)
        return needed > self.host.backend.n_ctx - 1

    def _needed(self, settings: dict[str, Any], messages: Sequence[Message]) -> tuple[int, bool]:
        """Tokens of a prompt that starts with `messages`, and of the reply to it; and whether these are only
        a lower bound, since it surely does not fit."""
        room = reply_room(settings, self.host.backend.n_ctx)
        options, _ = ChatOptions.split(settings)
        try:
            prompt = self.host.chat_format.prompt(
                [*messages, *self.said], options, namespace=self.session.namespace, must_fit=True
            )
        except ContextOverflow as error:
            return error.needed + room, True
        return len(prompt) + room, False

    def _folded(self, settings: dict[str, Any]) -> FoldPlan:
        """The fold that makes room for a turn. Nothing is stored before the turn's reply."""
        limit = self.host.backend.n_ctx - 1
        # Before anything is written: what no summary makes room for.
        needed, at_least = self._needed(settings, self.session._start.messages)
        for keep in (2, 1, 0) if needed <= limit else ():
            turns = foldable(self.session._start, self.base, keep)
            turn = yield from summarised(
                self.host.chat_format, turns, keep, self.session.namespace, {}, self.deadline
            )
            needed, at_least = self._needed(settings, turn.messages)
            if needed <= limit:
                return turn
        raise ContextOverflow(
            f"even after folding, this message needs {'at least ' if at_least else ''}{needed} tokens with "
            f"its reply, and {limit} fit: send less, or ask for a shorter reply",
            needed=needed,
            fits=limit,
            at_least=at_least,
        )


def today() -> str:
    """The date that a template is told of a conversation that begins now."""
    return datetime.now().isoformat(timespec="seconds")


def _date(history: History) -> str | None:
    """The day that the last turn was told, and so the day that the conversation began on: it stays, or each
    new day would change the prompt's beginning."""
    for _, turn in history.back():
        if isinstance(found := turn.settings.get("date"), str):
            return found
    return None


def _usage(reply: ChatReply) -> dict[str, int | str]:
    """What a turn says later of how its reply came about: tokens, by tier too, milliseconds, and why not more
    was reused."""
    timings = reply.timings
    return {
        "prompt_tokens": reply.usage.prompt_tokens,
        "completion_tokens": reply.usage.completion_tokens,
        "cached_tokens": reply.usage.cached_tokens,
        "reasoning_tokens": reply.usage.reasoning_tokens,
        **{f"{tier}_tokens": count for tier, count in reply.reuse.tiers.items()},
        "first_token_ms": round(1000 * (timings.queued + timings.prefill)),
        "decode_ms": round(1000 * timings.decode),
        "why": reply.reuse.why,
    }


def _found_kept(reply: ChatReply) -> int:
    """The tokens of a prompt whose state was found where it outlives the process, or is on its way there.
    What only a slot held may not have been written yet."""
    return reply.reuse.reused - reply.reuse.tiers.get("slot", 0)
