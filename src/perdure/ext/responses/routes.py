"""`/v1/responses`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perdure import ChatReply, Message, PerdureError, Usage
from perdure.ext.responses import conversations, websocket
from perdure.ext.responses.answers import (
    DeletedResponse,
    InputTokensAnswer,
    ItemList,
    ResponseAnswer,
    ResponseHead,
    usage,
)
from perdure.ext.responses.items import Item, make_item_id, new_response_id, said_items
from perdure.ext.responses.requests import AfterItem, ItemOrder, PromptRequest, ResponseRequest
from perdure.ext.responses.runs import Runs
from perdure.ext.responses.stored import Responses, StoredResponse
from perdure.ext.responses.stream import ResponseWriter
from perdure.spi.chat import SUMMARY_TRIES
from perdure.spi.server import (
    NO_BODY,
    PAGE,
    SSE,
    ApiError,
    AppState,
    AppStateDep,
    BodyRoute,
    Caller,
    CallerDep,
    EventResponse,
    Limit,
    Protocol,
    ProtocolEvent,
    Recorded,
    ResponseSchema,
    answer,
    errors,
    followed,
    invalid,
    refuse_fields,
    streamed,
    to_api_error,
)
from perdure.spi.sessions import HEADING, TurnStream

router = APIRouter(tags=["Responses"], route_class=BodyRoute)

_TOO_LONG = "context_length_exceeded"
ResponseId = Annotated[str, Path(max_length=100)]


async def _runs(request: Request) -> Runs:
    """The runs of this server, made with the first request: only the event loop calls this."""
    state = request.app.state
    if not hasattr(state, "runs"):
        state.runs = Runs()
    runs: Runs = state.runs
    return runs


RunsDep = Annotated[Runs, Depends(_runs)]


@router.post("/v1/responses", responses=streamed(404, 409, 507), response_model=ResponseAnswer)
async def create(
    body: ResponseRequest, request: Request, app_state: AppStateDep, caller: CallerDep, runs: RunsDep
) -> Response:
    """A response. Unless `store` is false it is kept as a turn: to be read, continued, resumed by its id."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    app_state = await app_state.serving(body.model or "", caller.visit, sign=bool(body.stream))
    responses = Responses(app_state, caller.namespace)
    if body.stores:
        return await _stored(responses, body, request, app_state, caller, runs)
    if body.background:
        raise invalid("background", "only with store, or nobody could ask for it")
    head = responses.unstored_head(body)
    try:
        job = await app_state.call(responses.submit_unstored, body)
    except (PerdureError, ApiError) as error:
        return _refused(error, head, body, app_state)
    return await _answered(job, head, body, request, app_state, caller, ResponseWriter(head))


async def _stored(
    responses: Responses,
    body: ResponseRequest,
    request: Request,
    app_state: AppState,
    caller: Caller,
    runs: Runs,
) -> Response:
    notes: dict[str, Any] = {}
    response, job = await app_state.call(responses.start, body, notes)
    if isinstance(job, ApiError):
        return _refused(job, response.head, body, app_state)
    if body.background:
        run = await runs.start(caller, response, job, notes, app_state)
        if body.stream:
            return followed(run, -1, app_state)
        return _json(await app_state.call(response.shown, "queued"))
    writer = ResponseWriter(response.head, notes=notes)
    runs.read(caller.namespace, response.head.id, job, writer)
    try:
        answer = await _answered(job, response.head, body, request, app_state, caller, writer)
        return InterruptibleStream(answer, response, writer, app_state) if body.stream else answer
    except BaseException:
        if not body.stream:
            # Nobody was told its id.
            job.cancel()
            await asyncio.shield(app_state.call(responses.delete, response.head.id))
        raise


async def _answered(
    job: TurnStream,
    head: ResponseHead,
    body: ResponseRequest,
    request: Request,
    app_state: AppState,
    caller: Caller,
    writer: ResponseWriter,
    *,
    stream: bool | None = None,
) -> Response:
    streams = body.stream if stream is None else stream
    return await answer(
        job,
        request,
        app_state,
        caller,
        whole=lambda replies: _json(head.whole(replies)),
        writer=writer if streams else None,
    )


class InterruptibleStream(Response):
    """The stream of a stored response. Where it breaks off, it is written down what was sent: a client that
    comes back gets the rest of the same reply, or an error."""

    def __init__(
        self, stream: Response, response: StoredResponse, writer: ResponseWriter, app_state: AppState
    ) -> None:
        self.background = None
        self._stream = stream
        self._response = response
        self._writer = writer
        self._app_state = app_state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._stream(scope, receive, send)
        finally:
            if not self._writer.ended:
                with suppress(PerdureError):
                    sent = self._writer.sent
                    await asyncio.shield(self._app_state.call(self._response.note_sent, sent))


