"""Options of a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perdure.chat.message import Tool
from perdure.chat.overflow import check_policy
from perdure.chat.parsing.markers import check_mode
from perdure.checks import is_whole
from perdure.config import Overflow, ReasoningMode
from perdure.errors import InvalidInputError

ToolChoice = str | Mapping[str, Any]
"""none, auto, required, or which one: its name, or `{"type": "function", "function": {"name": …}}`."""


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
    variables: Mapping[str, Any] | None = None
    """For the template."""

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """What the template is told of."""
        return () if self.tool_choice == "none" else self.tools

    def __post_init__(self) -> None:
        check_policy(self.overflow)
        check_mode(self.reasoning)
        budget = self.reasoning_budget
        if budget is not None and (not is_whole(budget) or budget < 0):
            raise InvalidInputError(f"reasoning_budget is None or a number of tokens from 0, got {budget!r}")

    @classmethod
    def take(cls, settings: dict[str, Any]) -> ChatOptions:
        """The options among a caller's keywords, which are taken out of `settings`."""
        found = {name: settings.pop(name) for name in list(settings) if name in cls.__dataclass_fields__}
        tools = found.pop("tools", None)
        return cls(tools=tuple(Tool.parse(tool) for tool in tools or ()), **found)
