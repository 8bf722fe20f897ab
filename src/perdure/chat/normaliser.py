"""Message normaliser: conversations in the form that a template shows.

Most need nothing. What rewrites the others is in `template/rewriting.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter, eq
from typing import TYPE_CHECKING, Any

from perdure.chat.message import Message, Tool
from perdure.chat.template.capabilities import TemplateCapabilities, capabilities, given_tools
from perdure.chat.template.template import Guard, Template

if TYPE_CHECKING:
    from perdure.chat.parsing.call_writer import CallWriter


@dataclass(frozen=True, slots=True)
class Normalised:
    """A conversation as a template takes it."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    variables: dict[str, Any]
    notes: tuple[str, ...]
    """What the template does not show as it was given, and what it gets instead."""


class MessageNormaliser:
    """Writes what a template does not show in the nearest form that it shows. Safe from any thread.

    Messages that need nothing stay the same objects. The beginning of a conversation is normalised like the
    whole of it, except for a last message that later ones are joined to.
    """

    def __init__(self, template: Template, writer: CallWriter, guard: Guard) -> None:
        self._template = template
        self._writer = writer
        self._guard = guard
        self._capabilities: dict[bool, TemplateCapabilities] = {}

    def capabilities(self, *, with_tools: bool) -> TemplateCapabilities:
        if (shown := self._capabilities.get(with_tools)) is None:
            shown = self._capabilities[with_tools] = capabilities(self._template, with_tools=with_tools)
        return shown

    def normalise(
        self,
        messages: Sequence[Message],
        tools: tuple[Tool, ...] = (),
        *,
        keep_reasoning: bool | None = None,
        now: datetime | None = None,
        unchanged: int = 0,
    ) -> Normalised:
        """Messages, of which the first `unchanged` have no calls and are rendered unchanged."""
        shown = self.capabilities(with_tools=bool(tools))
        if not tools and keep_reasoning is None and _is_plain(messages, shown, unchanged):
            return Normalised(tuple(messages), (), {}, ())
        from perdure.chat.template.rewriting import MessageRewriter

        work = MessageRewriter(shown, self._writer, self._guard)
        normalised = work.leading(messages)
        normalised = work.with_calls(normalised)
        normalised = work.with_tools(normalised, tools)
        normalised = work.joined(normalised)
        template_tools, variables = given_tools(shown.tools, work.described(tools), now)
        if keep_reasoning is not None:
            variables |= work.keep_reasoning(normalised, keep_reasoning)
        return Normalised(tuple(normalised), template_tools, variables, tuple(work.notes))


def _is_plain(messages: Sequence[Message], shown: TemplateCapabilities, unchanged: int) -> bool:
    """Whether messages need no change: at most one of the system, at the start, then the user and the
    assistant in turn, without calls. Almost all are so, and whole histories come again and again."""
    messages = messages[max(0, unchanged - 1) :]
    roles = list(map(attrgetter("role"), messages))
    start = not unchanged and roles[:1] == ["system"]
    return (
        shown.tools in ("tools", "with system", "none", "xml_tools")
        and (not start or shown.system)
        and set(roles[start:]) <= {"user", "assistant"}
        and not any(map(eq, roles, roles[1:]))
        and not any(map(attrgetter("tool_calls"), messages))
        and (shown.reasoning != "part" or not any(map(attrgetter("reasoning"), messages)))
    )
