"""Anthropic's Messages: what its client does not ask for, and what it cannot see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode.observed import Turnstile, open_toy, toy
from perdure.server.core.keys import Keys, new_key
from perdure.server.core.reasoning_cipher import ReasoningCipher
from server.live_server import live_server, opened
from server.scripted import scripted

PATH = "/v1/messages"


def asked(*said: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": each} if isinstance(each, str) else each for each in said]
    return {"model": "toy", "max_tokens": 8, "temperature": 0, "messages": messages, **more}


def named_events(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def streamed(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", PATH, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        found = list(named_events(response))
    assert all(name == event["type"] for name, event in found)
    return [event for _, event in found]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_thinking_comes_back_as_it_was_by_its_signature(stream: bool, display: str) -> None:
    with scripted("<think>Hm, the sea.</think>Blue.") as server, server.client() as client:
        model = server.runtime.model
        body = asked("Why?", max_tokens=60, thinking={"type": "adaptive", "display": display})
        content = blocks(streamed(client, body)) if stream else client.post(PATH, json=body).json()["content"]
        thought, answer = content
        assert (thought["type"], answer) == ("thinking", {"type": "text", "text": "Blue."})
        assert thought["thinking"] == ("Hm, the sea." if display == "summarized" else "")
        # Whatever a client makes of the text, what was sealed is what the model reads.
        thought["thinking"] = "something else"
        again = asked("Why?", {"role": "assistant", "content": content}, "And?")
        counted = client.post(f"{PATH}/count_tokens", json=again).json()["input_tokens"]
        expected = "user:Why?\nassistant:<think>Hm, the sea.</think>Blue.\nuser:And?\nassistant:"
        assert counted == len(model.tokenize(expected, special=True))
        # What was thought elsewhere is not what this model thought.
        thought["signature"] = "EqQBCgIYAhIM"
        plain = client.post(f"{PATH}/count_tokens", json=again).json()["input_tokens"]
        assert plain == len(model.tokenize(expected.replace("<think>Hm, the sea.</think>", ""), special=True))


def blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that a stream's events come to, by the rules of the client."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(found)
            found.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            kind = event["delta"]["type"].removesuffix("_delta")
            found[event["index"]][kind] += event["delta"][kind]
    return found


def test_a_stream_has_its_events_in_order(client: httpx.Client) -> None:
    events = streamed(client, asked("Hello"))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    assert events[-2]["usage"]["output_tokens"] == 8
    assert events[-2]["perdure"]["reuse"]["why"]


def test_a_changing_billing_header_does_not_spoil_the_prefix(client: httpx.Client) -> None:
    def body(cch: str) -> dict[str, Any]:
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.9; cch={cch};"}
        return asked("Hi", system=[header, {"type": "text", "text": "You are a very careful helper."}])

    first = client.post(PATH, json=body("00a1f")).json()["usage"]
    second = client.post(PATH, json=body("77b2c")).json()["usage"]
    assert second["cache_read_input_tokens"] == sum_of(first) - 1
    assert sum_of(second) == sum_of(first)


def sum_of(usage: dict[str, int]) -> int:
    return sum(usage[f"{kind}input_tokens"] for kind in ("", "cache_creation_", "cache_read_"))


def test_system_in_all_its_forms_is_the_same_prompt(client: httpx.Client) -> None:
    forms: list[Any] = ["Be brief.", [{"type": "text", "text": "Be brief."}]]
    counts = {
        client.post(f"{PATH}/count_tokens", json=asked("Hi", system=form)).json()["input_tokens"]
        for form in forms
    }
    assert len(counts) == 1
    later = asked(
        "Hi", {"role": "assistant", "content": "Yes?"}, {"role": "system", "content": "Be brief."}, "So?"
    )
    assert client.post(PATH, json=later).status_code == 200


def test_fields_and_blocks_that_nobody_knows_are_no_error(client: httpx.Client) -> None:
    block = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {}}
    body = asked(
        "Hi",
        {"role": "assistant", "content": [block, {"type": "text", "text": "Yes?"}]},
        "So?",
        context_management={"edits": []},
        metadata={"user_id": "x"},
        service_tier="auto",
        tools=[{"name": "f", "input_schema": {"type": "object"}, "defer_loading": True}],
    )
    answer = client.post(f"{PATH}?beta=true", json=body, headers={"anthropic-beta": "unknown-2030"})
    assert answer.status_code == 200, answer.text


def test_a_full_context_says_so_instead_of_being_cut(client: httpx.Client) -> None:
    answer = client.post(PATH, json=asked("Hello", max_tokens=5000)).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"


def test_a_signature_of_another_namespace_or_server_opens_nothing_h5() -> None:
    """H5."""
    cipher = ReasoningCipher(b"k" * 32, limit=1000)
    encrypted = cipher.encrypt("secret thoughts", "ada")
    assert cipher.decrypt(encrypted, "ada") == "secret thoughts"
    assert cipher.decrypt(encrypted, "bob") is None
    assert ReasoningCipher(b"q" * 32, limit=1000).decrypt(encrypted, "ada") is None
    assert "secret" not in encrypted
    for changed in (encrypted[:-4], "A" + encrypted[1:], "not base64!", ""):
        assert cipher.decrypt(changed, "ada") is None


def test_thoughts_are_known_again_after_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        with opened(toy(), store=tmp_path / "store") as rt, live_server(rt) as server:
            sealed = server.state.reasoning_cipher.encrypt("Hm.", "")
            (tmp_path / "seal").touch()
            before = (tmp_path / "seal").read_text()
            assert before in ("", sealed)
            (tmp_path / "seal").write_text(sealed)


def test_a_client_that_waits_for_its_prompt_hears_a_ping() -> None:
    gate = Turnstile()
    with (
        open_toy(gate=gate, n_ctx=512) as rt,
        live_server(rt, silent_seconds=0.05) as server,
        server.client() as client,
    ):
        try:
            body = {**asked("Hello"), "stream": True}
            with client.stream("POST", PATH, json=body) as response:
                events = named_events(response)
                heard = [next(events)[0] for _ in range(4)]
                assert heard == ["message_start", "ping", "ping", "ping"]
                gate.open()
                *_, (last, _) = events
            assert last == "message_stop"
        finally:
            gate.open()


def test_errors_before_a_route_have_the_same_shape() -> None:
    secret, key = new_key("ada")
    with opened(toy()) as rt, live_server(rt, keys=Keys([key])) as server, server.client() as client:
        refused = client.post(PATH, json=asked("Hi"))
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        taken = client.post(PATH, json=asked("Hi"), headers={"x-api-key": secret})
        assert taken.status_code == 200
        assert taken.headers["request-id"] == taken.headers["x-request-id"]
        wrong = client.post(PATH, json={"max_tokens": "x"}, headers={"x-api-key": secret})
        assert (wrong.status_code, wrong.json()["type"]) == (400, "error")


def test_a_last_message_of_the_assistant_is_the_beginning_of_the_reply() -> None:
    with scripted(" blue, and wide.") as server, server.client() as client:
        begun = {"role": "assistant", "content": [{"type": "text", "text": "The sea is"}]}
        message = client.post(PATH, json=asked("Say it.", begun, max_tokens=40)).json()
        assert message["content"] == [{"type": "text", "text": " blue, and wide."}]
        prompt = server.runtime.model.tokenize("user:Say it.\nassistant:The sea is")
        assert sum_of(message["usage"]) == len(prompt)
