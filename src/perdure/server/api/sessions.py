"""`/v1/sessions`: conversations that last, as resources."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from starlette.background import BackgroundTask
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse

from perdure.atomic import open_private, translate_os_errors, write_all
from perdure.chat.message import Message
from perdure.decode.request import Plan
from perdure.errors import StoreFullError
from perdure.extension import part
from perdure.server.api.session_schemas import (
    PAGE_BYTES,
    AppendRequest,
    CreateRequest,
    EditRequest,
    FilingRequest,
    ForkRequest,
    ImportAnswer,
    LabelRequest,
    MemoryAnswer,
    MemoryList,
    PendingAnswer,
    PendingTurnAnswer,
    RegenerateRequest,
    ResumeRequest,
    RewindRequest,
    Saying,
    SayRequest,
    SessionAnswer,
    SessionList,
    SessionSummary,
    StateAnswer,
    StopAnswer,
    TreeAnswer,
    TurnList,
    WakeMemoryRequest,
)
from perdure.server.core.api_error import ApiError, ClientLeft, invalid
from perdure.server.core.app_state import AppState, AppStateDep, CallerDep, ServedDep
from perdure.server.core.body_route import BodyRoute
from perdure.server.core.middleware import FILE_TYPE, check_length, too_large
from perdure.server.core.schemas import (
    NO_BODY,
    PAGE,
    DeletedAnswer,
    Limit,
    Name,
    ReuseAnswer,
    errors,
    refuse_fields,
    streamed,
)
from perdure.server.core.visit import Caller
from perdure.server.protocols.chat import (
    ChatAnswer,
    ChatOptionsSchema,
    chat_options,
    check_chat_options,
    given_chat_options,
    parsed,
)
from perdure.server.protocols.chat_routes import chat_answer
from perdure.sessions.fold import TurnStream
from perdure.sessions.info import FILED, name_problem
from perdure.sessions.session import Session

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], route_class=BodyRoute)

_PIECE = 1 << 16
"""Characters of a transcript that are sent at once."""
_RESERVE = 256 << 20
"""Bytes of disk that no file from elsewhere gets."""
Named = Annotated[Name, Path()]
OptionalName = Annotated[Name | None, Query()]


@router.get("", responses=errors(404))
async def list_sessions(
    app_state: AppStateDep,
    caller: CallerDep,
    limit: Limit = PAGE,
    after: OptionalName = None,
    text: Annotated[str | None, Query(min_length=1, max_length=1000)] = None,
) -> SessionList:
    """Your sessions, the latest first: a page of them, behind the one that is called `after`. With `text`,
    those that have it in their names or in what was said."""
    # A search reads everything that was said.
    in_thread = app_state.server.call if text is None else app_state.server.work
    sessions = await in_thread(
        app_state.runtime.sessions.list, caller.namespace, limit=limit + 1, after=after, text=text
    )
    return SessionList(
        data=[SessionSummary.of(info) for info in sessions[:limit]], has_more=len(sessions) > limit
    )


@router.post("", status_code=201, responses=errors(409, 507))
async def create(body: CreateRequest, app_state: AppStateDep, caller: CallerDep) -> SessionAnswer:
    """A new session. One that exists is an error: no client continues it by mistake."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)

    def work() -> SessionAnswer:
        session = app_state.runtime.sessions.create(
            body.name, system=body.system, namespace=caller.namespace, agent=caller.agent
        )
        if body.title:
            session.note({"title": body.title})
        return SessionAnswer.of(session)

    return await app_state.call(work)


