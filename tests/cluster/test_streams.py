"""A stream of Responses survives the loss of its replica: another one goes on with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

import perdure
from cluster.harness import Replica
from cluster.servers import PostgresServer, free_port
from perdure.testing.toy import ToyModel
from server.live_server import live_server

ASKED: dict[str, Any] = {
    "model": "toy",
    "input": "Tell me a long story.",
    "max_output_tokens": 120,
    "temperature": 0,
}


def events(response: httpx.Response) -> Any:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def test_a_stream_of_a_killed_replica_goes_on_at_another_one(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request and its seed are in PostgreSQL before its id is sent. The client reads the first events
    from one replica and the rest from the other: together they are the reply of one that nobody killed."""
    monkeypatch.setenv("PERDURE_TEST_EXACT", "1")
    first = postgres.url(tmp_path / "r0", lease=1)
    replica = Replica(first, free_port(), tmp_path / "log")
    seen = []
    try:
        replica.wait()
        with httpx.stream(
            "POST",
            f"http://127.0.0.1:{replica.port}/v1/responses",
            json={**ASKED, "stream": True},
            trust_env=False,
            timeout=60,
        ) as response:
            for event in events(response):
                seen.append(event)
                if len(seen) == 6:
                    break
            replica.kill()
    finally:
        replica.kill()
    name, last = seen[0]["response"]["id"], seen[-1]["sequence_number"]
    second = first.replace("%2Fr0", "%2Fr1")
    with (
        perdure.open(ToyModel(), n_ctx=1024, slots=4, store=second, exact=True) as runtime,
        live_server(runtime) as server,
        server.client() as client,
    ):
        with client.stream(
            "GET", f"/v1/responses/{name}", params={"stream": "true", "starting_after": last}
        ) as response:
            assert response.status_code == 200, response.read()
            seen += list(events(response))
        numbers = [event["sequence_number"] for event in seen]
        assert numbers == list(range(len(numbers)))
        assert seen[-1]["type"] in ("response.completed", "response.incomplete")
        undisturbed = client.post("/v1/responses", json=ASKED).json()
        said = "".join(each["delta"] for each in seen if each["type"] == "response.output_text.delta")
        assert said == undisturbed["output"][0]["content"][0]["text"]
