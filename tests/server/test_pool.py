"""Several models in one server: every protocol finds them, and waits with signs of life while they load."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.pool import ModelPool, ModelSpec
from perdure.worker.process import RestartPolicy
from server.live_server import LiveServer, hello, live_server

SWIFT = RestartPolicy(backoff=0.01, backoff_limit=0.05, grace=10.0)
ONE = 3 << 20
"""Bytes of which only one model's 2 MiB can be there at once."""
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": hello(),
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4, "store": False},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/v1/embeddings": {"input": "Hello"},
    "/api/chat": {**hello(), "stream": False},
    "/api/generate": {"prompt": "Hello", "stream": False, "options": {"num_predict": 4}},
    "/api/embed": {"input": "Hello"},
}


def spec(name: str, kind: str = "full", **more: Any) -> ModelSpec:
    return ModelSpec(
        name=name, source=f"worker.engines:{kind}", n_ctx=512, slots=2, **{"memory": 2 << 20, **more}
    )


@contextmanager
def served(
    *specs: ModelSpec, store: Path | None = None, memory: int | None = None, **settings: Any
) -> Iterator[LiveServer]:
    with closing(ModelPool.open(specs, store=store, memory=memory, restart_policy=SWIFT)) as pool:
        first = pool.default
        with live_server(first.runtime, pool=pool, **settings) as server:
            server.app_state.name = first.name
            yield server


def states(client: httpx.Client) -> dict[str, str]:
    return {each["id"]: each["state"] for each in client.get("/v1/models").json()["data"]}


def test_names_aliases_and_what_is_loaded(tmp_path: Path) -> None:
    with (
        served(
            spec("small"), spec("large", "sliding"), store=tmp_path, aliases=("gpt-*=large", "claude-*")
        ) as server,
        server.client() as client,
    ):
        assert states(client) == {"small": "unloaded", "large": "unloaded"}
        assert client.get("/api/ps").json() == {"models": []}
        assert client.get("/ready").status_code == 200
        assert client.get("/metrics").status_code == 200
        assert [each["state"] for each in client.get("/v1/machine").json()["models"]] == ["unloaded"] * 2
        for asked, name in (("gpt-5", "large"), ("large:latest", "large")):
            answer = client.post("/v1/chat/completions", json=hello(model=asked))
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name
        assert states(client) == {"small": "unloaded", "large": "ready"}
        [loaded] = client.get("/api/ps").json()["models"]
        assert loaded["name"] == "large:latest"
        assert [each["name"] for each in client.get("/api/tags").json()["models"]] == [
            "small:latest",
            "large:latest",
        ]
        # Names that are neither are refused by every protocol, and load nothing.
        for path, body in ASKED.items():
            for name in ("other", "gpt", "large2"):
                refused = client.post(path, json={**body, "model": name})
                assert refused.status_code == 404, (path, refused.text)
        assert states(client) == {"small": "unloaded", "large": "ready"}
        # Each protocol asks the model that it names.
        for path, body in ASKED.items():
            answer = client.post(path, json={**body, "model": "claude-haiku"})
            assert answer.status_code == 200, (path, answer.text)
        assert states(client) == {"small": "ready", "large": "ready"}
        let_go = client.post("/v1/models/large/unload", json={})
        assert let_go.status_code == 200, let_go.text
        assert let_go.json()["state"] == "unloaded"
        assert states(client)["large"] == "unloaded"
        again = client.post("/v1/models/gpt-4/load", json={"keep_alive": "1h"}).json()
        assert again["state"] == "ready"
        assert 0 < again["expires_in"] <= 3600
        # Ollama's way to let a model go.
        gone = client.post("/api/generate", json={"model": "large", "keep_alive": 0, "stream": False})
        assert gone.json()["done_reason"] == "unload"
        assert states(client)["large"] == "unloaded"


