"""What one request may hold: each field of each protocol at its bound and beyond it (class 2, X13, X20)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from pydantic import ValidationError

from decode.observed import toy
from perdure.server.app import request_schemas
from perdure.server.core.keys import Keys
from perdure.server.core.schemas import RequestSchema
from perdure.sessions import sessions as sessions_module
from server.live_server import LiveServer, live_server, opened

USER = {"role": "user", "content": "Hi"}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"

FIELDS: dict[str, tuple[str, int, Callable[[int], dict[str, Any]]]] = {
    "chat: messages": (CHAT, 4096, lambda n: {"messages": [USER] * n}),
    "chat: logit_bias": (CHAT, 1024, lambda n: {"messages": [USER], "logit_bias": _numbered(n)}),
    "chat: stop": (CHAT, 64, lambda n: {"messages": [USER], "stop": [f"{each}z" for each in range(n)]}),
    "chat: stop's length": (CHAT, 1024, lambda n: {"messages": [USER], "stop": "z" * n}),
    "chat: top_logprobs": (CHAT, 20, lambda n: {"messages": [USER], "logprobs": True, "top_logprobs": n}),
    "chat: depth": (CHAT, 64, lambda n: {"messages": [USER], "extra": _deep(n - 1)}),
    "chat: values": (
        CHAT,
        1 << 18,
        lambda n: {"messages": [USER], "extra": [0] * (n if n > 1 << 18 else n - 64)},
    ),
    "completions: prompts": ("/v1/completions", 128, lambda n: {"prompt": ["Hi"] * n}),
    "messages: messages": (MESSAGES, 4096, lambda n: {"max_tokens": 1, "messages": [USER] * n}),
    "messages: tools": (
        MESSAGES,
        1024,
        lambda n: {"messages": [USER], "tools": [{"name": f"f{i}"} for i in range(n)]},
    ),
    "messages: stop": (
        MESSAGES,
        64,
        lambda n: {"messages": [USER], "stop_sequences": [f"{i}z" for i in range(n)]},
    ),
    "responses: items": (RESPONSES, 4096, lambda n: {"input": [USER] * n}),
    "responses: tools": (
        RESPONSES,
        1024,
        lambda n: {"input": "Hi", "tools": [_function(i) for i in range(n)]},
    ),
    "responses: metadata": (
        RESPONSES,
        16,
        lambda n: {"input": "Hi", "metadata": {f"k{i}": "v" for i in range(n)}},
    ),
    "responses: metadata's names": (RESPONSES, 64, lambda n: {"input": "Hi", "metadata": {"k" * n: "v"}}),
    "responses: metadata's values": (RESPONSES, 512, lambda n: {"input": "Hi", "metadata": {"k": "v" * n}}),
    "responses: include": (RESPONSES, 64, lambda n: {"input": "Hi", "include": ["x"] * n}),
    "responses: prompt_cache_key": (RESPONSES, 512, lambda n: {"input": "Hi", "prompt_cache_key": "k" * n}),
    "ollama: messages": (
        "/api/chat",
        4096,
        lambda n: {"model": "toy", "messages": [USER] * n, "stream": False},
    ),
    "ollama: stop": (
        "/api/generate",
        64,
        lambda n: {
            "model": "toy",
            "prompt": "Hi",
            "stream": False,
            "options": {"stop": [f"{i}z" for i in range(n)]},
        },
    ),
    "ollama: texts": ("/api/embed", 2048, lambda n: {"model": "toy", "input": ["a"] * n}),
    "embeddings: texts": ("/v1/embeddings", 2048, lambda n: {"input": ["a"] * n}),
    "sessions: name": ("/v1/sessions", 200, lambda n: {"name": "s" * n}),
}
"""Fields with the most that each may hold, and a body that holds so much."""


def _numbered(count: int) -> dict[str, float]:
    return {str(each): 0.5 for each in range(count)}


def _deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def _function(number: int) -> dict[str, Any]:
    return {"type": "function", "name": f"f{number}"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with opened(toy(), n_ctx=512) as rt, live_server(rt) as server:
        yield server


def sent(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    limit = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    if path.startswith("/v1/") and path not in ("/v1/embeddings", "/v1/sessions"):
        body = {limit: 1, **body}
    return client.post(path, json=body)


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_holds_as_much_as_its_bound_and_no_more(field: str, server: LiveServer) -> None:
    """Class 2: at the bound a request may still be too long for the context, but it is not refused for the
    field; beyond it is, and the server goes on."""
    path, bound, body = FIELDS[field]
    with server.client() as client:
        at = sent(client, path, body(bound))
        assert at.status_code in (200, 201, 400, 413), at.text[:300]
        beyond = sent(client, path, body(bound + 1))
        assert beyond.status_code in (400, 413), beyond.text[:300]
        assert beyond.text != at.text, beyond.text[:300]
        assert client.get("/health").status_code == 200


# Every field that has a bound, made up from the schemas.


class Case(NamedTuple):
    """A body whose field has all that it may have, and one that has more."""

    schema: type[RequestSchema]
    path: str
    field: str
    at: dict[str, Any]
    beyond: dict[str, Any]


def cases() -> Iterator[Case]:
    for schema, paths in request_schemas().items():
        document = schema.model_json_schema()
        for field, at, beyond in bounded(document, document.get("$defs", {}), "", lambda body: body, ()):
            yield Case(schema, paths[0], field, at, beyond)


def bounded(
    schema: dict[str, Any],
    known: dict[str, Any],
    path: str,
    wrap: Callable[[Any], Any],
    inside: tuple[str, ...],
) -> Iterator[tuple[str, Any, Any]]:
    for name, field in schema.get("properties", {}).items():

        def within(value: Any, name: str = name) -> Any:
            return wrap({**least(schema, known), name: value})

        yield from bounded_value(field, known, f"{path}{name}", within, inside)


def bounded_value(
    field: dict[str, Any],
    known: dict[str, Any],
    path: str,
    wrap: Callable[[Any], Any],
    inside: tuple[str, ...],
) -> Iterator[tuple[str, Any, Any]]:
    for each in (*field.get("anyOf", ()), *field.get("oneOf", ())):
        yield from bounded_value(each, known, path, wrap, inside)
    if (name := field.get("$ref", "").rpartition("/")[2]) and name not in inside:
        yield from bounded(known[name], known, f"{path}.", wrap, (*inside, name))
    for at, beyond in edges(field, known):
        yield path, wrap(at), wrap(beyond)
    if field.get("items"):
        yield from bounded_value(field["items"], known, f"{path}[]", lambda value: wrap([value]), inside)


def edges(field: dict[str, Any], known: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The most and the least that a value may be, each with one that is no more allowed."""
    if "maxLength" in field:
        yield "x" * field["maxLength"], "x" * (field["maxLength"] + 1)
    if "maxItems" in field:
        item = least(field.get("items") or {}, known)
        yield [item] * field["maxItems"], [item] * (field["maxItems"] + 1)
    if "maxProperties" in field:
        value, most = least(field.get("additionalProperties") or {}, known), field["maxProperties"]
        yield {str(at): value for at in range(most)}, {str(at): value for at in range(most + 1)}
    step = 1 if field.get("type") == "integer" else 1e-3
    if "maximum" in field:
        yield field["maximum"], field["maximum"] + max(step, abs(field["maximum"]) * 1e-6)
    if "exclusiveMaximum" in field:
        yield field["exclusiveMaximum"] - step, field["exclusiveMaximum"]
    if "minimum" in field:
        yield field["minimum"], field["minimum"] - max(step, abs(field["minimum"]) * 1e-6)
    if "exclusiveMinimum" in field:
        yield field["exclusiveMinimum"] + step, field["exclusiveMinimum"]


