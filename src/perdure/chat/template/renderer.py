"""Conversations as text, turn by turn where their template allows it, and those that were rendered."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from perdure.chat.message import Message, Tool
from perdure.chat.template.template import UNGUARDED, Guard, Template
from perdure.errors import PerdureError

_ROLES = ("system", "user", "assistant")
_TURNS = ("user", "assistant")
_WITH_RESULTS = ("user", "assistant", "tool", "assistant")
_ANSWERED = ("user", "tool")
"""Whose messages a reply answers."""
_NEAR = 8
"""Messages that are rendered for a new one at most, besides those of the system."""
_Key = tuple[str, int, Message, tuple[Message, ...]]
_LIMIT = 8 << 20
_MESSAGE, _OVERHEAD = 256, 1024
"""Bytes that a message takes, and a rendering besides what it holds."""
_REACH = 8
"""Messages that a conversation may have gone on by since it was last rendered."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Messages and the text that they make, without what opens the reply."""

    messages: tuple[Message, ...]
    text: str
    near: tuple[Message, ...]
    """A short conversation that starts and ends as this one does."""
    near_length: int
    """Characters of the text that it makes."""

    def begins(self, messages: tuple[Message, ...]) -> bool:
        """Whether `messages` go on from its own."""
        return len(messages) > len(self.messages) and messages[: len(self.messages)] == self.messages


class TemplateRenderer:
    """Renders whole conversations, and of one that goes on only what is new.

    The latter only if the template was seen to treat every turn by itself, and to open every reply alike, for
    plain messages: then the text is the same. Whatever else a template does with a conversation, it is
    rendered as a whole.
    """

    def __init__(self, template: Template, guard: Guard = UNGUARDED) -> None:
        self._template = template
        self._guard = guard

    def whole(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        reply_follows: bool = True,
        now: datetime | None = None,
    ) -> str:
        return self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=reply_follows,
            guard=self._guard,
            now=now,
            **(variables or {}),
        )

    def prompt(
        self,
        messages: tuple[Message, ...],
        *,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        before: Rendering | None = None,
        now: datetime | None = None,
    ) -> tuple[str, Rendering | None]:
        """The prompt of a conversation, and what a later prompt may go on from.

        `before` is a rendering of its beginning.
        """
        if "tools" not in self._template.source:
            # It cannot ask for them: they were written into a message.
            tools = ()
        if tools or variables or self.opening is None or not messages or messages[-1].role not in _ANSWERED:
            return self.whole(messages, tools=tools, variables=variables, now=now), None
        if before is not None and before.begins(messages):
            new = messages[len(before.messages) :]
            if all(map(self._is_plain, (*before.near, *new))):
                return self._go_on(before, new)
        if not all(map(self._is_plain, messages)):
            return self.whole(messages), None
        text = self.whole(messages, reply_follows=False)
        rendering = None
        # A template may insist on what the short conversation lacks.
        with suppress(PerdureError):
            rendering = self._rendering(messages, text, messages, len(text))
        return text + self.opening, rendering

    @cached_property
    def opening(self) -> str | None:
        """What opens a reply, if the template treats each turn by itself, as far as trials can tell."""
        # Other words on another day.
        if "strftime_now" in self._template.source:
            return None
        try:
            openings = {self._tried(system, _TURNS) for system in (None, "s\n", "t /no_think")}
        except PerdureError:
            return None
        return openings.pop() if len(openings) == 1 else None

    @cached_property
    def _takes_results(self) -> bool:
        """Whether it treats results of tools by themselves, too, where it is not told of the tools."""
        try:
            return all(self._tried(system, _WITH_RESULTS) == self.opening for system in (None, "s\n"))
        except PerdureError:
            return False

    def _tried(self, system: str | None, roles: Sequence[str]) -> str | None:
        # Among them what some templates take for a switch or for a tool's result, wherever it was said.
        words = (
            *("a", " b\n\n", "c <x>\n", "d", "\te ", "f", "g\n", "h", "i\n", "j", "k /no_think", "l", "m"),
            *("n", "o /think", "p", "<tool_response>\nq\n</tool_response>", "r", "s", "t", "u"),
        )
        said = [Message(role=roles[at % len(roles)], content=word) for at, word in enumerate(words)]
        messages = tuple([Message(role="system", content=system)] * (system is not None) + said)
        start = messages[: len(messages) - len(words) + 1]
        text = self.whole(start, reply_follows=False)
        opening = self.whole(start)[len(text) :]
        before = self._rendering(start, text, start, len(text))
        for end in range(len(start) + 2, len(messages) + 1, 2):
            assert messages[end - 1].role in _ANSWERED
            before = self._more(before, messages[len(before.messages) : end])
            if before.text != self.whole(messages[:end], reply_follows=False):
                return None
            if before.text + opening != self.whole(messages[:end]):
                return None
        return opening

    def _go_on(self, before: Rendering, new: tuple[Message, ...]) -> tuple[str, Rendering | None]:
        assert self.opening is not None
        try:
            after = self._more(before, new)
        except PerdureError:
            return self.whole(before.messages + new), None
        return after.text + self.opening, after

    def _more(self, before: Rendering, new: tuple[Message, ...]) -> Rendering:
        """What a conversation goes on with, as the end of a short one that goes on alike."""
        near = before.near + new
        shown = self.whole(near, reply_follows=False)
        text = before.text + shown[before.near_length :]
        return self._rendering(before.messages + new, text, near, len(shown))

    def _is_plain(self, message: Message) -> bool:
        return (
            (message.role in _ROLES or (message.role == "tool" and self._takes_results))
            and isinstance(message.content, str)
            and not message.tool_calls
            and not message.reasoning
        )

    def _rendering(
        self, messages: tuple[Message, ...], text: str, near: tuple[Message, ...], near_length: int
    ) -> Rendering:
        if len(near) > _NEAR:
            near = _end(near)
            near_length = len(self.whole(near, reply_follows=False))
        return Rendering(messages, text, near, near_length)


