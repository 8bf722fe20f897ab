"""`/v1/messages`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from perdure.errors import ContextOverflow
from perdure.server.core.app_state import AppState, AppStateDep, CallerDep
from perdure.server.core.follow import answer
from perdure.server.core.protocol import Protocol
from perdure.server.core.schemas import errors, refuse_fields, streamed
from perdure.server.protocols.messages.answers import CountAnswer, MessagesAnswer, MessagesHead
from perdure.server.protocols.messages.errors import MessagesErrorAnswer, error_body
from perdure.server.protocols.messages.requests import (
    Conversation,
    CountRequest,
    MessagesRequest,
    prompt_options,
    reply_request,
)
from perdure.server.protocols.messages.stream import MessagesWriter
from perdure.server.protocols.reply_request import ReplyRequest
from perdure.sessions.fold import TurnStream

router = APIRouter(tags=["Anthropic"])


@router.post("/v1/messages", responses=streamed(529), response_model=MessagesAnswer)
async def messages(
    asked: MessagesRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> MessagesAnswer | Response:
    """A reply to a conversation, in the shape of Anthropic's Messages. Any `model` is served by this one."""
    refuse_fields(asked, strict=app_state.strict, refused={}, notes=caller.notes)
    wanted, stream = await app_state.call(_submit, asked, app_state, caller.namespace)
    head = MessagesHead(asked, app_state, caller.namespace)
    return await answer(
        stream,
        request,
        app_state,
        caller,
        whole=head.whole,
        timeout=asked.perdure.timeout if asked.perdure else None,
        writer=MessagesWriter(head, stream.prompt_tokens) if asked.stream else None,
        messages=wanted.messages,
    )


def _submit(asked: MessagesRequest, app_state: AppState, namespace: str) -> tuple[ReplyRequest, TurnStream]:
    """In one thread: to read what is asked takes time too."""
    wanted = reply_request(asked, app_state, namespace)
    return wanted, wanted.submit(app_state.runtime, namespace)


@router.post("/v1/messages/count_tokens", responses=errors(504, 529))
async def count_tokens(asked: CountRequest, app_state: AppStateDep, caller: CallerDep) -> CountAnswer:
    """The tokens of a prompt. Of one that cannot fit, at least as many."""
    return await app_state.work(_count, asked, app_state, caller.namespace)


def _count(asked: CountRequest, app_state: AppState, namespace: str) -> CountAnswer:
    said, options = Conversation(asked, app_state, namespace).messages, prompt_options(asked)
    try:
        return CountAnswer(input_tokens=app_state.runtime.count_chat(said, namespace=namespace, **options))
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
