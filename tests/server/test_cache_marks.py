"""Cache marks in each protocol: what is marked outlives what is not, and usage says what happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from decode.observed import toy
from perdure.memory import FullAttention, Hybrid, MemorySpec, Recurrent, SlidingWindow
from server.live_server import LiveServer, live_server, opened

RULES = "Rule: be kind, be brief, be clear. " * 12
EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


@contextmanager
def small(kind: type[MemorySpec] = FullAttention, **settings: Any) -> Iterator[LiveServer]:
    """A server with one slot, and memory for a few prompts."""
    with opened(toy(kind), **{"n_ctx": 2048, "slots": 1, **settings}) as rt, live_server(rt) as server:
        yield server


def message(**more: Any) -> dict[str, Any]:
    return {"max_tokens": 1, "temperature": 0, "messages": [{"role": "user", "content": "Hi"}], **more}


def marked(text: str, mark: dict[str, str] | None) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, **({"cache_control": mark} if mark else {})}]


def usage(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["usage"]
    return found


def test_creation_and_read_figures_are_what_happened() -> None:
    with small() as server, server.client() as client:
        turn = marked("Hello there.", EPHEMERAL)
        body = message(system=marked(RULES, HOUR), messages=[{"role": "user", "content": turn}])
        first = usage(client, body)
        created = first["cache_creation"]
        assert first["cache_read_input_tokens"] == 0
        assert 0 < created["ephemeral_5m_input_tokens"] < created["ephemeral_1h_input_tokens"]
        assert sum(created.values()) == first["cache_creation_input_tokens"]
        # What opens the reply comes behind the last mark.
        assert 0 < first["input_tokens"] < 20
        total = first["input_tokens"] + first["cache_creation_input_tokens"]
        again = usage(client, body)
        assert again["cache_read_input_tokens"] == total - 1
        assert again["cache_creation_input_tokens"] == 0
        # Another first message: what was marked in the system message is read, the rest is made.
        body["messages"] = [{"role": "user", "content": marked("Good morning to you.", EPHEMERAL)}]
        other = usage(client, body)
        assert other["cache_read_input_tokens"] >= created["ephemeral_1h_input_tokens"]
        assert other["cache_creation"]["ephemeral_1h_input_tokens"] == 0
        assert other["cache_creation"]["ephemeral_5m_input_tokens"] > 0


def test_without_a_mark_nothing_is_said_to_be_created(client: httpx.Client) -> None:
    found = usage(client, message(system=RULES[:100]))
    assert found["cache_creation_input_tokens"] == 0
    assert found["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}


@pytest.mark.parametrize("kind", [FullAttention, SlidingWindow, Recurrent, Hybrid])
def test_what_is_marked_outlives_what_is_not(kind: type[MemorySpec]) -> None:
    """For models whose state cannot be cut, a checkpoint is kept at the mark."""

    def read_again(mark: dict[str, str] | None, cache: int) -> tuple[int, int]:
        with small(kind, cache=cache) as server, server.client() as client:
            body = message(system=marked(RULES, mark), messages=[{"role": "user", "content": "One."}])
            first = usage(client, body)
            for number in range(24):
                crowd = f"Subject {number}: " + f"{number} tells of something else. " * 12
                usage(client, message(system=crowd))
            body["messages"] = [{"role": "user", "content": "Two, and not one."}]
            again = usage(client, body)
            total = first["input_tokens"] + first["cache_creation_input_tokens"]
            return again["cache_read_input_tokens"], total

    room = 96 << 10
    found, total = read_again(HOUR, room)
    assert found >= total // 2
    # The same without a mark: it had to go. Else the mark was not what kept it.
    lost, _ = read_again(None, room)
    assert lost < total // 2


@pytest.mark.parametrize("kind", [Recurrent, Hybrid])
def test_all_that_is_marked_is_read_again_where_state_cannot_be_cut(kind: type[MemorySpec]) -> None:
    """K2: a checkpoint is kept at the mark itself, not only now and then."""
    with small(kind) as server, server.client() as client:
        body = message(system=marked(RULES, EPHEMERAL), messages=[{"role": "user", "content": "One."}])
        created = usage(client, body)["cache_creation_input_tokens"]
        body["messages"] = [{"role": "user", "content": "Two, and not one."}]
        assert usage(client, body)["cache_read_input_tokens"] >= created > 0


def test_marks_are_checked(client: httpx.Client) -> None:
    five = [{"type": "text", "text": "a", "cache_control": EPHEMERAL}] * 5
    refused = client.post("/v1/messages", json=message(system=five))
    assert refused.status_code == 400
    assert "maximum of 4 blocks with cache_control" in refused.json()["error"]["message"]
    wrong = client.post("/v1/messages", json=message(system=marked("a", {"type": "ephemeral", "ttl": "2h"})))
    assert wrong.status_code == 400


def test_marks_stand_wherever_blocks_do(client: httpx.Client) -> None:
    """On tools, results of tools, replies, and for the whole request."""
    tool = {"name": "light", "input_schema": {"type": "object"}, "cache_control": HOUR}
    call = {"type": "tool_use", "id": "t1", "name": "light", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "lit", "cache_control": EPHEMERAL}
    messages = [
        {"role": "user", "content": "Light!"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    found = usage(client, message(tools=[tool], messages=messages, cache_control=EPHEMERAL))
    assert found["cache_creation_input_tokens"] > 0


@pytest.mark.parametrize("protocol", ["chat", "responses"])
@pytest.mark.parametrize("how", ["key", "breakpoint", "explicit"])
def test_keys_and_breakpoints_of_openai_keep_a_prompt(protocol: str, how: str) -> None:
    part: dict[str, Any] = {"type": "text" if protocol == "chat" else "input_text", "text": RULES}
    extra: dict[str, Any] = {}
    if how == "key":
        extra["prompt_cache_key"] = "agent-7"
    else:
        part["prompt_cache_breakpoint"] = {"mode": "explicit"}
    if how == "explicit":
        extra["prompt_cache_options"] = {"mode": "explicit", "ttl": "30m"}

    def asked(client: httpx.Client, last: str, **more: Any) -> tuple[int, int]:
        said = [{"role": "system", "content": [part]}, {"role": "user", "content": last}]
        if protocol == "chat":
            body = {"messages": said, "max_tokens": 1, **more}
            found = client.post("/v1/chat/completions", json=body).json()["usage"]
            return found["prompt_tokens_details"]["cached_tokens"], found["prompt_tokens"]
        body = {"input": said, "max_output_tokens": 1, "store": False, **more}
        found = client.post("/v1/responses", json=body).json()["usage"]
        return found["input_tokens_details"]["cached_tokens"], found["input_tokens"]

    with small(cache=96 << 10) as server, server.client() as client:
        _, total = asked(client, "One.", **extra)
        for number in range(24):
            usage(client, message(system=f"Subject {number}: " + f"{number} tells of something else. " * 12))
        cached, _ = asked(client, "Two, and not one.")
        assert cached >= total // 2
