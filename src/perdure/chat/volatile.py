"""Volatile text: what clients change in a prompt from turn to turn, kept from spoiling its prefix.

    system    You are an agent.                        system  You are an agent.
              Today's date: 2026-11-17          →      user    List the files.
    user      List the files.                                  Today's date: 2026-11-17

A line of the system prompt that a rule knows moves behind the last message, with its words, and is said again
only when it changes. What a message was sent with (a reminder, a counter behind it) is read with it for ever:
a client that sends the message again without it, or has it at a later message, goes on from the same prefix.
Text in the place where it was sent first never moves: an instruction stays behind what it refers to.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from perdure.chat.message import Message, Tool

_LIMIT = 4 << 20
"""Characters that are remembered."""
_LONGEST = 4096
"""Characters of a marked stretch. What is longer is content."""
_LEADING = ("system", "developer")
_Spans: TypeAlias = "list[tuple[int, int]]"


@dataclass(frozen=True, slots=True)
class Rule:
    """Text of a kind that changes by itself."""

    name: str
    client: str
    """Who sends it."""
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
            end += text.startswith("\n", end)
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
        "It is for whoever bills, and asks nothing of the model.",
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
        "It is read where it was sent first. A copy at a later message is read there too.",
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


@dataclass(frozen=True, slots=True)
class _Read:
    """How a message was read that had something volatile in it or behind it."""

    content: str | None
    behind: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.content or "") + sum(map(len, self.behind)) + 64


class VolatileText:
    """Puts volatile text where it costs nothing, alike for one conversation. Safe from any thread.

    Always holds: every word that a client sent for its last turn is in the prompt; what was read before is
    read again as it was, however the client sends it now.
    """

    def __init__(self, *, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._read: OrderedDict[bytes, _Read] = OrderedDict()
        self._size = 0
        self._orders: OrderedDict[tuple[str, frozenset[str]], tuple[str, ...]] = OrderedDict()

    def stabilise(
        self, messages: Sequence[Message], namespace: str = ""
    ) -> tuple[tuple[Message, ...], tuple[str, ...]]:
        """The messages with what is volatile in its place, and a line about each rule that was followed."""
        head = next((at for at, each in enumerate(messages) if each.role not in _LEADING), len(messages))
        key = hashlib.sha256(namespace.encode()).digest()
        notes: dict[str, None] = {}
        stabilised: list[Message] = []
        values: dict[str, str] = {}
        for message in messages[:head]:
            stable, parts = _split(message.content or "", _IN_SYSTEM)
            if not parts or not stable.strip():
                stabilised.append(message)
            else:
                stabilised.append(replace(message, content=stable))
                for rule, text in parts:
                    values[rule.name] = f"{values[rule.name]}\n{text}" if rule.name in values else text
            key = _next_key(key, message, stable)
        for name in values:
            notes[f"moved behind the messages: {name}"] = None
        entries = _entries(messages[head:])
        if not entries:
            return tuple(messages), ()
        answered = max((at for at, (each, _) in enumerate(entries) if each.role == "assistant"), default=-1)
        announced: dict[str, str] = {}
        for at, (message, behind) in enumerate(entries):
            stable = message.content or ""
            if message.role in ("user", "tool"):
                stable, _ = _split(stable, _IN_MESSAGES)
            key = _next_key(key, message, stable)
            sent = _Read(message.content, behind)
            read = self._lookup(key) if at < answered else None
            if read is not None and read != sent:
                for name in _names_of(read, sent) - values.keys():
                    notes[f"kept as it was read: {name}"] = None
            read = read or sent
            if at == len(entries) - 1:
                new = [text for name, text in values.items() if announced.get(name) != text]
                read = replace(read, behind=(*read.behind, *new))
            stabilised.append(
                message if read.content == message.content else replace(message, content=read.content)
            )
            if read.behind:
                stabilised.append(Message(role="system", content="\n".join(read.behind)))
                for each in read.behind:
                    announced |= {rule.name: text for rule, text in _split(each, _IN_SYSTEM)[1]}
            if message.role != "assistant" and (read.behind or stable != (message.content or "")):
                self._store(key, read)
        return tuple(stabilised), tuple(notes)

    def ordered(
        self, tools: tuple[Tool, ...], namespace: str = ""
    ) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
        """Tools in the order in which the same ones came first, and a line about it where that is another."""
        if len(tools) < 2:
            return tools, ()
        by_text = {repr(tool): tool for tool in tools}
        if len(by_text) < len(tools):
            return tools, ()
        key = (namespace, frozenset(by_text))
        with self._lock:
            order = self._orders.setdefault(key, tuple(by_text))
            self._orders.move_to_end(key)
            while len(self._orders) > 64:
                self._orders.popitem(last=False)
        known = tuple(by_text[text] for text in order)
        return known, () if known == tools else (f"put back: {TOOLS.name}",)

    def _lookup(self, key: bytes) -> _Read | None:
        with self._lock:
            if (read := self._read.get(key)) is not None:
                self._read.move_to_end(key)
            return read

    def _store(self, key: bytes, read: _Read) -> None:
        with self._lock:
            if (gone := self._read.pop(key, None)) is not None:
                self._size -= gone.size
            self._read[key] = read
            self._size += read.size
            while self._size > self._limit:
                self._size -= self._read.popitem(last=False)[1].size


def stable_key(message: Message) -> object | None:
    """What a message is without its volatile text; None for one of the system that is nothing else."""
    text = message.content or ""
    if message.role in (*_LEADING, "user", "tool"):
        text, parts = _split(text, _IN_MESSAGES)
        text, more = _split(text, _IN_SYSTEM) if message.role in _LEADING else (text, [])
        if message.role in _LEADING and (parts or more) and not text.strip():
            return None
    calls = tuple((call.name, call.arguments) for call in message.tool_calls)
    return message.role, text.strip(), calls


def _entries(messages: Iterable[Message]) -> list[tuple[Message, tuple[str, ...]]]:
    """Messages, each with the volatile ones of the system that stand behind it."""
    entries: list[tuple[Message, tuple[str, ...]]] = []
    for message in messages:
        text = message.content or ""
        if entries and message.role in _LEADING and text and not _split(text, _IN_MESSAGES)[0].strip():
            last, behind = entries[-1]
            if last.role != "assistant":
                entries[-1] = last, (*behind, text)
                continue
        entries.append((message, ()))
    return entries


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
    return "".join((*stable, text[at:])).rstrip("\n"), parts


def _next_key(key: bytes, message: Message, stable: str) -> bytes:
    """What tells a conversation up to a message, whatever is volatile in it."""
    calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
    about = repr((message.role, stable.strip(), message.tool_call_id, calls))
    return hashlib.sha256(key + about.encode("utf-8", "surrogatepass")).digest()


def _names_of(read: _Read, sent: _Read) -> set[str]:
    """The rules that two forms of a message differ by."""
    texts = [text for each in (read, sent) for text in (each.content or "", *each.behind)]
    return {
        rule.name
        for text in texts
        for rules in (_IN_SYSTEM, _IN_MESSAGES)
        for rule, _ in _split(text, rules)[1]
    }
