"""Conversations as text, turn by turn where their template allows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from perdure.chat.message import Message, Tool
from perdure.chat.template import Template
from perdure.errors import PerdureError

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Rendering:
    """Messages and the text that they make, without what opens the reply."""

    messages: tuple[Message, ...]
    text: str


class Renderer:
    """Renders whole conversations, and of one that goes on only what is new.

    The latter only if the template was seen to treat every turn by itself, for plain messages: then the text
    is the same. Whatever else a template does with a conversation, it is rendered as a whole.
    """

    def __init__(self, template: Template, guard: Callable[[Message], Message]) -> None:
        self._template = template
        self._guard = guard

    def whole(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        reply_follows: bool = True,
    ) -> str:
        return self._template.render(
            [self._guard(message) for message in messages],
            tools=tools,
            add_generation_prompt=reply_follows,
            **(variables or {}),
        )

    def prompt(
        self,
        messages: tuple[Message, ...],
        *,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        before: Rendering | None = None,
    ) -> tuple[str, Rendering | None]:
        """The prompt of a conversation, and what a later prompt may go on from.

        `before` is a rendering of its beginning.
        """
        plain = not tools and not variables and self.local
        if plain and before is not None and _begins(messages, before.messages):
            new = messages[len(before.messages) :]
            near = _near(before.messages)
            if all(map(_is_plain, (*near, *new))):
                return self._go_on(before, near, new)
        text = self.whole(messages, tools=tools, variables=variables)
        if not plain or not messages:
            return text, None
        return text, Rendering(messages, self.whole(messages, reply_follows=False))

    @cached_property
    def local(self) -> bool:
        """Whether the template treats each turn by itself, as far as trials can tell."""
        # Other words on another day.
        if "strftime_now" in self._template.source:
            return False
        try:
            return all(self._tried(system) for system in (None, "s\n"))
        except PerdureError:
            return False

    def _tried(self, system: str | None) -> bool:
        words = ("a", " b\n\n", "c <x>\n", "d", "\te ", "f", "g\n")
        said = [Message(role=_ROLES[1 + at % 2], content=word) for at, word in enumerate(words)]
        messages = tuple([Message(role="system", content=system)] * (system is not None) + said)
        head = len(messages) - len(words)
        before = Rendering(messages[: head + 1], self.whole(messages[: head + 1], reply_follows=False))
        for end in range(head + 3, len(messages) + 1, 2):
            text, after = self._go_on(before, _near(before.messages), messages[len(before.messages) : end])
            if text != self.whole(messages[:end]):
                return False
            if after.text != self.whole(messages[:end], reply_follows=False):
                return False
            before = after
        return True

    def _go_on(
        self, before: Rendering, near: tuple[Message, ...], new: tuple[Message, ...]
    ) -> tuple[str, Rendering]:
        """What a conversation goes on with, as the end of a short one that goes on alike."""
        known = len(self.whole(near, reply_follows=False))
        more = before.text + self.whole((*near, *new), reply_follows=False)[known:]
        text = before.text + self.whole((*near, *new))[known:]
        return text, Rendering(before.messages + new, more)


def _near(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """A short conversation that starts and ends as a longer one does: its head, and the last turns."""
    head = 0
    while head < len(messages) and messages[head].role == "system":
        head += 1
    tail = messages[max(head, len(messages) - 3) :]
    return (*messages[:head], *tail)


def _begins(messages: tuple[Message, ...], start: tuple[Message, ...]) -> bool:
    return len(messages) > len(start) and messages[: len(start)] == start


def _is_plain(message: Message) -> bool:
    return (
        message.role in _ROLES
        and isinstance(message.content, str)
        and not message.tool_calls
        and not message.reasoning
    )
