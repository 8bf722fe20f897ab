"""A tenant cannot change what another one gets: every route that changes something, called by one key while
another one is served.

Both keys have a session, a memory, a response, a conversation, a warmed prefix and a reply that is being
written. One of them calls a route, for what is its own (under the same name as the other's, where names are
chosen) and for what is the other's. Then the other one finds its replies, settings and state as before, and
is answered while the caller's reply still goes on: nothing that it asks for waits for that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from perdure.server.app import build
from perdure.server.core.keys import Keys, new_key
from server.live_server import LiveServer, hello
from server.test_pool import served, spec

SAID = [{"role": "user", "content": "Hello"}]
LONG = hello(model="a", max_tokens=32000, perdure={"ignore_eos": True, "loop_guard": 0}, stream=True)
KEEP = 600.0
"""Seconds that the model stays without a request, as the operator chose."""
Ids = dict[str, str]
Body = Any


@dataclass(frozen=True)
class Call:
    """One request. What is in braces in its path and its query is filled in; a session's name is chosen, and
    the caller has one under the same name."""

    body: Body | Callable[[Ids], Body] = field(default_factory=dict)
    status: int = 200
    others: int = 404
    """The status where what is in braces is the other key's."""
    query: str = ""
    binary: bool = False


def text(**more: Any) -> dict[str, Any]:
    return {**hello(), **more}


