"""`/v1/rerank`: documents by how near they are to a query."""

from __future__ import annotations

from typing import Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field

from perdure.decode.embedding import Embeddings
from perdure.server.api.embeddings import EmbeddingUsage
from perdure.server.core.api_error import ApiError
from perdure.server.core.app_state import AppStateDep, CallerDep
from perdure.server.core.embeddings import embed
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


@router.post("/rerank", responses=errors(404, 504))
@router.post("/v1/rerank", responses=errors(404, 504))
async def rerank(
    asked: RerankRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> RerankAnswer:
    """Documents, the most relevant to a query first, by the vectors that the model has for them."""
    refuse_fields(asked, strict=app_state.strict, refused={}, notes=caller.notes)
    app_state.check_model(asked.model)
    given = asked.documents if asked.documents is not None else asked.texts
    texts = [each if isinstance(each, str) else each.text for each in given or ()]
    if not texts:
        raise ApiError(400, "documents: give at least one", param="documents", code="invalid_value")
    found = await embed([asked.query, *texts], request, app_state, caller, param="documents")
    usage = EmbeddingUsage(prompt_tokens=sum(found.tokens), total_tokens=sum(found.tokens))
    return RerankAnswer(model=app_state.name, results=_ranked(found, texts, asked), usage=usage)


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
