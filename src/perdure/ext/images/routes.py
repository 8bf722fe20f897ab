"""Routes about images.

    POST /v1/images/count    how many tokens an image will take, before it is sent with a message
        {"image_url": "data:image/png;base64,…", "detail": "low", "model": "llava"}  →  {"tokens": 66}

    GET /v1/sessions/NAME/images/DIGEST    the file of an image in a session, as it was sent

A turn names its images in `messages[].images`: the number of characters before it, and the DIGEST (the
SHA-256 of the file, in hex) that the second route takes; behind it stands `low` for less detail, `sound` for
a sound. An image that no session of yours names is 404,
as is that of another key. `POST /v1/images/count` reads the header alone, and encodes and keeps nothing. The
first one starts the encoder (a second). A model that reads no images is 400 with the reason, as is a file
that is no image. `"sha256:DIGEST"` in the place of a data: URL is the image of a session of yours.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path
from starlette.responses import Response

from perdure import SessionNotFoundError
from perdure.ext.images.links import type_of_image
from perdure.ext.images.reader import StoredImages, kind_of
from perdure.spi.server import (
    AppState,
    AppStateDep,
    BodyRoute,
    CallerDep,
    Named,
    RequestSchema,
    ResponseSchema,
    errors,
    image_of_url,
    refuse_fields,
)

router = APIRouter(prefix="/v1", tags=["images"], route_class=BodyRoute)


class ImageCountRequest(RequestSchema):
    image_url: str
    """The image, as a data: URL."""
    detail: Literal["auto", "low", "high"] | None = None
    """As in chat completions."""
    model: str = ""


class ImageCountAnswer(ResponseSchema):
    tokens: int
    """That it takes in a prompt of this model."""


@router.post("/images/count", responses=errors(404, 503))
async def count(body: ImageCountRequest, app_state: AppStateDep, caller: CallerDep) -> ImageCountAnswer:
    """How many tokens an image will take, before it is sent with a message. Nothing of it is kept."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    served = await app_state.serving(body.model, caller.visit, caller.namespace)

    def work() -> int:
        image = image_of_url(body.image_url, "image_url", detail=body.detail or "auto")
        return _reader(served).count(image, caller.namespace)

    return ImageCountAnswer(tokens=await served.work(work))


@router.get(
    "/sessions/{name}/images/{digest}",
    response_class=Response,
    responses={
        200: {
            "content": {
                kind: {} for kind in ("image/png", "image/jpeg", "image/gif", "image/webp", "audio/wav")
            }
        },
        **errors(404),
    },
)
async def file(
    name: Named,
    digest: Annotated[str, Path(pattern="^[0-9a-f]{64}$")],
    app_state: AppStateDep,
    caller: CallerDep,
) -> Response:
    """The file of an image in a session, as it was sent."""

    def work() -> bytes:
        app_state.runtime.sessions.get(name, caller.namespace)
        data = _reader(app_state).file(digest, caller.namespace)
        if data is None:
            raise SessionNotFoundError(f"there is no file of an image {digest[:12]}… among your sessions")
        return data

    data = await app_state.work(work)
    headers = {
        # Nothing in it is run, whatever it says that it is.
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "default-src 'none'; sandbox",
        "Cache-Control": "private, max-age=31536000, immutable",
    }
    kind = "audio/wav" if kind_of(data) == "audio" else type_of_image(data)
    return Response(data, media_type=kind or "application/octet-stream", headers=headers)


def _reader(app_state: AppState) -> StoredImages:
    reader = app_state.runtime.chat_format.image_reader()
    assert isinstance(reader, StoredImages)
    return reader
