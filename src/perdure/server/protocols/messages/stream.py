"""Answers of Anthropic's Messages as a stream: events with names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from perdure.chat.reply import ChatDelta, ChatReply
from perdure.server.core.api_error import ApiError
from perdure.server.core.protocol import Event, Events, EventTemplate, named_event
from perdure.server.protocols.call_buffer import CallBuffer, WholeCall
from perdure.server.protocols.chat.answers import extension
from perdure.server.protocols.messages.answers import MessagesHead, MessagesUsage
from perdure.server.protocols.messages.errors import error_body

Kind = Literal["thinking", "text"]


class MessagesWriter:
    """Events of one message. Every block starts once and stops once, and blocks do not overlap."""

    def __init__(self, head: MessagesHead, prompt_tokens: int) -> None:
        self._head = head
        self._prompt_tokens = prompt_tokens
        self._next = 0
        """The index of the next block."""
        self._kind: Kind | None = None
        """Of the block that is open."""
        self._template: EventTemplate | None = None
        self._thoughts: list[str] = []
        self._calls = CallBuffer()

    def keep_alive(self, progress: dict[str, Any]) -> Events:
        return [named_event({"type": "ping", **progress})]

    def start(self) -> Events:
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
        return [named_event({"type": "message_start", "message": message}), named_event({"type": "ping"})]

    def delta(self, delta: ChatDelta) -> Events:
        if delta.text and self._kind == "text" and not (delta.reasoning or delta.tool_calls):
            assert self._template is not None
            return (self._template(delta.text),)
        events: list[Event] = []
        self._calls.drop(delta.tool_calls)
        if delta.reasoning:
            events += self._enter("thinking")
            self._thoughts.append(delta.reasoning)
            if not self._head.hides_thinking:
                assert self._template is not None
                events.append(self._template(delta.reasoning))
        if delta.text:
            events += self._enter("text")
            assert self._template is not None
            events.append(self._template(delta.text))
        return [*events, *self._write_calls(self._calls.push(delta.tool_calls))]

    def end(self, replies: Sequence[ChatReply]) -> Events:
        reply = replies[0]
        stop_reason, stop_sequence = self._head.ending(reply)
        last = {
            "type": "message_delta",
            "delta": {"stop_reason": stop_reason, "stop_sequence": stop_sequence},
            "usage": MessagesUsage.of(reply).model_dump(),
            "perdure": extension(reply).model_dump(),
        }
        return [
            *self._write_calls(self._calls.finish()),
            *self._leave(),
            named_event(last),
            named_event({"type": "message_stop"}),
        ]

    def error(self, error: ApiError) -> Events:
        return [named_event(error_body(error)[1])]

    def _enter(self, kind: Kind) -> list[Event]:
        """Have a block of this kind open."""
        if self._kind == kind:
            return []
        events = [*self._write_calls(self._calls.finish()), *self._leave()]
        index, self._kind = self._next, kind
        empty = (
            {"type": "text", "text": ""}
            if kind == "text"
            else {"type": "thinking", "thinking": "", "signature": ""}
        )

        def delta(text: str) -> dict[str, Any]:
            return _delta(index, {"type": f"{kind}_delta", kind: text})

        self._template = EventTemplate(delta, named_event)
        return [*events, _start(index, empty)]

    def _leave(self) -> list[Event]:
        """End the block that is open."""
        if self._kind is None:
            return []
        index, events = self._next, []
        if self._kind == "thinking":
            signature = self._head.signature("".join(self._thoughts))
            self._thoughts = []
            events.append(named_event(_delta(index, {"type": "signature_delta", "signature": signature})))
        self._kind, self._template = None, None
        self._next += 1
        return [*events, _stop(index)]

    def _write_calls(self, calls: Sequence[WholeCall]) -> list[Event]:
        if not calls:
            return []
        events = self._leave()
        for call in calls:
            index, self._next = self._next, self._next + 1
            json = {"type": "input_json_delta", "partial_json": call.arguments or "{}"}
            events += [
                _start(index, {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}),
                named_event(_delta(index, json)),
                _stop(index),
            ]
        return events


def _start(index: int, block: dict[str, Any]) -> Event:
    return named_event({"type": "content_block_start", "index": index, "content_block": block})


def _stop(index: int) -> Event:
    return named_event({"type": "content_block_stop", "index": index})


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}
