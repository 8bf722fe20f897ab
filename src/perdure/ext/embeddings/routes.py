"""Embeddings for a client: vectors of its texts, paid for as they are computed."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from perdure import Embeddings, InvalidInputError, RankedText
from perdure.spi.engine import Floats
from perdure.spi.runtime import EmbeddingFuture, cut, ranked
from perdure.spi.server import (
    AppState,
    AppStateDep,
    BodyRoute,
    Caller,
    CallerDep,
    Items,
    RequestSchema,
    ResponseSchema,
    Token,
    deadline,
    errors,
    invalid,
    refuse_fields,
    stopping,
    while_connected,
)


async def embed(
    texts: Sequence[str] | Sequence[list[int]],
    request: Request,
    app_state: AppState,
    caller: Caller,
    *,
    param: str = "input",
    limit: int = 2048,
    query: str | None = None,
    prefix: str = "",
    model: str = "",
) -> Embeddings:
    """Vectors of texts, unless the client of `request` leaves or they take too long: then the tokens that
    were read so far are paid for. `param` is the field that has the texts; with a `query`, they are documents
    to be compared with it, as `Runtime.submit_rank` does. `model` is as it was asked for: it may name an
    adapter."""
    if not texts or not all(texts):
        raise invalid(param, "give at least one text, and none that is empty")
    if len(texts) > limit:
        raise invalid(param, f"{len(texts)} texts, {limit} are allowed")
    runtime, adapters = app_state.runtime, app_state.model_options(model).get("adapters")

    def submit() -> EmbeddingFuture:
        if query is not None:
            documents = [text for text in texts if isinstance(text, str)]
            return runtime.submit_rank(query, documents, adapters=adapters)
        return runtime.submit_embed(texts, prefix=prefix, adapters=adapters)

    try:
        work = await app_state.call(submit)
    except InvalidInputError as error:
        raise invalid(param, str(error)) from None
    app_state.server.running.add(work)
    if app_state.server.stopping:
        work.cancel()
    seconds = app_state.server.limits.request_seconds
    try:
        async with asyncio.timeout(seconds):
            return await while_connected(request, asyncio.wrap_future(work))
    except TimeoutError:
        raise deadline(seconds) from None
    except asyncio.CancelledError:
        if app_state.server.stopping:
            raise stopping() from None
        raise
    except InvalidInputError as error:
        raise invalid(param, str(error)) from None
    finally:
        work.cancel()
        caller.charge(work.tokens_read)
        app_state.server.ledger.metrics.embedded(work.tokens_read)


async def check_width(width: int | None, app_state: AppState) -> None:
    """Refuse wider vectors than the model's."""
    if width is None:
        return
    own = await app_state.call(lambda: app_state.runtime.embedding_width)
    if width > own:
        raise invalid(
            "dimensions", f"the vectors of this model have {own}, {width} were asked for; leave it out"
        )


# `/v1/embeddings`.


class EmbeddingRequest(RequestSchema):
    model: str = ""
    input: str | Items[str] | Items[Token] | Items[Items[Token]]
    dimensions: int | None = Field(None, ge=1, lt=2**31)
    """As many as the model's vectors have, or fewer: the first ones, at length 1 again."""
    prefix: str = Field("", max_length=4096)
    """Put before each text, such as the `search_query: ` that some models were trained with."""
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


router = APIRouter(route_class=BodyRoute)


@router.post("/v1/embeddings", tags=["OpenAI"], responses=errors(404, 504), response_model=EmbeddingAnswer)
async def embeddings(
    body: EmbeddingRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> Response:
    """Texts as vectors of length 1."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    app_state = await app_state.serving(body.model, caller.visit)
    inputs: Any = body.input
    one = isinstance(inputs, str) or (inputs and all(isinstance(each, int) for each in inputs))
    await check_width(body.dimensions, app_state)
    texts = [inputs] if one else inputs
    embedded = await embed(texts, request, app_state, caller, prefix=body.prefix, model=body.model)
    embedded = cut(embedded, body.dimensions)
    if app_state.server.log_text:
        caller.notes["input"] = body.input
    # In a thread: a thousand vectors are a million numbers to write out.
    answer_body = await app_state.call(_body, embedded, app_state.name, body.encoding_format == "base64")
    return Response(answer_body, media_type="application/json")


def _body(embedded: Embeddings, model: str, packed: bool) -> bytes:
    data = [
        {"object": "embedding", "index": index, "embedding": _packed(vector) if packed else vector.tolist()}
        for index, vector in enumerate(embedded.vectors)
    ]
    usage = {"prompt_tokens": sum(embedded.tokens), "total_tokens": sum(embedded.tokens)}
    return json.dumps({"object": "list", "data": data, "model": model, "usage": usage}).encode()


def _packed(vector: Floats) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


# `/v1/rerank`: documents by how near they are to a query.


class DocumentAsked(RequestSchema):
    text: str


class RerankRequest(RequestSchema):
    model: str = ""
    query: str = Field(min_length=1)
    documents: Items[str | DocumentAsked] | None = None
    texts: Items[str] | None = None
    """Another word for `documents`."""
    top_n: int | None = Field(None, ge=1, lt=2**31)
    """How many of the best are given; all by default."""
    return_documents: bool | None = None
    """Whether each comes with its text."""


class DocumentAnswer(ResponseSchema):
    text: str


class RankedDocument(ResponseSchema):
    index: int
    relevance_score: float
    """By a model that scores pairs, its score; by any other, from -1 to 1, the cosine of the angle between
    the vectors of the query and of the document."""
    document: DocumentAnswer | None = None


class RerankAnswer(ResponseSchema):
    object: Literal["list"] = "list"
    model: str
    results: list[RankedDocument]
    """The most relevant first."""
    usage: EmbeddingUsage


@router.post("/rerank", tags=["rerank"], responses=errors(404, 504))
@router.post("/v1/rerank", tags=["rerank"], responses=errors(404, 504))
async def rerank(
    body: RerankRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> RerankAnswer:
    """Documents, the most relevant to a query first: by the score of each pair, where the model is a
    reranker, else by the vectors that it has for them."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    app_state = await app_state.serving(body.model, caller.visit)
    documents = body.documents if body.documents is not None else body.texts
    texts = [each if isinstance(each, str) else each.text for each in documents or ()]
    if not texts:
        raise invalid("documents", "give at least one")
    embedded = await embed(
        texts,
        request,
        app_state,
        caller,
        param="documents",
        limit=2047,
        query=body.query,
        model=body.model,
    )
    best = ranked(embedded, scored=app_state.runtime.model.info.pair is not None)
    usage = EmbeddingUsage(prompt_tokens=sum(embedded.tokens), total_tokens=sum(embedded.tokens))
    return RerankAnswer(model=app_state.name, results=_results(best, texts, body), usage=usage)


def _results(best: Sequence[RankedText], texts: list[str], body: RerankRequest) -> list[RankedDocument]:
    return [
        RankedDocument(
            index=each.index,
            relevance_score=each.score,
            document=DocumentAnswer(text=texts[each.index]) if body.return_documents else None,
        )
        for each in best[: body.top_n]
    ]
