"""Several models in one server: every protocol finds them, and waits with signs of life while they load."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.backend import BlockStorage
from perdure.engine_config import EngineConfig
from perdure.restart_policy import RestartPolicy
from perdure.server.core.keys import Keys, new_key
from perdure.server.pool import ModelPool, ModelSpec
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


def spec(name: str, kind: str = "full", *, n_ctx: int = 512, slots: int = 2, **more: Any) -> ModelSpec:
    return ModelSpec(
        name=name,
        source=f"ext.workers.engines:{kind}",
        config=EngineConfig(n_ctx=n_ctx, slots=slots),
        **{"memory": 2 << 20, **more},
    )


@contextmanager
def served(
    *specs: ModelSpec, store: Path | None = None, memory: int | None = None, **settings: Any
) -> Iterator[LiveServer]:
    storage = BlockStorage(folder=store)
    with closing(ModelPool.open(specs, storage=storage, memory=memory, restart_policy=SWIFT)) as pool:
        first = pool.default
        with live_server(first.runtime, name=first.name, pool=pool, **settings) as server:
            yield server


def states(client: httpx.Client) -> dict[str, str]:
    return {each["id"]: each["state"] for each in client.get("/v1/models").json()["data"]}


@pytest.mark.parametrize(("memory", "fit"), [(5 << 20, "fits"), (3 << 20, "in_turn")])
def test_the_list_says_whether_a_model_can_be_loaded_beside_the_others(memory: int, fit: str) -> None:
    with served(spec("a"), spec("b"), memory=memory) as server, server.client() as client:
        assert client.post("/v1/chat/completions", json=hello(model="a")).status_code == 200
        listed = {each["id"]: each["fit"] for each in client.get("/v1/models").json()["data"]}
    assert listed == {"a": "fits", "b": fit}


def test_the_list_says_which_model_takes_more_than_there_is() -> None:
    with served(spec("a"), spec("vast", memory=1 << 60)) as server, server.client() as client:
        listed = {each["id"]: each["fit"] for each in client.get("/v1/models").json()["data"]}
    assert listed == {"a": "fits", "vast": "not"}


def test_a_context_that_holds_for_all_models_is_told_before_they_are_loaded() -> None:
    own = ModelSpec(
        name="own", source="ext.workers.engines:full", config=EngineConfig(n_ctx=256), memory=2 << 20
    )
    common = ModelSpec(name="common", source="ext.workers.engines:full", memory=2 << 20)
    with closing(ModelPool.open([common, own], EngineConfig(n_ctx=1024), restart_policy=SWIFT)) as pool:
        first = pool.default
        with live_server(first.runtime, name=first.name, pool=pool) as server, server.client() as client:
            for _ in range(2):
                told = client.get("/v1/machine").json()["models"]
                assert [each["n_ctx"] for each in told] == [1024, 256]
                assert client.post("/v1/chat/completions", json=hello()).status_code == 200


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
        metrics = client.get("/metrics").text
        size, free = (
            float(re.search(rf"^{name} (\S+)", metrics, re.MULTILINE)[1])  # type: ignore[index]
            for name in ("perdure_disk_bytes", "perdure_disk_free_bytes")
        )
        assert 0 < free < size, "of the disk on which the store is"
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


UNLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "route": ("/v1/models/a/unload", {}),
    "ollama": ("/api/generate", {"model": "a", "keep_alive": 0, "stream": False}),
    "ollama chat": ("/api/chat", {"model": "a", "messages": [], "keep_alive": 0, "stream": False}),
}


@pytest.mark.parametrize("way", UNLOADS)
def test_an_unload_beside_a_long_reply_keeps_nobody_waiting_y2(way: str) -> None:
    """Y2: others waited until the reply was over, for as long as it was."""
    path, body = UNLOADS[way]
    with (
        served(spec("a", "slow", n_ctx=8192)) as server,
        server.client() as talker,
        server.client() as client,
    ):
        assert server.state.models.pool is not None
        model = server.state.models.pool.default
        long = hello(stream=True, max_tokens=8000, perdure={"ignore_eos": True, "loop_guard": 0})
        named = {"x-request-id": "long"}
        with talker.stream("POST", "/v1/chat/completions", json=long, headers=named) as reply:
            # An iterator that nobody holds closes its stream.
            lines = reply.iter_lines()
            next(lines)
            refused = client.post(path, json=body)
            assert refused.status_code == 409, refused.text
            assert "in use" in refused.text
            assert client.post("/v1/chat/completions", json=hello()).status_code == 200
            # The long reply was not over: it is still there to be ended.
            assert client.post("/v1/requests/long/cancel", json={}).status_code == 200
        assert model.loads == 1


@contextmanager
def keyed(*specs: ModelSpec) -> Iterator[tuple[httpx.Client, httpx.Client, httpx.Client]]:
    """The operator's client and two others of one server."""
    made = [new_key(name) for name in ("metrics", "ann", "bob")]
    with ExitStack() as stack:
        server = stack.enter_context(served(*specs, keys=Keys([key for _, key in made])))
        operator, ann, bob = (stack.enter_context(server.client(secret)) for secret, _ in made)
        yield operator, ann, bob


