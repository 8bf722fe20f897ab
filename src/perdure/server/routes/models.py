"""`/v1/models`, and text as tokens."""

from __future__ import annotations

from fastapi import APIRouter

from perdure.server.desk import ADesk, Desk
from perdure.server.routes.documented import errors
from perdure.server.shapes.base import refuse_fields
from perdure.server.shapes.completion import (
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelAnswer,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
)

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models", responses=errors())
async def list_models(desk: ADesk) -> ModelList:
    """The model that this server has."""
    return ModelList(data=[_model(desk)])


@router.get("/v1/models/{name:path}", responses=errors(404))
async def read_model(name: str, desk: ADesk) -> ModelAnswer:
    desk.check_model(name)
    return _model(desk)


@router.post("/tokenize", responses=errors(), tags=["tokens"])
async def tokenize(asked: TokenizeRequest, desk: ADesk) -> TokenizeAnswer:
    """A text as token ids."""
    refuse_fields(asked, strict=desk.strict, refused={})
    tokens = await desk.call(
        desk.runtime.model.tokenize, asked.content, special=asked.special, bos=asked.add_special
    )
    return TokenizeAnswer(tokens=tokens, count=len(tokens))


@router.post("/detokenize", responses=errors(), tags=["tokens"])
async def detokenize(asked: DetokenizeRequest, desk: ADesk) -> DetokenizeAnswer:
    """Token ids as text."""
    refuse_fields(asked, strict=desk.strict, refused={})
    text = await desk.call(desk.runtime.model.detokenize, asked.tokens, special=asked.special)
    return DetokenizeAnswer(content=text)


def _model(desk: Desk) -> ModelAnswer:
    model = desk.runtime.model
    return ModelAnswer(
        id=desk.name,
        created=int(desk.started),
        owned_by="perdure",
        n_ctx=desk.runtime.n_ctx,
        n_vocab=model.n_vocab,
        architecture=model.metadata.get("general.architecture", ""),
        digest=model.digest,
    )
