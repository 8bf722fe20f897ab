"""C13: every word of a prompt comes from its request, from the session that it names or from the template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure.decode.request import Request
from server.live_server import LiveServer
from server.scripted import THINKS, scripted

SYSTEM = "You are an agent."
BEGINNING = "What is the secret word?"
CHANNELS: dict[str, dict[str, Any]] = {
    "no name": {},
    "one cache key": {"prompt_cache_key": "app"},
}
"""How two conversations of one namespace may come that nothing tells from each other."""
CLAUDE, OPENCODE = {"x-claude-code-session-id": "11-22"}, {"x-session-affinity": "ses-1"}


class Seen:
    """A server, and the prompts that its model reads."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self._backend = server.runtime.backend
        self._submit = self._backend.submit
        self.prompts: list[str] = []
        self._backend.submit = self._seen  # type: ignore[method-assign]

    def _seen(self, request: Request) -> Any:
        model = self._server.runtime.model
        self.prompts.append(b"".join(model.piece(each, special=True) for each in request.prompt).decode())
        return self._submit(request)

    def ask(
        self, messages: Sequence[dict[str, Any]], headers: dict[str, str] | None = None, **fields: Any
    ) -> str:
        """The prompt of a request. Its answer has whatever the model says."""
        body = {"messages": list(messages), "max_tokens": 200, "perdure": {"settle": 0}, **fields}
        with self._server.client() as client:
            answer = client.post("/v1/chat/completions", json=body, headers=headers or {})
        assert answer.status_code == 200, answer.text
        self.answer = answer.json()
        self.message: dict[str, Any] = {
            name: value for name, value in self.answer["choices"][0]["message"].items() if value
        }
        return self.prompts[-1]

    @property
    def notes(self) -> list[str]:
        found: list[str] = self.answer.get("perdure", {}).get("notes", [])
        return found

    def sessions(self) -> dict[str, int]:
        with self._server.client() as client:
            return {each["name"]: each["turns"] for each in client.get("/v1/sessions").json()["data"]}


@contextmanager
def seen(store: Path, *texts: str, **settings: Any) -> Iterator[Seen]:
    with scripted(*(texts or ("OK",)), store=store, n_ctx=4096, **settings) as server:
        yield Seen(server)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reminder(word: str) -> str:
    return f"<system-reminder>The secret word is {word}.</system-reminder>"


OK = {"role": "assistant", "content": "OK"}
HEAD = {"role": "system", "content": SYSTEM}


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_conversation_is_read_with_its_own_reminder_y1(channel: str, tmp_path: Path) -> None:
    """Y1, C13: another conversation began with the same words, and was answered alike."""
    name = CHANNELS[channel]
    with seen(tmp_path) as server:
        server.ask([HEAD, user(f"{BEGINNING}\n{reminder('marzipan')}")], **name)
        server.ask([HEAD, user(f"{BEGINNING}\n{reminder('tulip')}")], **name)
        first = [HEAD, user(f"{BEGINNING}\n{reminder('marzipan')}"), OK, user("Say it.")]
        prompt = server.ask(first, **name)
        assert (prompt.count("marzipan"), prompt.count("tulip")) == (1, 0)
        second = [HEAD, user(f"{BEGINNING}\n{reminder('tulip')}"), OK, user("Say it.")]
        prompt = server.ask(second, **name)
        assert (prompt.count("marzipan"), prompt.count("tulip")) == (0, 1)


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_client_that_sent_no_reminder_is_read_without_one_y1(channel: str, tmp_path: Path) -> None:
    """Y1, C13: whether it says the same as another one or leaves out what that one sent."""
    name = CHANNELS[channel]
    with seen(tmp_path) as server:
        server.ask([HEAD, user(f"{BEGINNING}\n{reminder('marzipan')}")], **name)
        server.ask([HEAD, user(BEGINNING), {"role": "system", "content": reminder("tulip")}], **name)
        prompt = server.ask([HEAD, user(BEGINNING), OK, user("Say it.")], **name)
        assert "reminder" not in prompt
        assert prompt.count(BEGINNING) == 1


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_conversation_is_read_with_its_own_date_y1(channel: str, tmp_path: Path) -> None:
    """Y1, C13: two conversations with the same beginning, on two days, in turn."""
    name = CHANNELS[channel]
    days = [f"Today's date: 2026-11-1{day}" for day in (6, 7)]
    with seen(tmp_path) as server:
        said: list[dict[str, Any]] = []
        for turn in range(3):
            said.append(user(f"Question {turn}."))
            for day, other in (days, days[::-1]):
                prompt = server.ask([{"role": "system", "content": f"{SYSTEM}\n{day}"}, *said], **name)
                assert (prompt.count(day), prompt.count(other)) == (1, 0)
            said.append(OK)


@pytest.mark.parametrize("headers", [CLAUDE, OPENCODE], ids=["Claude Code", "opencode"])
def test_a_named_session_keeps_the_reminder_that_its_client_leaves_out(
    headers: dict[str, str], tmp_path: Path
) -> None:
    """A2, C13: the client goes on from the same prefix, by the words of its own session."""
    with seen(tmp_path) as server:
        said = [HEAD, user(BEGINNING)]
        prompt = ""
        for turn in range(3):
            latest = {**said[-1], "content": f"{said[-1]['content']}\n{reminder(f'word{turn}')}"}
            longer = server.ask([*said[:-1], latest], headers)
            assert longer.startswith(prompt)
            assert [longer.count(f"word{at}") for at in range(turn + 1)] == [1] * (turn + 1)
            assert bool(server.notes) == bool(turn)
            prompt = longer
            said += [OK, user(f"Question {turn}.")]
        assert server.notes == ["kept as it was read: reminder"]
        assert list(server.sessions().values()) == [3]


