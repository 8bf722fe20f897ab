"""Whole answers of Anthropic's Messages."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from perdure import ChatDelta, ChatReply, ContextOverflow, Message
from perdure.ext.messages.requests import (
    FIVE_MINUTES,
    HOUR,
    CountRequest,
    InnerMessages,
    MessagesRequest,
    prompt_options,
    reply_request,
)
from perdure.spi.chat import parse_messages
from perdure.spi.server import (
    ApiError,
    AppState,
    AppStateDep,
    BodyRoute,
    CallBuffer,
    Caller,
    CallerDep,
    Events,
    EventTemplate,
    ExtensionAnswer,
    Protocol,
    ProtocolEvent,
    ResponseSchema,
    WholeCall,
    answer,
    call_input,
    errors,
    extension,
    named_event,
    refuse_fields,
    streamed,
)
from perdure.spi.sessions import TurnStream


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
            # What a session hint keeps lasts for whatever time it says; Anthropic's clients know two.
            counts[FIVE_MINUTES if -seconds < HOUR else HOUR] += max(0, length - end)
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

    def __init__(
        self, body: MessagesRequest, app_state: AppState, namespace: str, ignored: Sequence[str] = ()
    ) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self.model = app_state.name
        self.hides_thinking = body.hides_thinking
        self._max_tokens = body.max_tokens
        self._cipher = app_state.server.reasoning_cipher
        self._namespace = namespace
        self._ignored = ignored

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
            perdure=self.extension(reply),
        )

    def extension(self, reply: ChatReply) -> ExtensionAnswer:
        return extension(reply, ignored=self._ignored)

    def signature(self, thinking: str) -> str:
        """What stands for thoughts when they are sent back, so that they are found again as they were."""
        return self._cipher.encrypt(thinking, self._namespace)

    def ending(self, reply: ChatReply) -> tuple[str, str | None]:
        """The stop reason, and the stop sequence that was met."""
        if reply.finish_reason == "tool_calls":
            return "tool_use", None
        if reply.finish_reason == "length":
            full = reply.usage.completion_tokens < self._max_tokens
            return ("model_context_window_exceeded" if full else "max_tokens"), None
        if reply.finish_reason != "stop":
            # What else cuts a reply short has no word there; `perdure.finish_reason` has ours.
            return "max_tokens", None
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


# Errors in the shape of Anthropic's Messages.

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class MessagesErrorDetail(ResponseSchema):
    type: str
    message: str


class MessagesErrorAnswer(ResponseSchema):
    """What every error of Messages looks like."""

    type: Literal["error"]
    error: MessagesErrorDetail


def error_body(error: ApiError) -> tuple[int, dict[str, Any]]:
    """The status and body of an error.

    Clients know by the words, and by 400, that a conversation has to be made shorter.
    """
    status, message = error.status, str(error)
    if error.code == "context_length_exceeded":
        status = 400
        if error.needed is not None and error.fits is not None:
            message = f"prompt is too long: {error.needed} tokens > {error.fits} maximum"
    elif status == 503:
        status = 529
    return status, {"type": "error", "error": error_detail(error, status, message)}


def error_detail(error: ApiError, status: int, message: str) -> dict[str, Any]:
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": kind, "message": message}


# Answers of Anthropic's Messages as a stream: events with names.

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
        events: list[ProtocolEvent] = []
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
            "perdure": self._head.extension(reply).model_dump(),
        }
        return [
            *self._write_calls(self._calls.finish()),
            *self._leave(),
            named_event(last),
            named_event({"type": "message_stop"}),
        ]

    def error(self, error: ApiError) -> Events:
        return [named_event(error_body(error)[1])]

    def _enter(self, kind: Kind) -> list[ProtocolEvent]:
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

    def _leave(self) -> list[ProtocolEvent]:
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

    def _write_calls(self, calls: Sequence[WholeCall]) -> list[ProtocolEvent]:
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


def _start(index: int, block: dict[str, Any]) -> ProtocolEvent:
    return named_event({"type": "content_block_start", "index": index, "content_block": block})


def _stop(index: int) -> ProtocolEvent:
    return named_event({"type": "content_block_stop", "index": index})


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


# `/v1/messages`.

router = APIRouter(tags=["Anthropic"], route_class=BodyRoute)


@router.post("/v1/messages", responses=streamed(404, 409, 507, 529), response_model=MessagesAnswer)
async def messages(
    body: MessagesRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> MessagesAnswer | Response:
    """A reply to a conversation, in the shape of Anthropic's Messages."""
    app_state = await app_state.serving(body.model, caller.visit, caller.namespace, sign=bool(body.stream))
    stream, messages = await app_state.call(_submit, body, app_state, caller)
    head = MessagesHead(body, app_state, caller.namespace, caller.ignored)
    return await answer(
        stream,
        request,
        app_state,
        caller,
        whole=head.whole,
        timeout=body.perdure.timeout if body.perdure else None,
        writer=MessagesWriter(head, stream.prompt_tokens) if body.stream else None,
        messages=messages,
    )


def _submit(
    body: MessagesRequest, app_state: AppState, caller: Caller
) -> tuple[TurnStream, Sequence[Message]]:
    """In one thread: to read what is asked takes time too."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    request = reply_request(body, app_state, caller.namespace)
    return request.submit(app_state, caller, body), request.messages


@router.post("/v1/messages/count_tokens", responses=errors(404, 504, 529))
async def count_tokens(body: CountRequest, app_state: AppStateDep, caller: CallerDep) -> CountAnswer:
    """The tokens of a prompt. Of one that cannot fit, at least as many."""
    app_state = await app_state.serving(body.model, caller.visit, caller.namespace)
    return await app_state.work(_count, body, app_state, caller.namespace)


def _count(body: CountRequest, app_state: AppState, namespace: str) -> CountAnswer:
    said = InnerMessages(body, app_state, namespace).messages
    messages, options = parse_messages(said), prompt_options(body)
    try:
        return CountAnswer(
            input_tokens=app_state.runtime.count_chat(messages, namespace=namespace, **options)
        )
    except ContextOverflow as error:
        return CountAnswer(input_tokens=error.needed)


PROTOCOL = Protocol(
    name="Anthropic Messages",
    prefix="/v1/messages",
    routers=(router,),
    writer=MessagesWriter,
    error_schema=MessagesErrorAnswer,
    error_body=error_body,
)
