"""The routing policy: where a request goes, by what replicas tell of themselves."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import InvalidInputError
from perdure.ext.cluster.ray.config import ClusterConfig
from perdure.ext.cluster.ray.marks import ask_of
from perdure.ext.cluster.ray.policy import (
    ReplicaFacts,
    RoutedRequest,
    RouterMemory,
    WarmMarks,
    cost,
    ranked,
    wanted_replicas,
    warm_tokens,
)

STORE = "postgresql://perdure@127.0.0.1/chats"
IDLE = ReplicaFacts(slots=2, seconds=2.0, rate=100.0)


def chat(*texts: str, key: str = "k", **more: object) -> RoutedRequest:
    messages = [{"role": "user", "content": text} for text in texts]
    body = json.dumps({"model": "m", "messages": messages, **more}).encode()
    return ask_of("/v1/chat/completions", [(b"authorization", key.encode())], body)


def test_a_session_goes_where_its_state_is_warm() -> None:
    ask = chat("more", perdure={"session": "trip"})
    mark = ask.marks[-1][0]
    warm = replace(IDLE, marks={mark: 900}, queue=1)
    assert ranked(ask, {"a": IDLE, "b": warm, "c": IDLE})[0] == "b"


def test_nobody_waits_in_a_queue_that_costs_more_than_moving_the_state() -> None:
    """400 tokens are had in 4 s; the queue there takes 2 s for each two requests."""
    ask = chat("more", perdure={"session": "trip"})
    warm = replace(IDLE, marks={ask.marks[-1][0]: 400})
    assert ranked(ask, {"a": IDLE, "b": replace(warm, queue=4)})[0] == "b"
    assert ranked(ask, {"a": IDLE, "b": replace(warm, queue=9)})[0] == "a"


def test_a_new_conversation_goes_where_its_beginning_is() -> None:
    before = chat("A long set of rules. " * 20)
    ask = chat("A long set of rules. " * 20, "And a question.")
    there = replace(IDLE, marks=dict(before.marks))
    assert ranked(ask, {"a": IDLE, "b": there})[0] == "b"
    assert ranked(chat("Something else."), {"a": IDLE, "b": there})[0] == "a", "the one with less state"


def test_what_is_known_nowhere_goes_to_the_least_loaded() -> None:
    ask = chat("hello")
    busy = {name: replace(IDLE, queue=queue) for name, queue in {"a": 2, "b": 1, "c": 4}.items()}
    assert ranked(ask, busy) == ["b", "a", "c"]
    # One that was measured to be a little faster does not draw all of them.
    assert ranked(ask, {**busy, "c": replace(IDLE, queue=4, rate=1e6)})[0] == "b"


def test_one_that_takes_its_leave_is_asked_last() -> None:
    ask = chat("more", perdure={"session": "trip"})
    leaving = replace(IDLE, marks={ask.marks[-1][0]: 9000}, draining=True)
    assert ranked(ask, {"a": leaving, "b": replace(IDLE, queue=50)}) == ["b", "a"]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5000)), min_size=1, max_size=6),
    st.integers(1, 9000),
)
def test_the_first_is_the_cheapest(each: list[tuple[int, int]], tokens: int) -> None:
    ask = RoutedRequest((("m", tokens),), tokens)
    replicas = {
        str(number): replace(IDLE, queue=queue, marks={"m": warm} if warm else {})
        for number, (queue, warm) in enumerate(each)
    }
    known = max(warm_tokens(ask, facts) for facts in replicas.values())
    costs = {name: cost(ask, facts, known=known, rate=100.0) for name, facts in replicas.items()}
    assert costs[ranked(ask, replicas)[0]] == min(costs.values())
    assert sorted(ranked(ask, replicas)) == sorted(replicas)


def test_marks_are_of_the_key_the_name_and_every_beginning() -> None:
    assert chat("a", perdure={"session": "s"}) != chat("a", perdure={"session": "s"}, key="other")
    named = ask_of("/v1/sessions/s/turns", [(b"authorization", b"k")], b"")
    assert named.marks[0][0] == chat("a", perdure={"session": "s"}).marks[0][0]
    header = ask_of("/v1/messages", [(b"authorization", b"k"), (b"x-session-id", b"s")], b"{}")
    assert header.marks[0][0] == named.marks[0][0]
    one, two = chat("a", "b"), chat("a", "b", "c")
    assert two.marks[: len(one.marks)] == one.marks
    assert [mark for mark, _ in chat("b", "a").marks][1:] != [mark for mark, _ in one.marks][1:]
    prompt = ask_of("/v1/completions", [], json.dumps({"prompt": "x" * 5000}).encode())
    longer = ask_of("/v1/completions", [], json.dumps({"prompt": "x" * 5000 + "y" * 3000}).encode())
    assert longer.marks[: len(prompt.marks)] == prompt.marks


@given(st.binary(max_size=200), st.text(max_size=50))
def test_no_body_makes_it_fail(body: bytes, text: str) -> None:
    ask_of("/v1/chat/completions", [], body)
    ask_of("/v1/chat/completions", [], json.dumps({"messages": text, "perdure": text}).encode())
    ask_of("/v1/responses", [], json.dumps({"input": [text, 1, None], "tools": {}}).encode())


@pytest.mark.parametrize("named", ['{"perdure": {"session": "%s"}}', '{"previous_response_id": "%s"}'])
def test_a_name_that_does_not_encode_makes_it_fail_neither(named: str) -> None:
    assert ask_of("/v1/chat/completions", [], (named % r"\ud800").encode()).marks


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [' + b"[]," * (1 << 17) + b"[]]}",
        b'{"messages": ' + b"[" * 100 + b"]" * 100 + b"}",
    ],
    ids=["many lists", "deep lists"],
)
def test_a_body_that_no_server_takes_is_not_parsed_before_a_key_is_asked_for(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text))
    assert ask_of("/v1/chat/completions", [], body).marks == ()
    assert parsed == []


def test_a_body_in_another_encoding_is_read_by_nobody() -> None:
    assert ask_of("/v1/chat/completions", [], '{"messages": ["Hi"]}'.encode("utf-16-le")).marks == ()


@given(
    st.dictionaries(
        st.sampled_from(["marks", "queue", "slots", "seconds", "rate", "full", "draining"]),
        st.one_of(st.none(), st.integers(-2, 2), st.floats(), st.text(max_size=2), st.booleans()),
    )
)
def test_what_a_replica_of_another_version_tells_is_understood_or_left_out(told: dict[str, object]) -> None:
    facts = ReplicaFacts.from_json(told)
    assert facts.slots >= 1
    assert facts.queue >= 0
    assert ranked(chat("a"), {"a": facts, "b": IDLE})


def test_facts_travel() -> None:
    facts = ReplicaFacts(marks={"m": 3}, queue=2, slots=4, seconds=1.5, rate=9.0, full=0.5, draining=True)
    assert ReplicaFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_a_router_remembers_what_it_sent_until_the_replica_has_told() -> None:
    memory, ask = RouterMemory(most=2), chat("more", perdure={"session": "trip"})
    replicas = {"a": IDLE, "b": IDLE}
    memory.sent(ask, "b", 500, now=10.0)
    seen = memory.seen(ask, replicas, {"b": 9.0}, trust=1.0)
    assert ranked(ask, seen)[0] == "b"
    assert warm_tokens(ask, seen["b"]) == 500
    # It told later, and knows nothing of it: its word counts.
    assert memory.seen(ask, replicas, {"b": 20.0}, trust=1.0) == replicas
    # A replica that is gone is not sent anything.
    assert memory.seen(ask, {"a": IDLE}, {}, trust=1.0) == {"a": IDLE}
    for number in range(5):
        memory.sent(chat(f"{number}", perdure={"session": str(number)}), "a", 0, now=11.0)
    assert len(memory) == 2


def test_what_is_warm_is_bounded_by_memory() -> None:
    warm = WarmMarks(capacity=100)
    asks = [RoutedRequest(((f"s{number}", 10),), 10) for number in range(5)]
    for ask in asks:
        warm.answered(ask, 40)
    assert warm.latest() == {"s3": 40, "s4": 40}
    warm.answered(asks[3], 50)
    warm.answered(asks[0], 50)
    assert warm.latest() == {"s3": 50, "s0": 50}
    assert warm.full() == 2.2, "five conversations go on, and two have room"
    assert warm.full(now=601.0) == 0
    assert warm.latest(1) == {"s0": 50}


def test_a_conversation_that_grows_is_counted_once() -> None:
    warm = WarmMarks(capacity=100)
    grown = [(f"m{number}", 10 * (number + 1)) for number in range(6)]
    for number in range(1, 7):
        warm.answered(RoutedRequest(tuple(grown[:number]), 10), 10 * number)
    assert warm.full() == 0.6
    assert warm.latest()["m0"] == 10
    # Its beginning goes with it, unless another conversation has it too.
    warm.answered(RoutedRequest((("m0", 10), ("other", 20)), 20), 50)
    assert set(warm.latest()) == {"m0", "other"}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 60)), max_size=30))
def test_the_marks_stay_within_memory(requests: list[tuple[int, int, int]]) -> None:
    warm = WarmMarks(capacity=100)
    for conversation, length, tokens in requests:
        marks = [("shared", 5), *((f"{conversation}.{at}", 10 * at) for at in range(length))]
        warm.answered(RoutedRequest(tuple(marks), 10), tokens)
        latest = warm.latest()
        assert latest[marks[-1][0]] == tokens
        assert warm.full() > 0
        assert set(latest) <= {"shared", *(f"{a}.{b}" for a in range(4) for b in range(4))}


def test_replicas_are_added_by_queue_and_by_memory() -> None:
    full, empty = replace(IDLE, full=0.95), replace(IDLE, full=0.1)
    assert wanted_replicas([empty], requests=0, target=4) == 1
    assert wanted_replicas([empty], requests=9, target=4) == 3
    assert wanted_replicas([full, full], requests=1, target=4) == 3
    assert wanted_replicas([full, empty], requests=1, target=4) == 1
    assert wanted_replicas([full], requests=0, target=4) == 1


def test_the_config_says_what_is_wrong() -> None:
    config = ClusterConfig.from_dict(
        {"store": STORE, "replicas": {"min": 1, "max": 4}, "blocks": ["file:///x"]}
    )
    assert config.replicas.max == 4
    for table, word in (
        ({}, "store is missing"),
        ({"store": "/a/folder"}, "postgresql"),
        ({"store": STORE, "replica": {}}, "replica is not known"),
        ({"store": STORE, "replicas": {"maximum": 3}}, "maximum is not known"),
        ({"store": STORE, "replicas": {"min": 3, "max": 2}}, "at least min"),
        ({"store": STORE, "replicas": {"min": 0}}, "whole number from 1"),
        ({"store": STORE, "replicas": 3}, "is a table"),
        ({"store": STORE, "blocks": "file:///x"}, "list of URLs"),
        ({"store": STORE, "engine": {"isolated": False}}, "remove it"),
        ({"store": STORE, "port": 0}, "65535"),
        ({"store": STORE, "model": 3}, "model is a text"),
        ({"store": STORE, "folder": "here"}, "absolute path"),
        ({"store": STORE, "body_bytes": 2**40}, "1 GiB"),
    ):
        with pytest.raises(InvalidInputError, match=word):
            ClusterConfig.from_dict(table)
