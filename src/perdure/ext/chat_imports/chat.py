"""Chat: a tree of messages as another program exported it, and its branches as turns of sessions.

user: Why? ── assistant: Light.  ── user: And at night?  ── assistant: …        the branch that was open
          └── assistant: Because of scattering.                                 another, which shares nothing
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from perdure import InvalidInputError, Message
from perdure.spi.sessions import FIRST, Turn

MOST_MESSAGES = 50_000
"""Of one chat."""
MOST_BRANCHES = 64
"""Of one chat; the latest are taken."""
MOST_MESSAGES_IN_BRANCHES = 200_000
"""Of one chat, those that branches share counted in each."""
_CITATION = re.compile("\ue200[^\ue201]*\ue201")
"""Marks of sources, which mean nothing outside of the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedMessage:
    """A message of a person or of a model."""

    id: str
    role: Literal["user", "assistant"]
    text: str
    reasoning: str = ""
    created: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A chat. `parents` has every message by its id, those that are not shown among them."""

    id: str
    title: str
    source: str
    """The program that it comes from."""
    created: float
    parents: Mapping[str, str | None]
    messages: Mapping[str, ExportedMessage]
    current: str | None = None
    """The message at which it stood; None: the latest one."""
    system: str = ""

    def branches(self) -> list[list[Turn]]:
        """The turns of each branch, the one that was open first."""
        if len(self.parents) > MOST_MESSAGES:
            raise InvalidInputError(
                f"it has {len(self.parents)} messages, and {MOST_MESSAGES} are read of one chat"
            )
        with_children = set(self.parents.values())
        ends = [each for each in self.parents if each not in with_children]
        if self.current in self.parents:
            # Where it stands within a branch, that branch is the open one.
            ends.sort(key=lambda end: self.current in self._ids(end), reverse=True)
        else:
            ends.reverse()
        paths: dict[tuple[str, ...], None] = {}
        total = 0
        for end in ends:
            path = tuple(each for each in self._ids(end) if each in self.messages)
            total += len(path)
            if total > MOST_MESSAGES_IN_BRANCHES:
                break
            if path and not any(known[: len(path)] == path for known in paths):
                paths[path] = None
            if len(paths) == MOST_BRANCHES:
                break
        # A branch may be the beginning of one that came after it.
        longest = [
            path for path in paths if not any(path != other and other[: len(path)] == path for other in paths)
        ]
        return [self._turns([self.messages[each] for each in path]) for path in longest]

    def _ids(self, end: str) -> list[str]:
        """The messages that lead to one, the first one first."""
        found: dict[str, None] = {}
        at: str | None = end
        while at is not None and at in self.parents and at not in found:
            found[at] = None
            at = self.parents[at]
        return list(found)[::-1]

    def _turns(self, messages: Sequence[ExportedMessage]) -> list[Turn]:
        system = (Message(role="system", content=self.system),) if self.system else ()
        turns = [Turn(kind="start", messages=system, before=FIRST, created=self.created)]
        said: list[Message] = []
        exchange = _Exchange()
        for message in messages:
            if message.role == "user" and exchange.parts:
                turns.append(exchange.turn(said, turns[-1].digest))
                said, exchange = [], _Exchange()
            if message.role == "user":
                said.append(Message(role="user", content=message.text))
                exchange.created = message.created
            else:
                exchange.add(message)
        if said or exchange.parts:
            turns.append(exchange.turn(said, turns[-1].digest))
        return turns


@dataclass(slots=True)
class _Exchange:
    """What a model wrote to one message. Some programs keep what it said between calls apart."""

    parts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    created: float = 0.0

    def add(self, message: ExportedMessage) -> None:
        self.parts.append(message.text)
        self.reasoning.append(message.reasoning)
        self.created = message.created or self.created

    def turn(self, said: Sequence[Message], before: bytes) -> Turn:
        turn = Turn(kind="turn", messages=tuple(said), before=before, created=self.created)
        if not self.parts:
            return turn
        reply = Message(
            role="assistant",
            content="\n\n".join(filter(None, self.parts)),
            reasoning="\n\n".join(filter(None, self.reasoning)) or None,
        )
        return replace(turn, reply=reply, finish_reason="stop")


# What the programs' files are read with.


def plain(value: object) -> str:
    """A text of a file without what no store and no tokenizer takes."""
    text = value if isinstance(value, str) else ""
    return _CITATION.sub("", text).encode("utf-8", "ignore").decode().replace("\0", "").strip()


def number(value: object) -> float:
    """A time in seconds; 0 where there is none."""
    is_time = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e15
    return float(value) if is_time else 0.0  # type: ignore[arg-type]


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def entries(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def attached(name: object, text: object) -> str:
    """A file in a message: its name and its text, in a fence that nothing in it closes; or its name alone."""
    title, content = plain(name) or "file", plain(text)
    if not content:
        return f"[{title}]"
    longest = max((len(run) for run in re.findall("`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{title}:\n{fence}\n{content}\n{fence}"
