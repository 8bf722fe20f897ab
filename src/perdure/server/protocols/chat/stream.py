"""Chat answers piece by piece: chunks in OpenAI's shape."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perdure.chat.reply import CallDelta, ChatDelta, ChatReply
from perdure.server import sse
from perdure.server.protocols.chat.answers import ChatHead
from perdure.server.schemas.base import UsageAnswer


class ChatWriter(sse.ChunkWriter):
    """Chunks in OpenAI's shape. Every sample opens once and ends once, whatever happens in between."""

    def __init__(self, head: ChatHead, n: int, *, include_usage: bool) -> None:
        self._head = head
        self._open = set(range(n))
        self._usage: dict[str, Any] = {"usage": None} if include_usage else {}
        self._frames = [sse.Frame(functools.partial(self._text, index)) for index in range(n)]

    def waiting_chunk(self, told: dict[str, Any]) -> sse.Chunk:
        return self._piece(min(self._open, default=0), {}, more=told)

    def opening_chunks(self) -> Iterable[sse.Chunk]:
        for index in sorted(self._open):
            yield self._piece(index, {"role": "assistant", "content": ""})

    def piece(self, delta: ChatDelta) -> bytes:
        if delta.text and not (delta.reasoning or delta.tool_calls or delta.logprobs):
            return self._frames[delta.index](delta.text)
        new: dict[str, Any] = {}
        if delta.text:
            new["content"] = delta.text
        if delta.reasoning:
            new["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            new["tool_calls"] = [_call(call) for call in delta.tool_calls]
        logprobs = self._head.logprobs(delta.logprobs) if delta.logprobs else None
        if not new and not logprobs:
            return b""
        shown = logprobs.model_dump() if logprobs else None
        return sse.events([self._piece(delta.index, new, logprobs=shown)])

    def ending_chunks(self, replies: Sequence[ChatReply]) -> Iterable[sse.Chunk]:
        for reply in replies:
            self._open.discard(reply.index)
            extension = self._head.extension(reply).model_dump()
            yield self._piece(reply.index, {}, reply.finish_reason, more={"perdure": extension})
        if self._usage:
            usage = UsageAnswer.of([reply.usage for reply in replies])
            yield self._head.chunk([], {"usage": usage.model_dump()})

    def broken_chunks(self) -> Iterable[sse.Chunk]:
        for index in sorted(self._open):
            yield self._piece(index, {}, "error")

    def _text(self, index: int, text: str) -> dict[str, Any]:
        return self._piece(index, {"content": text})

    def _piece(
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
