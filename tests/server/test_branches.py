"""Branches of a session (`fork_from`), in every protocol."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from decode.observed import toy
from perdure.server.core.keys import Keys, new_key
from perdure.sessions.session import Session
from server.live_server import LiveServer, live_server, opened

SAID = [
    {"role": "system", "content": "You are an agent. Be brief."},
    {"role": "user", "content": "Hello."},
]
PROTOCOLS = ("chat", "messages", "responses", "ollama")
SESSIONS = ("chat", "messages", "ollama")
"""A response is stored under its id, or not at all."""
NAMESPACES = 64


@dataclass
class Tenant:
    """A separate namespace on a server that all tests share."""

    server: LiveServer
    namespace: str
    client: httpx.Client

    def session(self, name: str) -> Session:
        return self.server.runtime.session(name, namespace=self.namespace)


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[Tenant]]:
    made = [new_key(f"n{number}") for number in range(NAMESPACES)]
    with (
        opened(toy(), store=tmp_path_factory.mktemp("store"), n_ctx=4096, slots=4) as rt,
        live_server(rt, keys=Keys([key for _, key in made])) as server,
    ):
        yield (Tenant(server, f"n{number}", server.client(secret)) for number, (secret, _) in enumerate(made))


@pytest.fixture
def tenant(tenants: Iterator[Tenant]) -> Iterator[Tenant]:
    tenant = next(tenants)
    with tenant.client:
        yield tenant


@pytest.fixture
def client(tenant: Tenant) -> httpx.Client:
    return tenant.client


def ask(
    client: httpx.Client, protocol: str, messages: list[dict[str, Any]], headers: Any = None, **fields: Any
) -> httpx.Response:
    """The same request in the words of a protocol."""
    system = [each["content"] for each in messages if each["role"] == "system"]
    rest = [each for each in messages if each["role"] != "system"]
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/v1/chat/completions", {"messages": messages, "max_tokens": 4}),
        "messages": (
            "/v1/messages",
            {"messages": rest, "max_tokens": 4, **({"system": system[0]} if system else {})},
        ),
        "responses": (
            "/v1/responses",
            {
                "input": rest,
                "store": False,
                "max_output_tokens": 4,
                **({"instructions": system[0]} if system else {}),
            },
        ),
        "ollama": ("/api/chat", {"messages": messages, "stream": False, "options": {"num_predict": 4}}),
    }
    path, body = bodies[protocol]
    return client.post(path, json={**body, **fields}, headers=headers or {})


def said(protocol: str, answer: httpx.Response) -> str:
    """The text of a whole answer."""
    found = answer.json()
    if protocol == "chat":
        return str(found["choices"][0]["message"]["content"])
    if protocol == "ollama":
        return str(found["message"]["content"])
    parts = found["content"] if protocol == "messages" else found["output"][0]["content"]
    return "".join(part.get("text", "") for part in parts)


def then(protocol: str, answer: httpx.Response, text: str) -> list[dict[str, Any]]:
    """The whole history behind an answer to `SAID`, as a client sends it."""
    return [
        *SAID,
        {"role": "assistant", "content": said(protocol, answer)},
        {"role": "user", "content": text},
    ]


def talk(client: httpx.Client, name: str, *texts: str) -> None:
    for text in texts:
        message = [{"role": "user", "content": text}]
        assert ask(client, "chat", message, perdure={"session": name}).status_code == 200


def listed(client: httpx.Client) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in client.get("/v1/sessions").json()["data"]}


def awake(client: httpx.Client, name: str) -> bool:
    return bool(client.get(f"/v1/sessions/{name}/state").json()["awake"])


def sessions(client: httpx.Client) -> dict[str, int]:
    return {each["name"]: each["turns"] for each in client.get("/v1/sessions").json()["data"]}


# `fork_from`: a branch.


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_branch_reads_only_what_is_new(tenant: Tenant, protocol: str) -> None:
    client = tenant.client
    talk(client, "talk", "Tell me of the sea.", "And of ships.")
    new = [{"role": "user", "content": "And of whales?"}]
    fields: dict[str, Any] = {"perdure": {"fork_from": "talk", "fork_turn": 1}}
    for stores in (False, True) if protocol == "responses" else (None,):
        if stores is not None:
            fields["store"] = stores
        answer = ask(client, protocol, new, **fields)
        assert answer.status_code == 200, answer.text
        [request] = client.get("/v1/requests", params={"limit": 1}).json()["data"]
        first = tenant.session("talk").history()[0].counts
        once = first["prompt_tokens"] + first["completion_tokens"]
        usage = request["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= once - 1, "the first turn is not read again"
        assert usage["prompt_tokens"] < 2 * once, "the second turn is not in it"
    assert tenant.session("talk").turns == 2
    if protocol != "responses":
        assert answer.headers["x-perdure-session"] == "talk~2"
        texts = [turn.messages[0].content for turn in tenant.session("talk~2").history()]
        assert texts == ["Tell me of the sea.", "And of whales?"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_branch_that_is_refused_leaves_nothing(client: httpx.Client, protocol: str) -> None:
    talk(client, "talk", "Hello.")
    new, long = [{"role": "user", "content": "More."}], [{"role": "user", "content": "word " * 4096}]
    for messages, asked, status in (
        (new, {"fork_from": "nobody"}, 404),
        (new, {"fork_from": "talk", "fork_turn": 7}, 400),
        (new, {"fork_turn": 1}, 400),
        (long, {"fork_from": "talk"}, 400),
    ):
        assert ask(client, protocol, messages, perdure=asked).status_code == status
    assert sessions(client) == {"talk": 1}


@pytest.mark.parametrize("protocol", SESSIONS)
def test_a_session_that_is_made_for_a_refused_request_is_not_there(
    client: httpx.Client, protocol: str
) -> None:
    long = [{"role": "user", "content": "word " * 4096}]
    assert ask(client, protocol, long, perdure={"session": "new"}).status_code == 400
    assert sessions(client) == {}


def test_a_session_that_somebody_else_went_on_with_is_not_taken_back(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = Session.submit

    def later(session: Session, said: Any, **options: Any) -> Any:
        monkeypatch.setattr(Session, "submit", submit)
        tenant.session("new").say("I was faster.", max_tokens=2)
        return session.submit(said, **options)

    monkeypatch.setattr(Session, "submit", later)
    long = [{"role": "user", "content": "word " * 4096}]
    assert ask(tenant.client, "chat", long, perdure={"session": "new"}).status_code == 400
    assert sessions(tenant.client) == {"new": 1}


@pytest.mark.parametrize("protocol", SESSIONS)
def test_a_branch_may_be_named_and_is_then_gone_on_with(client: httpx.Client, protocol: str) -> None:
    talk(client, "talk", "Hello.")
    new = [{"role": "user", "content": "More."}]
    ask(client, protocol, new, perdure={"fork_from": "talk", "session": "other"})
    taken = ask(client, protocol, new, perdure={"fork_from": "talk", "session": "other"})
    assert taken.status_code == 409
    ask(client, protocol, new, perdure={"session": "other"})
    assert sessions(client) == {"talk": 1, "other": 3}


def test_a_response_goes_on_from_one_place(client: httpx.Client) -> None:
    talk(client, "talk", "Hello.")
    new = [{"role": "user", "content": "More."}]
    for asked, fields in (
        ({"session": "talk"}, {}),
        ({"fork_from": "talk"}, {"previous_response_id": "resp_1"}),
    ):
        refused = ask(client, "responses", new, perdure=asked, **fields)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")


def test_a_namespace_cannot_branch_off_from_another(tenants: Iterator[Tenant]) -> None:
    ada, bob = next(tenants), next(tenants)
    with ada.client, bob.client:
        talk(ada.client, "talk", "Hello.")
        for protocol in PROTOCOLS:
            new = [{"role": "user", "content": "More."}]
            assert ask(bob.client, protocol, new, perdure={"fork_from": "talk"}).status_code == 404
        talk(bob.client, "mine", "Hello.")
        assert sessions(bob.client) == {"mine": 1}
        assert sessions(ada.client) == {"talk": 1}