@router.post(
    "/import",
    status_code=201,
    responses=errors(404, 409, 422, 507),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {FILE_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def import_session(
    request: Request,
    app_state: AppStateDep,
    caller: CallerDep,
    name: OptionalName = None,
    model: Annotated[str | None, Query(max_length=200)] = None,
) -> ImportAnswer:
    """A session out of a file that was exported, all of it verified first, under its own name or another.

    Its tokens are taken if they stand for its text, its state if this server's store wrote it.
    """
    folder = await app_state.call(app_state.runtime.sessions.temporary_folder)
    try:
        path = FilePath(folder.name) / "session"
        await receive_file(request, path, app_state)
        served = await app_state.serving(model or "", caller.visit)
        return await served.work(_import, served, caller.namespace, path, name)
    finally:
        # To delete a large file takes a while.
        await asyncio.shield(app_state.work(folder.cleanup))


@router.get("/{name}", responses=errors(404))
async def read(name: Named, app_state: AppStateDep, caller: CallerDep) -> SessionAnswer:
    return await app_state.call(lambda: SessionAnswer.of(_session(app_state, caller, name)))


@router.patch("/{name}", responses=errors(404, 507))
async def file_session(
    name: Named, body: FilingRequest, app_state: AppStateDep, caller: CallerDep
) -> SessionSummary:
    """Give a session a title, put it into a folder, pin it to the top. Its name, its address, stays."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)

    def work() -> SessionSummary:
        session = _session(app_state, caller, name)
        session.note(body.model_dump(include=set(FILED), exclude_none=True))
        return SessionSummary.of(session.info)

    return await app_state.call(work)


@router.delete("/{name}", responses=errors(404, 409))
async def delete(name: Named, app_state: AppStateDep, caller: CallerDep) -> DeletedAnswer:
    """Forget a session. Forks of it, and memories, stay."""
    await app_state.call(app_state.runtime.sessions.delete, name, caller.namespace)
    return DeletedAnswer(deleted=1)


@router.get("/{name}/turns", responses=errors(404))
async def turns(
    name: Named,
    app_state: AppStateDep,
    caller: CallerDep,
    limit: Limit = PAGE,
    after: Annotated[int, Query(ge=0, lt=2**31)] = 0,
) -> TurnList:
    """Everything that was said, turn by turn: a page of it, behind turn number `after`."""
    return await app_state.call(lambda: TurnList.of(_session(app_state, caller, name), limit, after))


@router.get(
    "/{name}/transcript",
    response_class=PlainTextResponse,
    responses=errors(404),
)
async def transcript(
    name: Named, app_state: AppStateDep, caller: CallerDep, form: Literal["markdown", "jsonl"] = "markdown"
) -> Response:
    """The conversation as text to read, or as a message a line."""
    parts = await app_state.call(lambda: _session(app_state, caller, name).transcript_parts(form))
    # Errors are raised before the answer begins.
    first = await app_state.call(_pieces, parts)

    async def text() -> AsyncIterator[str]:
        piece = first
        while piece:
            yield piece
            piece = await app_state.call(_pieces, parts)

    return StreamingResponse(text(), media_type="text/plain; charset=utf-8")


@router.post("/{name}/turns", responses=streamed(404, 409, 507), response_model=ChatAnswer)
async def say(
    name: Named, body: SayRequest, request: Request, app_state: ServedDep, caller: CallerDep
) -> ChatAnswer | Response:
    """Say something. The turn is kept once its reply is whole; `perdure.kept` says so."""

    def submit() -> tuple[Sequence[Message], TurnStream]:
        messages, options = _read(body, app_state, caller)
        return messages, _session(app_state, caller, name).submit(
            messages, extra=caller.turn_extra, **options
        )

    messages, stream = await app_state.call(submit)
    return await chat_answer(stream, body, request, app_state, caller, session=name, messages=messages)


@router.post("/{name}/edit", responses=streamed(404, 409, 507), response_model=ChatAnswer)
async def edit(
    name: Named, body: EditRequest, request: Request, app_state: ServedDep, caller: CallerDep
) -> ChatAnswer | Response:
    """Say something else in an earlier turn, and go on from its new reply."""

    def submit() -> tuple[Sequence[Message], TurnStream]:
        messages, options = _read(body, app_state, caller)
        return messages, _session(app_state, caller, name).submit_edit(body.turn, messages, **options)

    messages, stream = await app_state.call(submit)
    return await chat_answer(stream, body, request, app_state, caller, session=name, messages=messages)


@router.post("/{name}/regenerate", responses=streamed(404, 409, 507), response_model=ChatAnswer)
async def regenerate(
    name: Named, body: RegenerateRequest, request: Request, app_state: ServedDep, caller: CallerDep
) -> ChatAnswer | Response:
    """Another reply to the last message, in the place of the one there is."""
    _check_stores(body)
    check_chat_options(body, app_state, caller.notes)
    options = chat_options(body, app_state)
    stream = await app_state.call(lambda: _session(app_state, caller, name).submit_regenerate(**options))
    return await chat_answer(stream, body, request, app_state, caller, session=name)


@router.get("/{name}/pending", responses=errors(404))
async def pending(name: Named, app_state: AppStateDep, caller: CallerDep) -> PendingAnswer:
    """The turn that is being answered, or was interrupted: by a kill, the end of the server, an error, a
    client that left."""
    # Whichever model answers it.
    models = [each.sessions for each in app_state.server.models.runtimes]

    def work() -> PendingAnswer:
        found = [each.get(name, caller.namespace).pending for each in models]
        infos = [info for info in found if info is not None]
        if len(infos) < len(found):
            return PendingAnswer(pending=None)
        running = any(info.running for info in infos)
        return PendingAnswer(pending=PendingTurnAnswer.of(infos[0], running=running))

    return await app_state.call(work)


@router.post("/{name}/pending", responses=streamed(404, 409, 507), response_model=ChatAnswer)
async def resume(
    name: Named, body: ResumeRequest, request: Request, app_state: ServedDep, caller: CallerDep
) -> ChatAnswer | Response:
    """The whole reply to the pending turn, which then is a turn: what was written of it stands, and is
    continued behind its last token; or, `again`, another one from the start."""
    _check_stores(body)
    check_chat_options(body, app_state, caller.notes)
    options = given_chat_options(body, app_state)
    stream = await app_state.call(
        lambda: _session(app_state, caller, name).submit_resume(again=body.again, **options)
    )
    return await chat_answer(stream, body, request, app_state, caller, session=name)


@router.delete("/{name}/pending", responses=errors(404, 409))
async def discard(name: Named, app_state: AppStateDep, caller: CallerDep) -> DeletedAnswer:
    """Forget the pending turn: what was asked, and what was written of the reply."""

    def work() -> int:
        session = _session(app_state, caller, name)
        there = session.pending is not None
        session.discard()
        return int(there)

    return DeletedAnswer(deleted=await app_state.call(work))


@router.post("/{name}/append", responses=errors(404, 409, 507))
async def append(
    name: Named, body: AppendRequest, app_state: AppStateDep, caller: CallerDep
) -> SessionAnswer:
    """Have messages said that nobody answers yet. They are read while the engine is idle."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)

    def work() -> SessionAnswer:
        session = _session(app_state, caller, name)
        session.append(_messages(body, app_state), read_ahead=body.read_ahead)
        return SessionAnswer.of(session)

    return await app_state.call(work)


@router.post("/{name}/fork", status_code=201, responses=errors(404, 409, 507))
async def fork(name: Named, body: ForkRequest, app_state: AppStateDep, caller: CallerDep) -> SessionAnswer:
    """A new session that starts where this one stands, or after one of its turns."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    return await app_state.call(
        lambda: SessionAnswer.of(_session(app_state, caller, name).fork(body.name, turn=body.turn))
    )


@router.post("/{name}/rewind", responses=errors(404, 409, 507))
async def rewind(
    name: Named, body: RewindRequest, app_state: AppStateDep, caller: CallerDep
) -> SessionAnswer:
    """Go back by a number of turns."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)

    def work() -> SessionAnswer:
        session = _session(app_state, caller, name)
        session.rewind(body.turns)
        return SessionAnswer.of(session)

    return await app_state.call(work)


@router.get("/{name}/tree", responses=errors(404))
async def tree(
    name: Named,
    app_state: AppStateDep,
    caller: CallerDep,
    limit: Limit = PAGE,
    after: Annotated[str | None, Query(pattern=r"^[0-9a-f]{32}$")] = None,
) -> TreeAnswer:
    """The session with all that branched off, or that it branched off from: a page of turns, behind the one
    with the id `after`."""
    session_tree = await app_state.call(
        app_state.runtime.sessions.tree, name, caller.namespace, limit=limit + 1, after=after
    )
    return TreeAnswer.of(session_tree, limit)


@router.get("/{name}/state", responses=errors(404))
async def state(name: Named, app_state: ServedDep, caller: CallerDep) -> StateAnswer:
    """Where its state is, and what it takes. Nothing is moved."""
    return await app_state.call(lambda: StateAnswer.of(_session(app_state, caller, name)))


@router.post("/{name}/stop", responses=errors(404), openapi_extra=NO_BODY)
async def stop(name: Named, app_state: AppStateDep, caller: CallerDep) -> StopAnswer:
    """End the reply that is being written. Its reader gets an end with `cancelled`; the turn is kept as far
    as it is written, if it was asked with `perdure.keep_partial`."""
    # Whichever model writes it.
    models = [each.sessions for each in app_state.server.models.runtimes]
    return await app_state.call(
        lambda: StopAnswer(stopped=any(each.get(name, caller.namespace).stop() for each in models))
    )


@router.post("/{name}/sleep", responses=errors(404, 409, 507), openapi_extra=NO_BODY)
async def sleep(name: Named, app_state: ServedDep, caller: CallerDep) -> SessionAnswer:
    """Put its state where it outlives the server, and let go of the memory that it takes."""

    def work() -> SessionAnswer:
        session = _session(app_state, caller, name)
        session.sleep()
        return SessionAnswer.of(session)

    return await app_state.work(work)


@router.get("/{name}/plan", responses=errors(404))
async def plan(name: Named, app_state: ServedDep, caller: CallerDep) -> Plan:
    """What waking would take. Nothing is done."""
    return await app_state.call(lambda: _session(app_state, caller, name).plan_wake())


@router.post("/{name}/wake", responses=errors(404, 409, 422), openapi_extra=NO_BODY)
async def wake(name: Named, app_state: ServedDep, caller: CallerDep) -> ReuseAnswer:
    """Bring its state back. What is missing or damaged is computed with the next turn."""
    return await app_state.work(lambda: ReuseAnswer.model_validate(_session(app_state, caller, name).wake()))


@router.post("/{name}/label", status_code=201, responses=errors(404, 507))
async def label(name: Named, body: LabelRequest, app_state: AppStateDep, caller: CallerDep) -> MemoryAnswer:
    """Mark a point of the session as a memory, to be woken by its address."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    return await app_state.call(
        lambda: MemoryAnswer.of(
            _session(app_state, caller, name).label(
                body.label, kind=body.kind, turn=body.turn, note=body.note
            )
        )
    )


@router.get(
    "/{name}/export",
    response_class=FileResponse,
    responses={
        200: {"content": {FILE_TYPE: {"schema": {"type": "string", "format": "binary"}}}},
        **errors(404, 507),
    },
)
async def export(name: Named, app_state: ServedDep, caller: CallerDep, state: bool = True) -> Response:
    """The session as one file, with its state or without."""
    folder = await app_state.call(app_state.runtime.sessions.temporary_folder)
    try:
        path = FilePath(folder.name) / "session"
        written = await app_state.work(lambda: _session(app_state, caller, name).export(path, state=state))
    except BaseException:
        folder.cleanup()
        raise
    return FileResponse(
        written, media_type=FILE_TYPE, filename=f"{name}.perdure", background=BackgroundTask(folder.cleanup)
    )


def _pieces(parts: Iterator[str]) -> str:
    """The next parts of a text, as many as are worth a call of a thread; nothing at its end."""
    taken: list[str] = []
    size = 0
    for piece in parts:
        taken.append(piece)
        size += len(piece)
        if size >= _PIECE:
            break
    return "".join(taken)


def _session(app_state: AppState, caller: Caller, name: str) -> Session:
    return app_state.runtime.sessions.get(name, caller.namespace)


def _import(app_state: AppState, namespace: str, path: FilePath, name: str | None) -> ImportAnswer:
    if name is None:
        name = str(part("manifest of an export", "upkeep")(path).get("name"))
        if (problem := name_problem(name)) is not None:
            raise ApiError(
                422,
                f"the name in this file is none for a session here: {problem}; give another with ?name=",
                param="name",
                code="invalid_value",
            )
    return ImportAnswer.of_result(app_state.runtime.sessions.import_(path, name, namespace=namespace))


def _read(body: SayRequest, app_state: AppState, caller: Caller) -> tuple[Sequence[Message], dict[str, Any]]:
    """What is said, and what is asked of the reply. It is called in a thread: messages may be many."""
    _check_stores(body)
    check_chat_options(body, app_state, caller.notes)
    return _messages(body, app_state), chat_options(body, app_state)


def _check_stores(body: ChatOptionsSchema) -> None:
    if body.store is False:
        raise invalid("store", "a turn of a session is kept: leave it out, or ask /v1/chat/completions")


def _messages(body: Saying, app_state: AppState) -> Sequence[Message]:
    if (body.message is None) == (body.messages is None):
        raise invalid("message", "give either message or messages")
    if body.message is not None:
        if not body.message.strip():
            raise invalid("message", "it needs some text")
        return [Message.parse({"role": "user", "content": body.message})]
    assert body.messages is not None
    return parsed(body.messages, app_state)


async def receive_file(
    request: Request, path: FilePath, app_state: AppState, *, most: int | None = None
) -> None:
    """Write a body to a file as it comes, up to the limits of bytes and time. `most` bytes may be fewer than
    the server's limit."""
    limits = app_state.server.limits
    most = limits.upload_bytes if most is None else min(most, limits.upload_bytes)
    check_length(request.scope, most)
    size, more = 0, True
    clock = asyncio.get_running_loop().time
    end = clock() + limits.upload_seconds

    def write(data: bytes) -> None:
        with translate_os_errors(path, len(data)):
            write_all(file.fileno(), data)
        if shutil.disk_usage(path.parent).free < _RESERVE:
            raise StoreFullError(
                f"less than {_RESERVE} bytes are left on the disk, which are for conversations: free some "
                "space",
                needed=_RESERVE,
            )

    try:
        with open_private(path) as file:
            while more:
                # Each piece may take as long as a whole small body: files are long.
                async with asyncio.timeout_at(min(end, clock() + limits.body_seconds)):
                    message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                size += len(message.get("body", b""))
                if size > most:
                    raise too_large(most)
                await asyncio.to_thread(write, message.get("body", b""))
                more = message.get("more_body", False)
    except TimeoutError:
        raise ApiError(
            408,
            f"the file did not come within {limits.upload_seconds:g} seconds, or nothing of it "
            f"for {limits.body_seconds:g}",
            code="slow_request",
        ) from None


# `/v1/memories`: labelled points of sessions.

memories = APIRouter(prefix="/v1/memories", tags=["memories"], route_class=BodyRoute)

Text = Annotated[str | None, Query(max_length=1000)]


@memories.get("", responses=errors(404))
async def search(
    app_state: AppStateDep,
    caller: CallerDep,
    label: Text = None,
    kind: Text = None,
    text: Text = None,
    session: Text = None,
    limit: Limit = PAGE,
    after: Text = None,
) -> MemoryList:
    """Memories that fit everything given; `text` is looked for in notes and in what was said."""
    # A search reads everything that was said.
    in_thread = app_state.server.call if text is None else app_state.server.work
    page, has_more = await in_thread(
        app_state.runtime.memories.page,
        label=label,
        kind=kind,
        text=text,
        session=session,
        namespace=caller.namespace,
        limit=limit,
        nbytes=PAGE_BYTES,
        after=after,
    )
    return MemoryList(data=[MemoryAnswer.of(memory) for memory in page], has_more=has_more)


@memories.post("/wake", status_code=201, responses=errors(404, 409, 422, 507))
async def wake_memory(body: WakeMemoryRequest, app_state: AppStateDep, caller: CallerDep) -> SessionAnswer:
    """A new session at a memory."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    return await app_state.call(
        lambda: SessionAnswer.of(
            app_state.runtime.memories.wake(body.address, body.name, namespace=caller.namespace)
        )
    )


@memories.delete("", responses=errors(404, 507))
async def forget(
    app_state: AppStateDep, caller: CallerDep, address: Annotated[str, Query(min_length=1, max_length=1000)]
) -> DeletedAnswer:
    """Forget a memory. The session that it is of stays."""
    await app_state.call(app_state.runtime.memories.forget, address, caller.namespace)
    return DeletedAnswer(deleted=1)
