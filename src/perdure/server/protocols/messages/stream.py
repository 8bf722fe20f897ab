"""Answers of Anthropic's Messages piece by piece: events with names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from perdure.chat.reply import ChatDelta, ChatReply
from perdure.server.api_error import ApiError
from perdure.server.client_job import PromptProgress
from perdure.server.protocols.call_buffer import CallBuffer, WholeCall
from perdure.server.protocols.chat.answers import extension
from perdure.server.protocols.messages.answers import MessagesHead, MessagesUsage
from perdure.server.protocols.messages.errors import error_body
from perdure.server.sse import Frame, named_event, waiting

Kind = Literal["thinking", "text"]


class MessagesWriter:
    """Events of one message. Every block starts once and stops once, and blocks do not overlap."""

    media_type = "text/event-stream"

    def __init__(self, head: MessagesHead, prompt_tokens: int) -> None:
        self._head = head
        self._prompt_tokens = prompt_tokens
        self._next = 0
        """The index of the next block."""
        self._kind: Kind | None = None
        """Of the block that is open."""
        self._frame: Frame | None = None
        self._thoughts: list[str] = []
        self._calls = CallBuffer()

    def sign_of_life(self, progress: PromptProgress | None) -> bytes:
        return named_event({"type": "ping", **waiting(progress)})

    def opening(self) -> bytes:
        message: dict[str, Any] = {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            # How much of it is cached is known at the end.
            "usage": {
                "input_tokens": self._prompt_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
            },
        }
        return named_event({"type": "message_start", "message": message}) + self.sign_of_life(None)

    def piece(self, delta: ChatDelta) -> bytes:
        if delta.text and self._kind == "text" and not (delta.reasoning or delta.tool_calls):
            assert self._frame is not None
            return self._frame(delta.text)
        written = b""
        self._calls.drop(delta.tool_calls)
        if delta.reasoning:
            written += self._enter("thinking")
            self._thoughts.append(delta.reasoning)
            if not self._head.hides_thinking:
                assert self._frame is not None
                written += self._frame(delta.reasoning)
        if delta.text:
            written += self._enter("text")
            assert self._frame is not None
            written += self._frame(delta.text)
        return written + self._write_calls(self._calls.push(delta.tool_calls))

    def ending(self, replies: Sequence[ChatReply]) -> bytes:
        reply = replies[0]
        written = self._write_calls(self._calls.finish()) + self._leave()
        stop_reason, stop_sequence = self._head.ending(reply)
        written += named_event(
            {
                "type": "message_delta",
                "delta": {"stop_reason": stop_reason, "stop_sequence": stop_sequence},
                "usage": MessagesUsage.of(reply).model_dump(),
                "perdure": extension(reply).model_dump(),
            }
        )
        return written + named_event({"type": "message_stop"})

    def broken(self, error: ApiError) -> bytes:
        return named_event(error_body(error)[1])

    def _enter(self, kind: Kind) -> bytes:
        """Have a block of this kind open."""
        if self._kind == kind:
            return b""
        written = self._write_calls(self._calls.finish()) + self._leave()
        index, self._kind = self._next, kind
        empty = (
            {"type": "text", "text": ""}
            if kind == "text"
            else {"type": "thinking", "thinking": "", "signature": ""}
        )

        def delta(text: str) -> dict[str, Any]:
            return _delta(index, {"type": f"{kind}_delta", kind: text})

        self._frame = Frame(delta, named_event)
        return written + _start(index, empty)

    def _leave(self) -> bytes:
        """End the block that is open."""
        if self._kind is None:
            return b""
        index, written = self._next, b""
        if self._kind == "thinking":
            signature = self._head.signature("".join(self._thoughts))
            self._thoughts = []
            written = named_event(_delta(index, {"type": "signature_delta", "signature": signature}))
        self._kind, self._frame = None, None
        self._next += 1
        return written + named_event({"type": "content_block_stop", "index": index})

    def _write_calls(self, calls: Sequence[WholeCall]) -> bytes:
        if not calls:
            return b""
        written = self._leave()
        for call in calls:
            index, self._next = self._next, self._next + 1
            written += _start(index, {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            json = {"type": "input_json_delta", "partial_json": call.arguments or "{}"}
            written += named_event(_delta(index, json))
            written += named_event({"type": "content_block_stop", "index": index})
        return written


def _start(index: int, block: dict[str, Any]) -> bytes:
    return named_event({"type": "content_block_start", "index": index, "content_block": block})


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}
