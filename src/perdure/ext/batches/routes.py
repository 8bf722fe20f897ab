"""`/v1/files` and `/v1/batches`: requests that are answered in the background, as OpenAI has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import Field

from perdure.ext.batches.batch import ENDPOINTS, Batches
from perdure.ext.batches.files import KEPT, MOST_BYTES, Files
from perdure.ext.batches.form import file_of, read_form, text_of
from perdure.ext.batches.runner import runner_of
from perdure.spi.server import (
    FORM_TYPE,
    NO_BODY,
    PAGE,
    ApiError,
    AppState,
    AppStateDep,
    BodyRoute,
    CallerDep,
    Limit,
    RequestSchema,
    ResponseSchema,
    errors,
    invalid,
    refuse_fields,
    too_large,
)
from perdure.spi.sessions import Record

files = APIRouter(prefix="/v1/files", tags=["batches"], route_class=BodyRoute)
batches = APIRouter(prefix="/v1/batches", tags=["batches"], route_class=BodyRoute)

_LEAST, _MOST = 3600, KEPT
"""Seconds that a client may say a file stays."""
_PIECE = 64 << 10
Pairs = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            FORM_TYPE: {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": _LEAST, "maximum": _MOST},
                    },
                }
            }
        },
    }
}


class FileAnswer(ResponseSchema):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None

    @classmethod
    def of(cls, record: Record) -> FileAnswer:
        about = record.origin
        return cls(
            id=record.name,
            bytes=about["bytes"],
            created_at=about["created_at"],
            expires_at=about["expires_at"],
            filename=about["filename"],
            purpose=about["purpose"],
        )


class PageOfItems(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(ResponseSchema):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchAnswer(ResponseSchema):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: dict[str, int]
    metadata: dict[str, str] | None


class BatchRequest(RequestSchema):
    input_file_id: Annotated[str, Field(max_length=200)]
    endpoint: Annotated[str, Field(max_length=200)]
    completion_window: Annotated[str, Field(max_length=40)] = "24h"
    metadata: Pairs | None = None


def _files(app_state: AppState, namespace: str) -> Files:
    return Files(app_state.server.sessions.store, namespace)


def _batches(app_state: AppState, namespace: str) -> Batches:
    return Batches(app_state.server.sessions.store, namespace)


def _page(found: list[Record], after: str | None, limit: int, shown: Callable[[Record], Any]) -> PageOfItems:
    """Up to `limit`, of those behind `after`."""
    names = [each.name for each in found]
    if after is not None:
        if after not in names:
            raise ApiError(404, f"after: there is no {after[:100]!r}", param="after", code="not_found")
        found = found[names.index(after) + 1 :]
    page = found[:limit]
    return PageOfItems(
        data=[shown(each) for each in page],
        first_id=page[0].name if page else None,
        last_id=page[-1].name if page else None,
        has_more=len(found) > limit,
    )


After = Annotated[str | None, Query(max_length=200)]


@files.post("", responses=errors(507), openapi_extra=_FORM)
async def create_file(request: Request, app_state: AppStateDep, caller: CallerDep) -> FileAnswer:
    """Keep a file of requests, one a line, for 30 days or as long as `expires_after` says."""
    folder = await app_state.call(app_state.runtime.sessions.temporary_folder)
    try:
        form = await read_form(request, Path(folder.name) / "form", app_state)
        try:
            file, purpose = file_of(form), text_of(form, "purpose")
            if purpose != "batch":
                raise invalid("purpose", f"files are for 'batch' alone, got {str(purpose)[:40]!r}")
            if (file.size or 0) > MOST_BYTES:
                raise too_large(MOST_BYTES)
            seconds = _seconds(text_of(form, "expires_after[seconds]"))
            filename = (file.filename or "requests.jsonl")[:255]

            def keep() -> Record:
                pieces: Iterator[bytes] = iter(lambda: file.file.read(_PIECE), b"")
                kept = _files(app_state, caller.namespace)
                return kept.create(pieces, filename=filename, purpose=purpose, seconds=seconds)

            return FileAnswer.of(await app_state.work(keep))
        finally:
            await form.close()
    finally:
        await asyncio.shield(app_state.work(folder.cleanup))


def _seconds(text: str | None) -> int:
    if text is None:
        return KEPT
    if not (text.isascii() and text.isdigit() and len(text) < 12 and _LEAST <= int(text) <= _MOST):
        raise invalid("expires_after[seconds]", f"a number from {_LEAST} to {_MOST}, got {text[:40]!r}")
    return int(text)


@files.get("", responses=errors(404))
async def list_files(
    app_state: AppStateDep,
    caller: CallerDep,
    limit: Limit = PAGE,
    after: After = None,
    purpose: After = None,
) -> PageOfItems:
    """The files, the latest first."""

    def work() -> PageOfItems:
        found = _files(app_state, caller.namespace).all()
        kept = [each for each in found if purpose in (None, each.origin["purpose"])]
        return _page(kept, after, limit, FileAnswer.of)

    return await app_state.call(work)


@files.get("/{file_id}", responses=errors(404))
async def read_file(file_id: str, app_state: AppStateDep, caller: CallerDep) -> FileAnswer:
    return FileAnswer.of(await app_state.call(_files(app_state, caller.namespace).get, file_id))


@files.delete("/{file_id}", responses=errors(404, 409))
async def delete_file(file_id: str, app_state: AppStateDep, caller: CallerDep) -> FileDeleted:
    """Forget a file. One that a batch is answered out of stays until that is over."""

    def work() -> FileDeleted:
        kept = _batches(app_state, caller.namespace)
        record = kept.files.get(file_id)
        if (batch := kept.reading(file_id)) is not None:
            raise ApiError(409, f"batch {batch.name} is answered out of it: cancel that", code="file_in_use")
        kept.files.delete(record)
        return FileDeleted(id=file_id)

    return await app_state.work(work)


@files.get(
    "/{file_id}/content",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/jsonl": {}}, "description": "Its lines"}, **errors(404)},
)
async def file_content(file_id: str, app_state: AppStateDep, caller: CallerDep) -> StreamingResponse:
    """What is in a file."""
    kept = _files(app_state, caller.namespace)
    record = await app_state.call(kept.get, file_id)
    # Starlette reads it in threads, a piece at a time.
    pieces = (text.encode() for text in kept.text(record))
    return StreamingResponse(pieces, media_type="application/jsonl")


@batches.post("", responses=errors(404, 507))
async def create_batch(body: BatchRequest, app_state: AppStateDep, caller: CallerDep) -> BatchAnswer:
    """Answer the lines of a file in the background, behind all other requests."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    if body.endpoint not in ENDPOINTS:
        raise invalid("endpoint", f"one of {', '.join(ENDPOINTS)}, got {body.endpoint[:100]!r}")
    if body.completion_window != "24h":
        raise invalid("completion_window", f"it is '24h', got {body.completion_window!r}")
    runner = runner_of(app_state.server)
    kept = _batches(app_state, caller.namespace)
    key = None if caller.account is None else caller.account.key.digest

    def work() -> dict[str, Any]:
        return kept.shown(kept.create(body.endpoint, body.input_file_id, body.metadata or {}, key))

    shown = await app_state.call(work)
    runner.wake()
    return BatchAnswer(**shown)


@batches.get("", responses=errors(404))
async def list_batches(
    app_state: AppStateDep, caller: CallerDep, limit: Limit = PAGE, after: After = None
) -> PageOfItems:
    """The batches, the latest first."""
    kept = _batches(app_state, caller.namespace)
    return await app_state.call(lambda: _page(kept.all(), after, limit, kept.shown))


@batches.get("/{batch_id}", responses=errors(404))
async def read_batch(batch_id: str, app_state: AppStateDep, caller: CallerDep) -> BatchAnswer:
    kept = _batches(app_state, caller.namespace)
    return BatchAnswer(**await app_state.call(lambda: kept.shown(kept.get(batch_id))))


@batches.post("/{batch_id}/cancel", responses=errors(404, 409), openapi_extra=NO_BODY)
async def cancel_batch(batch_id: str, app_state: AppStateDep, caller: CallerDep) -> BatchAnswer:
    """Ask no more lines. What was answered stays."""
    kept = _batches(app_state, caller.namespace)

    def work() -> dict[str, Any]:
        batch = kept.get(batch_id)
        kept.cancel(batch)
        return kept.shown(batch)

    shown = await app_state.call(work)
    runner_of(app_state.server).cancelled(batch_id)
    return BatchAnswer(**shown)
