"""Chat answers as a stream: chunks in OpenAI's shape, and `[DONE]` at the end."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.chat.reply import CallDelta, ChatDelta, ChatReply
from perdure.server.core.api_error import ApiError
from perdure.server.core.protocol import DONE, Events, EventTemplate, event
from perdure.server.core.schemas import UsageAnswer
from perdure.server.protocols.chat.answers import ChatHead


class ChatWriter:
    """Chunks in OpenAI's shape. Every sample opens once and ends once, whatever happens in between."""

    def __init__(self, head: ChatHead, n: int, *, include_usage: bool) -> None:
        self._head = head
        self._open = set(range(n))
        self._usage: dict[str, Any] = {"usage": None} if include_usage else {}
        self._templates = [EventTemplate(functools.partial(self._text, index)) for index in range(n)]

    def keep_alive(self, progress: dict[str, Any]) -> Events:
        return [event(self._chunk(min(self._open, default=0), {}, more=progress))]

    def start(self) -> Events:
        return [
            event(self._chunk(index, {"role": "assistant", "content": ""})) for index in sorted(self._open)
        ]

    def delta(self, delta: ChatDelta) -> Events:
        if delta.text and not (delta.reasoning or delta.tool_calls or delta.logprobs):
            return (self._templates[delta.index](delta.text),)
        new: dict[str, Any] = {}
        if delta.text:
            new["content"] = delta.text
        if delta.reasoning:
            new["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            new["tool_calls"] = [_call(call) for call in delta.tool_calls]
        logprobs = self._head.logprobs(delta.logprobs) if delta.logprobs else None
        if not new and not logprobs:
            return ()
        return [event(self._chunk(delta.index, new, logprobs=logprobs.model_dump() if logprobs else None))]

    def end(self, replies: Sequence[ChatReply]) -> Events:
        chunks = []
        for reply in replies:
            self._open.discard(reply.index)
            extension = self._head.extension(reply).model_dump()
            chunks.append(self._chunk(reply.index, {}, reply.finish_reason, more={"perdure": extension}))
        if self._usage:
            usage = UsageAnswer.of([reply.usage for reply in replies])
            chunks.append(self._head.chunk([], {"usage": usage.model_dump()}))
        return [*map(event, chunks), DONE]

    def error(self, error: ApiError) -> Events:
        ends = [self._chunk(index, {}, "error") for index in sorted(self._open)]
        return [event(error.body), *map(event, ends), DONE]

    def _text(self, index: int, text: str) -> dict[str, Any]:
        return self._chunk(index, {"content": text})

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        *,
        logprobs: Any = None,
        more: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._head.chunk([choice], {**self._usage, **(more or {})})


def _call(call: CallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    shape: dict[str, Any] = {"index": call.index, "function": function}
    if call.name:
        function["name"] = call.name
    if call.id:
        shape |= {"id": call.id, "type": "function"}
    return shape