@router.get("/v1/responses/{response_id}", responses=streamed(404, 409), response_model=ResponseAnswer)
async def read(
    response_id: ResponseId,
    request: Request,
    app_state: AppStateDep,
    caller: CallerDep,
    runs: RunsDep,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1, lt=2**31)] = -1,
) -> Response:
    """A response as it stands; or as a stream, from behind event number `starting_after`.

    One that was interrupted, by its client or by the end of the server, is gone on with: it becomes what it
    would have become.
    """
    responses = Responses(app_state, caller.namespace)
    response = await app_state.call(responses.get, response_id)
    run = runs.background(caller.namespace, response_id)
    if run is not None:
        if stream:
            return followed(run, starting_after, app_state)
        return _json(await app_state.call(response.shown))
    finished = await app_state.call(lambda: response.turn is not None or response.failure is not None)
    if finished and stream:
        return await app_state.call(_replayed, response, starting_after, app_state)
    if finished:
        return _json(await app_state.call(response.shown))
    if not stream:
        if not runs.is_read(caller.namespace, response_id):
            notes: dict[str, Any] = {}
            await app_state.call(response.note_unknown)
            job = await app_state.call(responses.submit, response, notes)
            await runs.start(caller, response, job, notes, app_state)
        return _json(await app_state.call(response.shown))
    if (sent := runs.take_over(caller.namespace, response_id)) is not None:
        await app_state.call(response.note_sent, sent)
    await app_state.call(response.note_unknown)
    notes = {}
    job = await app_state.call(responses.submit, response, notes)
    writer = ResponseWriter(response.head, after=starting_after, sent=response.sent, notes=notes)
    runs.read(caller.namespace, response_id, job, writer)
    answer = await _answered(
        job, response.head, response.body, request, app_state, caller, writer, stream=True
    )
    return InterruptibleStream(answer, response, writer, app_state)


@router.delete("/v1/responses/{response_id}", responses=errors(404, 409))
async def delete(
    response_id: ResponseId, app_state: AppStateDep, caller: CallerDep, runs: RunsDep
) -> DeletedResponse:
    """Forget a response. Those that went on from it stay."""
    responses = Responses(app_state, caller.namespace)
    await app_state.call(responses.get, response_id)
    await _stop(runs, caller.namespace, response_id)
    await app_state.call(responses.delete, response_id)
    return DeletedResponse(id=response_id, object="response")


@router.post(
    "/v1/responses/{response_id}/cancel",
    responses=errors(404, 409),
    response_model=ResponseAnswer,
    openapi_extra=NO_BODY,
)
async def cancel(
    response_id: ResponseId, app_state: AppStateDep, caller: CallerDep, runs: RunsDep
) -> Response:
    """End a response that is being made. One that has ended stays as it is."""
    responses = Responses(app_state, caller.namespace)
    response = await app_state.call(responses.get, response_id)
    await _stop(runs, caller.namespace, response_id)

    def ended() -> dict[str, Any]:
        if response.turn is None and response.failure is None:
            response.end("cancelled")
        return response.shown()

    return _json(await app_state.call(ended))


@router.get("/v1/responses/{response_id}/input_items", responses=errors(404))
async def read_input_items(
    response_id: ResponseId,
    app_state: AppStateDep,
    caller: CallerDep,
    limit: Limit = PAGE,
    order: ItemOrder = "desc",
    after: AfterItem = None,
) -> ItemList:
    """What a response was made of, the latest first."""

    def found() -> ItemList:
        items = Responses(app_state, caller.namespace).get(response_id).input_items()
        return page(items, limit, order, after)

    return await app_state.call(found)


@router.post("/v1/responses/input_tokens", responses=errors(404, 409))
async def input_tokens(body: PromptRequest, app_state: AppStateDep, caller: CallerDep) -> InputTokensAnswer:
    """The tokens of a prompt."""
    app_state = await app_state.serving(body.model or "", caller.visit)
    count = await app_state.work(Responses(app_state, caller.namespace).count, body)
    return InputTokensAnswer(input_tokens=count)


def page(items: list[dict[str, Any]], limit: int, order: str, after: str | None) -> ItemList:
    """A page of items, behind the one that is called `after`."""
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        places = [at for at, item in enumerate(ordered) if item["id"] == after]
        ordered = ordered[places[0] + 1 :] if places else []
    return ItemList.of(ordered, limit)


