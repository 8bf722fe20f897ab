"""A response as a stream: events with names and numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, Literal

from pydantic_core import to_json

from perdure import ChatDelta, ChatReply, Message, ToolCall, Turn
from perdure.ext.responses.answers import ResponseHead, sent_differs
from perdure.ext.responses.items import Item, text_part
from perdure.spi.server import ApiError, CallBuffer, Events, ProtocolEvent, named_event

Data = dict[str, Any]
OPENING = 1
"""The number of the last event that says nothing of the reply."""
_NUMBER, _TEXT = -7_777_777, "\0"
"""Stand where a number and a text are to be put."""


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
        self._withheld: list[ProtocolEvent] = []
        self.came_again: bool | None = True if sent is None else None
        """Whether the part that was sent before has come again. None while that is not known."""
        self.ended = False
        self._notes = notes if notes is not None else {}
        self._part: _OpenPart | None = None
        self._output: list[Item] = []
        self._calls = CallBuffer()
        self._whole_calls: list[ToolCall] = []

    # As a stream's writer.

    def keep_alive(self, progress: dict[str, Any]) -> Events:
        """The second event again, always with its own number."""
        return [named_event({**self._in_progress(), "sequence_number": 1, **progress})]

    def start(self) -> Events:
        created = {"type": "response.created", "response": self._head.shown("in_progress")}
        return self._numbered([created, self._in_progress()])

    def delta(self, delta: ChatDelta) -> Events:
        part = self._part
        if (
            delta.text
            and part is not None
            and part.kind == "text"
            and not (delta.reasoning or delta.logprobs)
        ):
            self._hold(delta)
            return self._delta(part, delta.text)
        events: list[ProtocolEvent] = []
        if delta.reasoning:
            part, opened = self._entered("reasoning")
            events += [*opened, *self._delta(part, delta.reasoning)]
        if delta.text:
            part, opened = self._entered("text")
            events += [*opened, *self._delta(part, delta.text, self._head.logprobs(delta.logprobs))]
        self._hold(delta)
        return events

    @property
    def sent(self) -> SentPart:
        return SentPart(self._number - 1, self._digest.hexdigest())

    def end(self, replies: Sequence[ChatReply]) -> Events:
        return self._ended(self._head.whole(replies))

    def error(self, error: ApiError) -> Events:
        if self._withholds:
            # The client has a part of another reply, or of one that did not come this far again.
            self._part, self._before = None, None
            self._output.clear()
        events = self._left("incomplete")
        failed = {"type": "response.failed", "response": self._head.failed(error, self._output)}
        return [*events, *self._numbered([failed])]

    # Of what is stored.

    def replay(self, turn: Turn) -> Iterator[ProtocolEvent]:
        """The events of a response that was made before, as they were sent then."""
        yield from self.start()
        reply = turn.reply or Message(role="assistant", content="")
        lengths = turn.settings.get("deltas")
        lengths = lengths if isinstance(lengths, dict) else {}
        for kind, text in (("reasoning", reply.reasoning or ""), ("text", reply.content or "")):
            for part in _cut(text, lengths.get(kind)):
                yield from self.delta(
                    ChatDelta(reasoning=part) if kind == "reasoning" else ChatDelta(text=part)
                )
        self._whole_calls = list(reply.tool_calls)
        yield from self._ended(self._head.stored(turn))

    # Inside.

    @property
    def _withholds(self) -> bool:
        return self._before is not None and self._after > OPENING

    def _in_progress(self) -> Data:
        return {"type": "response.in_progress", "response": self._head.shown("in_progress")}

    def _hold(self, delta: ChatDelta) -> None:
        if delta.tool_calls:
            self._take(self._calls.push(delta.tool_calls))

    def _take(self, calls: Sequence[Any]) -> None:
        self._whole_calls += [
            ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in calls
        ]

    def _delta(
        self, part: _OpenPart, text: str, logprobs: list[dict[str, Any]] | None = None
    ) -> Sequence[ProtocolEvent]:
        part.texts.append(text)
        self._digest.update(f"{part.kind}\0{text}\0".encode("utf-8", "surrogatepass"))
        self._notes.setdefault("deltas", {}).setdefault(part.kind, []).append(len(text))
        number, self._number = self._number, self._number + 1
        if logprobs:
            part.logprobs += logprobs
        events: tuple[ProtocolEvent, ...] = ()
        if number > self._after and logprobs:
            events = (named_event({**part.delta(text), "sequence_number": number, "logprobs": logprobs}),)
        elif number > self._after:
            events = (part.event(text, number),)
        return events if self._before is None else self._checked(events)

    def _entered(self, kind: Literal["reasoning", "text"]) -> tuple[_OpenPart, Events]:
        """Have an item of this kind open."""
        if self._part is not None and self._part.kind == kind:
            return self._part, ()
        left = self._left()
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
        added = self._numbered(
            [
                {"type": "response.output_item.added", "output_index": index, "item": item},
                {"type": f"response.{part.group}.added", **part.place, "part": part.empty},
            ]
        )
        return part, [*left, *added]

    def _left(self, status: str = "completed") -> Sequence[ProtocolEvent]:
        """End the item that is open."""
        part, self._part = self._part, None
        if part is None:
            return []
        text, form = "".join(part.texts), self._head.form
        if part.kind == "text":
            item = form.message(text, status=status, logprobs=part.logprobs)
        else:
            item = form.reasoning(text, status=status)
        self._output.append(item)
        done: Data = {"type": f"{part.name}.done", **part.place, "text": text}
        if part.kind == "text":
            done["logprobs"] = part.logprobs
        whole = {**part.empty, "text": text}
        return self._numbered(
            [
                done,
                {"type": f"response.{part.group}.done", **part.place, "part": whole},
                {"type": "response.output_item.done", "output_index": part.index, "item": item},
            ]
        )

    def _ended(self, response: dict[str, Any]) -> Events:
        status = response["status"]
        self.ended = True
        self._take(self._calls.finish())
        events: list[ProtocolEvent] = []
        if not (self._part or self._output or self._whole_calls):
            # A reply that says nothing is an empty message.
            events += self._entered("text")[1]
        events += self._left("incomplete" if status == "incomplete" else "completed")
        for number, call in enumerate(self._whole_calls):
            events += self._numbered(self._call(call, number))
        events += self._numbered([{"type": f"response.{status}", "response": response}])
        if self._withholds:
            raise sent_differs()
        return events

    def _call(self, call: ToolCall, number: int) -> list[Data]:
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
        done: Data = {"type": f"{name}.done", **place, key: item[key]}
        if key == "arguments":
            done["name"] = call.name
        return [
            {"type": "response.output_item.added", "output_index": index, "item": begun},
            {"type": f"{name}.delta", **place, "delta": item[key]},
            done,
            {"type": "response.output_item.done", "output_index": index, "item": item},
        ]

    def _numbered(self, events: Sequence[Data]) -> Sequence[ProtocolEvent]:
        """Events with their numbers, as far as they are behind `after`."""
        numbered = []
        for data in events:
            number, self._number = self._number, self._number + 1
            if number > self._after:
                numbered.append(named_event({**data, "sequence_number": number}))
        return numbered if self._before is None else self._checked(numbered)

    def _checked(self, events: Events) -> Events:
        """Events of a response of which a part was sent before: none for a client that has of it, until the
        same part has come again."""
        assert self._before is not None
        if self.came_again is None and self._number > self._before.number:
            # Only text changes the digest, and text is counted event by event: it is of that very number.
            self.came_again = self._digest.hexdigest() == self._before.digest
        if not self._withholds:
            return events
        self._withheld += events
        if not self.came_again:
            return ()
        self._before = None
        events, self._withheld = self._withheld, []
        return events


class WarmUpWriter(ResponseWriter):
    """Events of a response whose prompt is read, and that is all that was asked for."""

    def delta(self, delta: ChatDelta) -> Events:
        return ()

    def end(self, replies: Sequence[ChatReply]) -> Events:
        empty: Data = {"output": [], "status": "completed", "incomplete_details": None}
        response = {**self._head.whole(replies), **empty}
        return self._numbered([{"type": "response.completed", "response": response}])


def failed_event(head: ResponseHead, error: ApiError, *, number: int) -> ProtocolEvent:
    """The one event of a stream that says nothing of the reply."""
    response = head.failed(error)
    return named_event({"type": "response.failed", "response": response, "sequence_number": number})


class _OpenPart:
    """The part of an item that is being written."""

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
        # The number stands before any text that a model wrote.
        data = {"type": f"{name}.delta", "sequence_number": _NUMBER, **self.delta(_TEXT)}
        self._name, whole, _ = named_event(data)
        self._before, _, rest = whole.partition(to_json(_NUMBER))
        self._between, _, self._after = rest.partition(to_json(_TEXT))

    def event(self, text: str, number: int) -> ProtocolEvent:
        """The event of a delta."""
        encoded = encode_basestring(text).encode()
        return ProtocolEvent(
            self._name, b"%b%d%b%b%b" % (self._before, number, self._between, encoded, self._after)
        )

    def delta(self, text: str) -> Data:
        event: Data = {"type": f"{self.name}.delta", **self.place, "delta": text}
        if self.kind == "text":
            event["logprobs"] = []
        return event


def _cut(text: str, lengths: Any) -> Iterator[str]:
    """A text in the pieces in which it was sent, or whole."""
    at = 0
    for length in lengths if isinstance(lengths, list) else ():
        if isinstance(length, int) and length > 0 and at + length <= len(text):
            yield text[at : at + length]
            at += length
    if at < len(text):
        yield text[at:]
