"""Several models, each with separate adapters: `model:adapter` is a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from perdure import InvalidInputError
from perdure.engine_config import EngineConfig
from perdure.server.pool import ModelPool, ModelSpec, Selection, with_adapters
from server.live_server import LiveServer, live_server

TOY = "perdure.testing.toy:ToyModel"
MODELS = Selection(
    models=tuple(
        ModelSpec(name=name, source=TOY, config=EngineConfig(n_ctx=512, slots=1), memory=1 << 20)
        for name in ("a", "b")
    )
)
GIVEN = ("a:pirate=./p.gguf", "b:pirate=./q.gguf:0.5", "b:judge=./j.gguf")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    specs = with_adapters(MODELS, GIVEN).models
    with closing(ModelPool.open(specs)) as pool:
        first = pool.default
        with live_server(first.runtime, pool=pool, adapters=first.adapters, name="a") as found:
            yield found


def text(client: httpx.Client, model: str, **more: Any) -> str:
    said = [{"role": "user", "content": "Hello"}]
    body = {"model": model, "messages": said, "max_tokens": 12, "temperature": 0, **more}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_each_model_has_its_adapters(server: LiveServer) -> None:
    with server.client() as client:
        listed = client.get("/v1/models").json()["data"]
        assert [each["id"] for each in listed] == ["a", "b", "a:pirate", "b:pirate", "b:judge"]
        assert client.get("/v1/models/b:pirate").json()["adapter"] == {"name": "pirate", "scale": 0.5}
        assert client.get("/v1/models/a:judge").status_code == 404
        replies = {each["id"]: text(client, each["id"]) for each in listed}
        assert replies["a"] == replies["b"], "the same model twice"
        assert len(set(replies.values())) == 4
        asked = {"model": "a:judge", "messages": [{"role": "user", "content": "Hello"}]}
        assert client.post("/v1/chat/completions", json=asked).status_code == 404
        assert text(client, "b", perdure={"adapters": {"judge": 1.0}}) == replies["b:judge"]


@pytest.mark.parametrize(
    "given", ["pirate=./p.gguf", "c:pirate=./p.gguf", "a:=./p.gguf", "a:pirate", ":x=./y"]
)
def test_what_is_wrong_is_told(given: str) -> None:
    with pytest.raises(InvalidInputError, match="--adapter"):
        with_adapters(MODELS, [given])
