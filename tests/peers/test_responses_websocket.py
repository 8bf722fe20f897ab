"""Responses over a WebSocket, by the published `openai` client and by hand."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from decode.observed import toy
from perdure.server.core.keys import Keys, new_key
from server.live_server import LiveServer, live_server, opened
from server.scripted import scripted

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
SAID = "<think>Hm.</think>Blue."


def address(server: LiveServer) -> str:
    return f"ws{server.url.removeprefix('http')}/v1/responses"


def asked(socket: ClientConnection, **fields: Any) -> list[dict[str, Any]]:
    socket.send(json.dumps({"type": "response.create", "model": "toy", **fields}))
    found: list[dict[str, Any]] = []
    while not found or found[-1]["type"] not in (
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ):
        found.append(json.loads(socket.recv(timeout=60)))
    return found


# The client opens its connection in a way that the newest `websockets` warns of.
@pytest.mark.filterwarnings("ignore:connect.* must be used:DeprecationWarning")
def test_its_client_over_a_websocket() -> None:
    with scripted(SAID, n_ctx=1024) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with client, client.responses.connect() as connection:
            connection.response.create(model="toy", input="Why?")
            kinds = []
            for event in connection:
                kinds.append(event.type)
                if event.type == "response.completed":
                    break
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert "response.output_text.delta" in kinds


@pytest.mark.parametrize("store", [True, False])
def test_turns_go_on_by_id_and_a_warm_up_reads_the_prompt(store: bool) -> None:
    with scripted(SAID, n_ctx=1024) as server, connect(address(server)) as socket:
        warm = asked(socket, input="Why?", store=store, generate=False)
        assert [event["type"] for event in warm] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        assert warm[-1]["response"]["output"] == []
        first = asked(socket, input="Why?", store=store)[-1]["response"]
        assert first["usage"]["input_tokens_details"]["cached_tokens"] == first["usage"]["input_tokens"] - 1
        second = asked(socket, input="And?", store=store, previous_response_id=first["id"])[-1]["response"]
        cached = second["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["total_tokens"] - 1
        [missing] = asked(socket, input="x", store=store, previous_response_id="resp_" + "0" * 32)
        assert (missing["type"], missing["error"]["code"]) == ("error", "previous_response_not_found")
        [wrong] = asked(socket, input=5)
        assert (wrong["type"], wrong["status"]) == ("error", 400)


def test_a_page_of_another_site_and_a_client_without_a_key_are_refused_i3() -> None:
    """I3: browsers let any page open a WebSocket anywhere, so the origin is checked here."""
    with opened(toy(), n_ctx=1024) as rt, live_server(rt) as server, pytest.raises(InvalidStatus):
        connect(address(server), additional_headers={"origin": "https://evil.example"})
    secret, key = new_key("ada")
    with opened(toy(), n_ctx=1024) as rt, live_server(rt, keys=Keys([key])) as server:
        with pytest.raises(InvalidStatus):
            connect(address(server))
        headers = {"authorization": f"Bearer {secret}"}
        with connect(address(server), additional_headers=headers) as socket:
            found = asked(socket, input="Hi", max_output_tokens=2)
            assert found[-1]["type"] in ("response.completed", "response.incomplete")
