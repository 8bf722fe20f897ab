"""`/v1/rerank`: documents by how near they are to a query."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from server.live_server import LiveServer

QUERY, DOCUMENTS = "the sea", ["a mountain", "the sea is blue", "the sea", "ships"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_documents_come_by_the_angle_of_their_vectors(
    path: str, here: LiveServer, client: httpx.Client
) -> None:
    found = client.post(path, json={"query": QUERY, "documents": DOCUMENTS}).json()
    vectors = here.runtime.embed([QUERY, *DOCUMENTS]).vectors
    scores = vectors[1:] @ vectors[0]
    assert [each["index"] for each in found["results"]] == np.argsort(-scores).tolist()
    assert found["results"][0]["index"] == DOCUMENTS.index(QUERY)
    assert found["results"][0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)
    assert found["usage"]["prompt_tokens"] == sum(here.runtime.embed([QUERY, *DOCUMENTS]).tokens)


def test_the_best_with_their_texts(client: httpx.Client) -> None:
    documents: list[Any] = [{"text": text} for text in DOCUMENTS]
    body = {"query": QUERY, "documents": documents, "top_n": 2, "return_documents": True}
    results = client.post("/v1/rerank", json=body).json()["results"]
    assert len(results) == 2
    assert results[0]["document"] == {"text": QUERY}
    same = client.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "top_n": 2}).json()["results"]
    assert [each["index"] for each in same] == [each["index"] for each in results]
    assert same[0]["document"] is None


@pytest.mark.parametrize(
    "body",
    [
        {"query": QUERY},
        {"query": QUERY, "documents": []},
        {"query": QUERY, "documents": ["a", ""]},
        {"query": "", "documents": ["a"]},
        {"query": QUERY, "documents": ["a"] * 2048},
        {"documents": ["a"]},
    ],
)
def test_what_cannot_be_ranked_is_400(body: dict[str, Any], client: httpx.Client) -> None:
    assert client.post("/v1/rerank", json=body).status_code == 400