ROWS: dict[tuple[str, str], list[Call]] = {
    ("POST", "/v1/chat/completions"): [
        Call(text(model="a")),
        Call(text(model="a", perdure={"session": "mine"})),
        Call(text(model="a", prompt_cache_key="k")),
        Call(text(model="b")),
        Call(text(model="a:pirate")),
        Call(text(model="a", perdure={"adapters": {"pirate": 0.5}})),
    ],
    ("POST", "/v1/completions"): [Call({"prompt": "Hello", "max_tokens": 4})],
    ("POST", "/v1/messages"): [Call({"messages": SAID, "max_tokens": 4})],
    ("POST", "/v1/messages/count_tokens"): [Call({"messages": SAID})],
    ("POST", "/v1/images/count"): [Call({"image_url": "data:,"}, 400)],
    ("POST", "/v1/responses"): [
        Call({"input": "Hello", "max_output_tokens": 4}),
        Call({"input": "Hello", "max_output_tokens": 4, "background": True}),
    ],
    ("DELETE", "/v1/responses/{response_id}"): [Call()],
    ("POST", "/v1/responses/{response_id}/cancel"): [Call()],
    ("POST", "/v1/responses/input_tokens"): [Call({"input": "Hello"})],
    ("POST", "/v1/responses/compact"): [Call({"input": "Hello"})],
    ("POST", "/v1/conversations"): [Call({"metadata": {"a": "b"}})],
    ("POST", "/v1/conversations/{conversation_id}"): [Call({"metadata": {"a": "c"}})],
    ("DELETE", "/v1/conversations/{conversation_id}"): [Call()],
    ("POST", "/v1/conversations/{conversation_id}/items"): [
        Call({"items": [{"type": "message", "role": "user", "content": "more"}]})
    ],
    ("POST", "/api/chat"): [
        Call(text(model="a", stream=False, keep_alive=0)),
        Call({"model": "a", "messages": [], "keep_alive": 0, "stream": False}, status=403),
    ],
    ("POST", "/api/generate"): [
        Call({"model": "a", "prompt": "Hi", "stream": False, "keep_alive": "1s"}),
        Call({"model": "a", "keep_alive": 0, "stream": False}, status=403),
    ],
    ("POST", "/api/embed"): [Call({"model": "a", "input": "Hello", "keep_alive": 0})],
    ("POST", "/api/embeddings"): [Call({"model": "a", "prompt": "Hello", "keep_alive": 0})],
    ("POST", "/api/show"): [Call({"model": "a"})],
    ("POST", "/api/pull"): [Call({"model": "a", "stream": False})],
    ("POST", "/api/copy"): [
        Call({"source": "b", "destination": "a"}),
        Call({"source": "b", "destination": "default"}),
        Call({"source": "b", "destination": "bobs"}),
    ],
    ("DELETE", "/api/delete"): [Call({"model": "b"}, status=403)],
    ("POST", "/v1/embeddings"): [Call({"input": "Hello"})],
    ("POST", "/v1/rerank"): [Call({"query": "Hello", "documents": ["a", "b"]})],
    ("POST", "/rerank"): [Call({"query": "Hello", "documents": ["a", "b"]})],
    ("POST", "/v1/models/pull"): [Call({"model": "me/one"}, status=403)],
    ("DELETE", "/v1/models/pull"): [Call(status=403)],
    ("POST", "/v1/models/{model}/load"): [Call({"keep_alive": 0}), Call({"keep_alive": "1s"})],
    ("POST", "/v1/models/{model}/unload"): [Call(status=403)],
    ("POST", "/tokenize"): [Call({"content": "Hello"})],
    ("POST", "/detokenize"): [Call({"tokens": [72, 101]})],
    ("POST", "/v1/sessions"): [Call({"name": "another"}, status=201), Call({"name": "mine"}, status=409)],
    ("POST", "/v1/sessions/import"): [
        Call(
            lambda ids: ids["export"].encode("latin-1"),
            status=201,
            others=201,
            query="?name=from-{request}",
            binary=True,
        )
    ],
    ("POST", "/v1/chats/import"): [Call(b"[]", status=201, binary=True)],
    ("POST", "/v1/documents/text"): [Call(b"none", status=400, binary=True)],
    ("POST", "/v1/files"): [Call(b"none", status=415, binary=True)],
    ("DELETE", "/v1/files/none"): [Call(status=404)],
    ("POST", "/v1/batches"): [Call({"input_file_id": "none", "endpoint": "/v1/embeddings"}, status=404)],
    ("POST", "/v1/batches/none/cancel"): [Call(status=404)],
    # One that is asked for is written once no reply is: both are, here.
    ("POST", "/v1/sessions/{session}/title"): [Call({"instead_of": "another"})],
    ("PATCH", "/v1/sessions/{session}"): [Call({"title": "Renamed", "folder": "work", "pinned": True})],
    ("DELETE", "/v1/sessions/{session}"): [Call()],
    ("POST", "/v1/sessions/{session}/turns"): [Call({"message": "more", "max_tokens": 4})],
    ("POST", "/v1/sessions/{session}/edit"): [Call({"turn": 1, "message": "other", "max_tokens": 4})],
    ("POST", "/v1/sessions/{session}/regenerate"): [Call({"max_tokens": 4})],
    ("POST", "/v1/sessions/{session}/append"): [Call({"messages": SAID})],
    ("POST", "/v1/sessions/{session}/fork"): [Call({"name": "forked"}, status=201)],
    ("POST", "/v1/sessions/{session}/rewind"): [Call({"turns": 1})],
    ("POST", "/v1/sessions/{session}/stop"): [Call()],
    ("POST", "/v1/sessions/{session}/pending"): [Call({}, status=409)],
    ("DELETE", "/v1/sessions/{session}/pending"): [Call()],
    ("POST", "/v1/sessions/{session}/sleep"): [Call()],
    ("POST", "/v1/sessions/{session}/wake"): [Call()],
    ("POST", "/v1/sessions/{session}/label"): [Call({"label": "second"}, status=201)],
    ("POST", "/v1/sessions/{session}/turns/1/analysis"): [Call(status=400)],
    ("POST", "/v1/memories/wake"): [
        Call(lambda ids: {"name": "woken", "address": ids["address"]}, status=201),
    ],
    ("DELETE", "/v1/memories"): [Call(query="?address={address}")],
    ("POST", "/v1/cache/warm"): [Call({"prompt": "ann " * 20, "labels": ["kept"]}, status=201)],
    ("DELETE", "/v1/cache"): [Call(), Call(query="?label=kept")],
    ("POST", "/v1/requests/{request}/cancel"): [Call()],
    ("POST", "/apply-template"): [Call({"messages": SAID})],
    ("POST", "/infill"): [Call({"input_prefix": "a", "input_suffix": "b"}, status=400)],
    ("POST", "/open_session"): [Call({"session_id": "mine"})],
    ("POST", "/close_session"): [Call({"session_id": "mine"})],
}
"""What a key calls, for every route that is no GET."""


