"""`/v1/rerank`: documents by how near they are to a query."""

from __future__ import annotations

from typing import Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field

from perdure.decode.embedding import Embeddings
from perdure.errors import InvalidInputError
from perdure.server.api.embeddings import EmbeddingUsage
from perdure.server.core.api_error import ApiError
from perdure.server.core.app_state import AppStateDep, CallerDep
from perdure.server.core.follow import outcome
from perdure.server.core.schemas import Items, RequestSchema, ResponseSchema, errors, refuse_fields


class DocumentAsked(RequestSchema):
    text: str


class RerankRequest(RequestSchema):
    model: str = ""
    query: str = Field(min_length=1)
    documents: Items[str | DocumentAsked] | None = None
    texts: Items[str] | None = None
    """Another word for `documents`."""
    top_n: int | None = Field(None, ge=1, lt=2**31)
    """How many of the best are given; all, if not told."""
    return_documents: bool | None = None
    """Whether each comes with its text."""


class DocumentAnswer(ResponseSchema):
    text: str


class RankedDocument(ResponseSchema):
    index: int
    relevance_score: float
    """From -1 to 1: the cosine of the angle between the vectors of the query and of the document."""
    document: DocumentAnswer | None = None


class RerankAnswer(ResponseSchema):
    object: Literal["list"] = "list"
    model: str
    results: list[RankedDocument]
    """The most relevant first."""
    usage: EmbeddingUsage


router = APIRouter(tags=["rerank"])

_DOCUMENTS = 2047
"""Of one request: with the query, as many texts as embeddings take."""
_BAD = "invalid_value"


@router.post("/rerank", responses=errors(404, 504))
@router.post("/v1/rerank", responses=errors(404, 504))
async def rerank(
    asked: RerankRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> RerankAnswer:
    """Documents, the most relevant to a query first, by the vectors that the model has for them."""
    refuse_fields(asked, strict=app_state.strict, refused={}, notes=caller.notes)
    app_state.check_model(asked.model)
    texts = _documents(asked)
    work = await app_state.call(app_state.runtime.submit_embed, [asked.query, *texts])
    try:
        found = await outcome(work, request, app_state)
    except InvalidInputError as error:
        raise ApiError(400, f"documents: {error}", param="documents", code=_BAD) from None
    app_state.metrics.embedded(sum(found.tokens))
    caller.charge(sum(found.tokens))
    usage = EmbeddingUsage(prompt_tokens=sum(found.tokens), total_tokens=sum(found.tokens))
    return RerankAnswer(model=app_state.name, results=_ranked(found, texts, asked), usage=usage)


def _documents(asked: RerankRequest) -> list[str]:
    given = asked.documents if asked.documents is not None else asked.texts
    texts = [each if isinstance(each, str) else each.text for each in given or ()]
    if not texts or not all(texts):
        problem = "give at least one, and none that is empty"
    elif len(texts) > _DOCUMENTS:
        problem = f"{len(texts)} were given, {_DOCUMENTS} are allowed"
    else:
        return texts
    raise ApiError(400, f"documents: {problem}", param="documents", code=_BAD)


def _ranked(found: Embeddings, texts: list[str], asked: RerankRequest) -> list[RankedDocument]:
    # The vectors have length 1.
    scores = np.clip(found.vectors[1:] @ found.vectors[0], -1.0, 1.0)
    order = np.argsort(-scores, kind="stable")[: asked.top_n]
    return [
        RankedDocument(
            index=int(at),
            relevance_score=float(scores[at]),
            document=DocumentAnswer(text=texts[at]) if asked.return_documents else None,
        )
        for at in order
    ]
