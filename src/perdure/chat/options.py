"""Options of a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, get_args

from perdure.chat.message import Tool
from perdure.checks import check_one_of, is_whole
from perdure.config import Overflow, ReasoningMode
from perdure.decode.slots import KeptPrefix
from perdure.errors import InvalidInputError

ToolChoice = str | Mapping[str, Any]
"""none, auto, required, or which one: its name, or `{"type": "function", "function": {"name": …}}`."""

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"}) | frozenset(
    {"bos_token", "eos_token", "guard", "now", "no_tools"}
)
"""Variables of a template that are set for it, and never by a caller."""


_MARKS = 16
"""Of one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of a chat request besides its messages and those of decoding."""

    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningMode = "capture"
    reasoning_budget: int | None = None
    overflow: Overflow = "error"
    limit_to_context: bool = False
    """Whether `max_tokens` may be more than fits: the reply then ends, by length, where the context does."""
    keep_reasoning: bool | None = None
    """Whether the template shows the reasoning of earlier turns, where it has a switch for that; None leaves
    it to the template."""
    continue_final_message: bool = False
    """Whether the reply goes on from the last message, which is the assistant's."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with what opens a reply: unless a message is continued, if not told."""
    date: str | None = None
    """The day, or the moment, that a template is told when it asks, in ISO 8601: today, if not told."""
    cache_marks: Sequence[KeptPrefix] = ()
    """Up to where the state of the conversation is to be kept for a time."""
    variables: Mapping[str, Any] | None = None
    """For the template. `chat_template_kwargs` are the same."""

    @property
    def opens_reply(self) -> bool:
        """Whether the prompt ends with what opens a reply."""
        asked = self.add_generation_prompt
        return not self.continue_final_message if asked is None else asked

    @property
    def now(self) -> datetime | None:
        return None if self.date is None else datetime.fromisoformat(self.date)

    def __post_init__(self) -> None:
        check_one_of("overflow", self.overflow, get_args(Overflow))
        check_one_of("reasoning", self.reasoning, get_args(ReasoningMode))
        budget = self.reasoning_budget
        if budget is not None and (not is_whole(budget) or budget < 0):
            raise InvalidInputError(f"reasoning_budget is None or a number of tokens from 0, got {budget!r}")
        for name in ("keep_reasoning", "continue_final_message", "add_generation_prompt"):
            if getattr(self, name) not in (None, True, False):
                raise InvalidInputError(f"{name} is true or false, got {getattr(self, name)!r}")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidInputError(
                "continue_final_message goes on from a message, and add_generation_prompt begins another: "
                "set one of them"
            )
        if len(self.cache_marks) > _MARKS or not all(
            isinstance(m, KeptPrefix) and m.after is not None for m in self.cache_marks
        ):
            raise InvalidInputError(f"cache_marks are at most {_MARKS} of type CacheMark")
        try:
            _ = self.now
        except (TypeError, ValueError):
            raise InvalidInputError(f"date is such as 2026-01-31, got {self.date!r}") from None
        if self.variables is not None and not isinstance(self.variables, Mapping):
            raise InvalidInputError(f"variables are a mapping, got {type(self.variables).__name__}")
        if taken := sorted(RESERVED & (self.variables or {}).keys()):
            raise InvalidInputError(f"variables: {taken[0]} is set for the template, leave it out")

    @classmethod
    def take(cls, settings: dict[str, Any]) -> ChatOptions:
        """The options among a caller's keywords, which are taken out of `settings`."""
        found = {name: settings.pop(name) for name in list(settings) if name in cls.__dataclass_fields__}
        tools = found.pop("tools", None)
        kwargs = settings.pop("chat_template_kwargs", None)
        if kwargs is not None:
            given = found.get("variables")
            if not isinstance(kwargs, Mapping):
                raise InvalidInputError(f"chat_template_kwargs are a mapping, got {type(kwargs).__name__}")
            found["variables"] = {**(given or {}), **kwargs}
        return cls(tools=tuple(Tool.parse(tool) for tool in tools or ()), **found)
