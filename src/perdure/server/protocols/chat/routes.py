"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from perdure.chat.message import Message
from perdure.chat.reply import ChatDelta, ChatReply
from perdure.server.core.app_state import AppState, AppStateDep, Caller, CallerDep
from perdure.server.core.follow import Stream, answer
from perdure.server.core.protocol import Protocol
from perdure.server.core.schemas import streamed
from perdure.server.protocols.chat.answers import ChatAnswer, ChatHead
from perdure.server.protocols.chat.requests import ChatOptionsSchema, ChatRequest, reply_request
from perdure.server.protocols.chat.stream import ChatWriter

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", responses=streamed(404, 409, 507), response_model=ChatAnswer)
async def chat(
    asked: ChatRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> ChatAnswer | Response:
    """A reply to a conversation, in OpenAI's shape."""
    wanted = reply_request(asked, app_state, caller.notes)
    stream = await app_state.call(wanted.submit, app_state.runtime, caller.namespace, caller.agent)
    return await chat_answer(
        stream, asked, request, app_state, caller, session=wanted.session, messages=wanted.messages
    )


async def chat_answer(
    stream: Stream[ChatDelta, ChatReply],
    asked: ChatOptionsSchema,
    request: Request,
    app_state: AppState,
    caller: Caller,
    *,
    session: str | None = None,
    messages: Sequence[Message] = (),
) -> ChatAnswer | Response:
    """What comes of a stream, whole or as a stream of chunks."""
    head = ChatHead(app_state, session, with_logprobs=bool(asked.logprobs))
    n: Any = getattr(asked, "n", None) or 1
    include_usage = bool(asked.stream_options and asked.stream_options.include_usage)
    return await answer(
        stream,
        request,
        app_state,
        caller,
        timeout=asked.perdure.timeout if asked.perdure else None,
        whole=head.whole,
        writer=ChatWriter(head, n, include_usage=include_usage) if asked.stream else None,
        session=session,
        messages=messages,
    )


PROTOCOL = Protocol(name="OpenAI chat completions", prefix="/v1/chat", routers=(router,), writer=ChatWriter)
