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
from perdure.server.core.app_state import AppStateDep, CallerDep
from perdure.server.core.embeddings import check_width, embed
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


@router.post("/v1/embeddings", responses=errors(404, 504), response_model=EmbeddingAnswer)
async def embeddings(
    asked: EmbeddingRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> Response:
    """Texts as vectors of length 1."""
    refuse_fields(asked, strict=app_state.strict, refused={}, notes=caller.notes)
    app_state.check_model(asked.model)
    given: Any = asked.input
    one = isinstance(given, str) or (given and all(isinstance(each, int) for each in given))
    await check_width(asked.dimensions, app_state)
    found = await embed([given] if one else given, request, app_state, caller)
    if app_state.log_text:
        caller.notes["input"] = asked.input
    # In a thread: a thousand vectors are a million numbers to write out.
    body = await app_state.call(_body, found, app_state.name, asked.encoding_format == "base64")
    return Response(body, media_type="application/json")


def _body(found: Embeddings, model: str, packed: bool) -> bytes:
    data = [
        {"object": "embedding", "index": index, "embedding": _packed(vector) if packed else vector.tolist()}
        for index, vector in enumerate(found.vectors)
    ]
    usage = {"prompt_tokens": sum(found.tokens), "total_tokens": sum(found.tokens)}
    return json.dumps({"object": "list", "data": data, "model": model, "usage": usage}).encode()


def _packed(vector: Floats) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
