"""`/v1/events`: what happens in the engine, told to whoever runs the server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import httpx

from perdure import Runtime
from perdure.backend import LocalBackend
from perdure.engine_config import EngineConfig
from perdure.server.core.keys import Keys, new_key
from perdure.testing.toy import ToyModel
from server.live_server import live_server


def read(lines: Iterator[str]) -> Iterator[dict[str, object]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_events_are_streamed_and_a_wrong_kind_is_refused() -> None:
    with Runtime(LocalBackend(ToyModel(), EngineConfig(n_ctx=256, slots=2))) as rt, live_server(rt) as server:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            refused = client.get("/v1/events?kind=Tokens")
            assert refused.status_code == 400
            assert "there are Queued" in refused.text
            with client.stream("GET", "/v1/events") as answer:
                events = read(answer.iter_lines())
                assert next(events)["type"] == "ping"
                body = {"model": "toy", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
                threading.Thread(target=lambda: httpx.post(f"{server.url}/v1/completions", json=body)).start()
                found = []
                for event in events:
                    found.append(event)
                    if event.get("kind") == "Ended":
                        break
        kinds = [event["kind"] for event in found]
        assert kinds[:2] == ["Queued", "Placed"]
        drawn = [event for event in found if event["kind"] == "TokenDrawn"]
        assert len(drawn) == 3
        assert all(event["text"] for event in drawn)


def test_only_the_operators_key_opens_them_and_they_tell_no_text() -> None:
    made = {name: new_key(name) for name in ("alice", "metrics")}
    keys = Keys([key for _, key in made.values()])
    with (
        Runtime(LocalBackend(ToyModel(), EngineConfig(n_ctx=256, slots=2))) as rt,
        live_server(rt, keys=keys) as server,
    ):
        as_ = {name: {"authorization": f"Bearer {secret}"} for name, (secret, _) in made.items()}
        assert httpx.get(f"{server.url}/v1/events", headers=as_["alice"]).status_code == 403
        with httpx.stream("GET", f"{server.url}/v1/events?kind=TokenDrawn", headers=as_["metrics"]) as answer:
            events = read(answer.iter_lines())
            assert next(events)["type"] == "ping"
            body = {"model": "toy", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
            httpx.post(f"{server.url}/v1/completions", json=body, headers=as_["alice"])
            event = next(events)
        assert event["token"] == -1
        assert event["text"] == ""
        assert event["probability"] > 0  # type: ignore[operator]
