"""Reranking in the shape that Jina and Cohere gave it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perdure.server.schemas.base import Items, RequestSchema, ResponseSchema
from perdure.server.schemas.embedding import EmbeddingUsage


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