@dataclass
class Tenant:
    """One key with everything that it can have."""

    client: httpx.Client
    name: str
    ids: Ids = field(default_factory=dict)

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, (path, answer.text)
        return answer.json()

    def prepare(self) -> None:
        """Have all of it anew."""
        for session in self.client.get("/v1/sessions").json()["data"]:
            self.client.delete(f"/v1/sessions/{session['name']}")
        self.post("/v1/sessions", {"name": "mine", "system": f"You are {self.name}'s."}, 201)
        for message in ("first", "second"):
            self.post(
                "/v1/sessions/mine/turns",
                {"message": f"{self.name} {message}", "max_tokens": 4, "temperature": 0},
            )
        memory = self.post("/v1/sessions/mine/label", {"label": f"{self.name}-there"}, 201)
        response = self.post("/v1/responses", {"input": self.name, "max_output_tokens": 4, "temperature": 0})
        conversation = self.post("/v1/conversations", {"metadata": {"whose": self.name}})
        self.post("/v1/cache/warm", {"prompt": f"{self.name} " * 20, "labels": ["kept"]}, 201)
        self.ids = {
            "session": "mine",
            "model": "a",
            "request": self.name,
            "address": memory["address"],
            "response_id": response["id"],
            "conversation_id": conversation["id"],
            "export": self.client.get("/v1/sessions/mine/export").content.decode("latin-1"),
        }

    def view(self) -> dict[str, Any]:
        """What it gets and sees, without what the time of a request changes."""
        read = {
            path: self.client.get(path.format(**self.ids)).json()
            for path in (
                "/v1/sessions/mine/turns",
                "/v1/memories",
                "/v1/responses/{response_id}",
                "/v1/conversations/{conversation_id}",
                "/v1/cache",
            )
        }
        models = self.client.get("/v1/models").json()["data"]
        [model] = [each for each in models if each["id"] == "a"]
        answer = self.post(
            "/v1/chat/completions",
            {**hello(model="a"), "messages": [{"role": "user", "content": f"{self.name}, as ever"}]},
        )
        return {
            **read,
            "sessions": [
                (each["name"], each["turns"]) for each in self.client.get("/v1/sessions").json()["data"]
            ],
            "models": [each["id"] for each in models],
            "names": [each["name"] for each in self.client.get("/api/tags").json()["models"]],
            "model": {name: model[name] for name in ("state", "pinned", "loads", "expires_in")},
            "default": self.client.get("/props").json()["model_alias"],
            "reply": answer["choices"][0]["message"]["content"],
            "cached": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Tenant, Tenant]]:
    made = {name: new_key(name) for name in ("ann", "bob")}
    with ExitStack() as stack:
        server = stack.enter_context(
            served(
                *(
                    spec(name, kind, n_ctx=32768, slots=4, keep_alive=KEEP, adapters=ADAPTERS)
                    for name, kind in MODELS.items()
                ),
                store=tmp_path_factory.mktemp("store"),
                keys=Keys([key for _, key in made.values()]),
            )
        )
        ann, bob = (
            Tenant(stack.enter_context(server.client(secret)), name) for name, (secret, _) in made.items()
        )
        bob.prepare()
        # What is asked twice is found the second time.
        bob.view()
        yield server, ann, bob


MODELS = {"a": "slow", "b": "sliding"}
ADAPTERS = {"pirate": ("pirate.gguf", 1.0)}


def filled(path: str, ids: Ids) -> str:
    quoted = {
        name: httpx.URL("http://x", params={"q": value}).query.decode()[2:] for name, value in ids.items()
    }
    return path.format(**quoted)


def call(tenant: Tenant, method: str, path: str, each: Call, ids: Ids) -> httpx.Response:
    body = each.body(ids) if callable(each.body) else each.body
    kind = {"content-type": "application/octet-stream" if each.binary else "application/json"}
    content = body if each.binary else json.dumps(body)
    return tenant.client.request(method, filled(path + each.query, ids), content=content, headers=kind)


@pytest.mark.parametrize(("method", "path"), ROWS)
def test_no_route_changes_what_another_key_gets(
    method: str, path: str, place: tuple[LiveServer, Tenant, Tenant]
) -> None:
    """C2, I1, Y2, Y9: its replies, its settings, and how long it waits."""
    _, ann, bob = place
    ann.prepare()
    before = bob.view()
    with ExitStack() as stack:
        replies = [
            stack.enter_context(
                each.client.stream(
                    "POST", "/v1/chat/completions", json=LONG, headers={"x-request-id": each.name}
                )
            )
            for each in (ann, bob)
        ]
        # An iterator that nobody holds closes its stream.
        lines = [reply.iter_lines() for reply in replies]
        assert all(next(each) for each in lines)
        for row in ROWS[method, path]:
            if callable(row.body) or ("{" in path + row.query and "{model}" not in path):
                theirs = call(ann, method, path, row, {**bob.ids, "session": "bobs"})
                assert theirs.status_code == row.others, theirs.text
            own = call(ann, method, path, row, ann.ids)
            assert own.status_code == row.status, own.text
        after = bob.view()
        # Both replies went on all the while: they are there to be ended.
        for tenant in (bob,) if "{request}" in path else (ann, bob):
            tenant.post(f"/v1/requests/{tenant.name}/cancel", {})
        assert after["model"].pop("expires_in") == KEEP
        before["model"].pop("expires_in")
        assert after == before


def test_every_route_that_changes_something_has_a_row(place: tuple[LiveServer, Tenant, Tenant]) -> None:
    """A new one without a row fails here."""
    document = build(place[0].state).openapi()
    routes = {
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method in methods
        if method not in ("get", "head")
    }
    assert {(method, _plain(path)) for method, path in ROWS} == {
        (method, _plain(path)) for method, path in routes
    }


def _plain(path: str) -> str:
    """A path without the names of what is filled in."""
    parts = ["{}" if part.startswith("{") or part in ("1", "none") else part for part in path.split("/")]
    return "/".join(parts)
