"""Difference: the first place where a prompt departs from the one that its conversation had before.

    system prompt, line 3: "Today is Monday" was "Today is Sunday"
    messages[4] (tool): shorter than it was
    tools: read_file is new

What was asked before is remembered by its messages and tools, so that the cause is named in a client's own
words and not as a token number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from perdure.chat.media.marks import with_names
from perdure.chat.message import Message, Tool
from perdure.chat.past_conversations import PastConversation, message_key
from perdure.chat.transcript import shared_length
from perdure.decode.request import ReuseReport, Timings

Kind = Literal["tools", "system", "message", "reply", "history", "variables", "template"]
_SHOWN = 160
"""Characters of a line that are shown."""
_SLACK = 128
"""Tokens that are computed again though they are kept: blocks are whole, and the last one gives logits."""

ADVICE: dict[Kind, str] = {
    "tools": "Send the same tools with every request of a conversation.",
    "system": "Keep the system prompt the same; put what changes into the last message.",
    "message": "Append to a conversation: behind an earlier message that changes, everything is read again.",
    "reply": "Send replies back as they came, with their reasoning.",
    "history": "Messages were left out or put in: what follows them is read again once.",
    "variables": "Send the same template variables with every request of a conversation.",
    "template": "The template writes earlier turns otherwise than the latest: try keep_reasoning=True.",
}
"""What would have kept the prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a prompt first differs from the one before it."""

    kind: Kind
    place: str
    """Such as `system prompt, line 3`."""
    before: str
    now: str
    """The line that differs, before and now; empty where there is none."""
    tokens: int
    """Of the prompt that stand before it."""
    lost: int = 0
    """Tokens behind it that are not new, and are read again."""

    @property
    def advice(self) -> str:
        return ADVICE[self.kind]

    def __str__(self) -> str:
        if not self.before and not self.now:
            return self.place
        return f"{self.place}: {self.now!r} was {self.before!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """Tokens of a prompt that were computed again: how many, for how long, and what would have kept them."""

    cause: Kind | Literal["cache"]
    """What differed; `cache` where nothing did, and the state was no longer kept."""
    why: str
    """The place of the first difference, or what became of the state."""
    before: str
    now: str
    tokens: int
    seconds: float
    advice: str

    @classmethod
    def of(
        cls, difference: Difference | None, expected: int, reuse: ReuseReport, timings: Timings
    ) -> Miss | None:
        """Why fewer tokens were reused than there might have been. `expected` were read before."""
        if reuse.reused + _SLACK < expected:
            tokens, cause, why = expected - reuse.reused, "cache", reuse.why
            before = now = ""
            advice = "Give the cache or the store more bytes, or the server more slots."
        elif difference is not None and difference.lost:
            tokens, cause, why = difference.lost, difference.kind, difference.place
            before, now, advice = difference.before, difference.now, difference.advice
        else:
            return None
        seconds = timings.prefill * min(1.0, tokens / max(1, reuse.computed))
        return cls(
            cause=cause,  # type: ignore[arg-type]
            why=why,
            before=before,
            now=now,
            tokens=tokens,
            seconds=seconds,
            advice=advice,
        )

    def __str__(self) -> str:
        shown = f": {self.now!r} was {self.before!r}" if self.before or self.now else ""
        return f"{self.tokens} tokens computed again, {self.why}{shown}"


def first_difference(past: PastConversation, now: PastConversation, shared: int) -> Difference | None:
    """Where a prompt departs from a past one, with which it shares that many characters; None where it goes
    on from all of it."""
    if shared >= min(len(past.text), len(now.text)):
        return None
    cuts = now.transcript.cuts
    tokens = tokens_at(cuts, shared)
    lost = max(0, tokens_at(cuts, _history_end(now.messages, now.text)) - tokens)
    return replace(_difference(past, now, shared), tokens=tokens, lost=lost)


def tokens_at(cuts: Sequence[tuple[int, int]], chars: int) -> int:
    """The tokens up to the last cut that stands at so many characters or before."""
    cut = bisect_right(cuts, chars, key=lambda cut: cut[0])
    return cuts[cut - 1][1] if cut else 0


def _history_end(messages: Sequence[Message], text: str) -> int:
    """Where in the text of a prompt its history ends: behind the last reply."""
    at = max((at for at, each in enumerate(messages) if each.role == "assistant"), default=-1)
    first = next((each.content for each in messages[at + 1 :] if each.content), None)
    start = text.rfind(first.strip()[:200]) if first else -1
    return len(text) if start < 0 else start


def _difference(past: PastConversation, now: PastConversation, shared: int) -> Difference:
    by_tools = _tools(past.tools, now.tools)
    by_message = _messages(past.messages, now.messages)
    if by_tools is not None and by_message is not None:
        # Whichever stands first in the text: a tool that differs, or a message before it.
        at = by_message[3]
        content = (now.messages[at].content or "") if at < len(now.messages) else ""
        start = now.text.find(content[:64]) if content else -1
        tool = min((now.text.find(each.name) for each in now.tools), default=-1)
        if 0 <= start <= shared < start + len(content) and not (start < tool <= shared):
            by_tools = None
    if by_tools is not None:
        return Difference(kind="tools", place=f"tools: {by_tools}", before="", now="", tokens=0)
    if by_message is not None:
        kind, place, lines, _ = by_message
        return Difference(kind=kind, place=place, before=lines[0], now=lines[1], tokens=0)
    for name in sorted({*past.variables, *now.variables}):
        was, value = past.variables.get(name), now.variables.get(name)
        if was != value:
            place = f"template variable {name}"
            return Difference(kind="variables", place=place, before=repr(was), now=repr(value), tokens=0)
    _, (before, line) = _changed_line(with_names(past.text), with_names(now.text))
    return Difference(kind="template", place="the template", before=before, now=line, tokens=0)


def _tools(before: Sequence[Tool], now: Sequence[Tool]) -> str | None:
    if tuple(before) == tuple(now):
        return None
    old, new = {tool.name: tool for tool in before}, {tool.name: tool for tool in now}
    if added := [name for name in new if name not in old]:
        return f"{', '.join(added[:3])} {'is' if len(added) == 1 else 'are'} new"
    if gone := [name for name in old if name not in new]:
        return f"{', '.join(gone[:3])} {'is' if len(gone) == 1 else 'are'} gone"
    if changed := [name for name in new if old[name] != new[name]]:
        return f"{', '.join(changed[:3])} changed"
    return "another order"


def _messages(
    before: Sequence[Message], now: Sequence[Message]
) -> tuple[Kind, str, tuple[str, str], int] | None:
    """The first message that differs: kind, place, the lines, its index."""
    for at, (old, new) in enumerate(zip(before, now, strict=False)):
        if message_key(old) == message_key(new):
            continue
        is_reply = at == len(before) - 1 and old.role == "assistant"
        if at + 1 < len(now) and message_key(now[at + 1]) == message_key(old):
            return "history", f"messages[{at}] ({new.role}): put in", ("", ""), at
        if at + 1 < len(before) and message_key(before[at + 1]) == message_key(new):
            return "history", f"messages[{at}] ({old.role}): left out", ("", ""), at
        if old.role != new.role:
            if len(now) < len(before):
                return "history", f"messages[{at}] on: replaced by fewer messages", ("", ""), at
            return "history", f"messages[{at}]: {new.role} was {old.role}", ("", ""), at
        if old.tool_calls != new.tool_calls:
            return ("reply" if is_reply else "message"), f"messages[{at}] ({new.role}): calls", ("", ""), at
        first, second = (with_names(each.content or "").strip() for each in (old, new))
        number, lines = _changed_line(first, second)
        if new.role in ("system", "developer"):
            place: str = (
                f"system prompt, line {number}" if not at else f"messages[{at}] ({new.role}), line {number}"
            )
            return "system", place, lines, at
        if first.startswith(second) or second.startswith(first):
            how = "shorter" if len(second) < len(first) else "longer"
            place = f"messages[{at}] ({new.role}): {how} than it was"
            return ("reply" if is_reply else "message"), place, ("", ""), at
        return ("reply" if is_reply else "message"), f"messages[{at}] ({new.role}), line {number}", lines, at
    if len(now) < len(before) - 1:
        return "history", f"messages[{len(now)}] on: left out", ("", ""), len(now)
    return None


def _changed_line(before: str, now: str) -> tuple[int, tuple[str, str]]:
    at = shared_length(before, now)
    return before.count("\n", 0, at) + 1, (_lines_at(before, at), _lines_at(now, at))


def _lines_at(text: str, at: int) -> str:
    """The line of a text around a place, or the part of it that is near."""
    start = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    end = len(text) if end < 0 else end
    start = max(start, at - _SHOWN // 2)
    return text[start : min(end, start + _SHOWN)]
