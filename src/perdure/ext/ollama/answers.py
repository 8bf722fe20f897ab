"""Answers in Ollama's shape: lines of JSON, or the last of them with all in it.

{"model": "smollm2", "created_at": "…", "message": {"role": "assistant", "content": "No"}, "done": false}
{"model": "smollm2", …, "done": true, "done_reason": "stop", "eval_count": 5}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from perdure import ChatDelta, ChatReply, Delta, Reply
from perdure.spi.server import (
    ApiError,
    CallBuffer,
    Events,
    EventTemplate,
    ProtocolEvent,
    ResponseSchema,
    ReuseAnswer,
    WholeCall,
    call_input,
    event,
)

# Errors in Ollama's shape: a text.


class OllamaErrorAnswer(ResponseSchema):
    """What every error of Ollama's routes looks like."""

    error: str


def error_body(error: ApiError) -> tuple[int, dict[str, Any]]:
    """The status and body of an error."""
    status = 400 if error.code == "context_length_exceeded" else error.status
    return status, {"error": str(error)}


# Replies.

Kind = Literal["chat", "generate"]
_OWN = ("stop", "tool_calls")
"""Ends that are the model's own; whatever else cuts a reply short is `length` there."""


class OllamaWriter:
    """Lines of one reply: of a chat, or of a prompt, whose text has another name."""

    def __init__(
        self, model: str, kind: Kind, notes: Sequence[str] = (), ignored: Sequence[str] = ()
    ) -> None:
        self._model = model
        self._kind = kind
        self._notes = list(notes)
        self._ignored = list(ignored)
        self._calls = CallBuffer()
        # The moment of its beginning, so that a line is not made anew for each token.
        self._created = now()
        self._template = EventTemplate(lambda text: self._chunk(text))

    def keep_alive(self, progress: dict[str, Any]) -> Events:
        return [event(self._chunk("", more=progress))]

    def start(self) -> Events:
        return ()

    def delta(self, delta: ChatDelta | Delta) -> Events:
        if isinstance(delta, Delta):
            return (self._template(delta.text),) if delta.text else ()
        events = []
        if delta.reasoning:
            events.append(event(self._chunk("", delta.reasoning)))
        if delta.text:
            events.append(self._template(delta.text))
        return [*events, *self._write_calls(self._calls.push(delta.tool_calls))]

    def end(self, replies: Sequence[ChatReply] | Sequence[Reply]) -> Events:
        return [*self._write_calls(self._calls.finish()), event(self._last(replies[0], "", None, ()))]

    def error(self, error: ApiError) -> Events:
        return [event(error_body(error)[1])]

    def whole(self, replies: Sequence[ChatReply] | Sequence[Reply]) -> dict[str, Any]:
        """All of a reply as one object."""
        reply = replies[0]
        if isinstance(reply, Reply):
            return self._last(reply, reply.text, None, ())
        calls = [WholeCall(call.id, call.name, call.arguments) for call in reply.tool_calls]
        return self._last(reply, reply.text, reply.reasoning, calls)

    def _chunk(
        self,
        text: str,
        thinking: str | None = None,
        calls: Sequence[WholeCall] = (),
        more: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        shown: dict[str, Any] = {"model": self._model, "created_at": self._created}
        if self._kind == "chat":
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if thinking:
                message["thinking"] = thinking
            if calls:
                message["tool_calls"] = [_call(call, at) for at, call in enumerate(calls)]
            shown["message"] = message
        else:
            shown["response"] = text
            if thinking:
                shown["thinking"] = thinking
        return {**shown, "done": False, **(more or {})}

    def _last(
        self, reply: ChatReply | Reply, text: str, thinking: str | None, calls: Sequence[WholeCall]
    ) -> dict[str, Any]:
        timings, usage = reply.timings, reply.usage
        more: dict[str, Any] = {
            "done": True,
            "done_reason": "stop" if reply.finish_reason in _OWN else "length",
            "total_duration": nanoseconds(timings.queued + timings.prefill + timings.decode),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(timings.prefill),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(timings.decode),
            "perdure": {
                "finish_reason": reply.finish_reason,
                "reuse": ReuseAnswer.model_validate(reply.reuse).model_dump(),
                "notes": self._notes,
                "ignored": self._ignored,
            },
        }
        if self._kind == "generate":
            # The tokens of a conversation, which older clients send back; here what was computed is found.
            more["context"] = []
        return self._chunk(text, thinking, calls, more)

    def _write_calls(self, calls: Sequence[WholeCall]) -> list[ProtocolEvent]:
        return [event(self._chunk("", None, calls))] if calls else []


def idle(model: str, kind: Kind, reason: str) -> dict[str, Any]:
    """The answer to a request that only has the model loaded or let go."""
    shown: dict[str, Any] = {"model": model, "created_at": now()}
    if kind == "chat":
        shown["message"] = {"role": "assistant", "content": ""}
    else:
        shown["response"] = ""
    return {**shown, "done": True, "done_reason": reason}


def now() -> str:
    return rfc3339(datetime.now(UTC))


def rfc3339(moment: datetime) -> str:
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return max(0, int(seconds * 1e9))


def _call(call: WholeCall, index: int) -> dict[str, Any]:
    arguments = call_input(call.arguments)
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}
