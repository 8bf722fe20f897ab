"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from perdure.chat.message import Message
from perdure.chat.reply import ChatDelta, ChatReply
from perdure.server.core.app_state import AppState, AppStateDep, CallerDep
from perdure.server.core.body_route import BodyRoute
from perdure.server.core.event_log import EventLog, EventLogs, followed, missing
from perdure.server.core.follow import ReplyStream, answer
from perdure.server.core.protocol import Protocol
from perdure.server.core.schemas import streamed
from perdure.server.core.visit import Caller, Visit
from perdure.server.protocols import chat_record
from perdure.server.protocols.chat import (
    ChatAnswer,
    ChatHead,
    ChatOptionsSchema,
    ChatRequest,
    ChatWriter,
    reply_request,
)
from perdure.sessions.fold import TurnStream

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)


@router.post("/v1/chat/completions", responses=streamed(404, 409, 507), response_model=ChatAnswer)
async def chat(
    body: ChatRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> ChatAnswer | Response:
    """A reply to a conversation, in OpenAI's shape."""
    app_state = await app_state.serving(body.model, caller.visit, sign=bool(body.stream))
    made = None
    if body.is_resumable:
        made = await app_state.call(chat_record.submit, body, app_state, caller)
        stream, messages = made.stream, made.request.messages
    else:
        stream, messages = await app_state.call(_submit, body, app_state, caller)
    return await chat_answer(
        stream,
        body,
        request,
        app_state,
        caller,
        session=caller.session,
        messages=messages,
        made=made,
    )


def _submit(body: ChatRequest, app_state: AppState, caller: Caller) -> tuple[TurnStream, Sequence[Message]]:
    """Queue what is asked. To read and to render takes time: this is called in a thread."""
    request = reply_request(body, app_state, caller.notes)
    return request.submit(app_state, caller, body), request.messages


async def chat_answer(
    stream: ReplyStream[ChatDelta, ChatReply],
    body: ChatOptionsSchema,
    request: Request,
    app_state: AppState,
    caller: Caller,
    *,
    session: str | None = None,
    messages: Sequence[Message] = (),
    made: chat_record.ChatStream | None = None,
) -> ChatAnswer | Response:
    """What comes of a stream, whole or as a stream of chunks. `made` has the record of a resumable one."""
    head = ChatHead(
        app_state,
        session,
        with_logprobs=bool(body.logprobs),
        ignored=caller.ignored,
        name=made.name if made is not None else "",
        created=made.created if made is not None else None,
        turn_stored=made.turn_stored if made is not None else False,
    )
    n: Any = getattr(body, "n", None) or 1
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    if body.is_resumable:
        visit = Visit()
        # Loaded for its request: it stays so when the client leaves.
        await app_state.serving(app_state.name, visit)
        log = EventLog(
            stream,
            ChatWriter(head, n, include_usage=include_usage),
            app_state,
            caller,
            visit,
            timeout=body.perdure.timeout if body.perdure else None,
            session=session,
            messages=messages,
            record=made.record if made is not None else None,
            again=made.again if made is not None else False,
        )
        logs: EventLogs = request.app.state.logs
        logs.add(caller.namespace, head.common["id"], log)
        return followed(log, -1, app_state)
    return await answer(
        stream,
        request,
        app_state,
        caller,
        timeout=body.perdure.timeout if body.perdure else None,
        whole=head.whole,
        writer=ChatWriter(head, n, include_usage=include_usage) if body.stream else None,
        session=session,
        messages=messages,
    )


@router.get("/v1/chat/completions/{completion_id}", responses=streamed(404, 409), response_model=None)
async def resume(
    completion_id: Annotated[str, Path(max_length=100)],
    request: Request,
    app_state: AppStateDep,
    caller: CallerDep,
    starting_after: Annotated[int | None, Query(ge=-1, lt=2**31)] = None,
) -> Response:
    """The rest of a stream that was asked for with `perdure.resumable`, from behind event number
    `starting_after`, or behind the one that the header `Last-Event-ID` names.

    One whose server is gone is made again here, from its record in the store.
    """
    last = request.headers.get("last-event-id", "")
    if starting_after is None:
        starting_after = int(last) if last.isascii() and last.isdigit() and len(last) < 10 else -1
    logs: EventLogs = request.app.state.logs
    log = logs.get(caller.namespace, completion_id, starting_after)
    if log is None:
        await _make_again(completion_id, request, app_state, caller)
        log = logs.get(caller.namespace, completion_id, starting_after)
    if log is None:
        raise missing(completion_id)
    return followed(log, starting_after, app_state)


async def _make_again(name: str, request: Request, app_state: AppState, caller: Caller) -> None:
    """Have a log here of a stream whose server is gone, if there is a record of it."""
    record = await app_state.call(chat_record.take, app_state, caller, name)
    if record is None:
        return
    try:
        app_state = await app_state.serving(record.about["model"], caller.visit)
        made = await app_state.call(chat_record.submit_again, record, app_state, caller)
        await chat_answer(
            made.stream,
            made.body,
            request,
            app_state,
            caller,
            session=made.session,
            messages=made.request.messages,
            made=made,
        )
    except BaseException:
        await app_state.call(record.release)
        raise


PROTOCOL = Protocol(name="OpenAI chat completions", prefix="/v1/chat", routers=(router,), writer=ChatWriter)