async def _stop(runs: Runs, namespace: str, response_id: str) -> None:
    runs.take_over(namespace, response_id)
    run = runs.background(namespace, response_id)
    if run is not None:
        await run.cancel()


def _refused(
    error: PerdureError | ApiError, head: ResponseHead, body: ResponseRequest, app_state: AppState
) -> Response:
    """A conversation that is too long is reported in the stream: there clients know to make it shorter."""
    refused = to_api_error(error)
    if not body.stream or refused.code != _TOO_LONG:
        raise refused
    writer = ResponseWriter(head)
    return _recorded([*writer.start(), *writer.error(refused)], app_state)


def _replayed(response: StoredResponse, after: int, app_state: AppState) -> Response:
    writer = ResponseWriter(response.head, after=after, sent=response.sent)
    turn, failure = response.turn, response.failure
    if turn is not None:
        return _recorded(writer.replay(turn), app_state)
    assert failure is not None
    error = failure["error"] or {"code": failure["status"], "message": "it was cancelled"}
    api_error = ApiError(400, error["message"], code=error["code"])
    return _recorded([*writer.start(), *writer.error(api_error)], app_state)


def _recorded(events: Iterable[ProtocolEvent], app_state: AppState) -> EventResponse:
    return EventResponse(Recorded(list(events)), SSE, app_state.server.limits)


def _json(shown: dict[str, Any]) -> Response:
    return Response(to_json(shown), media_type="application/json")


PROTOCOL = Protocol(
    name="OpenAI Responses",
    prefix="/v1/responses",
    # `compact` before the routes of a response: it is no id.
    routers=(router, conversations.router, websocket.router),
    writer=ResponseWriter,
)


# `/v1/responses/compact`: a conversation made shorter, as items that another response goes on from.

_FAILED = "empty"
"""The code of a summary that could not be had."""
_AT_LEAST = 0.001
"""Seconds for a try: when they are up, the request has taken too long."""


class CompactionAnswer(ResponseSchema):
    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    """What the user said, and an item that stands for all that was said."""
    usage: dict[str, Any]


@router.post("/v1/responses/compact", responses=errors(404, 409, 504), response_model=CompactionAnswer)
async def compact(
    body: PromptRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> CompactionAnswer | Response:
    """Have the model sum a conversation up, in several passes where it does not fit into the context at once.
    The summary is encrypted: only this server reads it again."""
    app_state = await app_state.serving(body.model or "", caller.visit)
    responses = Responses(app_state, caller.namespace)
    ends = time.monotonic() + app_state.server.seconds(None)
    passes, conversation = await app_state.call(responses.to_sum_up, body)
    used: list[Usage] = []
    while (part := passes.part) is not None:
        reply = await _summed_up(part, responses, request, app_state, caller, ends)
        used.append(reply.usage)
        await app_state.call(passes.add, reply.text.strip())
    response_id = new_response_id()
    summary = f"{HEADING}\n{passes.summary}"
    await app_state.call(responses.read_ahead, body, conversation, summary)
    item: Item = {
        "id": make_item_id("cmp", response_id),
        "type": "compaction",
        "encrypted_content": app_state.server.reasoning_cipher.encrypt(summary, caller.namespace),
    }
    return CompactionAnswer(
        id=response_id,
        created_at=int(time.time()),
        output=[*said_items([each for each in conversation if each.role == "user"], response_id), item],
        usage=usage(
            sum(each.prompt_tokens for each in used),
            sum(each.cached_tokens for each in used),
            sum(each.completion_tokens for each in used),
            sum(each.reasoning_tokens for each in used),
        ),
    )


async def _summed_up(
    part: Sequence[Message],
    responses: Responses,
    request: Request,
    app_state: AppState,
    caller: Caller,
    ends: float,
) -> ChatReply:
    """The reply that sums a part up. Only one that came to its end counts: half a summary would lose the rest
    of the conversation without a word."""
    why = "empty"
    for words, temperature in SUMMARY_TRIES:
        left = max(ends - time.monotonic(), _AT_LEAST)
        job = await app_state.call(
            responses.submit_summary, part, words, temperature=temperature, timeout=left
        )
        answered = await answer(
            job, request, app_state, caller, timeout=left, whole=lambda replies: replies[0]
        )
        assert isinstance(answered, ChatReply)
        if answered.text.strip() and answered.finish_reason == "stop":
            return answered
        why = "not finished" if answered.text.strip() else why
    raise ApiError(
        500,
        f"the model's summary was {why}, so the conversation was not made shorter; ask again, or send less",
        code=_FAILED,
    )
