"""Provenance: where the words of a prompt come from. A check for tests (`PERDURE_CHECK_PROMPTS=1`).

    You are an agent.              messages[0]
    Today's date: 2026-11-17       messages[0], moved by a rule
    <|im_start|>user               the template
    Result of read:                the normaliser
    tulip                          nothing: ProvenanceError

What is looked at are the tokens that the model reads, so that remembered tokens are checked too.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from perdure import Message, Template, Tool
from perdure.spi.chat import CallWriter, ChatReply, MessageNormaliser, MessageRewriter, capabilities

_WORD = re.compile(r"[^\W_]+")
_COUNTED = re.compile(r"\d{1,4}")
"""Numbers that a template counts itself, and those of a date."""
_SHORTEST, _JOINED = 2, 3
"""Characters of a word that a template may have joined to others, and how many it joins."""
_ESCAPED = re.compile(r"\\u[0-9a-fA-F]{4}|\\[nrtbf]")


class ProvenanceError(RuntimeError):
    """A word of a prompt that nobody said: a defect of ours, and never a caller's."""


class Provenance:
    """The words that prompts of one template may have besides those of their requests."""

    def __init__(self, template: Template, writer: CallWriter) -> None:
        """`writer` writes the calls of prompts."""
        self._own: dict[str, str] = {}
        for each in (MessageNormaliser, MessageRewriter, capabilities, ChatReply, type(writer)):
            module = inspect.getmodule(each)
            assert module is not None
            self._own |= dict.fromkeys(_words(inspect.getsource(module)), module.__name__.rpartition(".")[2])
        self._own |= dict.fromkeys(_words(f"{template.source} {template.bos} {template.eos}"), "the template")
        self._dates = "strftime_now" in template.source or "datetime" in template.source
        self._template = template

    def check(
        self,
        text: str,
        messages: Sequence[Message],
        put_back: Mapping[str, str],
        tools: Sequence[Tool],
        variables: Mapping[str, Any] | None,
        now: datetime | None,
    ) -> dict[str, str]:
        """The words of a prompt with where each comes from; ProvenanceError for one that comes from nowhere.
        `put_back` is what was remembered of calls, by what proves that it is of this conversation."""
        sources = dict(self._own)
        if self._dates:
            moments = [now] if now is not None else [datetime.now()]
            sources |= dict.fromkeys(_words(f"{moments[0]:%A %a %B %b %d %Y %H %M %S %p}"), "the date")
        sources |= dict.fromkeys(_words(_values([variables or {}])), "variables")
        sources |= dict.fromkeys(_words(_values([tool.to_dict() for tool in tools])), "tools")
        for proof, words in put_back.items():
            sources |= dict.fromkeys(_words(words), f"rule: reasoning of {proof}")
        for at, message in enumerate(messages):
            sources |= dict.fromkeys(_words(_values([message.to_dict()])), f"messages[{at}]")
            ids = (message.tool_call_id, *(call.id for call in message.tool_calls))
            sources |= dict.fromkeys((self._template._id(each) for each in ids if each), f"messages[{at}]")
        found: dict[str, str] = {}
        for match in _WORD.finditer(text):
            word = match.group()
            if word not in found and (source := _source(word, sources)) is None:
                near = text[max(0, match.start() - 80) : match.end() + 40]
                raise ProvenanceError(f"the word {word!r} of a prompt was not said: … {near!r} …")
            found.setdefault(word, source or "")
        return found


def _source(word: str, sources: Mapping[str, str], joined: int = _JOINED) -> str | None:
    """Where a word comes from, or the parts that a template joined."""
    if word in sources:
        return sources[word]
    if _COUNTED.fullmatch(word):
        return "the template"
    if joined > 1:
        for end in range(len(word) - 1, _SHORTEST - 1, -1):
            if word[:end] in sources and (rest := _source(word[end:], sources, joined - 1)) is not None:
                return f"{sources[word[:end]]}, {rest}"
    return None


def _words(text: str) -> set[str]:
    """The words of a text, and of the same text as templates write it: within JSON, in other cases."""
    written = json.dumps(text, ensure_ascii=False)
    forms = (text, written, json.dumps(text), _ESCAPED.sub(" ", text), _ESCAPED.sub(" ", written))
    words = {word for form in forms for word in _WORD.findall(form)}
    return words | {change(word) for word in words for change in (str.lower, str.upper, str.title)}


def _values(values: Iterable[Any]) -> str:
    """All texts of plain values, a line each."""
    return "\n".join(_texts(list(values)))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value
        try:
            # Arguments of calls are JSON within a text.
            parsed = json.loads(value) if value[:1] in "{[" and value else None
        except (ValueError, RecursionError):
            parsed = None
        if parsed is not None:
            yield from _texts(parsed)
    else:
        yield json.dumps(value, default=str)