def test_a_named_session_says_a_line_of_the_system_prompt_again_where_it_changed(tmp_path: Path) -> None:
    """A2: it knows by its own turns, also after a restart."""
    said: list[dict[str, Any]] = []
    for turn, day in enumerate((6, 6, 7, 7)):
        said.append(user(f"Question {turn}."))
        with seen(tmp_path) as server:
            head = {"role": "system", "content": f"Today's date: 2026-11-1{day}\n{SYSTEM}"}
            prompt = server.ask([head, *said], CLAUDE)
            assert prompt.count("2026-11-16") == 1
            assert prompt.count("2026-11-17") == (day == 7)
            assert server.notes[0] == "moved behind the messages: date"
            assert server.sessions() == {"claude-code:11-22": turn + 1}
        said.append(OK)


def test_what_a_client_sends_in_the_place_of_its_reminder_is_read_y1(tmp_path: Path) -> None:
    """Y1, C13: a session holds what was left out, and never stands for what was sent."""
    with seen(tmp_path) as server:
        server.ask([HEAD, user(f"{BEGINNING}\n{reminder('marzipan')}")], CLAUDE)
        prompt = server.ask([HEAD, user(f"{BEGINNING}\n{reminder('tulip')}"), OK, user("Say it.")], CLAUDE)
        assert (prompt.count("marzipan"), prompt.count("tulip")) == (0, 1)
        nudge = {"role": "system", "content": "The TodoWrite tool hasn't been used recently."}
        prompt = server.ask([HEAD, user(BEGINNING), OK, nudge, user("Say it.")], CLAUDE)
        assert prompt.count("TodoWrite") == 1


def test_prompts_are_as_they_were_sent_where_that_is_asked_for(tmp_path: Path) -> None:
    with seen(tmp_path) as server:
        server.ask([HEAD, user(f"{BEGINNING}\n{reminder('marzipan')}")], CLAUDE)
        sent = [HEAD, user(BEGINNING), OK, user("Say it.")]
        prompt = server.ask(sent, CLAUDE, perdure={"stable_prefix": False, "settle": 0})
        assert "marzipan" not in prompt


# A history that is almost the one that is stored.

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SHOWN = (
    "{% for m in messages %}[{{ m.role }}|{{ m.name or '' }}|{{ m.tool_call_id or '' }}|"
    "{{ m.reasoning_content or '' }}|{{ m.content or '' }}|"
    "{% for c in m.tool_calls or [] %}{{ c.id }} {{ c.function.name }}{% endfor %}]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant|{% endif %}{# <think> <tool_call> #}"
)
"""A template that shows all that a message has."""
HIDDEN = (
    "{% for m in messages %}[{{ m.role }}|{{ (m.content or '') | trim }}|"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant|{% endif %}{# <think> <tool_call> #}"
)
"""One that shows little of it."""


def changed(change: str, history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first, asked, called, result, *rest = history
    if change == "whitespace":
        asked = {**asked, "content": f"{asked['content']}\n\n"}
    elif change == "name":
        result = {**result, "name": "watch"}
    elif change == "tool_call_id":
        called = {**called, "tool_calls": [{**called["tool_calls"][0], "id": "abcdefghi"}]}
        result = {**result, "tool_call_id": "abcdefghi"}
    else:
        called = {**called, "reasoning_content": "Another thought."}
    return [first, asked, called, result, *rest]


@pytest.mark.parametrize("shows", [True, False], ids=["shown", "not shown"])
@pytest.mark.parametrize("change", ["whitespace", "name", "tool_call_id", "reasoning"])
def test_a_history_that_is_read_otherwise_is_another_one_y14(
    change: str, shows: bool, tmp_path: Path
) -> None:
    """Y14, C13: what the client sends is what the model reads. What no template shows is no difference."""
    template = tmp_path / "template.jinja"
    template.write_text(SHOWN if shows else HIDDEN)
    with seen(tmp_path / "store", CALL, "It is blue.", template=template) as server:
        history = [HEAD, user("Look.")]
        server.ask(history, CLAUDE, tools=TOOLS)
        result = {"role": "tool", "content": "blue", "tool_call_id": server.message["tool_calls"][0]["id"]}
        history += [server.message, result]
        server.ask(history, CLAUDE, tools=TOOLS)
        history += [server.message, user("Again.")]
        sent = changed(change, history)
        named = server.ask(sent, CLAUDE, tools=TOOLS)
        lines = len(server.sessions())
        alone = server.ask(sent, tools=TOOLS)
        assert named == alone
        assert lines == 1 + shows


def test_a_history_without_the_reasoning_that_its_session_holds_goes_on_y14(tmp_path: Path) -> None:
    with seen(tmp_path, "<think>A thought.</think>It is blue.", template=THINKS) as server:
        server.ask([HEAD, user("Look.")], CLAUDE)
        prompt = server.ask(
            [HEAD, user("Look."), {"role": "assistant", "content": "It is blue."}, user("So?")], CLAUDE
        )
        assert prompt.count("A thought.") == 1
        assert server.sessions() == {"claude-code:11-22": 2}


def test_reasoning_of_another_conversation_under_one_cache_key_is_not_read(tmp_path: Path) -> None:
    """C13: a cache key may be sent with all that a client asks."""
    thoughts = [f"<think>{word}</think>It is blue." for word in ("marzipan", "tulip", "rose")]
    with seen(tmp_path, *thoughts, template=THINKS) as server:
        for _ in range(2):
            server.ask([HEAD, user("Look.")], prompt_cache_key="app")
        said = [HEAD, user("Look."), {"role": "assistant", "content": "It is blue."}, user("So?")]
        prompt = server.ask(said, prompt_cache_key="app")
        assert "marzipan" not in prompt
        assert "tulip" not in prompt
