"""Fields of a request that name its conversation, hints about its state, and branches: in every protocol."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from decode.observed import toy
from perdure.server.core.keys import Keys, new_key
from perdure.sessions.agent_conversation import AgentConversation
from perdure.sessions.info import as_tree
from perdure.sessions.session import Session
from server.live_server import LiveServer, live_server, opened
from server.test_conversations import sessions

SAID = [
    {"role": "system", "content": "You are an agent. Be brief."},
    {"role": "user", "content": "Hello."},
]
PROTOCOLS = ("chat", "messages", "responses", "ollama")
NAMESPACES = 64


@dataclass
class Tenant:
    """A namespace of its own on a server that all tests share."""

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


# Names.


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_fields_and_headers_name_a_conversation_that_goes_on(client: httpx.Client, protocol: str) -> None:
    cases: list[tuple[dict[str, Any], dict[str, str], str]] = [
        ({"nvext": {"session_control": {"session_id": "s1", "action": "open"}}}, {}, "dynamo:s1"),
        ({"nvext": {"agent_context": {"session_id": "s2"}}}, {}, "dynamo:s2"),
        ({"session_params": {"id": "s3"}}, {}, "sglang:s3"),
        ({}, {"x-dynamo-session-id": "s4", "x-session-id": "other"}, "dynamo:s4"),
        ({"session_params": {"id": "s5"}}, {"x-session-id": "other"}, "sglang:s5"),
        ({"session_params": {"id": "no name"}}, {"x-openwebui-chat-id": "s6"}, "open-webui:s6"),
        ({}, {"thread-id": "s7", "session-id": "s8"}, "codex:s7"),
    ]
    for fields, headers, name in cases:
        answer = ask(client, protocol, SAID, headers, **fields)
        assert answer.status_code == 200, answer.text
        again = ask(client, protocol, then(protocol, answer, "More."), headers, **fields)
        assert [each.headers["x-perdure-session"] for each in (answer, again)] == [name, name]
    assert sessions(client) == {name: 2 for _, _, name in cases}


@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_a_cache_key_names_a_conversation_where_nothing_else_does(
    client: httpx.Client, protocol: str
) -> None:
    ask(client, protocol, SAID, prompt_cache_key="7f-3a")
    ask(client, protocol, SAID, {"thread-id": "t1"}, prompt_cache_key="7f-3a")
    ask(client, protocol, SAID, prompt_cache_key="no name: it has spaces")
    assert sessions(client) == {"cache-key:7f-3a": 1, "codex:t1": 1}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_parents_give_the_tree_of_agents(tenant: Tenant, protocol: str) -> None:
    client = tenant.client
    control = {"session_id": "child", "parent_session_id": "root", "action": "open"}
    ask(client, protocol, SAID, session_params={"id": "a"})
    ask(client, protocol, SAID, session_params={"id": "b", "parent_id": "a"})
    ask(client, protocol, SAID, nvext={"session_control": control})
    assert {name: each["parent"] for name, each in listed(client).items()} == {
        "sglang:a": "",
        "sglang:b": "sglang:a",
        "dynamo:child": "dynamo:root",
    }
    rows = tenant.server.runtime.sessions.list(tenant.namespace)
    tree = [(level, row.name) for level, row in as_tree(rows)]
    assert tree == [(0, "dynamo:child"), (0, "sglang:a"), (1, "sglang:b")]


def test_no_conversation_is_its_own_parent() -> None:
    assert AgentConversation(name="a", parent="a").origin == {}
    assert AgentConversation(name="a:b", parent="a").origin == {"parent": "a"}


def test_an_agent_that_is_started_with_its_parents_history_branches_off_there(client: httpx.Client) -> None:
    first = ask(client, "chat", SAID, session_params={"id": "a"})
    history = then("chat", first, "Look into it.")
    ask(client, "chat", history, session_params={"id": "b", "parent_id": "a"})
    branch = listed(client)["sglang:b"]
    assert branch["origin"] == {"how": "fork", "session": "sglang:a", "turn": 1}
    assert (branch["parent"], sessions(client)) == ("sglang:a", {"sglang:a": 1, "sglang:b": 2})


def test_branches_of_a_conversation_keep_its_agent_and_its_parent(client: httpx.Client) -> None:
    headers = {
        "x-claude-code-session-id": "s",
        "x-claude-code-agent-id": "sub",
        "user-agent": "claude-cli/2.1",
    }
    first = ask(client, "messages", SAID, headers)
    for text in ("One way.", "Another way."):
        ask(client, "messages", then("messages", first, text), headers)
    found = listed(client)
    assert sorted(found) == ["claude-code:s:sub", "claude-code:s:sub~2"]
    for each in found.values():
        assert (each["agent"], each["parent"]) == ("claude-cli", "claude-code:s")


def test_lists_show_the_model_the_tokens_and_the_session(tenant: Tenant) -> None:
    client = tenant.client
    usage = ask(client, "chat", SAID, session_params={"id": "a"}).json()["usage"]
    found = listed(client)["sglang:a"]
    name = tenant.server.runtime.model.info.name
    assert (found["model"], found["tokens"]) == (name, usage["total_tokens"])
    [request] = client.get("/v1/requests").json()["data"]
    assert request["session"] == "sglang:a"


# State that is kept, and let go.


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_conversation_that_is_closed_leaves_its_slot_and_stays(client: httpx.Client, protocol: str) -> None:
    first = ask(client, protocol, SAID, session_params={"id": "a"})
    assert awake(client, "sglang:a")
    last = {"session_params": {"id": "a", "keep": False}}
    ask(client, protocol, then(protocol, first, "The last one."), **last)
    while awake(client, "sglang:a"):
        pass
    assert sessions(client) == {"sglang:a": 2}


def test_a_last_request_of_its_own_makes_no_line(client: httpx.Client) -> None:
    """Dynamo's clients end a session with a request that has nothing to do with it."""
    name, end = {"x-dynamo-session-id": "s"}, [{"role": "user", "content": "."}]
    ask(client, "chat", SAID, name)
    ask(client, "chat", end, {**name, "x-dynamo-session-final": "true"})
    while awake(client, "dynamo:s"):
        pass
    assert sessions(client) == {"dynamo:s": 1}


