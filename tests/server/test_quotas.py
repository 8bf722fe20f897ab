"""X20, Y5, Y6: what a key may store, and how much of it is in memory when it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode.observed import toy
from perdure import InvalidInputError, Message, Turn
from perdure.server.api import session_schemas, sessions
from perdure.server.core.keys import Key, Keys, new_key
from server.live_server import live_server, opened


def test_x20_a_key_stores_no_more_than_it_may(tmp_path: Path) -> None:
    ada, bob = new_key("ada", sessions=2, stored_bytes=20_000), new_key("bob")
    with (
        opened(toy(), n_ctx=1024, store=tmp_path) as rt,
        live_server(rt, keys=Keys([ada[1], bob[1]])) as server,
        server.client(ada[0]) as client,
        server.client(bob[0]) as other,
    ):
        for name in ("one", "two"):
            client.post("/v1/sessions", json={"name": name}).raise_for_status()
        refused = client.post("/v1/sessions", json={"name": "three"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "quota_exceeded")
        assert "2 sessions" in refused.json()["error"]["message"]
        # A stored response is one too.
        assert client.post("/v1/responses", json={"input": "Hi"}).status_code == 507
        other.post("/v1/sessions", json={"name": "three"}).raise_for_status()
        client.delete("/v1/sessions/two").raise_for_status()
        client.post("/v1/sessions", json={"name": "three"}).raise_for_status()
        said = client.post("/v1/sessions/one/fork", json={"name": "four"})
        assert said.status_code == 507
        client.delete("/v1/sessions/three").raise_for_status()
        long = {"name": "long", "system": "x" * 30_000}
        refused = client.post("/v1/sessions", json=long)
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "quota_exceeded")
        other.post("/v1/sessions", json=long).raise_for_status()
        assert [each["name"] for each in client.get("/v1/sessions").json()["data"]] == ["one"]


def test_x20_the_smallest_bound_among_the_keys_of_a_namespace_counts(tmp_path: Path) -> None:
    line = new_key("ada", sessions=5, stored_bytes=1000)[1].line
    (tmp_path / "keys").write_text(f"{line}\n{new_key('ada', sessions=3)[1].line}\n")
    keys = Keys.read(tmp_path / "keys")
    assert [(key.sessions, key.stored_bytes) for key in keys] == [(5, 1000), (3, None)]
    assert (keys.quota("ada").sessions, keys.quota("ada").nbytes) == (3, 1000)
    assert (keys.quota("bob").sessions, keys.quota("bob").nbytes) == (None, None)
    assert Key("a", "0" * 64, sessions=7).line.endswith(" sessions=7")


def test_x20_turns_come_in_pages_of_bytes_and_a_transcript_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_schemas, "PAGE_BYTES", 3000)
    turns = [Turn(kind="start", messages=())]
    for number in range(12):
        said = (Message(role="user", content=f"{number} " + "x" * 1000),)
        turns.append(Turn(kind="turn", messages=said, before=turns[-1].digest))
    with (
        opened(toy(), n_ctx=1024, store=tmp_path) as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        rt.sessions.store.create("", "long", turns)
        texts, page = list[str](), {"has_more": True}
        while page["has_more"]:
            params = {"after": len(texts), "limit": 100}
            page = client.get("/v1/sessions/long/turns", params=params).raise_for_status().json()
            assert 1 <= len(page["data"]) <= 3
            texts += [turn["messages"][0]["content"] for turn in page["data"]]
        assert texts == [turn.messages[0].content for turn in turns[1:]]
        text = client.get("/v1/sessions/long/transcript").raise_for_status().text
        assert text == rt.sessions.get("long").transcript()
        assert all(each in text for each in texts)
        assert client.get("/v1/sessions/nobody/transcript").status_code == 404


def test_y5_the_request_of_a_stored_response_counts(tmp_path: Path) -> None:
    """Y5: a response that could not be made leaves its request, which a key cannot fill a disk with."""
    ada = new_key("ada", stored_bytes=100_000)
    with (
        opened(toy(), n_ctx=256, store=tmp_path) as rt,
        live_server(rt, keys=Keys([ada[1]])) as server,
        server.client(ada[0]) as client,
    ):
        statuses = []
        for _ in range(8):
            # Its prompt is too long: a client that streams finds the response failed, and stored.
            body = {"input": "word " * 8_000, "stream": True}
            statuses.append(client.post("/v1/responses", json=body).status_code)
        assert statuses == [200, 200, *[507] * 6]
        body = {"input": "Hi", "max_output_tokens": 1, "metadata": {"note": "x" * 500}}
        answers = [client.post("/v1/responses", json=body) for _ in range(30)]
        kept = [answer.json()["id"] for answer in answers if answer.status_code == 200]
        assert 0 < len(kept) < 30, "the metadata of small ones counts too"
        [size] = rt.sessions.store.sizes()
        assert size.nbytes <= 100_000
        for each in kept:
            client.delete(f"/v1/responses/{each}").raise_for_status()
        client.post("/v1/responses", json=body).raise_for_status()


def test_y6_labels_and_notes_count_and_come_in_pages_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Y6: memories are stored bytes, a note is bounded, and a page of them too."""
    monkeypatch.setattr(sessions, "PAGE_BYTES", 10_000)
    ada = new_key("ada", stored_bytes=100_000)
    with (
        opened(toy(), store=tmp_path) as rt,
        live_server(rt, keys=Keys([ada[1]])) as server,
        server.client(ada[0]) as client,
    ):
        client.post("/v1/sessions", json={"name": "one"}).raise_for_status()
        refused = client.post("/v1/sessions/one/label", json={"label": "long", "note": "x" * 4097})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "note")
        with pytest.raises(InvalidInputError, match="4096 characters, got one of 4097"):
            rt.sessions.get("one", "ada").label("long", note="x" * 4097)
        statuses = []
        for number in range(40):
            body = {"label": f"l{number}", "note": f"{number} " + "x" * 4000}
            statuses.append(client.post("/v1/sessions/one/label", json=body).status_code)
        kept = statuses.count(201)
        assert statuses == [201] * kept + [507] * (40 - kept)
        assert 20 < kept < 25
        for text in (None, "xxx"):
            labels, after, page = list[str](), None, {"has_more": True}
            while page["has_more"]:
                params = {"limit": 1000, "after": after, "text": text}
                given = {name: value for name, value in params.items() if value is not None}
                page = client.get("/v1/memories", params=given).raise_for_status().json()
                assert 1 <= len(page["data"]) <= 2
                labels += [memory["label"] for memory in page["data"]]
                after = page["data"][-1]["address"]
            assert labels == [f"l{number}" for number in range(kept)]
        assert [each["label"] for each in client.get("/v1/memories?limit=1").json()["data"]] == ["l0"]
        client.delete("/v1/memories", params={"address": after}).raise_for_status()
        client.post("/v1/sessions/one/label", json={"label": "again", "note": "x"}).raise_for_status()
