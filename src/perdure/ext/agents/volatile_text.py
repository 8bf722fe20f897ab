"""Volatile text: what clients change in a prompt from turn to turn, kept from spoiling its prefix.

    system    You are an agent.                        system  You are an agent.
              Today's date: 2026-11-17          →      user    List the files.
    user      List the files.                                  Today's date: 2026-11-17

A line of the system prompt that a rule knows moves behind the last message, with its words, and stays there
for as long as it does not change. Only digests of places are remembered for that, and no words: a prompt has
only words of its request, each in one place, whatever other conversations there are.

What a message was sent with (a reminder, a counter behind it) stays where it is. Only a session that the
client names may hold such text after the client has left it out (`agent_conversation.py`).
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from perdure import Message, Tool

_PLACES = 1 << 15
"""Places that are remembered, as digests."""
_ORDERS = 64
"""Sets of tools whose order is remembered."""
_LONGEST = 4096
"""Characters of a marked stretch. What is longer is content."""
_LEADING = ("system", "developer")
_Spans: TypeAlias = "list[tuple[int, int]]"
Values: TypeAlias = Mapping[str, str]
"""Volatile text by the name of its rule."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Text of a kind that changes by itself."""

    name: str
    client: str
    """The clients that send it."""
    reason: str
    """Why its place does not matter."""
    find: Callable[[str], _Spans]
    """Where it is in a text: stretches from and up to a character, in their order."""
    in_messages: bool = False
    """Whether it is looked for in messages behind the system prompt, and not in that."""


def _lines(pattern: str) -> Callable[[str], _Spans]:
    compiled = re.compile(rf"^[ \t]*(?:[-*] )?(?:{pattern})[^\n]{{0,200}}(?:\n|\Z)", re.MULTILINE)
    return lambda text: [match.span() for match in compiled.finditer(text)]


def _tagged(name: str) -> Callable[[str], _Spans]:
    opening, closing = f"<{name}>", f"</{name}>"

    def find(text: str) -> _Spans:
        spans: _Spans = []
        at = text.find(opening)
        while at >= 0:
            end = text.find(closing, at, at + _LONGEST)
            if end < 0:
                at = text.find(opening, at + len(opening))
                continue
            end += len(closing)
            # A line that has nothing else goes as a whole.
            end += text.startswith("\n", end) and text[at - 1 : at] in ("", "\n")
            spans.append((at, end))
            at = text.find(opening, end)
        return spans

    return find


def _whole(pattern: str) -> Callable[[str], _Spans]:
    compiled = re.compile(pattern)
    return lambda text: [(0, len(text))] if len(text) < _LONGEST and compiled.match(text) else []


RULES: tuple[Rule, ...] = (
    Rule(
        "billing header",
        "Claude Code",
        "It is for billing, and asks nothing of the model.",
        _lines(r"x-anthropic-billing-header:"),
    ),
    Rule(
        "tokens left",
        "Claude Code",
        "It counts what is left now: the latest is the one that holds.",
        _tagged("total_tokens"),
    ),
    Rule(
        "date",
        "Claude Code, opencode, Qwen Code, Cline and others",
        "It is a fact by itself: nothing before or behind it refers to its place.",
        _lines(
            r"(?:Today's date|Today is|Current date|Current time|The current date|Date)"
            r"(?: and time)?(?: is)?:? "
            r"[^\n]{0,40}\d"
        ),
    ),
    Rule(
        "percentage",
        "OpenClaw and others",
        "It says how full something is now: the latest is the one that holds.",
        _lines(r"(?:Memory|Context)\b[^\n]{0,80}\d%"),
    ),
    Rule(
        "reminder",
        "Claude Code, opencode",
        "It is read where it was sent.",
        _tagged("system-reminder"),
        in_messages=True,
    ),
    Rule(
        "tokens left, behind a message",
        "Claude Code",
        "It is read where it was sent.",
        _tagged("total_tokens"),
        in_messages=True,
    ),
    Rule(
        "task nudge",
        "Claude Code",
        "It is read where it was sent.",
        _whole(
            r"(?:This is a reminder that your todo list|"
            r"The (?:TodoWrite|task) tools? (?:has|have)(?:n't| not) been used recently)"
        ),
        in_messages=True,
    ),
)
"""The client table: every kind of text that is known to change, who sends it, and why it may move."""
TOOLS = Rule(
    "order of tools",
    "any client with MCP servers",
    "Tools are a set: each is called by its name.",
    lambda text: [],
)
_IN_SYSTEM = tuple(rule for rule in RULES if not rule.in_messages)
_IN_MESSAGES = tuple(rule for rule in RULES if rule.in_messages)