def test_sglangs_routes_open_and_close_sessions(client: httpx.Client) -> None:
    assert client.post("/open_session", json={"capacity_of_str_len": 9, "session_id": "a"}).json() == "a"
    made = client.post("/open_session", json={"capacity_of_str_len": 9}).json()
    ask(client, "chat", SAID, session_params={"id": "a", "rid": None})
    ask(client, "chat", SAID, session_params={"id": made})
    assert sessions(client) == {"sglang:a": 1, f"sglang:{made}": 1}
    assert client.post("/close_session", json={"session_id": "a"}).status_code == 200
    assert not awake(client, "sglang:a")
    assert client.post("/close_session", json={"session_id": "a b"}).status_code == 400


def test_state_is_kept_for_as_long_as_a_client_says(client: httpx.Client) -> None:
    """As by a cache mark behind the last message."""
    control = {"session_id": "s", "action": "open", "timeout": 600.0}
    marked = ask(client, "messages", SAID, nvext={"session_control": control}).json()["usage"]
    plain = ask(client, "messages", [*SAID[:1], {"role": "user", "content": "Bye."}]).json()["usage"]
    assert marked["cache_creation_input_tokens"] > 0
    assert plain["cache_creation_input_tokens"] == 0


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


@pytest.mark.parametrize("protocol", ["chat", "messages", "ollama"])
def test_a_session_that_is_made_for_a_refused_request_is_not_there(
    client: httpx.Client, protocol: str
) -> None:
    """Neither one that was named, nor one of a client's conversation, nor a branch of that."""
    long = [{"role": "user", "content": "word " * 4096}]
    assert ask(client, protocol, long, perdure={"session": "new"}).status_code == 400
    assert ask(client, protocol, long, session_params={"id": "new"}).status_code == 400
    assert ask(client, protocol, SAID, session_params={"id": "new", "keep": -5.0}).status_code == 400
    assert sessions(client) == {}
    ask(client, protocol, SAID, session_params={"id": "new"})
    assert ask(client, protocol, [*SAID, *long], session_params={"id": "new"}).status_code == 400
    assert sessions(client) == {"sglang:new": 1}


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


@pytest.mark.parametrize("protocol", ["chat", "messages", "ollama"])
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
        ask(bob.client, "chat", SAID, session_params={"id": "a"})
        assert sessions(bob.client) == {"sglang:a": 1}
        assert sessions(ada.client) == {"talk": 1}
