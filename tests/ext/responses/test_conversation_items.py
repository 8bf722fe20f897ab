"""Items of a conversation: pages of them, and what a page reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from counting import calls_of
from decode.observed import toy
from perdure import Message, Session, Turn
from perdure.ext.responses.conversations import ConversationItems
from perdure.sessions.sessions import Sessions
from perdure.sessions.store.sql import tables
from server.live_server import live_server, opened

ROUTE = "/v1/conversations"


def pages(client: httpx.Client, conversation: str, order: str, limit: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        params: dict[str, str | int] = {"order": order, "limit": limit}
        if found:
            params["after"] = found[-1]["id"]
        page = client.get(f"{ROUTE}/{conversation}/items", params=params).raise_for_status().json()
        assert len(page["data"]) <= limit
        found += page["data"]
        if not page["has_more"]:
            return found


def said(item: dict[str, Any]) -> str:
    return str(item["content"][0]["text"])


def test_all_pages_are_all_items_in_either_order(tmp_path: Path) -> None:
    with (
        opened(toy(), n_ctx=1024, store=tmp_path) as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        conversation, other = (client.post(ROUTE, json={}).json()["id"] for _ in range(2))
        texts = []
        for number in range(4):
            given = [{"role": "user", "content": f"{number}.{at}"} for at in range(number % 3 + 1)]
            added = client.post(f"{ROUTE}/{conversation}/items", json={"items": given}).json()
            assert [said(item) for item in added["data"]] == [each["content"] for each in given]
            texts += [each["content"] for each in given]
        asked = {"input": "And?", "conversation": conversation, "max_output_tokens": 4}
        client.post("/v1/responses", json=asked).raise_for_status()
        for limit in (1, 2, 3, 100):
            every = pages(client, conversation, "asc", limit)
            assert [said(item) for item in every][: len(texts) + 1] == [*texts, "And?"]
            assert every[-1]["role"] == "assistant"
            assert pages(client, conversation, "desc", limit) == every[::-1]
        assert len({item["id"] for item in every}) == len(every)
        for item in every:
            assert client.get(f"{ROUTE}/{conversation}/items/{item['id']}").json() == item
            assert client.get(f"{ROUTE}/{other}/items/{item['id']}").status_code == 404
        key = conversation.partition("_")[2]
        for name in ("msg_x", f"msg_{key}_0i0", f"msg_{key}_1i9", f"msg_{key}_99i0", f"fco_{key}_1i0"):
            assert client.get(f"{ROUTE}/{conversation}/items/{name}").status_code == 404
            found = client.get(f"{ROUTE}/{conversation}/items", params={"after": name}).json()
            assert (found["data"], found["has_more"]) == ([], False)


def test_the_latest_items_cost_the_same_in_a_long_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = []
    for count in (40, 400):
        name = f"conv_{count:032x}"
        with Sessions(tmp_path) as sessions:
            turns = [Turn(kind="start", messages=())]
            for number in range(count):
                message = Message(role="user", content=f"{number}")
                turns.append(Turn(kind="turn", messages=(message,), before=turns[-1].digest))
            sessions.store.create("", name, turns)
            session = Session(sessions, sessions.store.find("", name))
            with calls_of(monkeypatch, (tables, "read_turn")) as read:
                page = ConversationItems(session).page(5, "desc", None)
        assert [said(item) for item in page.data] == [f"{count - at}" for at in range(1, 6)]
        costs.append(read.count)
    assert costs[0] == costs[1] < 40