def test_with_keys_the_operator_alone_unloads_y2() -> None:
    with keyed(spec("a")) as (operator, ann, bob):
        assert bob.post("/v1/chat/completions", json=hello()).status_code == 200
        for path, body in UNLOADS.values():
            refused = ann.post(path, json=body)
            assert refused.status_code == 403, (path, refused.text)
        assert states(bob) == {"a": "ready"}
        assert operator.post("/v1/models/a/unload", json={}).json()["state"] == "unloaded"
        assert operator.post("/v1/models/a/load", json={}).json()["loads"] == 2
        # Of the rest it opens nothing.
        assert operator.post("/v1/chat/completions", json=hello()).status_code == 403
        assert operator.get("/v1/models/a").status_code == 403


def test_a_pinned_model_refuses_to_go_y9() -> None:
    with served(spec("a", pinned=True)) as server, server.client() as client:
        assert client.post("/v1/chat/completions", json=hello()).status_code == 200
        for path, body in UNLOADS.values():
            refused = client.post(path, json=body)
            assert refused.status_code == 409, (path, refused.text)
            assert "pinned" in refused.text
        assert states(client) == {"a": "ready"}


def test_a_key_only_lengthens_how_long_a_model_stays_y9() -> None:
    """Y9: `keep_alive` of one key's request held for all."""
    with keyed(spec("a", keep_alive=600.0)) as (operator, ann, bob):

        def stays(client: httpx.Client) -> float | None:
            [model] = client.get("/v1/models").json()["data"]
            expires_in: float | None = model["expires_in"]
            return expires_in

        def ask(keep_alive: str | int) -> None:
            for path, body in {**KEPT, "/v1/models/a/load": {}}.items():
                answer = ann.post(path, json={**body, "keep_alive": keep_alive})
                assert answer.status_code == 200, (path, answer.text)

        ask(0)
        ask("1s")
        assert 500 < (stays(bob) or 0) <= 600
        ask("1h")
        assert 3500 < (stays(bob) or 0) <= 3600
        ask(-1)
        assert stays(bob) is None
        ask("2h")
        assert stays(bob) is None
        # The operator decides.
        assert operator.post("/v1/models/a/load", json={"keep_alive": "5m"}).status_code == 200
        assert 200 < (stays(bob) or 0) <= 300


KEPT: dict[str, dict[str, Any]] = {
    "/api/chat": {**hello(), "stream": False},
    "/api/generate": {"prompt": "Hello", "stream": False, "options": {"num_predict": 4}},
    "/api/embed": {"input": "Hello"},
    "/api/embeddings": {"prompt": "Hello"},
}


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
        pool = server.state.models.pool
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


@pytest.mark.extension("inspection")
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
