"""Embeddings in OpenAI's shape."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perdure.server.schemas.base import Items, RequestSchema, ResponseSchema
from perdure.server.schemas.completion import Token


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
