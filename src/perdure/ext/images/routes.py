"""`/v1/images/count`: what a picture costs before it is sent. `/v1/sessions/{name}/images/{digest}`: a picture
of a conversation, for its owner."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Path as PathParameter, Request
from starlette.responses import Response

from perdure.ext.images.encoder import MOST_BYTES
from perdure.ext.images.media_store import FileDigest
from perdure.ext.images.reader import StoredImages
from perdure.spi.base import read_file
from perdure.spi.server import (
    FILE_TYPE,
    ApiError,
    AppState,
    AppStateDep,
    BodyRoute,
    CallerDep,
    Named,
    ResponseSchema,
    ServedDep,
    errors,
    receive_file,
)

router = APIRouter(prefix="/v1", tags=["images"], route_class=BodyRoute)

_KINDS = ((b"\x89PNG", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"))
Digest = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{64}$")]


class ImageCount(ResponseSchema):
    tokens: int


@router.post(
    "/images/count",
    responses=errors(404, 413, 507),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {FILE_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def count_image(request: Request, app_state: ServedDep) -> ImageCount:
    """How many tokens a picture will be, by its header. Nothing of it is kept."""
    folder = await app_state.call(app_state.runtime.sessions.temporary_folder)
    try:
        path = Path(folder.name) / "image"
        await receive_file(request, path, app_state, most=MOST_BYTES)

        def count() -> ImageCount:
            return ImageCount(tokens=_reader(app_state).count(read_file(path, MOST_BYTES)))

        return await app_state.work(count)
    finally:
        await asyncio.shield(app_state.work(folder.cleanup))


@router.get(
    "/sessions/{name}/images/{digest}",
    response_class=Response,
    responses={
        200: {"content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}},
        **errors(404),
    },
)
async def session_image(name: Named, digest: Digest, app_state: AppStateDep, caller: CallerDep) -> Response:
    """A picture as it was sent. Each namespace has its own, also of the same file."""

    def read() -> bytes:
        app_state.runtime.sessions.get(name, caller.namespace)
        found = _reader(app_state).file(FileDigest(bytes.fromhex(digest)), caller.namespace)
        if found is None or _kind(found) is None:
            raise ApiError(404, "there is no such picture", code="image_not_found")
        return found

    data = await app_state.call(read)
    headers = {
        "cache-control": "private, max-age=31536000, immutable",
        "content-security-policy": "default-src 'none'; sandbox",
        "x-content-type-options": "nosniff",
    }
    return Response(data, media_type=_kind(data), headers=headers)


def _reader(app_state: AppState) -> StoredImages:
    reader = app_state.runtime.chat_format.open_images()
    assert isinstance(reader, StoredImages)
    return reader


def _kind(data: bytes) -> str | None:
    """What a picture is, by its first bytes; None where a browser should not show it."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for head, kind in _KINDS if data.startswith(head)), None)
