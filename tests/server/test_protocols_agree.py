"""Whatever protocol a client speaks, the same request gets the same tokens, usage and kind of error (H8)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from decode.observed import Turnstile, open_toy, toy
from perdure.server.core.settings import ReplyDefaults
from server.live_server import live_server, opened, raw
from server.scripted import scripted

SYSTEM, SAID, AGAIN = "Be brief.", "Hello there", "And then?"


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with opened(toy(), n_ctx=512, slots=4) as rt, live_server(rt) as server, server.client() as client:
        yield client


def asked(client: httpx.Client, messages: list[dict[str, str]], limit: int) -> dict[str, dict[str, Any]]:
    """The answers to one conversation, over each protocol."""
    system = {"role": "system", "content": SYSTEM}
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/v1/chat/completions", {"messages": [system, *messages], "max_tokens": limit}),
        "responses": (
            "/v1/responses",
            {"instructions": SYSTEM, "input": messages, "max_output_tokens": limit, "store": False},
        ),
        "messages": ("/v1/messages", {"system": SYSTEM, "messages": messages, "max_tokens": limit}),
        "ollama": (
            "/api/chat",
            {
                "messages": [system, *messages],
                "options": {"num_predict": limit, "temperature": 0},
                "stream": False,
            },
        ),
    }
    found = {}
    for tongue, (path, body) in bodies.items():
        answer = client.post(path, json={"temperature": 0, **body} if tongue != "ollama" else body)
        found[tongue] = {"status": answer.status_code, **answer.json()}
    return found


def test_the_servers_defaults_hold_where_no_protocol_says_otherwise_h8() -> None:
    """H8: the settings of sampling and the length, as the config file has them."""
    defaults = ReplyDefaults(sampling={"temperature": 5.0, "top_k": 0, "seed": 7}, max_tokens=3)
    said = [{"role": "user", "content": SAID}]
    with (
        opened(toy(), n_ctx=512, slots=4) as rt,
        live_server(rt, defaults=defaults) as server,
        server.client() as client,
    ):
        assert client.post("/v1/sessions", json={"name": "a"}).status_code == 201
        chat = client.post("/v1/chat/completions", json={"messages": said}).json()
        turn = client.post("/v1/sessions/a/turns", json={"message": SAID}).json()
        stored, unstored = (
            client.post("/v1/responses", json={"input": SAID, "store": store}).json()
            for store in (True, False)
        )
        ollama = client.post("/api/chat", json={"messages": said, "stream": False}).json()
        anthropic = client.post("/v1/messages", json={"messages": said, "max_tokens": 3}).json()
        texts = {
            chat["choices"][0]["message"]["content"],
            turn["choices"][0]["message"]["content"],
            *(each["output"][0]["content"][0]["text"] for each in (stored, unstored)),
            ollama["message"]["content"],
            anthropic["content"][0]["text"],
        }
        assert len(texts) == 1
        assert [chat["usage"]["completion_tokens"], ollama["eval_count"]] == [3, 3]
        options = {"temperature": 0, "num_predict": 5}
        greedy = client.post("/api/chat", json={"messages": said, "stream": False, "options": options}).json()
        assert greedy["eval_count"] == 5
        assert not greedy["message"]["content"].startswith(texts.pop())
        whole = client.post(
            "/api/chat", json={"messages": said, "stream": False, "options": {"num_predict": -1}}
        )
        assert whole.json()["eval_count"] > 3


def test_the_servers_way_with_a_full_context_holds_where_no_request_says_otherwise_h8() -> None:
    """H8, C3: in every protocol; a session's own way and a request's win."""
    long = [{"role": role, "content": "x" * 300} for role in ("user", "assistant", "user")]
    with opened(toy(), n_ctx=512, slots=4) as rt:
        for overflow in ("drop_oldest", None):
            defaults = ReplyDefaults(overflow=overflow, max_tokens=3)
            with live_server(rt, defaults=defaults) as server, server.client() as client:
                found = asked(client, long, 3)
                refusing = {name for name, each in found.items() if each.get("error")}
                assert refusing == (set() if overflow else found.keys())
                refused = {"messages": long, "perdure": {"overflow": "error"}}
                assert client.post("/v1/chat/completions", json=refused).status_code == 400
    assert ReplyDefaults.from_json(ReplyDefaults(overflow="fold").to_json()).overflow == "fold"


def test_the_servers_defaults_hold_for_a_summary_h8() -> None:
    """H8: where they have every reply end at once, a summary is empty, and that is told."""
    model = toy()
    defaults = ReplyDefaults(sampling={"logit_bias": dict.fromkeys(model.ends, 1e6)})
    with opened(model) as rt, live_server(rt, defaults=defaults) as server, server.client() as client:
        answer = client.post("/v1/responses/compact", json={"input": SAID})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "empty")


def test_one_conversation_through_every_protocol_h8(client: httpx.Client) -> None:
    """H8: text, prompt tokens, tokens written, and the tokens that had to be computed."""
    messages = [{"role": "user", "content": SAID}]
    for _ in range(2):
        found = asked(client, messages, 12)
        seen = {
            "chat": (
                found["chat"]["choices"][0]["message"]["content"],
                found["chat"]["usage"]["prompt_tokens"],
                found["chat"]["usage"]["completion_tokens"],
            ),
            "responses": (
                found["responses"]["output"][0]["content"][0]["text"],
                found["responses"]["usage"]["input_tokens"],
                found["responses"]["usage"]["output_tokens"],
            ),
            "messages": (
                found["messages"]["content"][0]["text"],
                sum(
                    found["messages"]["usage"][f"{kind}input_tokens"]
                    for kind in ("", "cache_creation_", "cache_read_")
                ),
                found["messages"]["usage"]["output_tokens"],
            ),
            "ollama": (
                found["ollama"]["message"]["content"],
                found["ollama"]["prompt_eval_count"],
                found["ollama"]["eval_count"],
            ),
        }
        assert len(set(seen.values())) == 1, seen
        # The first has read it for all of them.
        computed = {found[tongue]["perdure"]["reuse"]["computed"] for tongue in list(found)[1:]}
        assert computed == {1}
        messages += [{"role": "assistant", "content": seen["chat"][0]}, {"role": "user", "content": AGAIN}]


def test_what_does_not_fit_is_the_same_kind_of_error_h8(client: httpx.Client) -> None:
    """H8, C3: a status of the client's fault and the figures, in each protocol's own words; never a cut."""
    found = asked(client, [{"role": "user", "content": "x" * 5000}], 4)
    assert {tongue: answer["status"] for tongue, answer in found.items()} == {
        "chat": 400,
        "responses": 400,
        "messages": 400,
        "ollama": 400,
    }
    assert found["chat"]["error"]["code"] == found["responses"]["error"]["code"] == "context_length_exceeded"
    assert found["messages"]["error"]["message"].startswith("prompt is too long: ")
    assert "tokens" in found["ollama"]["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 40}], "max_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "word " * 40}], "max_tokens": 2}),
        ("/v1/responses", {"input": "word " * 40, "max_output_tokens": 2, "store": False}),
        ("/api/chat", {"messages": [{"role": "user", "content": "word " * 40}]}),
    ],
)
def test_a_retry_goes_on_where_the_first_request_was(path: str, body: dict[str, Any]) -> None:
    """A client whose timer ended the request while its prompt was read sends it again."""
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=512, slots=1, n_batch=32) as rt, live_server(rt) as server:
        whole = {**body, "stream": False}
        with server.connect() as connection:
            connection.sendall(raw(path, json.dumps(whole).encode()))
            gate.pass_through(100)
        gate.open()
        with server.client() as client:
            answer = client.post(path, json=whole).json()
        assert sum(answer["perdure"]["reuse"]["tiers"].values()) > 0


def test_a_call_that_was_cut_is_text_in_the_stream_as_in_the_whole_c8() -> None:
    """C8: no stream shows a call that the whole answer does not have, with arguments that nobody can read."""
    written = '<tool_call>\n{"name": "light", "arguments": {"place": "the kitchen by the sea"}}\n</tool_call>'
    shape = {"type": "object", "properties": {"place": {"type": "string"}}}
    said = [{"role": "user", "content": SAID}]
    function = {"name": "light", "parameters": shape}
    with scripted(written, n_ctx=1024) as server, server.client() as client:
        limit = len(server.runtime.model.tokenize(written[:-40], special=True, bos=False))
        body: dict[str, Any] = {"max_tokens": limit, "messages": said}
        tools: list[dict[str, Any]] = [{"name": "light", "input_schema": shape}]
        seen = [
            event
            for event in events(client, "/v1/messages", {**body, "tools": tools})
            if event["type"].startswith("content_block")
        ]
        shown = "".join(event["delta"]["text"] for event in seen if event["type"] == "content_block_delta")
        whole = client.post("/v1/messages", json={**body, "tools": tools}).json()
        assert [block["type"] for block in whole["content"]] == ["text"]
        assert shown == whole["content"][0]["text"]
        assert {event["index"] for event in seen} == {0}

        tools = [{"type": "function", **function}]
        asked = {"input": said, "max_output_tokens": limit, "tools": tools, "store": False}
        end = events(client, "/v1/responses", asked)[-1]["response"]
        assert [(item["type"], item["content"][0]["text"]) for item in end["output"]] == [("message", shown)]

        tools = [{"type": "function", "function": function}]
        ollama = {"messages": said, "tools": tools, "options": {"num_predict": limit}}
        with client.stream("POST", "/api/chat", json=ollama) as response:
            messages = [json.loads(line)["message"] for line in response.iter_lines()]
        assert "".join(message["content"] for message in messages) == shown
        assert not any("tool_calls" in message for message in messages)


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