class VolatileText:
    """Puts volatile text where it costs least. Safe from any thread.

    Always holds: the words of a prompt are those of its request, each as often as it was sent. What is
    remembered decides about their places and about nothing else.
    """

    def __init__(self, *, limit: int = _PLACES) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._places: dict[str, OrderedDict[bytes, None]] = {}
        """By namespace: digests of a conversation up to a message and of a line that was read behind it."""
        self._orders: dict[str, OrderedDict[frozenset[str], tuple[str, ...]]] = {}

    def canonicalise(
        self, messages: Sequence[Message], namespace: str = ""
    ) -> tuple[tuple[Message, ...], tuple[str, ...]]:
        """The messages with what is volatile in its place, and a line about each rule that was followed."""
        remaining, values = extract(messages)
        last = max((at for at, each in enumerate(remaining) if _can_precede(each)), default=None)
        if not values or last is None:
            return tuple(messages), ()
        behind: dict[int, dict[str, str]] = {}
        for name, at in self._places_of(remaining[: last + 1], values, namespace).items():
            behind.setdefault(at, {})[name] = values[name]
        canonical: list[Message] = []
        for at, message in enumerate(remaining):
            canonical.append(message)
            if at in behind:
                canonical.append(announcement(behind[at]))
        return tuple(canonical), tuple(f"moved behind the messages: {name}" for name in values)

    def _places_of(self, messages: Sequence[Message], values: Values, namespace: str) -> dict[str, int]:
        """The message behind which each line was read before, or else the last one."""
        digests: list[tuple[int, str, bytes]] = []
        key = hashlib.sha256(namespace.encode()).digest()
        for at, message in enumerate(messages):
            key = _next_key(key, message)
            if _can_precede(message):
                digests += [(at, name, _digest(key, (name, text))) for name, text in values.items()]
        places: dict[str, int] = {}
        with self._lock:
            known = self._places.setdefault(namespace, OrderedDict())
            for at, name, digest in digests:
                if name not in places and (digest in known or at == len(messages) - 1):
                    places[name] = at
                    known[digest] = None
                    known.move_to_end(digest)
            _forget_oldest(self._places, self._limit)
        return {name: places[name] for name in values}

    def ordered(
        self, tools: tuple[Tool, ...], namespace: str = ""
    ) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
        """Tools in the order in which the same ones came first, and a line about it where that is another."""
        if len(tools) < 2:
            return tools, ()
        by_text = {repr(tool): tool for tool in tools}
        if len(by_text) < len(tools):
            return tools, ()
        key = frozenset(by_text)
        with self._lock:
            orders = self._orders.setdefault(namespace, OrderedDict())
            order = orders.setdefault(key, tuple(by_text))
            orders.move_to_end(key)
            _forget_oldest(self._orders, _ORDERS)
        known = tuple(by_text[text] for text in order)
        return known, () if known == tools else (f"put back: {TOOLS.name}",)


def _forget_oldest(held: dict[str, OrderedDict[Any, Any]], limit: int) -> None:
    """Forget the oldest of the namespace that has the most, until no more than `limit` are held: one that
    sends much changes no prompt of another."""
    while sum(map(len, held.values())) > limit:
        most = max(held, key=lambda namespace: len(held[namespace]))
        held[most].popitem(last=False)
        if not held[most]:
            del held[most]


def extract(messages: Sequence[Message]) -> tuple[list[Message], Values]:
    """The messages without the volatile text of the system prompt, and that text by its rules' names."""
    head = next((at for at, each in enumerate(messages) if each.role not in _LEADING), len(messages))
    remaining = list(messages)
    parts: list[tuple[Rule, str]] = []
    for at, message in enumerate(messages[:head]):
        stable, found = _split(message.content or "", _IN_SYSTEM)
        if found and stable.strip():
            remaining[at] = replace(message, content=stable)
            parts += found
    return remaining, _by_rule(parts)


def announced(messages: Iterable[Message], values: Values) -> list[Message]:
    """What is to be said behind messages, so that they say these values and no older ones last."""
    latest: dict[str, str] = {}
    for message in messages:
        if message.role in _LEADING:
            stable, parts = _split(message.content or "", _IN_SYSTEM)
            latest |= {} if stable.strip() else _by_rule(parts)
    new = {name: text for name, text in values.items() if latest.get(name) != text}
    return [announcement(new)] if new else []


def apart(message: Message) -> tuple[str, list[tuple[str, str]]]:
    """The text of a message without what is volatile in it, and that, in its order, with the names of the
    rules."""
    text = message.content or ""
    if message.role == "assistant":
        return text, []
    rules = (*_IN_MESSAGES, *_IN_SYSTEM) if message.role in _LEADING else _IN_MESSAGES
    stable, parts = _split(text, rules)
    return stable, [(rule.name, part) for rule, part in parts]


def _can_precede(message: Message) -> bool:
    """Whether a line of the system prompt may move behind a message."""
    return message.role not in (*_LEADING, "assistant")


def announcement(values: Values) -> Message:
    """The message that says what was taken out of the system prompt."""
    return Message(role="system", content="\n".join(values.values()))


def _by_rule(parts: Iterable[tuple[Rule, str]]) -> dict[str, str]:
    values: dict[str, str] = {}
    for rule, text in parts:
        values[rule.name] = f"{values[rule.name]}\n{text}" if rule.name in values else text
    return values


def _split(text: str, rules: Sequence[Rule]) -> tuple[str, list[tuple[Rule, str]]]:
    """A text without what rules know, and that."""
    spans: list[tuple[int, int, Rule]] = []
    for rule in rules:
        spans += [(start, end, rule) for start, end in rule.find(text)]
    if not spans:
        return text, []
    stable, parts, at = [], [], 0
    for start, end, rule in sorted(spans, key=lambda each: each[:2]):
        if start < at:
            continue
        stable.append(text[at:start])
        parts.append((rule, text[start:end].strip("\n")))
        at = end
        if start and end < len(text) and not (text[start - 1].isspace() or text[end].isspace()):
            # Two words do not become one.
            stable.append(" ")
    return "".join((*stable, text[at:])).rstrip("\n"), parts


def _next_key(key: bytes, message: Message) -> bytes:
    """The digest of a conversation up to a message."""
    calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
    return _digest(key, (message.role, (message.content or "").strip(), message.tool_call_id, calls))


def _digest(key: bytes, about: object) -> bytes:
    return hashlib.sha256(key + repr(about).encode("utf-8", "surrogatepass")).digest()