def test_a_session_goes_on_with_another_model_over_http(tmp_path: Path) -> None:
    with (
        served(spec("a"), spec("b", "sliding"), store=tmp_path, memory=ONE) as server,
        server.client() as client,
    ):
        for number, model in enumerate(("a", "b", "a")):
            body = hello(model=model, perdure={"session": "s"})
            answer = client.post("/v1/chat/completions", json=body).json()
            assert answer["perdure"]["kept"], answer
            assert answer["model"] == model
            assert client.get("/v1/sessions/s").json()["turns"] == number + 1
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_who_waits_for_a_model_hears_that_it_comes(tmp_path: Path) -> None:
    """Both models cannot be loaded: while one is held, a stream of the other says signs of life."""
    with (
        served(
            spec("a"), spec("b", "sliding"), memory=ONE, silent_seconds=0.05, progress_seconds=0.05
        ) as server,
        server.client() as client,
    ):
        pool = server.app_state.pool
        assert pool is not None
        a = pool.models["a"]
        assert client.post("/v1/models/a/load", json={}).status_code == 200
        for path, sign in (
            ("/v1/chat/completions", b": "),
            ("/v1/messages", b": "),
            ("/api/chat", b"loading"),
        ):
            assert client.post("/v1/models/a/load", json={}).status_code == 200
            assert pool.try_acquire(a)
            seen = threading.Event()
            held = [a]

            def let_go(seen: threading.Event = seen, held: list[Any] = held) -> None:
                seen.wait(60)
                pool.release(held.pop())

            thread = threading.Thread(target=let_go)
            thread.start()
            body = {**hello(model="b", stream=True)}
            with client.stream("POST", path, json=body) as response:
                assert response.status_code == 200
                said = b""
                for part in response.iter_bytes():
                    said += part
                    if sign in said:
                        seen.set()
            thread.join()
            assert seen.is_set(), said
            text = said.decode()
            if path.startswith("/api"):
                assert json.loads(text.splitlines()[-1])["done"] is True
            else:
                assert "[DONE]" in text or "message_stop" in text


def test_an_error_after_a_sign_of_life_is_an_event() -> None:
    with (
        served(spec("a"), spec("broken", "stillborn"), silent_seconds=0.01, progress_seconds=0.01) as server,
        server.client() as client,
    ):
        with client.stream(
            "POST", "/v1/chat/completions", json=hello(model="broken", stream=True)
        ) as response:
            assert response.status_code == 200
            text = response.read().decode()
        [data] = [line for line in text.splitlines() if line.startswith("data: ")]
        assert "error" in json.loads(data[6:])
        whole = client.post("/v1/chat/completions", json=hello(model="broken"))
        assert whole.status_code in (500, 503)
        assert client.post("/v1/chat/completions", json=hello(model="a")).status_code == 200


@pytest.mark.parametrize("value", ["soon", "1 hour", [], {}])
def test_a_keep_alive_that_is_none_is_refused(value: Any) -> None:
    with served(spec("a")) as server, server.client() as client:
        assert client.post("/v1/models/a/load", json={"keep_alive": value}).status_code in (400, 422)
        assert states(client) == {"a": "unloaded"}


def test_looking_loads_nothing_and_clearing_reaches_every_model(tmp_path: Path) -> None:
    with (
        served(spec("a"), spec("b", "sliding"), store=tmp_path, memory=ONE) as server,
        server.client() as client,
    ):
        for path in (
            "/v1/cache",
            "/v1/cache/blocks",
            "/v1/cache/tree",
            "/v1/machine",
            "/metrics",
            "/v1/sessions",
        ):
            assert client.get(path).status_code == 200, path
        assert states(client) == {"a": "unloaded", "b": "unloaded"}
        for model in ("a", "b"):
            warmed = client.post(
                f"/v1/cache/warm?model={model}", json={"prompt": "x" * 100, "labels": ["mine"]}
            )
            assert warmed.status_code == 201, warmed.text
        assert client.delete("/v1/cache?label=mine").json()["deleted"] == 2
