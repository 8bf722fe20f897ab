"""Conversations that agents name by their headers are sessions: they go on, branch, and last."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from chat.test_prefetch import THOUGHT, template
from decode.observed import toy
from ext.agents.test_side_requests import TITLES
from inside import due_in_quiet, inside
from perdure import Runtime
from perdure.cli.commands.sessions import origin_line
from perdure.cli.output.words import quoted
from perdure.ext.agents.conversation_names import conversation_of
from perdure.server.core.settings import ReplyDefaults
from server.live_server import LiveServer, live_server, opened
from server.scripted import scripted, steer
from server.test_branches import sessions

SYSTEM = "You are an agent. Be brief."
CLAUDE = {"x-claude-code-session-id": "11-22"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with opened(toy(), store=tmp_path, n_ctx=4096) as rt, live_server(rt) as server:
        yield server


class Agent:
    """A client that sends its whole history, over Anthropic's Messages."""

    def __init__(self, server: LiveServer, headers: dict[str, str] = CLAUDE, system: str = SYSTEM) -> None:
        self._server = server
        self._headers = headers
        self.system = system
        self.history: list[dict[str, Any]] = []

    def say(self, text: str) -> dict[str, Any]:
        self.history.append({"role": "user", "content": text})
        body = {"max_tokens": 6, "system": self.system, "messages": self.history}
        with self._server.client() as client:
            answer = client.post("/v1/messages", json=body, headers=self._headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        content = "".join(each.get("text", "") for each in found["content"]) or "(nothing)"
        self.history.append({"role": "assistant", "content": content})
        return found["usage"]  # type: ignore[no-any-return]


def test_a_conversation_that_an_agent_names_is_a_session_that_goes_on(server: LiveServer) -> None:
    agent = Agent(server)
    for text in ("One.", "Two.", "Three."):
        agent.say(text)
    with server.client() as client:
        assert sessions(client) == {"claude-code:11-22": 3}


def test_where_the_history_differs_a_branch_grows_and_both_lines_go_on(server: LiveServer) -> None:
    agent = Agent(server)
    for text in ("One.", "Two.", "Three."):
        agent.say(text)
    whole = list(agent.history)
    agent.history = whole[:2]
    agent.say("Something else.")
    with server.client() as client:
        assert sessions(client) == {"claude-code:11-22": 3, "claude-code:11-22~2": 2}
    agent.say("And more.")
    agent.history = whole
    agent.say("Four.")
    with server.client() as client:
        assert sessions(client) == {"claude-code:11-22": 4, "claude-code:11-22~2": 3}


def test_what_made_a_branch_is_named(server: LiveServer) -> None:
    """A5: also where the conversation is a session."""
    agent = Agent(server)
    agent.say("One.")
    agent.say("Two.")
    agent.system = "You are a helper. Be brief."
    agent.say("Three.")
    with server.client() as client:
        latest, *before = client.get("/v1/requests?limit=3").json()["data"]
    assert (latest["miss"]["cause"], latest["miss"]["why"]) == ("system", "system prompt, line 1")
    assert [each["miss"] for each in before] == [None, None]


def test_a_compaction_is_a_line_of_its_own(server: LiveServer) -> None:
    agent = Agent(server)
    agent.say("One.")
    agent.history = []
    agent.say("This is what was said before: one.")
    agent.say("Go on.")
    with server.client() as client:
        assert sessions(client) == {"claude-code:11-22": 1, "claude-code:11-22~2": 2}


def test_after_a_restart_only_what_is_new_is_computed(tmp_path: Path) -> None:
    """A1: also where a counter and a reminder changed at every turn."""
    history: list[dict[str, Any]] = []
    before = 0
    for round_ in range(3):
        with opened(toy(), store=tmp_path, n_ctx=4096) as rt, live_server(rt) as server:
            agent = Agent(server, system=f"{SYSTEM}\n<total_tokens>{round_}</total_tokens>")
            agent.history = history
            usage = agent.say(f"Question {round_} of this conversation.")
            if round_:
                assert usage["cache_read_input_tokens"] > 0.6 * before, "all that was read before is reused"
            before = (
                usage["input_tokens"]
                + usage["cache_read_input_tokens"]
                + usage.get("cache_creation_input_tokens", 0)
            )
            with server.client() as client:
                assert sessions(client) == {"claude-code:11-22": round_ + 1}


def test_a_subagent_has_a_session_of_its_own_that_names_its_parent(server: LiveServer) -> None:
    Agent(server).say("One.")
    inner = {**CLAUDE, "x-claude-code-agent-id": "sub-1"}
    Agent(server, inner).say("Look into it.")
    with server.client() as client:
        assert sessions(client) == {"claude-code:11-22": 1, "claude-code:11-22:sub-1": 1}
        parents = {each["name"]: each["parent"] for each in client.get("/v1/sessions").json()["data"]}
    assert parents == {"claude-code:11-22": "", "claude-code:11-22:sub-1": "claude-code:11-22"}


@pytest.mark.parametrize(
    ("headers", "name", "parent"),
    [
        (
            {"x-claude-code-session-id": "a", "x-claude-code-agent-id": "b"},
            "claude-code:a:b",
            "claude-code:a",
        ),
        (
            {
                "x-claude-code-session-id": "a",
                "x-claude-code-agent-id": "c",
                "x-claude-code-parent-agent-id": "b",
            },
            "claude-code:a:c",
            "claude-code:a:b",
        ),
        ({"x-session-affinity": "s1"}, "opencode:s1", ""),
        ({"x-session-id": "s1", "x-parent-session-id": "s0"}, "opencode:s1", "opencode:s0"),
        ({"session-id": "x", "thread-id": "t"}, "codex:t", ""),
        ({"session-id": "x"}, "codex:x", ""),
        ({"x-openwebui-chat-id": "c"}, "open-webui:c", ""),
    ],
)
def test_the_names_that_agents_give(headers: dict[str, str], name: str, parent: str) -> None:
    found = conversation_of(headers, "")
    assert found is not None
    assert (found.name, found.parent) == (name, parent)


@pytest.mark.parametrize("value", ["", "a/b", "a b", "x" * 101, "é", "a\n"])
def test_what_is_no_name_names_nothing(value: str) -> None:
    assert conversation_of({"x-session-id": value}, "") is None


def test_they_are_not_kept_where_that_is_turned_off(tmp_path: Path) -> None:
    with opened(toy(), store=tmp_path, n_ctx=4096) as rt, live_server(rt) as server:
        server.state.conversations = False
        Agent(server).say("One.")
        with server.client() as client:
            assert sessions(client) == {}


def test_where_a_session_came_from_is_told_in_words() -> None:
    made = {"agent": "claude-cli", "parent": "claude-code:1"}
    assert origin_line(made) == f"made by {quoted('claude-cli')}, started from {quoted('claude-code:1')}"
    forked = {"how": "fork", "session": "a", "turn": 2}
    assert origin_line(forked) == f"fork of {quoted('a')} after turn 2"


def test_without_a_store_and_without_a_name_nothing_is_kept() -> None:
    with opened(toy(), n_ctx=4096) as rt, live_server(rt) as server, server.client() as client:
        Agent(server).say("One.")
        Agent(server, {}).say("One.")
        assert sessions(client) == {}


def test_chat_completions_and_ollama_keep_conversations_too(server: LiveServer) -> None:
    said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello."}]
    with server.client() as client:
        client.post(
            "/v1/chat/completions", json={"messages": said, "max_tokens": 2}, headers={"x-session-id": "oc"}
        )
        client.post(
            "/api/chat",
            json={"messages": said, "stream": False, "options": {"num_predict": 2}},
            headers={"x-openwebui-chat-id": "ow"},
        )
        assert sessions(client) == {"opencode:oc": 1, "open-webui:ow": 1}


def test_what_open_webui_sends_is_answered(server: LiveServer) -> None:
    """By its source, 0.12.4 (`routers/openai.py`): the list of models, a stream, and Continue."""
    headers = {
        "x-openwebui-user-name": "Ada",
        "x-openwebui-user-id": "1",
        "x-openwebui-user-email": "ada@example.org",
        "x-openwebui-user-role": "user",
        "x-openwebui-chat-id": "ow",
    }
    said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello."}]
    with server.client() as client:
        [model] = client.get("/v1/models", headers=headers).json()["data"]
        body = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "model": model["id"],
            "messages": said,
            "max_tokens": 4,
            "temperature": 0.8,
            "top_p": 0.9,
            "stop": ["###"],
            "seed": 7,
            "frequency_penalty": 0.1,
            "logit_bias": {"5": -100},
            "user": {"name": "Ada", "id": "1", "email": "ada@example.org", "role": "user"},
        }
        answer = client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"usage":{' in answer.text
        assert sessions(client) == {"open-webui:ow": 1}
        begun = [*said, {"role": "assistant", "content": "Well"}]
        more = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
        answer = client.post("/v1/chat/completions", json={**body, **more}, headers=headers)
        assert answer.status_code == 200, answer.text


def test_a_conversation_may_begin_with_several_messages_to_the_system(server: LiveServer) -> None:
    head = [{"role": "system", "content": SYSTEM}]
    head += [{"role": "developer", "content": f"{each} rules. " * 8} for each in ("Sandbox", "Style")]
    said: list[dict[str, Any]] = []
    with server.client() as client:
        for text in ("One.", "Two."):
            said.append({"role": "user", "content": text})
            asked = {"messages": [*head, *said], "max_tokens": 4}
            answer = client.post("/v1/chat/completions", json=asked, headers={"thread-id": "t1"})
            said.append(answer.raise_for_status().json()["choices"][0]["message"])
        assert sessions(client) == {"codex:t1": 2}


@pytest.mark.parametrize("client", TITLES)
def test_a_title_is_no_turn_of_the_conversation_that_it_is_asked_under(
    client: str, server: LiveServer
) -> None:
    """As opencode's, which comes first and has the name of the conversation."""
    headers = {"x-session-affinity": "ses-1"}
    title = [{"role": role, "content": text} for role, text in TITLES[client]]
    agent = Agent(server, headers)
    with server.client() as http:
        for count in (1, 2):
            asked = {"messages": title, "max_tokens": 4}
            answer = http.post("/v1/chat/completions", json=asked, headers=headers).raise_for_status()
            assert "x-perdure-session" not in answer.headers
            assert answer.headers["x-perdure-no-session"] == "a side request is no turn of it"
            agent.say(f"Number {count}.")
            assert sessions(http) == {"opencode:ses-1": count}


READ = '<tool_call>\n{"name": "read", "arguments": {"path": "a.txt"}}\n</tool_call>'


@pytest.mark.parametrize("change", ["a result pruned", "a result cut short", "a text trimmed"])
def test_what_a_client_prunes_or_trims_grows_a_branch_there(change: str, tmp_path: Path) -> None:
    """A2: what stands before it is not read again, and both lines go on."""
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "read", "parameters": parameters}}]
    said: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM * 8}]

    def say(client: httpx.Client, *messages: dict[str, Any]) -> dict[str, Any]:
        said.extend(messages)
        asked = {"messages": said, "tools": tools, "max_tokens": 200}
        answer = client.post("/v1/chat/completions", json=asked, headers={"x-session-affinity": "ses-1"})
        message = answer.raise_for_status().json()["choices"][0]["message"]
        said.append({name: value for name, value in message.items() if value})
        (request, *_) = client.get("/v1/requests").json()["data"]
        found: dict[str, Any] = request
        return found

    with (
        scripted(READ, "It has three long lines.", "So it is.", store=tmp_path, n_ctx=4096) as server,
        server.client() as client,
    ):
        say(client, {"role": "user", "content": "Read a.txt."})
        [call] = said[-1]["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "first line\nsecond line\nthird"}
        say(client, result)
        before = say(client, {"role": "user", "content": "Which is the second?"})
        assert sessions(client) == {"opencode:ses-1": 3}
        whole = list(said)
        at = 3 if "result" in change else 4
        content = {"a result pruned": "[cleared]", "a result cut short": "first line"}.get(change, "It has")
        said[at] = {**said[at], "content": content}
        branch = say(client, {"role": "user", "content": "And the third?"})
        assert sessions(client) == {"opencode:ses-1": 3, "opencode:ses-1~2": 2}
        kept = branch["usage"]["prompt_tokens"] - branch["reuse"]["computed"]
        assert kept > 0.6 * before["usage"]["prompt_tokens"], "a branch, and no new beginning"
        said[:] = whole
        say(client, {"role": "user", "content": "Go on with the first line."})
        assert sessions(client)["opencode:ses-1"] == 4


def killed(store: Path, copy: Path) -> None:
    """The store as a kill leaves it: nobody closes anything."""
    shutil.copytree(store, copy, ignore=shutil.ignore_patterns("*.socket", "*.lock"))


def until_saved(rt: Runtime) -> None:
    """Wait until what waits for quiet is done, and written."""
    rt.chat_format.prefetcher.wait()
    while due_in_quiet(inside(rt).engine_loop):
        time.sleep(0.001)
    # In the engine thread: not before what it does now is done.
    for tier in inside(rt).slot_cache.tiers.lower:
        inside(rt).engine_loop.call(tier.flush)


@pytest.mark.parametrize("drops", [False, True], ids=["as it came", "without reasoning"])
@pytest.mark.parametrize("turns", [1, 3])
def test_a_kill_right_after_a_turn_has_only_what_is_new_read_again(
    tmp_path: Path, turns: int, drops: bool
) -> None:
    """A7: the reply, and what was read ahead where the next prompt shows it otherwise, are on the disk."""
    shown: dict[str, Any] = {"template": template(tmp_path)} if drops else {}
    said: list[dict[str, Any]] = []

    @contextmanager
    def serving(store: str) -> Iterator[LiveServer]:
        with opened(toy(), store=tmp_path / store, n_ctx=4096, **shown) as rt:
            steer(rt, THOUGHT if drops else "The answer is seven.")
            with live_server(rt, defaults=ReplyDefaults(settle=4096)) as server:
                yield server

    def say(server: LiveServer, text: str) -> tuple[int, int, int]:
        """Tokens of the prompt, of the reply, and computed."""
        said.append({"role": "user", "content": text})
        with server.client() as client:
            asked = {"max_tokens": 200, "messages": said}
            answer = client.post("/v1/messages", json=asked, headers=CLAUDE).raise_for_status().json()
            (request, *_) = client.get("/v1/requests").json()["data"]
        said.append({"role": "assistant", "content": answer["content"]})
        usage = request["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"], request["reuse"]["computed"]

    with serving("a") as server:
        for turn in range(turns):
            prompt, reply, _ = say(server, f"Question {turn} of this conversation.")
        until_saved(server.runtime)
        killed(tmp_path / "a", tmp_path / "b")
        # What the same turn computes without a kill is what is new in it.
        before = list(said)
        longer, _, new = say(server, "And now?")
    said[:] = before
    with serving("b") as server:
        assert say(server, "And now?")[2] == new
        with server.client() as client:
            assert sessions(client) == {"claude-code:11-22": turns + 1}
    if not drops:
        assert new <= longer - prompt - reply + 1
    assert new < 60
