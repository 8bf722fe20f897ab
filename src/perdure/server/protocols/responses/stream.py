"""A response piece by piece: events with names and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic_core import to_json

from perdure.chat.message import Message, ToolCall
from perdure.chat.reply import ChatDelta, ChatReply
from perdure.server.api_error import ApiError
from perdure.server.client_job import PromptProgress
from perdure.server.protocols.call_buffer import CallBuffer
from perdure.server.protocols.responses.answers import ResponseHead
from perdure.server.protocols.responses.items import Item, text_part
from perdure.server.sse import Frame, named_event, waiting
from perdure.sessions.turn import Turn

Event = dict[str, Any]
_NUMBER = -7_777_777
"""Stands where a number is to be put."""


class ResponseWriter:
    """Events of one response, numbered from 0 without a gap.

    The same tokens make the same events with the same numbers, so that a reader whose stream broke can go on
    behind the last one that it has: in `after` is its number. Calls come last, as they do in the whole.
    """

    media_type = "text/event-stream"

    def __init__(self, head: ResponseHead, *, after: int = -1, notes: dict[str, Any] | None = None) -> None:
        self._head = head
        self._after = after
        self._number = 0
        self._notes = notes if notes is not None else {}
        self._part: _OpenPart | None = None
        self._output: list[Item] = []
        self._calls = CallBuffer()
        self._whole_calls: list[ToolCall] = []

    # As a stream's writer.

    def sign_of_life(self, progress: PromptProgress | None) -> bytes:
        """The second event again, always with its own number."""
        return named_event({**self._in_progress(), "sequence_number": 1, **waiting(progress)})

    def opening(self) -> bytes:
        return self._written([{"type": "response.created", "response": self._head.shown("in_progress")}]) + (
            self._written([self._in_progress()])
        )

    def piece(self, delta: ChatDelta) -> bytes:
        part = self._part
        if (
            delta.text
            and part is not None
            and part.kind == "text"
            and not (delta.reasoning or delta.logprobs)
        ):
            self._hold(delta)
            return self._delta(part, delta.text)
        written = b""
        if delta.reasoning:
            part, opened = self._entered("reasoning")
            written += opened + self._delta(part, delta.reasoning)
        if delta.text:
            part, opened = self._entered("text")
            written += opened + self._delta(part, delta.text, self._head.logprobs(delta.logprobs))
        self._hold(delta)
        return written

    def ending(self, replies: Sequence[ChatReply]) -> bytes:
        return self._ended(self._head.whole(replies))

    def completed(self, response: dict[str, Any]) -> bytes:
        """The end of a response that has no output."""
        return self._written([{"type": "response.completed", "response": response}])

    def broken(self, error: ApiError) -> bytes:
        written = self._left("incomplete")
        return written + self._written(
            [{"type": "response.failed", "response": self._head.failed(error, self._output)}]
        )

    # Of what is stored.

    def replay(self, turn: Turn) -> Iterator[bytes]:
        """The events of a response that was made before, as they were sent then."""
        yield self.opening()
        reply = turn.reply or Message(role="assistant", content="")
        lengths = turn.settings.get("deltas")
        lengths = lengths if isinstance(lengths, dict) else {}
        for kind, text in (("reasoning", reply.reasoning or ""), ("text", reply.content or "")):
            for piece in _cut(text, lengths.get(kind)):
                yield self.piece(ChatDelta(reasoning=piece) if kind == "reasoning" else ChatDelta(text=piece))
        self._whole_calls = list(reply.tool_calls)
        yield self._ended(self._head.stored(turn))

    # Inside.

    def _in_progress(self) -> Event:
        return {"type": "response.in_progress", "response": self._head.shown("in_progress")}

    def _hold(self, delta: ChatDelta) -> None:
        if delta.tool_calls:
            self._take(self._calls.push(delta.tool_calls))

    def _take(self, calls: Sequence[Any]) -> None:
        self._whole_calls += [
            ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in calls
        ]

    def _delta(self, part: _OpenPart, text: str, logprobs: list[dict[str, Any]] | None = None) -> bytes:
        part.texts.append(text)
        self._notes.setdefault("deltas", {}).setdefault(part.kind, []).append(len(text))
        number, self._number = self._number, self._number + 1
        if number <= self._after:
            if logprobs:
                part.logprobs += logprobs
            return b""
        if logprobs:
            part.logprobs += logprobs
            return named_event({**part.delta(text), "sequence_number": number, "logprobs": logprobs})
        return part.frame(text).replace(part.blank, b"%d" % number, 1)

    def _entered(self, kind: Literal["reasoning", "text"]) -> tuple[_OpenPart, bytes]:
        """Have an item of this kind open."""
        if self._part is not None and self._part.kind == kind:
            return self._part, b""
        written = self._left()
        form, index = self._head.form, len(self._output)
        if kind == "text":
            item = form.message(None, status="in_progress")
            part = _OpenPart(kind, item["id"], index, "response.output_text", "content_part", text_part(""))
        elif form.summarised:
            item = form.reasoning(None, status="in_progress")
            empty = {"type": "summary_text", "text": ""}
            part = _OpenPart(
                kind, item["id"], index, "response.reasoning_summary_text", "reasoning_summary_part", empty
            )
        else:
            item = {**form.reasoning(None, status="in_progress"), "content": []}
            empty = {"type": "reasoning_text", "text": ""}
            part = _OpenPart(kind, item["id"], index, "response.reasoning_text", "content_part", empty)
        self._part = part
        return part, written + self._written(
            [
                {"type": "response.output_item.added", "output_index": index, "item": item},
                {"type": f"response.{part.group}.added", **part.place, "part": part.empty},
            ]
        )

    def _left(self, status: str = "completed") -> bytes:
        """End the item that is open."""
        part, self._part = self._part, None
        if part is None:
            return b""
        text, form = "".join(part.texts), self._head.form
        if part.kind == "text":
            item = form.message(text, status=status, logprobs=part.logprobs)
        else:
            item = form.reasoning(text, status=status)
        self._output.append(item)
        done: Event = {"type": f"{part.name}.done", **part.place, "text": text}
        if part.kind == "text":
            done["logprobs"] = part.logprobs
        whole = {**part.empty, "text": text}
        return self._written(
            [
                done,
                {"type": f"response.{part.group}.done", **part.place, "part": whole},
                {"type": "response.output_item.done", "output_index": part.index, "item": item},
            ]
        )

    def _ended(self, response: dict[str, Any]) -> bytes:
        status = response["status"]
        self._take(self._calls.finish())
        if not (self._part or self._output or self._whole_calls):
            # A reply that says nothing is an empty message.
            _, written = self._entered("text")
        else:
            written = b""
        written += self._left("incomplete" if status == "incomplete" else "completed")
        for number, call in enumerate(self._whole_calls):
            written += self._written(self._call(call, number))
        return written + self._written([{"type": f"response.{status}", "response": response}])

    def _call(self, call: ToolCall, number: int) -> list[Event]:
        form, index = self._head.form, len(self._output)
        item = form.call(call, number)
        self._output.append(item)
        place = {"item_id": item["id"], "output_index": index}
        name, key = (
            ("response.custom_tool_call_input", "input")
            if item["type"] == "custom_tool_call"
            else ("response.function_call_arguments", "arguments")
        )
        begun = form.call(call, number, begun=True)
        done: Event = {"type": f"{name}.done", **place, key: item[key]}
        if key == "arguments":
            done["name"] = call.name
        return [
            {"type": "response.output_item.added", "output_index": index, "item": begun},
            {"type": f"{name}.delta", **place, "delta": item[key]},
            done,
            {"type": "response.output_item.done", "output_index": index, "item": item},
        ]

    def _written(self, events: Sequence[Event]) -> bytes:
        parts = []
        for event in events:
            number, self._number = self._number, self._number + 1
            if number > self._after:
                parts.append(named_event({**event, "sequence_number": number}))
        return b"".join(parts)


class _OpenPart:
    """The part of an item that is being written."""

    blank = to_json(_NUMBER)

    def __init__(
        self,
        kind: Literal["reasoning", "text"],
        item_id: str,
        index: int,
        name: str,
        group: str,
        empty: dict[str, Any],
    ) -> None:
        self.kind, self.index, self.name, self.group, self.empty = kind, index, name, group, empty
        at = "summary_index" if group == "reasoning_summary_part" else "content_index"
        self.place = {"item_id": item_id, "output_index": index, at: 0}
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.frame = Frame(lambda text: {**self.delta(text), "sequence_number": _NUMBER}, _number_first)

    def delta(self, text: str) -> Event:
        event: Event = {"type": f"{self.name}.delta", **self.place, "delta": text}
        if self.kind == "text":
            event["logprobs"] = []
        return event


def _number_first(event: Event) -> bytes:
    """An event whose number stands before any text that a model wrote."""
    return named_event({"type": event["type"], "sequence_number": event["sequence_number"], **event})


def _cut(text: str, lengths: Any) -> Iterator[str]:
    """A text in the pieces in which it was sent, or whole."""
    at = 0
    for length in lengths if isinstance(lengths, list) else ():
        if isinstance(length, int) and length > 0 and at + length <= len(text):
            yield text[at : at + length]
            at += length
    if at < len(text):
        yield text[at:]
