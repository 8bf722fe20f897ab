"""Ollama's API: what its client does not ask for, and what it cannot see."""

from __future__ import annotations

import json
from typing import Any

import httpx

from decode.observed import Turnstile, open_toy
from server.live_server import live_server
from server.scripted import scripted

USER = [{"role": "user", "content": "Hello"}]


def lines(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.iter_lines()]


def test_thinking_and_calls_have_their_own_fields_and_come_back() -> None:
    call = '<tool_call>\n{"name": "light", "arguments": {"on": true}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "light", "parameters": {"type": "object"}}}
    with scripted(f"<think>Hm.</think>So:{call}", n_ctx=1024) as server, server.client() as client:
        body = {"model": "toy", "messages": USER, "tools": [tool]}
        found = lines(client, "/api/chat", body)
        whole = client.post("/api/chat", json={**body, "stream": False}).json()["message"]
        messages = [each["message"] for each in found]
        assert "".join(each.get("thinking", "") for each in messages) == whole["thinking"] == "Hm."
        assert "".join(each["content"] for each in messages) == whole["content"] == "So:"
        [streamed] = [made for each in messages for made in each.get("tool_calls", ())]
        assert streamed["function"] == {"index": 0, "name": "light", "arguments": {"on": True}}
        assert whole["tool_calls"][0]["function"] == streamed["function"]
        result = {"role": "tool", "tool_name": "light", "content": "lit"}
        again = {**body, "messages": [*USER, whole, result], "stream": False}
        reply = client.post("/api/chat", json=again).json()
        assert reply["perdure"]["reuse"]["tiers"]
        assert reply["prompt_eval_count"] > found[-1]["prompt_eval_count"]


def test_num_ctx_is_told(client: httpx.Client) -> None:
    options = {"num_ctx": 131072, "num_thread": 8, "num_predict": 2}
    body = {"messages": USER, "options": options, "stream": False}
    notes = client.post("/api/chat", json=body).json()["perdure"]["notes"]
    assert notes[0] == "num_ctx is 512 here, as the server was started, not 131072"
    assert notes[1].startswith("num_thread")


def test_errors_are_texts(client: httpx.Client) -> None:
    refused = client.post("/api/chat", json={"messages": [{**USER[0], "images": ["aGk="]}]})
    assert (refused.status_code, list(refused.json())) == (400, ["error"])
    assert "images cannot be read" in refused.json()["error"]
    assert list(client.post("/api/chat", json={"messages": 5}).json()) == ["error"]
    assert list(client.post("/api/generate", json={"prompt": "x", "suffix": "y"}).json()) == ["error"]


def test_who_wants_a_model_hears_where_it_comes_from(client: httpx.Client) -> None:
    refused = client.post("/api/pull", json={"model": "llama3.2"})
    assert refused.status_code == 404
    assert "`perdure pull NAME`" in refused.json()["error"]
    for path in ("create", "push", "blobs/sha256:00"):
        refused = client.post(f"/api/{path}", json={"model": "mine", "from": "default"})
        assert refused.status_code == 501
        assert "`perdure quantize`" in refused.json()["error"]


def test_somebody_is_there(client: httpx.Client) -> None:
    assert client.get("/").text == "Ollama is running"
    assert client.head("/").status_code == 200
    assert client.get("/api/version").json()["version"] >= "0.13.4"


def test_a_client_that_waits_for_its_prompt_hears_of_it() -> None:
    gate = Turnstile()
    with (
        open_toy(gate=gate, n_ctx=512) as rt,
        live_server(rt, silent_seconds=0.05) as server,
        server.client() as client,
    ):
        try:
            body = {"messages": USER, "options": {"num_predict": 2}}
            with client.stream("POST", "/api/chat", json=body) as response:
                found = response.iter_lines()
                assert [json.loads(next(found))["done"] for _ in range(2)] == [False, False]
                gate.open()
                *_, last = found
            assert json.loads(last)["done"]
        finally:
            gate.open()


def test_one_list_of_models_for_three_readers(client: httpx.Client) -> None:
    """OpenAI's, Anthropic's and Codex's."""
    found = client.get("/v1/models", params={"limit": 1000, "client_version": "1"}).json()
    [model] = found["data"]
    assert (model["object"], model["type"], model["display_name"]) == ("model", "model", "toy")
    assert found["first_id"] == found["last_id"] == model["id"] == found["models"][0]["slug"]
    assert found["models"][0]["context_window"] == model["n_ctx"]


def test_a_model_has_the_names_that_its_aliases_allow() -> None:
    with open_toy() as rt, live_server(rt, aliases=("gpt-*",)) as server, server.client() as client:
        body = {"messages": USER, "max_tokens": 2}
        assert client.post("/v1/chat/completions", json={**body, "model": "gpt-oss:20b"}).status_code == 200
        assert client.post("/v1/chat/completions", json={**body, "model": "other"}).status_code == 404
        assert client.post("/v1/responses", json={"input": "x", "model": "gpt-x", "store": False}).is_success


def test_a_last_message_of_the_assistant_is_the_beginning_of_the_reply() -> None:
    with scripted(" blue, and wide.") as server, server.client() as client:
        said = [*USER, {"role": "assistant", "content": "The sea is"}]
        answer = client.post("/api/chat", json={"messages": said, "stream": False}).json()
        assert answer["message"]["content"] == " blue, and wide."
        prompt = server.runtime.model.tokenize(f"user:{USER[0]['content']}\nassistant:The sea is")
        assert answer["prompt_eval_count"] == len(prompt)
