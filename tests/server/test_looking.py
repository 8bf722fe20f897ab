"""What the page looks at: trees of branches and of prefixes, search, state, slots, the last requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode.observed import Turnstile, open_toy, toy
from perdure.server.core.keys import Keys, new_key
from server.live_server import LiveServer, live_server, opened, streamed

SESSIONS = "/v1/sessions"


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Two callers of one server with a store."""
    made = [new_key(name) for name in ("alice", "bob")]
    with (
        opened(toy(), store=tmp_path) as rt,
        live_server(rt, keys=Keys([key for _, key in made])) as server,
        server.client(made[0][0]) as alice,
        server.client(made[1][0]) as bob,
    ):
        yield alice, bob


def say(client: httpx.Client, name: str, text: str, **more: Any) -> dict[str, Any]:
    body = {"message": text, "max_tokens": 6, "temperature": 0, **more}
    response = client.post(f"{SESSIONS}/{name}/turns", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def make(client: httpx.Client, name: str, *said: str) -> None:
    assert client.post(SESSIONS, json={"name": name}).status_code == 201
    for text in said:
        say(client, name, text)


def read(client: httpx.Client, path: str, **query: Any) -> dict[str, Any]:
    response = client.get(path, params=query)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.extension("inspection")
@pytest.mark.parametrize("what", ["records", "blocks"])
def test_what_the_cache_holds_is_read_page_by_page(
    what: str, keyed: tuple[httpx.Client, httpx.Client]
) -> None:
    """All pages together are all of one's own, each once; the last one says that it is."""
    alice, bob = keyed
    for number in range(7):
        asked = {"prompt": f"{number} is what this begins with. " * 9, "labels": [str(number)]}
        assert alice.post("/v1/cache/warm", json=asked).status_code == 201
    path, key = ("/v1/cache", "records") if what == "records" else ("/v1/cache/blocks", "data")
    every = read(alice, path, limit=1000)
    assert len({each["id"] for each in every[key]}) == len(every[key]) >= 7
    assert not every["has_more"]
    pages: list[dict[str, Any]] = []
    query: dict[str, Any] = {"limit": 3}
    while True:
        answer = read(alice, path, **query)
        assert 0 < len(answer[key]) <= 3
        pages += answer[key]
        if not answer["has_more"]:
            break
        query["after"] = answer[key][-1]["id"]
    assert pages == every[key]
    assert read(bob, path)[key] == []
    for wrong in ({"limit": 0}, {"limit": 1001}, {"after": "x"}):
        assert alice.get(path, params=wrong).status_code == 400
    assert bob.get(path, params={"after": pages[0]["id"]}).status_code == 400


def test_a_tree_has_every_branch_with_its_sessions_and_memories(
    keyed: tuple[httpx.Client, httpx.Client],
) -> None:
    alice, bob = keyed
    make(alice, "trunk", "one", "two", "three")
    make(bob, "trunk", "other words")
    assert alice.post(f"{SESSIONS}/trunk/fork", json={"name": "twig", "turn": 1}).status_code == 201
    say(alice, "twig", "instead")
    labelled = alice.post(f"{SESSIONS}/trunk/label", json={"label": "here", "turn": 2}).json()

    tree = read(alice, f"{SESSIONS}/twig/tree")
    by_id = {turn["id"]: turn for turn in tree["data"]}
    heads = {each["name"]: by_id[each["at"]] for each in tree["sessions"]}

    def said(turn: dict[str, Any]) -> list[str]:
        found = [turn["said"]]
        while turn["parent"] is not None:
            turn = by_id[turn["parent"]]
            found.append(turn["said"])
        return found[::-1][1:]

    assert {name: said(turn) for name, turn in heads.items()} == {
        "trunk": ["one", "two", "three"],
        "twig": ["one", "instead"],
    }
    assert [(each["label"], by_id[each["at"]]["said"]) for each in tree["memories"]] == [("here", "two")]
    assert tree["memories"][0]["address"] == labelled["address"]
    assert [turn["turn"] for turn in tree["data"]] == [0, 1, 2, 3, 2]
    assert tree == read(alice, f"{SESSIONS}/trunk/tree")
    assert {turn["said"] for turn in read(bob, f"{SESSIONS}/trunk/tree")["data"]} == {"", "other words"}
    assert bob.get(f"{SESSIONS}/twig/tree").status_code == 404


def test_a_tree_comes_in_pages_each_turn_after_the_one_it_follows(
    keyed: tuple[httpx.Client, httpx.Client],
) -> None:
    alice, bob = keyed
    make(alice, "long", *(f"say {number}" for number in range(5)))
    whole = read(alice, f"{SESSIONS}/long/tree")["data"]
    pages, after = [], None
    while True:
        page = read(alice, f"{SESSIONS}/long/tree", limit=2, **({"after": after} if after else {}))
        pages += page["data"]
        if not page["has_more"]:
            break
        after = page["data"][-1]["id"]
    assert pages == whole
    seen: set[str | None] = {None}
    for turn in whole:
        assert turn["parent"] in seen
        seen.add(turn["id"])
    make(bob, "short", "x")
    answer = bob.get(f"{SESSIONS}/short/tree", params={"after": whole[1]["id"]})
    assert answer.status_code == 404


def test_sessions_are_found_by_their_names_and_by_what_was_said(
    keyed: tuple[httpx.Client, httpx.Client],
) -> None:
    alice, bob = keyed
    make(alice, "Trip to Lisbon", "nothing special")
    make(alice, "cooking", "how long does a Lisbon tart bake?", "and then?")
    make(alice, "maths", "what is 6 times 7?")
    make(bob, "bobs", "Lisbon too")
    reply = say(alice, "maths", "ça va")["choices"][0]["message"]["content"]

    def found(client: httpx.Client, text: str, **query: Any) -> list[str]:
        return [each["name"] for each in read(client, SESSIONS, text=text, **query)["data"]]

    assert sorted(found(alice, "LISBON")) == ["Trip to Lisbon", "cooking"]
    assert found(alice, "ça va") == ["maths"]
    assert "maths" in found(alice, reply[:4])
    assert found(alice, "assistant") == []
    assert found(alice, "no such thing") == []
    assert found(bob, "lisbon") == ["bobs"]
    first = read(alice, SESSIONS, text="lisbon", limit=1)
    assert first["has_more"]
    assert len(found(alice, "lisbon", after=first["data"][0]["name"])) == 1


def test_state_says_where_a_session_is_before_and_after_it_sleeps(
    keyed: tuple[httpx.Client, httpx.Client],
) -> None:
    alice, bob = keyed
    make(alice, "dozy", "a few words to remember " * 3)
    awake = read(alice, f"{SESSIONS}/dozy/state")
    assert awake["awake"]
    assert awake["tiers"]["slot"]["tokens"] > 0
    assert awake["turn_bytes"] > 0
    assert alice.post(f"{SESSIONS}/dozy/sleep", json={}).status_code == 200
    asleep = read(alice, f"{SESSIONS}/dozy/state")
    assert not asleep["awake"]
    assert asleep["tiers"]["disk"]["nbytes"] > 0
    plan = read(alice, f"{SESSIONS}/dozy/plan")
    assert asleep["tiers"]["disk"]["tokens"] == plan["tiers"]["disk"]
    assert read(alice, f"{SESSIONS}/dozy/state") == asleep
    assert bob.get(f"{SESSIONS}/dozy/state").status_code == 404


@pytest.mark.extension("inspection")
def test_kept_prefixes_are_a_tree_of_shared_beginnings_of_ones_own(
    keyed: tuple[httpx.Client, httpx.Client],
) -> None:
    alice, bob = keyed
    start = "a beginning that both of them have in common, and that is longer than a block of tokens. " * 2
    for label, end in (("left", "then left " * 20), ("right", "then right " * 20)):
        warmed = alice.post("/v1/cache/warm", json={"prompt": start + end, "labels": [label]})
        assert warmed.status_code == 201, warmed.text
    [trunk] = read(alice, "/v1/cache/tree")["data"]
    assert start.startswith(trunk["text"][1:20]) or trunk["text"] in start
    assert trunk["follows"]
    assert sum(trunk["nbytes"].values()) > 0
    branches = read(alice, "/v1/cache/tree", parent=trunk["id"])["data"]
    assert sorted(label for run in branches for label in run["labels"]) == ["left", "right"]
    assert all(run["start"] == trunk["start"] + trunk["tokens"] for run in branches)
    one = read(alice, "/v1/cache/tree", parent=trunk["id"], limit=1)
    assert one["has_more"]
    two = read(alice, "/v1/cache/tree", parent=trunk["id"], limit=1, after=1)
    assert [*one["data"], *two["data"]] == branches
    assert read(bob, "/v1/cache/tree")["data"] == []
    for parent in (trunk["id"], "0" * 64):
        assert bob.get("/v1/cache/tree", params={"parent": parent}).status_code == 404


def test_the_machine_shows_slots_and_what_is_in_them_to_their_owner(
    keyed: tuple[httpx.Client, httpx.Client],
) -> None:
    alice, bob = keyed
    make(alice, "mine", "hello there")
    [model] = read(alice, "/v1/machine")["models"]
    assert (model["id"], model["state"], model["waiting"]) == ("toy", "ready", 0)
    assert [slot["own"] for slot in model["slots"]].count(True) == 1
    assert "hello there" in next(slot["text"] for slot in model["slots"] if slot["own"])
    [seen] = read(bob, "/v1/machine")["models"]
    assert {(slot["own"], slot["tokens"], slot["text"]) for slot in seen["slots"]} == {(False, None, None)}


def test_the_last_requests_say_what_was_reused_and_why_not_more(
    keyed: tuple[httpx.Client, httpx.Client],
) -> None:
    alice, bob = keyed
    make(alice, "talk", "one", "two")
    answer = say(alice, "talk", "three")
    requests = read(alice, "/v1/requests")["data"]
    assert [each["number"] for each in requests] == [3, 2, 1]
    assert requests[0]["session"] == "talk"
    assert requests[0]["reuse"] == answer["perdure"]["reuse"]
    assert requests[0]["timings"] == answer["perdure"]["timings"]
    assert requests[0]["reuse"]["why"]
    page = read(alice, "/v1/requests", limit=2)
    assert page["has_more"]
    assert [each["number"] for each in read(alice, "/v1/requests", before=2)["data"]] == [1]
    assert read(bob, "/v1/requests") == {"object": "list", "data": [], "has_more": False}


def test_a_turn_tells_later_how_its_reply_came_about(keyed: tuple[httpx.Client, httpx.Client]) -> None:
    alice, _ = keyed
    make(alice, "talk", "one")
    said = say(alice, "talk", "two", top_p=0.5)
    turn = read(alice, f"{SESSIONS}/talk/turns")["data"][-1]
    tiers = said["perdure"]["reuse"]["tiers"]
    assert {tier: turn["usage"][f"{tier}_tokens"] for tier in tiers} == tiers
    assert {"first_token_ms", "decode_ms"} <= turn["usage"].keys()
    assert turn["settings"]["top_p"] == 0.5


@pytest.fixture
def held() -> Iterator[tuple[LiveServer, Turnstile]]:
    gate = Turnstile(is_open=True)
    with open_toy(gate=gate) as rt, live_server(rt) as server:
        yield server, gate
        gate.open()


@pytest.mark.parametrize("keep", [True, False])
def test_a_reply_that_is_stopped_ends_like_any_other_and_is_kept_if_that_was_asked(
    held: tuple[LiveServer, Turnstile], keep: bool
) -> None:
    server, gate = held
    with server.client() as client, server.client() as other:
        make(client, "talk")
        assert other.post(f"{SESSIONS}/talk/stop", json={}).json() == {"stopped": False}
        gate.shut()
        chunks: list[dict[str, Any]] = []

        def listen() -> None:
            body = {"message": "hi", "max_tokens": 200, "temperature": 0}
            body["perdure"] = {"keep_partial": keep}
            chunks.extend(streamed(client, f"{SESSIONS}/talk/turns", body))

        listening = threading.Thread(target=listen)
        listening.start()
        assert gate.reached.wait(60)
        gate.admit(40)
        assert gate.reached.wait(60)
        assert other.post(f"{SESSIONS}/talk/stop", json={}).json() == {"stopped": True}
        gate.open()
        listening.join()
        assert not any("error" in chunk for chunk in chunks)
        last = chunks[-1]
        assert last["perdure"]["finish_reason"] == "cancelled"
        assert last["perdure"]["kept"] is keep
        turns = read(other, f"{SESSIONS}/talk/turns")["data"]
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert [turn["reply"]["content"] for turn in turns] == ([text] if keep else [])
        say(other, "talk", "and now?")


def test_keep_partial_is_for_sessions(held: tuple[LiveServer, Turnstile]) -> None:
    server, _ = held
    with server.client() as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "perdure": {"keep_partial": True}}
        refused = client.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "perdure.keep_partial")


@pytest.mark.parametrize("path", ["/v1/cache/tree?parent=x", "/v1/requests/a%20b/cancel"])
def test_a_name_that_cannot_be_one_is_refused_in_words(
    path: str, keyed: tuple[httpx.Client, httpx.Client]
) -> None:
    """Nobody reads regular expressions."""
    answer = keyed[0].post(path, json={}) if "requests" in path else keyed[0].get(path)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "take it from an answer as it is" in message
    assert "^" not in message
