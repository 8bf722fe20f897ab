"""What a hostile client sends fetches nothing, holds up nobody and reaches nothing of others (I1 to I3)."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decode.observed import toy
from server.house import House, hello, house, opened
from serving import Page, site

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[House]:
    with opened(toy(), n_ctx=2048) as rt, house(rt) as server:
        yield server


def calling(parameters: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """A request whose reply is this call: a client can hold a reply to any text."""
    text = json.dumps({"name": "f", "arguments": arguments})
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return hello(tools=[tool], max_tokens=len(text) + 8, perdure={"regex": re.escape(text)})


def problems(server: House, body: dict[str, Any]) -> list[str]:
    with server.client() as client:
        response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["tool_calls"]
    found: list[str] = response.json()["perdure"]["problems"]
    return found


def test_a_schema_makes_the_server_fetch_nothing_s1(server: House, tmp_path: Path) -> None:
    """S1, I1: neither a URL nor a file of this machine."""
    secret = tmp_path / "secret.json"
    secret.write_text('{"enum": ["secret words"]}')
    with site() as elsewhere:
        elsewhere.pages["/schema.json"] = Page(body=b'{"enum": ["fetched"]}')
        for ref in (f"{elsewhere.url}/schema.json", secret.as_uri(), str(secret)):
            for schema in ({"$ref": ref}, {"properties": {"a": {"$ref": ref}}}, {"$dynamicRef": ref}):
                told = " ".join(problems(server, calling(schema, {"a": "x"})))
                assert "cannot be used" in told
                assert "secret words" not in told
            with server.client() as client:
                required = calling({"$ref": ref}, {"a": "x"}) | {"tool_choice": "required", "perdure": None}
                assert client.post(CHAT, json=required).status_code == 400
                held = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": ref}}}
                assert client.post(CHAT, json=hello(response_format=held)).status_code == 400
        assert elsewhere.requests == []


def test_a_pattern_is_matched_in_linear_time_s2(server: House) -> None:
    """S2, I2: Python's `re` would take longer than the universe lasts."""
    schema = {"properties": {"a": {"pattern": "^(a+)+$"}}}
    assert "arguments.a" in problems(server, calling(schema, {"a": "a" * 400 + "!"}))[0]
    assert problems(server, calling(schema, {"a": "a" * 400})) == []
    for more in ({"patternProperties": {"^(b+)+$": False}}, {"additionalProperties": False}):
        told = problems(server, calling({"properties": {}, **more}, {"b" * 60: 1}))
        assert len(told) == 1
    nested = {"patternProperties": {"^(b+)+$": True}, "additionalProperties": False}
    assert problems(server, calling(nested, {"b" * 400: 1})) == []


def test_a_schema_that_is_exponential_is_given_up_s2(server: House) -> None:
    """S2, I2: references that double at each of 60 levels."""
    levels = {f"l{i}": {"allOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 2} for i in range(60)}
    schema = {"$ref": "#/$defs/l0", "$defs": {**levels, "l60": {}}}
    assert "steps" in problems(server, calling(schema, {"a": 1}))[0]


def test_arguments_are_not_checked_on_the_event_loop_s2(
    server: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2: somebody else is answered meanwhile."""
    from perdure.chat.parsing import schema

    checking, answered = threading.Event(), threading.Event()
    matches = schema._matches

    def watched(pattern: str, text: str) -> bool:
        checking.set()
        assert answered.wait(60), "nobody else was answered"
        return matches(pattern, text)

    monkeypatch.setattr(schema, "_matches", watched)
    body = calling({"properties": {"a": {"pattern": "x"}}}, {"a": "x"})
    found: list[list[str]] = []
    asking = threading.Thread(target=lambda: found.append(problems(server, body)))
    asking.start()
    try:
        assert checking.wait(60)
        with server.client() as client:
            assert client.get("/health").status_code == 200
    finally:
        answered.set()
        asking.join()
    assert found == [[]]
