"""A response piece by piece: events with names and numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import to_json

from perdure.chat.message import Message, ToolCall
from perdure.chat.reply import ChatDelta, ChatReply
from perdure.server.api_error import ApiError
from perdure.server.client_job import PromptProgress
from perdure.server.protocols.call_buffer import CallBuffer
from perdure.server.protocols.responses.answers import ResponseHead
from perdure.server.protocols.responses.errors import sent_differs
from perdure.server.protocols.responses.items import Item, text_part
from perdure.server.sse import Frame, named_event, waiting
from perdure.sessions.turn import Turn

Event = dict[str, Any]
OPENING = 1
"""The number of the last event that says nothing of the reply."""
_NUMBER = -7_777_777
"""Stands where a number is to be put."""


@dataclass(frozen=True, slots=True)
class SentPart:
    """How far the events of a response were sent: the number of the last one, and a digest of their text."""

    number: int
    digest: str


class ResponseWriter:
    """Events of one response, numbered from 0 without a gap.

    The same tokens make the same events with the same numbers, so that a reader whose stream broke can go on
    behind the last one that it has: in `after` is its number. Calls come last, as they do in the whole.

    Whether the reply that is made again is the same is checked against what was `sent` before: a client that
    has a part of it gets nothing until the same part has come again, and an error where another one did.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        head: ResponseHead,
        *,
        after: int = -1,
        sent: SentPart | None = None,
        notes: dict[str, Any] | None = None,
    ) -> None:
        self._head = head
        self._after = after
        self._number = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._before = sent
        self._waiting = b""
        """Events for a client that has a part, while that part has not come again."""
        self.came_again: bool | None = True if sent is None else None
        """Whether the part that was sent before has come again. None while that is not known."""
        self.ended = False
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

    @property
    def sent(self) -> SentPart:
        return SentPart(self._number - 1, self._digest.hexdigest())

    def ending(self, replies: Sequence[ChatReply]) -> bytes:
        return self._ended(self._head.whole(replies))

    def completed(self, response: dict[str, Any]) -> bytes:
        """The end of a response that has no output."""
        return self._written([{"type": "response.completed", "response": response}])

    def broken(self, error: ApiError) -> bytes:
        if self._withholds:
            # The client has a part of another reply, or of one that did not come this far again.
            self._part, self._before = None, None
            self._output.clear()
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

    @property
    def _withholds(self) -> bool:
        return self._before is not None and self._after > OPENING

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
        self._digest.update(f"{part.kind}\0{text}\0".encode("utf-8", "surrogatepass"))
        self._notes.setdefault("deltas", {}).setdefault(part.kind, []).append(len(text))
        number, self._number = self._number, self._number + 1
        if logprobs:
            part.logprobs += logprobs
        if number <= self._after:
            event = b""
        elif logprobs:
            event = named_event({**part.delta(text), "sequence_number": number, "logprobs": logprobs})
        else:
            event = part.frame(text).replace(part.blank, b"%d" % number, 1)
        return event if self._before is None else self._checked(event)

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
        self.ended = True
        self._take(self._calls.finish())
        if not (self._part or self._output or self._whole_calls):
            # A reply that says nothing is an empty message.
            _, written = self._entered("text")
        else:
            written = b""
        written += self._left("incomplete" if status == "incomplete" else "completed")
        for number, call in enumerate(self._whole_calls):
            written += self._written(self._call(call, number))
        written += self._written([{"type": f"response.{status}", "response": response}])
        if self._withholds:
            raise sent_differs()
        return written

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
        written = b"".join(parts)
        return written if self._before is None else self._checked(written)

    def _checked(self, events: bytes) -> bytes:
        """Events of a response of which a part was sent before: nothing for a client that has of it, until
        the same part has come again."""
        assert self._before is not None
        if self.came_again is None and self._number > self._before.number:
            # Only text changes the digest, and text is counted event by event: it is of that very number.
            self.came_again = self._digest.hexdigest() == self._before.digest
        if not self._withholds:
            return events
        self._waiting += events
        if not self.came_again:
            return b""
        self._before = None
        events, self._waiting = self._waiting, b""
        return events


def failed_event(head: ResponseHead, error: ApiError, *, number: int) -> bytes:
    """The one event of a stream that says nothing of the reply."""
    response = head.failed(error)
    return named_event({"type": "response.failed", "response": response, "sequence_number": number})


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
