"""Protocol: one way that clients speak to the server, as a value; and the events of its streams.

    writer    a stream in the protocol's words: events `(name, data)` for start, delta, keep-alive, end, error
    framing   events as bytes: server-sent events, or lines of JSON

    chat completions   data: {"choices": [{"delta": {"content": "Hi"}}]}
    Messages           event: content_block_delta
                       data: {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hi"}}
    Ollama             {"message": {"role": "assistant", "content": "Hi"}, "done": false}

The access log finds the protocol of a request by its path; body limits, errors and streams read it there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, NamedTuple, TypeVar
from typing import Protocol as Interface

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.types import Scope

from perdure.chat.reply import CallDelta
from perdure.server.core.api_error import PROTOCOL, ApiError
from perdure.server.core.schemas import ErrorAnswer, ResponseSchema

_BLANK = "\0"


class ProtocolEvent(NamedTuple):
    """One event, as it is sent."""

    name: bytes
    """Empty where the protocol has no names."""
    data: bytes
    """JSON."""
    id: bytes = b""
    """Its number, where a client can come back for those behind it."""


Events = Sequence[ProtocolEvent]


def event(data: dict[str, Any]) -> ProtocolEvent:
    """An event without a name."""
    return ProtocolEvent(b"", to_json(data))


DONE = ProtocolEvent(b"", b"[DONE]")
"""The last event of OpenAI's streams of chunks."""


def named_event(data: dict[str, Any]) -> ProtocolEvent:
    """An event whose name is the `type` of its data."""
    return ProtocolEvent(data["type"].encode(), to_json(data))


class EventTemplate:
    """An event of which only one text changes: made once, and filled in for every token."""

    def __init__(
        self, data: Callable[[str], dict[str, Any]], form: Callable[..., ProtocolEvent] = event
    ) -> None:
        self._name, whole, _ = form(data(_BLANK))
        self._before, self._after = whole.split(to_json(_BLANK))

    def __call__(self, text: str) -> ProtocolEvent:
        return ProtocolEvent(self._name, self._before + encode_basestring(text).encode() + self._after)


@dataclass(frozen=True, slots=True)
class Framing:
    """How events stand in the body of an answer."""

    media_type: str
    frame: Callable[[ProtocolEvent], bytes]


def _server_sent(event: ProtocolEvent) -> bytes:
    name, data, number = event
    if number:
        return b"id: %b\n" % number + _server_sent(ProtocolEvent(name, data))
    return b"event: %b\ndata: %b\n\n" % (name, data) if name else b"data: %b\n\n" % data


SSE = Framing("text/event-stream", _server_sent)
JSON_LINES = Framing("application/x-ndjson", lambda event: event.data + b"\n")


class Ending(Interface):
    """A delta or a reply: it has, or may have, a reason for its end."""

    @property
    def finish_reason(self) -> str | None: ...


D_contra = TypeVar("D_contra", bound=Ending, contravariant=True)
R_contra = TypeVar("R_contra", bound=Ending, contravariant=True)


class Writer(Interface[D_contra, R_contra]):
    """The events of one stream, in the words of one protocol."""

    def keep_alive(self, progress: dict[str, Any]) -> Events:
        """For a client that waits, or a proxy in between. `progress` says how much of the prompt is read."""
        ...

    def start(self) -> Events: ...
    def delta(self, delta: D_contra) -> Events:
        """What a delta brings; every token makes one."""
        ...

    def end(self, replies: Sequence[R_contra]) -> Events: ...
    def error(self, error: ApiError) -> Events:
        """Ends every reply that has not ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """One protocol. What differs by protocol outside of the protocol's folder is a field of this."""

    name: str
    prefix: str
    """How its paths begin."""
    routers: tuple[APIRouter, ...] = ()
    writer: type[Writer[Any, Any]] | None = None
    framing: Framing = SSE
    error_schema: type[ResponseSchema] = ErrorAnswer
    error_body: Callable[[ApiError], tuple[int, dict[str, Any]]] = lambda error: (error.status, error.body)
    """The status and body of an error."""
    any_content_type: bool = False
    """Whether a body is read as JSON whatever type its headers name, unless a browser sent it."""


OPENAI = Protocol(name="OpenAI", prefix="")
"""The shape of errors wherever no other protocol is spoken: our own routes have it too."""


def protocol_at(scope: Scope) -> Protocol:
    """The protocol that is spoken where a request was sent."""
    protocol = scope.get("state", {}).get(PROTOCOL, OPENAI)
    assert isinstance(protocol, Protocol)
    return protocol


# Call buffer: the calls of a reply that comes piece by piece, each given out once it is whole.


@dataclass(slots=True)
class WholeCall:
    id: str = ""
    name: str = ""
    arguments: str = ""


class CallBuffer:
    """Holds the call that is being written.

    A reply that begins like a call may turn out to be none, and most protocols cannot take back what
    they have shown.
    """

    def __init__(self) -> None:
        self._open: dict[int, WholeCall] = {}

    @property
    def holds(self) -> bool:
        return bool(self._open)

    def push(self, deltas: Sequence[CallDelta]) -> list[WholeCall]:
        """Take what is new, and give the calls that it ends."""
        whole: list[WholeCall] = []
        dropped = self.drop(deltas)
        for delta in deltas:
            if delta.index in dropped:
                continue
            if delta.index not in self._open:
                whole += self.finish()
            call = self._open.setdefault(delta.index, WholeCall())
            call.id += delta.id
            call.name += delta.name
            call.arguments += delta.arguments
        return whole

    def drop(self, deltas: Sequence[CallDelta]) -> set[int]:
        """Forget the calls that turned out to be none; their numbers. Their text comes in the same delta, so
        this goes before that is written."""
        dropped = {delta.index for delta in deltas if delta.dropped}
        for index in dropped:
            self._open.pop(index, None)
        return dropped

    def finish(self) -> list[WholeCall]:
        """The calls that are left, once something else follows or the reply has ended."""
        whole, self._open = list(self._open.values()), {}
        return [call for call in whole if call.name]


def call_input(arguments: str) -> dict[str, Any]:
    """Arguments as an object. Those that a cut reply left incomplete stand as text under a special name."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"_unparsed": arguments}
