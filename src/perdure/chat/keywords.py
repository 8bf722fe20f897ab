"""The keywords of a chat request, typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perdure.chat.message import Tool
from perdure.chat.options import ToolChoice
from perdure.config import Overflow, ReasoningMode
from perdure.decode.keywords import ReplyKeywords
from perdure.decode.slots import KeptPrefix


class TurnKeywords(ReplyKeywords, total=False):
    """How a turn of a conversation is made."""

    tools: Sequence[Tool | Mapping[str, Any]] | None
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    reasoning: ReasoningMode
    reasoning_budget: int | None
    overflow: Overflow
    limit_to_context: bool
    keep_reasoning: bool | None
    continue_final_message: bool
    add_generation_prompt: bool | None
    date: str | None
    cache_marks: Sequence[KeptPrefix]
    variables: Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None


class ChatKeywords(TurnKeywords, total=False):
    """What `chat` and its like take besides the messages."""

    namespace: str
