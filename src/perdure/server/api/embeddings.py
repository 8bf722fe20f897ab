"""`/v1/embeddings`."""

from __future__ import annotations

import base64
import json
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from perdure.decode.embedding import Embeddings
from perdure.engine.contract import Floats
from perdure.errors import InvalidInputError
from perdure.server.core.api_error import ApiError
from perdure.server.core.app_state import AppStateDep, CallerDep
from perdure.server.core.follow import outcome
from perdure.server.core.schemas import Items, RequestSchema, ResponseSchema, Token, errors, refuse_fields


class EmbeddingRequest(RequestSchema):
    model: str = ""
    input: str | Items[str] | Items[Token] | Items[Items[Token]]
    dimensions: int | None = Field(None, ge=1, lt=2**31)
    """As many as the model's vectors have; others are refused."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64` is the numbers as 32-bit floats, little-endian."""
    user: str | None = None
    """Not used."""


class Embedding(ResponseSchema):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ResponseSchema):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


router = APIRouter(tags=["OpenAI"])

_TEXTS = 2048
"""Of one request, as OpenAI has it."""
_BAD = "invalid_value"


@router.post("/v1/embeddings", responses=errors(404, 504), response_model=EmbeddingAnswer)
async def embed(
    asked: EmbeddingRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> Response:
    """Texts as vectors of length 1."""
    refuse_fields(asked, strict=app_state.strict, refused={}, notes=caller.notes)
    app_state.check_model(asked.model)
    texts = _texts(asked)
    if asked.dimensions is not None:
        _check_width(asked.dimensions, await app_state.call(lambda: app_state.runtime.embedding_width))
    try:
        found = await outcome(await app_state.call(app_state.runtime.submit_embed, texts), request, app_state)
    except InvalidInputError as error:
        raise ApiError(400, f"input: {error}", param="input", code=_BAD) from None
    app_state.metrics.embedded(sum(found.tokens))
    caller.charge(sum(found.tokens))
    if app_state.log_text:
        caller.notes["input"] = asked.input
    # In a thread: a thousand vectors are a million numbers to write out.
    body = await app_state.call(_body, found, app_state.name, asked.encoding_format == "base64")
    return Response(body, media_type="application/json")


def _texts(asked: EmbeddingRequest) -> list[str] | list[list[int]]:
    given: Any = asked.input
    one = isinstance(given, str) or (given and all(isinstance(each, int) for each in given))
    texts: list[str] | list[list[int]] = [given] if one else given
    if not texts or not all(texts):
        raise ApiError(400, "input: give at least one text, and none that is empty", param="input", code=_BAD)
    if len(texts) > _TEXTS:
        raise ApiError(400, f"input: {len(texts)} texts, {_TEXTS} are allowed", param="input", code=_BAD)
    return texts


def _check_width(asked: int, width: int) -> None:
    if asked != width:
        raise ApiError(
            400,
            f"dimensions: the vectors of this model have {width}, {asked} were asked for; leave it out",
            param="dimensions",
            code=_BAD,
        )


def _body(found: Embeddings, model: str, packed: bool) -> bytes:
    data = [
        {"object": "embedding", "index": index, "embedding": _packed(vector) if packed else vector.tolist()}
        for index, vector in enumerate(found.vectors)
    ]
    usage = {"prompt_tokens": sum(found.tokens), "total_tokens": sum(found.tokens)}
    return json.dumps({"object": "list", "data": data, "model": model, "usage": usage}).encode()


def _packed(vector: Floats) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
