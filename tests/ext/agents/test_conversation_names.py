"""Fields of a request that name its conversation, and hints about its state: in every protocol."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from perdure.ext.agents.agent_conversation import AgentConversation
from perdure.sessions.tree import as_tree
from server.test_branches import (
    PROTOCOLS,
    SAID,
    Tenant,
    ask,
    awake,
    client,
    listed,
    sessions,
    talk,
    tenant,
    tenants,
    then,
)
from server.test_branches import SESSIONS as NAMING

__all__ = ["client", "tenant", "tenants"]
"""Fixtures."""


# Names.


@pytest.mark.parametrize("protocol", NAMING)
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


def test_a_cache_key_names_a_conversation_where_nothing_else_does(client: httpx.Client) -> None:
    ask(client, "chat", SAID, prompt_cache_key="7f-3a")
    ask(client, "chat", SAID, {"thread-id": "t1"}, prompt_cache_key="7f-3a")
    ask(client, "chat", SAID, prompt_cache_key="no name: it has spaces")
    assert sessions(client) == {"cache-key:7f-3a": 1, "codex:t1": 1}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_y3_what_is_not_to_be_stored_is_not_whatever_names_it(tenant: Tenant, protocol: str) -> None:
    """Y3: `store: false` goes before every name of a conversation, in all protocols."""
    client = tenant.client
    names: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({}, {"x-dynamo-session-id": "s1"}),
        ({}, {"x-claude-code-session-id": "s2"}),
        ({}, {"thread-id": "s3"}),
        ({"nvext": {"session_control": {"session_id": "s4", "action": "open"}}}, {}),
        ({"session_params": {"id": "s5"}}, {}),
    ]
    if protocol in ("chat", "responses"):
        names.append(({"prompt_cache_key": "s6"}, {}))
    for fields, headers in names:
        answer = ask(client, protocol, SAID, headers, store=False, **fields)
        assert answer.status_code == 200, answer.text
        assert "x-perdure-session" not in answer.headers
    if protocol == "chat":
        body = {"perdure": {"resumable": True}, "stream": True}
        ask(client, protocol, SAID, store=False, **body).raise_for_status()
    store = tenant.server.runtime.sessions.store
    assert [size for size in store.sizes() if size.namespace == tenant.namespace] == []
    # A session that is asked for by name is not made, and not gone on with.
    talk(client, "talk", "Hello.")
    for place in ({"session": "talk"}, {"session": "new"}):
        refused = ask(client, protocol, SAID[-1:], store=False, perdure=place)
        assert refused.status_code == 400, refused.text
    new = [{"role": "user", "content": "And now?"}]
    ask(client, protocol, new, store=False, perdure={"fork_from": "talk"}).raise_for_status()
    for route in ("turns", "edit", "regenerate"):
        body = {"message": "More.", "turn": 1, "store": False}
        assert client.post(f"/v1/sessions/talk/{route}", json=body).status_code == 400
    assert sessions(client) == {"talk": 1}


@pytest.mark.parametrize("protocol", NAMING)
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


@pytest.mark.parametrize("protocol", NAMING)
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


@pytest.mark.parametrize("protocol", NAMING)
def test_a_session_of_a_conversation_that_is_made_for_a_refused_request_is_not_there(
    client: httpx.Client, protocol: str
) -> None:
    """Neither one of a client's conversation, nor a branch of that."""
    long = [{"role": "user", "content": "word " * 4096}]
    assert ask(client, protocol, long, session_params={"id": "new"}).status_code == 400
    assert ask(client, protocol, SAID, session_params={"id": "new", "keep": -5.0}).status_code == 400
    assert sessions(client) == {}
    ask(client, protocol, SAID, session_params={"id": "new"})
    assert ask(client, protocol, [*SAID, *long], session_params={"id": "new"}).status_code == 400
    assert sessions(client) == {"sglang:new": 1}