def least(field: dict[str, Any], known: dict[str, Any]) -> Any:
    """A value that a field may have, as small as it can be."""
    if "default" in field and field["default"] is not None:
        return field["default"]
    if "$ref" in field:
        return least(known[field["$ref"].rpartition("/")[2]], known)
    if choices := (*field.get("anyOf", ()), *field.get("oneOf", ())):
        return least(choices[0], known)
    if "const" in field:
        return field["const"]
    if "enum" in field:
        return field["enum"][0]
    match field.get("type"):
        case "object":
            return {
                name: least(each, known)
                for name, each in field.get("properties", {}).items()
                if name in field.get("required", ())
            }
        case "array":
            return [least(field["items"], known)] * field.get("minItems", 0)
        case "string":
            return "x" * field.get("minLength", 1)
        case "integer" | "number":
            return field.get("minimum", 1)
        case "boolean":
            return False
    return "x"


def test_the_schemas_refuse_what_is_beyond_the_bound_of_any_field_and_take_what_is_at_it() -> None:
    """Class 2: docs/options.md lists the same fields, from the same schemas."""
    count = 0
    for case in cases():
        where = f"{case.path}: {case.field}"
        try:
            case.schema.model_validate(case.at)
        except ValidationError as error:
            pytest.fail(f"{where} at its bound: {error}")
        try:
            case.schema.model_validate(case.beyond)
        except ValidationError:
            count += 1
        else:
            pytest.fail(f"{where} was taken beyond its bound")
    assert count > 400


@pytest.mark.soak
def test_every_field_is_sent_at_its_bound_and_beyond_it(server: LiveServer) -> None:
    """Class 2: at it a request may be refused for another reason, beyond it it is refused for this one."""
    with server.client() as client:
        for number, case in enumerate(cases()):
            path = case.path.format(name="alice", conversation_id="conv_x")
            body = {**case.at, **({"max_tokens": 1} if "max_tokens" in case.schema.model_fields else {})}
            answer = client.post(path, json=body)
            # No time at all is too little.
            assert answer.status_code < 500 or answer.status_code == 504, (path, case.field, answer.text)
            refused = client.post(path, json=case.beyond)
            assert refused.status_code in (400, 405, 413), (path, case.field, refused.text[:300])
            if number % 50 == 0:
                assert client.get("/health").status_code == 200


