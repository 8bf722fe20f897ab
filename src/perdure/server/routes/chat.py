"""`/v1/chat/completions`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from perdure.chat.reply import ChatDelta, ChatReply
from perdure.decode.request import TokenLogprob
from perdure.server import sse
from perdure.server.api_error import ApiError
from perdure.server.app_state import AppState, AppStateDep, Caller, CallerDep
from perdure.server.client_job import Job
from perdure.server.routes.answer_head import AnswerHead, finite
from perdure.server.routes.responses import streamed
from perdure.server.schemas.base import ReuseAnswer, TimingsAnswer, UsageAnswer, refuse_fields
from perdure.server.schemas.chat import (
    REFUSED,
    CallAnswer,
    ChatAnswer,
    ChatOptionsSchema,
    ChatRequest,
    Choice,
    ExtensionAnswer,
    FunctionAnswer,
    LogprobsAnswer,
    MessageAnswer,
    SchemaFormat,
    TokenAnswer,
    ToolChosen,
    TopLogprob,
)
from perdure.sessions.fold import TurnJob

router = APIRouter(tags=["OpenAI"])

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
"""Variables of a template that are the server's to set."""


@router.post("/v1/chat/completions", responses=streamed(404, 409, 507), response_model=ChatAnswer)
async def chat(
    asked: ChatRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> ChatAnswer | Response:
    """A reply to a conversation, in OpenAI's shape."""
    check_chat_options(asked, app_state)
    app_state.check_model(asked.model)
    if asked.modalities and set(asked.modalities) != {"text"}:
        raise ApiError(
            400, "modalities: only text can be written", param="modalities", code="unsupported_parameter"
        )
    app_state.check_message_count(len(asked.messages))
    messages = [message.plain for message in asked.messages]
    options = {**chat_options(asked, app_state), **({"n": asked.n} if asked.n is not None else {})}
    session = asked.perdure.session if asked.perdure is not None else None
    job: TurnJob
    if session is None:
        job = await app_state.call(
            app_state.runtime.submit_chat, messages, namespace=caller.namespace, **options
        )
    else:
        job = await app_state.call(_session_turn, app_state, caller.namespace, session, messages, options)
    return await answer(job, asked, request, app_state, caller, session=session, said=messages)


async def answer(
    job: Job[ChatDelta, ChatReply],
    asked: ChatOptionsSchema,
    request: Request,
    app_state: AppState,
    caller: Caller,
    *,
    session: str | None = None,
    said: Sequence[dict[str, Any]] = (),
) -> ChatAnswer | Response:
    """What comes of a job, whole or as a stream."""
    client_job = app_state.client_job(job, request, asked.perdure.timeout if asked.perdure else None)
    head = ChatHead(app_state, session, with_logprobs=bool(asked.logprobs))
    n = getattr(asked, "n", None) or 1

    def settle(replies: Sequence[ChatReply]) -> None:
        app_state.settle(replies, caller)
        if app_state.log_text:
            caller.notes["messages"] = list(said)
            caller.notes["replies"] = [reply.text for reply in replies]

    if asked.stream:
        await client_job.begin()
        include_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        writer = ChatWriter(head, n, include_usage=include_usage)
        return sse.response(client_job, writer, limits=app_state.limits, notes=caller.notes, settle=settle)
    replies = await client_job.replies()
    settle(replies)
    if (refused := client_job.cut(replies)) is not None:
        raise refused
    return head.whole(replies)


def check_chat_options(asked: ChatOptionsSchema, app_state: AppState) -> None:
    """Refuse what cannot be done, or was said twice."""
    refuse_fields(asked, strict=app_state.strict, refused=REFUSED)
    limits = {asked.max_tokens, asked.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(
            400,
            f"max_tokens is {asked.max_tokens} and max_completion_tokens is {asked.max_completion_tokens}: "
            "they mean the same, give one",
            param="max_tokens",
            code="invalid_value",
        )
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs: set logprobs too", param="top_logprobs", code="invalid_value")
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options: only with stream", param="stream_options", code="invalid_value")
    variables = (asked.perdure.variables if asked.perdure else None) or {}
    if taken := sorted(_RESERVED & variables.keys()):
        raise ApiError(
            400,
            f"perdure.variables: {taken[0]} is set by the server",
            param="perdure.variables",
            code="invalid_value",
        )


def chat_options(asked: ChatOptionsSchema, app_state: AppState) -> dict[str, Any]:
    """What is asked of a reply, in the runtime's words."""
    options = asked.sampling
    extension = asked.perdure
    if (limit := asked.max_completion_tokens or asked.max_tokens) is not None:
        options["max_tokens"] = limit
    if asked.logprobs:
        options["logprobs"] = asked.top_logprobs or 0
    if asked.tools:
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in asked.tools]
    if asked.tool_choice is not None:
        chosen = asked.tool_choice
        options["tool_choice"] = chosen.model_dump() if isinstance(chosen, ToolChosen) else chosen
    if asked.parallel_tool_calls is not None:
        options["parallel_tool_calls"] = asked.parallel_tool_calls
    if isinstance(asked.response_format, SchemaFormat):
        options["schema"] = asked.response_format.json_schema.schema_
    elif asked.response_format is not None and asked.response_format.type == "json_object":
        options["schema"] = {"type": "object"}
    variables: dict[str, Any] = {}
    if asked.reasoning_effort is not None:
        variables["reasoning_effort"] = asked.reasoning_effort
    if extension is not None:
        for name in ("overflow", "reasoning", "reasoning_budget", "regex"):
            if (value := getattr(extension, name)) is not None:
                options[name] = value
        variables |= extension.variables or {}
    if variables:
        options["variables"] = variables
    options["timeout"] = app_state.seconds(extension.timeout if extension else None)
    return options


def _session_turn(
    app_state: AppState, namespace: str, name: str, messages: list[dict[str, Any]], options: dict[str, Any]
) -> TurnJob:
    """What is new goes to the session; a system message that comes first is that of a new one."""
    system = None
    if messages[0]["role"] in ("system", "developer") and len(messages) > 1:
        content = messages.pop(0).get("content")
        system = content if isinstance(content, str) else "".join(part["text"] for part in content or ())
    return app_state.runtime.session(name, namespace=namespace, system=system).submit(messages, **options)


class ChatHead(AnswerHead):
    """The head of chat answers, and what they say of a reply."""

    prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"

    def __init__(self, app_state: AppState, session: str | None, *, with_logprobs: bool) -> None:
        super().__init__(app_state)
        self._session = session
        self._with_logprobs = with_logprobs

    def whole(self, replies: Sequence[ChatReply]) -> ChatAnswer:
        return ChatAnswer(
            **self.common,
            choices=[self._choice(reply) for reply in replies],
            usage=UsageAnswer.of([reply.usage for reply in replies]),
            perdure=self.extension(replies[0]),
        )

    def extension(self, reply: ChatReply) -> ExtensionAnswer:
        return ExtensionAnswer(
            reuse=ReuseAnswer.of(reply.reuse),
            timings=TimingsAnswer.of(reply.timings),
            seed=reply.seed,
            dropped=reply.dropped,
            problems=list(reply.problems),
            session=self._session,
            kept=reply.kept,
            not_kept=reply.not_kept or None,
        )

    def logprobs(self, entries: Sequence[TokenLogprob] | None) -> LogprobsAnswer | None:
        if not self._with_logprobs:
            return None
        return LogprobsAnswer(
            content=[
                TokenAnswer(
                    **self._token(entry.token, entry.logprob),
                    top_logprobs=[TopLogprob(**self._token(top.token, top.logprob)) for top in entry.top],
                )
                for entry in entries or ()
            ]
        )

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.piece(token)
        return {
            "token": piece.decode("utf-8", "replace"),
            "logprob": finite(logprob),
            "bytes": list(piece),
        }

    def _choice(self, reply: ChatReply) -> Choice:
        calls = [
            CallAnswer(id=call.id, function=FunctionAnswer(name=call.name, arguments=call.arguments))
            for call in reply.tool_calls
        ]
        return Choice(
            index=reply.index,
            message=MessageAnswer(
                content=reply.text or (None if calls else ""),
                reasoning_content=reply.reasoning,
                tool_calls=calls or None,
            ),
            finish_reason=reply.finish_reason,
            logprobs=self.logprobs(reply.logprobs),
        )


class ChatWriter:
    """Chunks in OpenAI's shape. Every sample opens once and ends once, whatever happens in between."""

    def __init__(self, head: ChatHead, n: int, *, include_usage: bool) -> None:
        self._head = head
        self._open = set(range(n))
        self._usage: dict[str, Any] = {"usage": None} if include_usage else {}
        self._frames = [sse.Frame(functools.partial(self._text, index)) for index in range(n)]

    def opening(self) -> Iterable[dict[str, Any]]:
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

    def ending(self, replies: Sequence[ChatReply]) -> Iterable[dict[str, Any]]:
        for reply in replies:
            self._open.discard(reply.index)
            extension = self._head.extension(reply).model_dump()
            yield self._piece(reply.index, {}, reply.finish_reason, perdure=extension)
        if self._usage:
            usage = UsageAnswer.of([reply.usage for reply in replies])
            yield self._head.chunk([], usage=usage.model_dump())

    def broken(self) -> Iterable[dict[str, Any]]:
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
        **more: Any,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._head.chunk([choice], **self._usage, **more)


def _call(call: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    shape: dict[str, Any] = {"index": call.index, "function": function}
    if call.name:
        function["name"] = call.name
    if call.id:
        shape |= {"id": call.id, "type": "function"}
    return shape
