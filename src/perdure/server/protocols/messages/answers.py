"""Whole answers of Anthropic's Messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from perdure.chat.reply import ChatReply
from perdure.server.core.app_state import AppState
from perdure.server.core.schemas import ResponseSchema
from perdure.server.protocols.chat.answers import ExtensionAnswer, extension
from perdure.server.protocols.messages.requests import FIVE_MINUTES, HOUR, MessagesRequest


class CacheCreation(ResponseSchema):
    """Tokens that were computed and are kept for a time, by how long that is."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int

    @classmethod
    def of(cls, reply: ChatReply) -> CacheCreation:
        """From what was found kept up to each mark: of two marks at one place, the one that lasts longer."""
        counts = {FIVE_MINUTES: 0, HOUR: 0}
        end = reply.usage.cached_tokens
        for length, seconds in sorted((pin.length, -(pin.seconds or 0)) for pin in reply.reuse.pins):
            counts[-seconds] += max(0, length - end)
            end = max(end, length)
        return cls(ephemeral_5m_input_tokens=counts[FIVE_MINUTES], ephemeral_1h_input_tokens=counts[HOUR])

    @property
    def total(self) -> int:
        return self.ephemeral_5m_input_tokens + self.ephemeral_1h_input_tokens


class MessagesUsage(ResponseSchema):
    """Tokens. What was read is the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    output_tokens_details: dict[str, int]

    @classmethod
    def of(cls, reply: ChatReply) -> MessagesUsage:
        usage, created = reply.usage, CacheCreation.of(reply)
        return cls(
            input_tokens=usage.prompt_tokens - usage.cached_tokens - created.total,
            cache_creation_input_tokens=created.total,
            cache_read_input_tokens=usage.cached_tokens,
            cache_creation=created,
            output_tokens=usage.completion_tokens,
            output_tokens_details={"thinking_tokens": usage.reasoning_tokens},
        )


class MessagesAnswer(ResponseSchema):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage
    perdure: ExtensionAnswer


class CountAnswer(ResponseSchema):
    input_tokens: int


class MessagesHead:
    """What whole answers and streams of one request say alike."""

    def __init__(self, asked: MessagesRequest, app_state: AppState, namespace: str) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self.model = app_state.name
        self.hides_thinking = asked.hides_thinking
        self._max_tokens = asked.max_tokens
        self._seal = app_state.seal
        self._namespace = namespace

    def whole(self, replies: Sequence[ChatReply]) -> MessagesAnswer:
        reply = replies[0]
        stop_reason, stop_sequence = self.ending(reply)
        return MessagesAnswer(
            id=self.id,
            model=self.model,
            content=self._content(reply),
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=MessagesUsage.of(reply),
            perdure=extension(reply),
        )

    def signature(self, thinking: str) -> str:
        """What stands for thoughts when they are sent back, so that they are found again as they were."""
        return self._seal.close(thinking, self._namespace)

    def ending(self, reply: ChatReply) -> tuple[str, str | None]:
        """The stop reason, and the stop sequence that was met."""
        if reply.finish_reason == "tool_calls":
            return "tool_use", None
        if reply.finish_reason == "length":
            full = reply.usage.completion_tokens < self._max_tokens
            return ("model_context_window_exceeded" if full else "max_tokens"), None
        return ("end_turn", None) if reply.stop is None else ("stop_sequence", reply.stop)

    def _content(self, reply: ChatReply) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            shown = "" if self.hides_thinking else reply.reasoning
            signature = self.signature(reply.reasoning)
            content.append({"type": "thinking", "thinking": shown, "signature": signature})
        if reply.text:
            content.append({"type": "text", "text": reply.text})
        for call in reply.tool_calls:
            content.append(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": call_input(call.arguments)}
            )
        return content


def call_input(arguments: str) -> dict[str, Any]:
    """Arguments as an object. What is none, since a reply was cut short, stands under a name of its own."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"_unparsed": arguments}