@pytest.mark.soak
def test_no_field_costs_memory_that_lasts(server: LiveServer) -> None:
    """Class 2: every field at its bound and beyond, again and again; the process stays as large as it was."""
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    def round_of_all(client: httpx.Client) -> None:
        for path, bound, body in FIELDS.values():
            for count in (bound, bound + 1, 4 * bound):
                answer = sent(client, path, body(count))
                assert answer.status_code < 500, answer.text[:300]
                assert client.get("/health").status_code == 200

    with server.client() as client:
        for _ in range(3):
            round_of_all(client)
        before = resident()
        for _ in range(10):
            round_of_all(client)
        assert resident() < before + (64 << 20)


@pytest.mark.extension("responses")
def test_a_page_of_items_is_bounded_in_bytes_x20(monkeypatch: pytest.MonkeyPatch, server: LiveServer) -> None:
    """X20: pages of large items are short, and lead to all of them."""
    from perdure.ext.responses import conversations

    monkeypatch.setattr(conversations, "_PAGE_BYTES", 1000)
    texts = [f"{number} " + "x" * 300 for number in range(10)]
    with server.client() as client:
        items = [{"role": "user", "content": text} for text in texts]
        conversation = client.post("/v1/conversations", json={"items": items}).json()["id"]
        for order in ("asc", "desc"):
            found: list[str] = []
            params = {"order": order}
            while True:
                page = client.get(f"/v1/conversations/{conversation}/items", params=params).json()
                found += [item["content"][0]["text"] for item in page["data"]]
                assert 1 <= len(page["data"]) <= 2
                if not page["has_more"]:
                    break
                params["after"] = page["last_id"]
            assert found == (texts if order == "asc" else texts[::-1])


def test_stored_responses_at_hand_are_bounded_in_bytes_x13(monkeypatch: pytest.MonkeyPatch) -> None:
    """X13: those that are large are read again, and found all the same."""
    monkeypatch.setattr(sessions_module, "_AT_HAND_BYTES", 100_000)
    with opened(toy(), n_ctx=512) as rt, live_server(rt, keys=Keys()) as server, server.client() as client:
        ids = []
        for number in range(8):
            extra = {"input": "Hi", "metadata": {"n": str(number)}, "unknown": "x" * 40_000}
            answer = client.post(RESPONSES, json={**extra, "max_output_tokens": 1})
            assert answer.status_code == 200, answer.text[:300]
            ids.append(answer.json()["id"])
            assert rt.sessions.at_hand[1] <= 100_000
        for number, response_id in enumerate(ids):
            assert client.get(f"{RESPONSES}/{response_id}").json()["metadata"] == {"n": str(number)}


# Every field without a separate bound: it is as large as its request may be.


def unbounded(
    schema: dict[str, Any], known: dict[str, Any], path: str, inside: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Texts, lists and objects that say nothing of their size: the path, the names on the way, the kind."""
    for name, field in schema.get("properties", {}).items():
        place = f"{path}{name}"
        for each in variants(field):
            reference = each.get("$ref", "").rpartition("/")[2]
            if reference and reference not in inside:
                yield from unbounded(known[reference], known, f"{place}.", (*inside, reference))
            bound = {"string": "maxLength", "array": "maxItems", "object": "maxProperties"}
            kind = each.get("type")
            if kind in bound and bound[kind] not in each and "enum" not in each and "const" not in each:
                yield place, tuple(place.split(".")), kind


def variants(field: dict[str, Any]) -> Iterator[dict[str, Any]]:
    choices = (*field.get("anyOf", ()), *field.get("oneOf", ()))
    if not choices:
        yield field
    for each in choices:
        yield from variants(each)


def filled(kind: str, count: int) -> Any:
    """A value of that kind with so many bytes in it."""
    match kind:
        case "string":
            return "x" * count
        case "array":
            return ["x" * 98] * (count // 100)
        case _:
            return {f"{number:06}": "x" * 90 for number in range(count // 100)}


@pytest.mark.parametrize("limit", ["body_bytes", "members"])
def test_a_field_without_a_bound_of_its_own_is_bounded_by_its_request(limit: str) -> None:
    """Class 2: whatever has no number in docs/options.md, in every protocol; no field is left out."""
    fields = [
        (paths[0], place, names, kind)
        for schema, paths in request_schemas().items()
        if paths[0].startswith(("/v1", "/api")) and "{" not in paths[0]
        for document in [schema.model_json_schema()]
        for place, names, kind in unbounded(document, document.get("$defs", {}), "", ())
    ]
    assert len(fields) > 100
    limits: dict[str, Any] = {"body_bytes": 20_000} if limit == "body_bytes" else {"members": 100}
    count = 0
    with opened(toy(), n_ctx=512) as rt, live_server(rt, **limits) as server, server.client() as client:
        for path, place, names, kind in fields:
            if limit == "members" and kind != "object":
                continue
            value = filled(kind, 21_000)
            for name in reversed(names):
                value = {name: value}
            answer = client.post(path, json=value)
            assert answer.status_code == 413, (path, place, kind, answer.text[:200])
            count += 1
        assert client.get("/health").status_code == 200
    print(limit, count)
