"""What a hostile client sends fetches nothing, holds up nobody and reaches nothing of others (I1 to I3)."""

from __future__ import annotations

import json
import re
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from decode.observed import Turnstile, open_toy, toy
from perdure import InvalidInputError
from perdure.ext.completions.routes import CompletionRequest
from perdure.ext.embeddings.routes import EmbeddingRequest
from perdure.server.core.keys import Keys, new_key
from perdure.server.core.middleware import JsonScan
from perdure.server.core.settings import AllowedHosts
from server.live_server import LiveServer, check_freed, hello, live_server, opened, raw
from serving import Page, site

CHAT = "/v1/chat/completions"
LONG = "x" * 400_000
"""More than fits, whatever its tokens are."""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with opened(toy(), n_ctx=8192) as rt, live_server(rt) as server:
        yield server


def calling(parameters: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """A request whose reply is this call: a client can hold a reply to any text."""
    text = json.dumps({"name": "f", "arguments": arguments})
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return hello(tools=[tool], max_tokens=len(text) + 8, perdure={"regex": re.escape(text)})


def problems(server: LiveServer, body: dict[str, Any]) -> list[str]:
    with server.client() as client:
        response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["tool_calls"]
    found: list[str] = response.json()["perdure"]["problems"]
    return found


def test_a_schema_makes_the_server_fetch_nothing_s1(server: LiveServer, tmp_path: Path) -> None:
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


def test_a_pattern_is_matched_in_linear_time_s2(server: LiveServer) -> None:
    """S2, I2: Python's `re` would take longer than the universe lasts."""
    schema = {"properties": {"a": {"pattern": "^(a+)+$"}}}
    assert "arguments.a" in problems(server, calling(schema, {"a": "a" * 400 + "!"}))[0]
    assert problems(server, calling(schema, {"a": "a" * 400})) == []
    for more in ({"patternProperties": {"^(b+)+$": False}}, {"additionalProperties": False}):
        told = problems(server, calling({"properties": {}, **more}, {"b" * 60: 1}))
        assert len(told) == 1
    nested = {"patternProperties": {"^(b+)+$": True}, "additionalProperties": False}
    assert problems(server, calling(nested, {"b" * 400: 1})) == []


def test_a_schema_that_is_exponential_is_given_up_s2(server: LiveServer) -> None:
    """S2, I2: references that double at each of 60 levels."""
    levels = {f"l{i}": {"allOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 2} for i in range(60)}
    schema = {"$ref": "#/$defs/l0", "$defs": {**levels, "l60": {}}}
    assert "steps" in problems(server, calling(schema, {"a": 1}))[0]


WIDE: dict[str, tuple[int, dict[str, Any]]] = {
    "values to be one of": (5, {"items": {"enum": list(range(1000, 1100))}}),
    "a look at every item": (11, {"items": {}}),
    "a comparison of all items": (11, {"uniqueItems": True}),
    "an error that quotes everything": (11, {"type": "string"}),
}
"""Work that is one keyword to write, and how often it is doubled."""


@pytest.mark.parametrize("kind", WIDE)
def test_what_a_keyword_goes_through_counts_as_work_s2(server: LiveServer, kind: str) -> None:
    """S2, I2: it lists as many values, and is applied to as many items, as a client likes."""
    doubled, work = WIDE[kind]
    levels = {f"l{i}": {"allOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 2} for i in range(doubled)}
    schema = {
        "properties": {"a": {"$ref": "#/$defs/l0"}},
        "$defs": {**levels, f"l{doubled}": work},
    }
    assert "steps" in problems(server, calling(schema, {"a": [0] * 300}))[0]


def test_arguments_are_not_checked_on_the_event_loop_s2(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2: somebody else is answered meanwhile."""
    from perdure.ext.call_checks import schema

    checking, answered = threading.Event(), threading.Event()
    matches = schema.matches

    def watched(pattern: str, text: str) -> bool:
        checking.set()
        assert answered.wait(60), "nobody else was answered"
        return matches(pattern, text)

    monkeypatch.setattr(schema, "matches", watched)
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


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil", "[::2]", "0.0.0.0"],
)
def test_a_name_that_is_not_the_servers_reads_nothing_s3(server: LiveServer, host: str) -> None:
    """S3, I3: DNS rebinding: the page's own name, pointed at this machine."""
    with server.client() as client:
        for path in ("/v1/sessions", "/health", "/metrics", "/openapi.json"):
            response = client.get(path, headers={"host": host})
            assert response.status_code == 403
            assert response.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.:80", "127.0.0.1:1", "[::1]:8080"])
def test_this_machine_is_let_in_by_its_names_s3(server: LiveServer, host: str) -> None:
    with server.client() as client:
        assert client.get("/v1/sessions", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://localhost:3000"},
        {"origin": "null"},
        {"origin": "http://[bad"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_page_of_another_origin_can_neither_read_nor_write_s3_s4(
    server: LiveServer, headers: dict[str, str]
) -> None:
    """S3, S4, I3."""
    with server.client() as client:
        made = client.post("/v1/sessions", json={"name": f"mine {headers}".replace("/", "")})
        assert made.status_code == 201
        name = made.json()["name"]
        for method, path in (
            ("GET", "/v1/sessions"),
            ("POST", f"/v1/sessions/{name}/sleep"),
            ("POST", f"/v1/sessions/{name}/wake"),
            ("POST", "/v1/sessions/import"),
            ("POST", CHAT),
            ("DELETE", f"/v1/sessions/{name}"),
        ):
            response = client.request(method, path, headers=headers, json={} if method == "POST" else None)
            assert response.status_code == 403, (method, path)
            assert response.json()["error"]["code"] == "origin_not_allowed"
            assert not any(name.startswith("access-control") for name in response.headers)
        own = {"origin": server.url, "sec-fetch-site": "same-origin"}
        assert client.get(f"/v1/sessions/{name}", headers=own).status_code == 200


@pytest.mark.parametrize(
    "content_type", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_what_a_form_can_send_is_not_taken_s4(server: LiveServer, content_type: str) -> None:
    """S4: a browser asks first before it sends any other type to another site."""
    with server.client() as client:
        client.post("/v1/sessions", json={"name": "form"})
        headers = {"content-type": content_type} if content_type else {}
        for path in (
            CHAT,
            "/v1/sessions",
            "/v1/sessions/import",
            "/v1/sessions/form/sleep",
            "/v1/sessions/form/wake",
        ):
            response = client.post(path, content=b"{}", headers=headers)
            assert response.status_code == 415, path
            assert response.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_ollamas_bodies_are_json_unless_a_browser_sent_them_s4(server: LiveServer, content_type: str) -> None:
    """S4, I3: as `curl -d` and litellm send them; a page cannot hide that it is one."""
    headers = {"content-type": content_type} if content_type else {}
    body = b'{"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "stream": false}'
    with server.client() as client:
        taken = client.post("/api/chat", content=body, headers=headers)
        assert taken.status_code == 200, taken.text
        assert taken.json()["message"]["role"] == "assistant"
        for mark in ("origin", "sec-fetch-site", "sec-fetch-mode", "referer"):
            own = server.url if mark in ("origin", "referer") else "same-origin"
            refused = client.post("/api/chat", content=body, headers={**headers, mark: own})
            assert refused.status_code == 415, mark


def test_further_names_are_let_in_by_the_operator_s3() -> None:
    hosts = AllowedHosts("127.0.0.1", ["Chat.example.org"])
    with opened(toy()) as rt, live_server(rt, hosts=hosts) as server, server.client() as client:
        named = {"host": "chat.example.org"}
        assert client.get("/health", headers=named).status_code == 200
        page = {**named, "origin": "https://chat.example.org", "sec-fetch-site": "cross-site"}
        assert client.get("/health", headers=page).status_code == 200
        assert client.get("/health", headers={"host": "other.example.org"}).status_code == 403
    for wrong in ("", "a/b", "http://a", "a:80", "*"):
        with pytest.raises(InvalidInputError, match="allow-host"):
            AllowedHosts("127.0.0.1", [wrong])


def test_a_server_with_keys_may_be_asked_by_any_name_s3() -> None:
    """What a page does not know is the key."""
    secret, key = new_key("team")
    with opened(toy()) as rt, live_server(rt, keys=Keys([key]), hosts=None) as server:
        with server.client(secret) as client:
            assert client.get("/v1/sessions", headers={"host": "behind.a.proxy"}).status_code == 200
        with server.client() as client:
            assert client.get("/v1/sessions", headers={"host": "behind.a.proxy"}).status_code == 401


HOSTILE = {
    "quotes": b'"' * (4 << 20),
    "open text": b'["' + b"x" * (4 << 20),
    "escapes": b'["' + b'\\"' * (2 << 20),
    "backslashes": b'"' + b"\\" * (4 << 20),
    "brackets": b"[]" * (2 << 20),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_body_is_looked_through_in_little_memory_c3(kind: str) -> None:
    """C3, I2: one of 16 MB took 2 GB."""
    body = HOSTILE[kind]
    scan = JsonScan()
    tracemalloc.start()
    try:
        scan.push(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(body)
    assert scan.depth <= 1


def test_json_of_too_many_values_is_not_parsed_c3() -> None:
    """C3, I2."""
    with opened(toy()) as rt, live_server(rt, values=1000) as server, server.client() as client:
        for body in (b"[" + b"1," * 1000 + b"1]", b"[" + b"[]," * 500 + b"[]]", b'{"a":[' + b'"",' * 1000):
            response = client.post("/tokenize", content=body, headers={"content-type": "application/json"})
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "too_many_values"
        assert client.post("/tokenize", json={"content": "," * 5000}).status_code == 200


def test_json_of_too_many_lists_objects_and_fields_is_not_parsed_c3() -> None:
    """C3: 131,072 empty objects took half a second in which nobody else was served."""
    with opened(toy()) as rt, live_server(rt, members=1000) as server, server.client() as client:
        fields = json.dumps({f"k{number}": 1 for number in range(1000)}).encode()
        for body in (fields, b"[" + b"[]," * 1000 + b"[]]", b'{"a":[' + b'{"":""},' * 500):
            for padding in (b"", b" " * 70_000):
                content = body + padding
                response = client.post(
                    "/tokenize", content=content, headers={"content-type": "application/json"}
                )
                assert response.status_code == 413
                assert "1000 lists, objects and fields" in response.json()["error"]["message"]
        assert client.post("/tokenize", json={"content": ":[{" * 5000}).status_code == 200


@pytest.mark.parametrize("wrong", [[-1], [[-1]], [[1], "a"], [None], [True]])
def test_the_first_wrong_item_ends_the_checking_of_a_list_c3(wrong: list[Any]) -> None:
    """C3: 200,000 wrong token ids took 15 s and 1 GB to be told of."""
    shapes: list[tuple[type[BaseModel], str]] = [(CompletionRequest, "prompt"), (EmbeddingRequest, "input")]
    for shape, field in shapes:
        with pytest.raises(ValidationError) as caught:
            shape.model_validate({field: wrong * 1000})
        assert caught.value.error_count() < 10


@pytest.mark.parametrize("seed", [2**70, -(2**70), 10**4299])
def test_numbers_without_bounds_are_400(server: LiveServer, seed: int) -> None:
    with server.client() as client:
        for path, body in ((CHAT, hello(seed=seed)), ("/v1/completions", {"prompt": "a", "seed": seed})):
            assert client.post(path, json=body).status_code == 400
        assert client.post(CHAT, json=hello(logit_bias={str(seed): 1})).status_code == 400


def test_prompts_that_were_queued_before_one_was_refused_are_ended_c2() -> None:
    """C2: they ran on for nobody until their time was up."""
    gate = Turnstile()
    with (
        open_toy(gate=gate, slots=1, n_ctx=512, queue=1) as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        response = client.post("/v1/completions", json={"prompt": ["a", "b", "c", "d"], "max_tokens": 100})
        assert response.status_code == 429
        rt.cache.stats()
        check_freed(rt)
        gate.open()


def test_a_file_has_a_time_to_come_in_as_a_whole() -> None:
    """I2: a sender who never stops, and never sends much, is told so."""
    with opened(toy()) as rt, live_server(rt, upload_seconds=0.5) as server, server.connect() as connection:
        head = raw("/v1/sessions/import", b"x", content_length=str(1 << 32))
        connection.sendall(head.replace(b"application/json", b"application/octet-stream"))
        # Whether the answer is read before the connection is cut depends on the system.
        with suppress(ConnectionError):
            for _ in range(3_000_000):
                connection.sendall(b"x")
        with server.client() as client:
            counted = client.get("/metrics").text
        assert 'route="/v1/sessions/import",status="408"' in counted


def test_as_many_files_at_once_as_are_allowed() -> None:
    """I2: each may take as much disk as the largest."""
    with opened(toy()) as rt, live_server(rt, uploads=1) as server, server.connect() as first:
        head = raw("/v1/sessions/import", b"x", content_length="1000000")
        first.sendall(head.replace(b"application/json", b"application/octet-stream"))
        with server.client() as client:
            kind = {"content-type": "application/octet-stream"}
            while (
                status := client.post("/v1/sessions/import", content=b"x", headers=kind).status_code
            ) != 429:
                # The first one may not have arrived yet.
                assert status == 422


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": LONG, "echo": True}),
        ("/v1/completions", {"prompt": ["a", LONG], "echo": True}),
        (CHAT, hello(messages=[{"role": "user", "content": LONG}])),
        (CHAT, hello(messages=[{"role": "user", "content": LONG}], perdure={"overflow": "drop_oldest"})),
        (CHAT, hello(messages=[{"role": "user", "content": LONG}], perdure={"overflow": "shift"})),
        ("/v1/sessions/long/turns", {"message": LONG}),
        ("/v1/sessions/long/turns", {"message": LONG, "perdure": {"overflow": "fold"}}),
        ("/v1/sessions/long/edit", {"turn": 1, "message": LONG, "perdure": {"overflow": "drop_oldest"}}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/responses", {"input": LONG, "store": False, "truncation": "auto"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}),
        ("/v1/embeddings", {"input": ["x", LONG]}),
        ("/v1/cache/warm", {"prompt": LONG}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_surely_does_not_fit_is_not_tokenised_c4(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """C4, I2: wherever a text comes in, and whatever is to be done where it does not fit."""
    tokenize = server.runtime.model.tokenize
    with server.client() as client:
        if client.post("/v1/sessions", json={"name": "long"}).status_code == 201:
            said = {"message": "Hello", "max_tokens": 4}
            assert client.post("/v1/sessions/long/turns", json=said).status_code == 200

    def short(text: str, **how: Any) -> list[int]:
        assert len(text) < 100_000
        return tokenize(text, **how)

    monkeypatch.setattr(server.runtime.model, "tokenize", short)
    with server.client() as client:
        response = client.post(path, json=body)
    assert response.status_code in (400, 413)
    # Clients of Messages look for words of Anthropic's.
    assert ("too long" if path == "/v1/messages" else "at least") in response.json()["error"]["message"]
