"""A reply that repeats itself ends, with a reason in every protocol's words and in ours; and priorities."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from decode.observed import Turnstile, open_toy
from inside import active_in, inside
from perdure.decode.sequence import Rank
from server.live_server import LiveServer, live_server, opened

SAID = [{"role": "user", "content": "Hello"}]
LOOP: dict[str, Any] = {"logit_bias": {"97": 100}, "temperature": 0}
GUARD: dict[str, Any] = {"perdure": {"loop_guard": 32}}

WORDS: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Any]], Any], Any]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": SAID, "max_tokens": 99, **LOOP, **GUARD},
        lambda answer: answer["choices"][0]["finish_reason"],
        "length",
    ),
    "completions": (
        "/v1/completions",
        {"prompt": "Hello", "max_tokens": 99, **LOOP, **GUARD},
        lambda answer: answer["choices"][0]["finish_reason"],
        "length",
    ),
    "responses": (
        "/v1/responses",
        {"input": "Hello", "max_output_tokens": 99, "store": False, **LOOP, **GUARD},
        lambda answer: (answer["status"], answer["incomplete_details"], answer["output"][0]["status"]),
        ("incomplete", {"reason": "max_output_tokens"}, "incomplete"),
    ),
    "messages": (
        "/v1/messages",
        {"messages": SAID, "max_tokens": 99, **LOOP, **GUARD},
        lambda answer: answer["stop_reason"],
        "max_tokens",
    ),
    "ollama": (
        "/api/chat",
        {"messages": SAID, "stream": False, "options": {"num_predict": 99, "loop_guard": 32, **LOOP}},
        lambda answer: answer["done_reason"],
        "length",
    ),
}


@pytest.mark.parametrize("protocol", WORDS)
def test_a_reply_that_repeats_itself_says_so(protocol: str, server: LiveServer) -> None:
    """C7, Y18: every reply ends with a true reason, in a word that the protocol's clients know."""
    path, body, ending, right = WORDS[protocol]
    with server.client() as client:
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert ending(answer.json()) == right
        assert answer.json()["perdure"]["finish_reason"] == "repetition"


def test_a_turn_that_was_ended_so_is_kept_and_read_back(tmp_path: Any) -> None:
    """I7: also from a store."""
    from perdure.testing.toy import ToyModel

    with opened(ToyModel(), store=tmp_path) as rt:
        said = rt.session("one").say("Hi", logit_bias={97: 100.0}, loop_guard=32, temperature=0)
        assert said.finish_reason == "repetition"
        assert said.kept
    with opened(ToyModel(), store=tmp_path) as rt:
        assert [turn.finish_reason for turn in rt.session("one").history()][-1] == "repetition"


@pytest.fixture(scope="module")
def server() -> Any:
    with open_toy(n_ctx=512, slots=2) as rt, live_server(rt) as found:
        yield found


BACKGROUND: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": SAID, "service_tier": "flex"}),
    "extension": ("/v1/chat/completions", {"messages": SAID, "perdure": {"priority": "background"}}),
    "messages": (
        "/v1/messages",
        {"messages": SAID, "max_tokens": 50, "perdure": {"priority": "background"}},
    ),
    "ollama": (
        "/api/chat",
        {"messages": SAID, "stream": False, "options": {"priority": "background"}},
    ),
    "responses": ("/v1/responses", {"input": "Hello", "store": False, "service_tier": "flex"}),
}


def test_every_protocol_can_say_that_a_request_is_in_the_background() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=512, slots=1) as rt, live_server(rt) as server:
        for path, body in BACKGROUND.values():
            answers: list[int] = []

            def ask(path: str = path, body: dict[str, Any] = body, answers: list[int] = answers) -> None:
                with server.client() as client:
                    answers.append(client.post(path, json=body).status_code)

            asking = threading.Thread(target=ask)
            asking.start()
            assert gate.reached.wait(60)
            assert [group.rank for group in active_in(inside(rt).engine_loop)] == [Rank.BACKGROUND], path
            gate.open()
            asking.join(60)
            assert answers == [200]
            gate.shut()


def test_a_priority_that_there_is_not_is_refused(server: LiveServer) -> None:
    with server.client() as client:
        for path, body in (
            ("/v1/chat/completions", {"messages": SAID, "perdure": {"priority": "urgent"}}),
            ("/api/chat", {"messages": SAID, "options": {"priority": "urgent"}}),
            ("/api/chat", {"messages": SAID, "options": {"priority": 3}}),
            ("/api/chat", {"messages": SAID, "options": {"loop_guard": -1}}),
        ):
            assert client.post(path, json=body).status_code == 400