class RenderingCache:
    """The latest renderings, by namespace and messages, up to a number of bytes. Safe from any thread.

    A client that sends its whole history each time then has only what is new of it rendered.
    """

    def __init__(self, *, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._held: OrderedDict[_Key, Rendering] = OrderedDict()
        self.nbytes = 0
        """What it takes of memory, about."""

    def lookup(self, messages: tuple[Message, ...], namespace: str) -> Rendering | None:
        """What `messages` go on from."""
        for count in range(len(messages) - 1, max(0, len(messages) - 1 - _REACH), -1):
            with self._lock:
                found = self._held.get(_key(messages[:count], namespace))
            if found is not None and found.begins(messages):
                return found
        return None

    def store(self, rendering: Rendering, namespace: str, instead_of: Rendering | None = None) -> None:
        """Remember a rendering, in the place of the one that it goes on from."""
        with self._lock:
            for each in (instead_of, rendering):
                if (
                    each is not None
                    and (gone := self._held.pop(_key(each.messages, namespace), None)) is not None
                ):
                    self.nbytes -= _size(gone)
            self._held[_key(rendering.messages, namespace)] = rendering
            self.nbytes += _size(rendering)
            while self.nbytes > self._limit:
                self.nbytes -= _size(self._held.popitem(last=False)[1])


def _end(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """A conversation's head, and its last turns."""
    head = 0
    while head < len(messages) and messages[head].role == "system":
        head += 1
    tail = messages[max(head, len(messages) - 3) :]
    return (*messages[:head], *tail)


def _size(rendering: Rendering) -> int:
    """In memory, about: the text stands in the messages too."""
    characters = len(rendering.text) * (1 if rendering.text.isascii() else 4)
    return 2 * characters + _MESSAGE * len(rendering.messages) + _OVERHEAD


def _key(messages: tuple[Message, ...], namespace: str) -> _Key:
    """What tells most conversations apart; their messages decide."""
    return namespace, len(messages), messages[0], messages[-2:]
