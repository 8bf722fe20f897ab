"""A pending turn as a session shows it, and how it is resumed."""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perdure.chat.message import Message
from perdure.errors import SessionError
from perdure.sessions.info import Record
from perdure.sessions.pending_turn import PendingTurn, TurnExtra
from perdure.sessions.turn import Turn


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
