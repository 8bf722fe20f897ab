"""Options of a chat request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from perdure.chat.message import Tool
from perdure.config import Overflow, ReasoningMode
from perdure.decode.request import KEYWORDS, KeptPrefix, ReplyKeywords
from perdure.errors import InvalidInputError
from perdure.options import check_options, option, unknown_options

_KWARGS = "chat_template_kwargs"
"""What vLLM and llama.cpp call `variables`."""
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
    parallel_tool_calls: bool = option(True, help="whether a reply may call several tools")
    unchecked_calls: bool = option(
        False, help="whether the arguments of a call may be anything, also what the tool's schema rules out"
    )
    reasoning: ReasoningMode = option(
        "capture", help="what becomes of the model's reasoning: part of the text, left out, or apart"
    )
    reasoning_budget: int | None = option(
        None, low=0, help="tokens that the model may reason for", unset="as many as it needs"
    )
    overflow: Overflow = option("error", help="what happens when the conversation no longer fits")
    limit_to_context: bool = option(
        False, help="whether max_tokens may be more than fits; the reply then ends where the context does"
    )
    keep_reasoning: bool | None = option(
        None,
        help="whether the template shows the reasoning of earlier turns, where it has a switch for that",
        unset="left to the template",
    )
    continue_final_message: bool = option(
        False, help="whether the reply continues the last message, which is the assistant's"
    )
    add_generation_prompt: bool | None = option(
        None,
        help="whether the prompt ends with what opens a reply",
        unset="unless a message is continued",
    )
    date: str | None = option(
        None,
        characters=40,
        help="the date, or the date and time, that a template reads, in ISO 8601",
        unset="today",
    )
    stable_prefix: bool = option(
        False, help="whether text that clients are known to change at every turn is moved behind the rest"
    )
    settle: int = option(
        0,
        low=0,
        high=1 << 20,
        help="tokens of the next prompt's beginning to read after the reply, while no request is served",
    )
    cache_marks: Sequence[KeptPrefix] = ()
    """Up to where the state of the conversation is to be kept for a time."""
    variables: Mapping[str, Any] | None = None
    """For the template. `chat_template_kwargs` are the same."""

    @property
    def opens_reply(self) -> bool:
        """Whether the prompt ends with what opens a reply."""
        opens = self.add_generation_prompt
        return not self.continue_final_message if opens is None else opens

    @property
    def now(self) -> datetime | None:
        return None if self.date is None else datetime.fromisoformat(self.date)

    def __post_init__(self) -> None:
        check_options(self)
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidInputError(
                "continue_final_message continues a message, and add_generation_prompt begins another: "
                "set one of them"
            )
        if len(self.cache_marks) > _MARKS or not all(
            isinstance(m, KeptPrefix) and m.after is not None for m in self.cache_marks
        ):
            raise InvalidInputError(f"cache_marks are at most {_MARKS} of type KeptPrefix")
        try:
            _ = self.now
        except (TypeError, ValueError):
            raise InvalidInputError(f"date is such as 2026-01-31, got {self.date!r}") from None
        if self.variables is not None and not isinstance(self.variables, Mapping):
            raise InvalidInputError(f"variables are a mapping, got {type(self.variables).__name__}")
        if taken := sorted(RESERVED & (self.variables or {}).keys()):
            raise InvalidInputError(f"variables: {taken[0]} is set for the template, leave it out")

    @classmethod
    def split(cls, keywords: Mapping[str, Any]) -> tuple[ChatOptions, dict[str, Any]]:
        """The options among a caller's keywords, and the other keywords: those of `Request.of`."""
        if unknown := unknown_options(keywords, KEYWORDS | cls.__dataclass_fields__.keys() | {_KWARGS}):
            raise unknown
        own = {name: value for name, value in keywords.items() if name in cls.__dataclass_fields__}
        others = {name: value for name, value in keywords.items() if name not in own and name != _KWARGS}
        own["tools"] = tuple(Tool.parse(tool) for tool in own.get("tools") or ())
        if (more := keywords.get(_KWARGS)) is not None:
            if not isinstance(more, Mapping):
                raise InvalidInputError(f"{_KWARGS} are a mapping, got {type(more).__name__}")
            own["variables"] = {**(own.get("variables") or {}), **more}
        return cls(**own), others


# The keywords of a chat request, typed.


class TurnKeywords(ReplyKeywords, total=False):
    """How a turn of a conversation is made."""

    tools: Sequence[Tool | Mapping[str, Any] | Callable[..., Any]] | None
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    unchecked_calls: bool
    reasoning: ReasoningMode
    reasoning_budget: int | None
    overflow: Overflow
    limit_to_context: bool
    keep_reasoning: bool | None
    stable_prefix: bool
    settle: int
    continue_final_message: bool
    add_generation_prompt: bool | None
    date: str | None
    cache_marks: Sequence[KeptPrefix]
    variables: Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None


class ChatKeywords(TurnKeywords, total=False):
    """What `chat` and its like take besides the messages."""

    namespace: str
