"""OpenAI's Responses: events, resuming, fullness, namespaces, and what clients send that nobody knows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode.observed import Turnstile, open_toy, toy
from perdure.server.core.keys import Keys, new_key
from perdure.sessions import sessions as sessions_module
from perdure.sessions.store.sql import store as sqlite_store
from server.live_server import LiveServer, live_server, opened
from server.scripted import THINKS, scripted, steer

PATH = "/v1/responses"
SAID = "<think>Hm, the sea.</think>Blue, as ever."


@contextmanager
def server_on(store: Path, **settings: Any) -> Iterator[LiveServer]:
    with opened(toy(), n_ctx=1024, store=store, **settings) as rt, live_server(rt) as server:
        yield server


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    assert response.status_code == 200, response.read()
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            assert event["type"] == name
            yield event


def streamed(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", PATH, json={"stream": True, **body}) as response:
        return list(events(response))


def resumed(client: httpx.Client, response_id: str, after: int) -> list[dict[str, Any]]:
    params: dict[str, str | int] = {"stream": "true", "starting_after": after}
    with client.stream("GET", f"{PATH}/{response_id}", params=params) as response:
        return list(events(response))


def same(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events without what is another's at another time."""
    shown = json.loads(json.dumps(found))
    for event in shown:
        if "response" in event:
            for name in ("completed_at", "perdure", "usage"):
                event["response"].pop(name, None)
    return shown  # type: ignore[no-any-return]


def text_of(found: list[dict[str, Any]]) -> str:
    return "".join(each["delta"] for each in found if each["type"] == "response.output_text.delta")


def test_a_stored_response_expires_and_what_goes_on_from_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later:
        """The clock, 31 days later."""

        @staticmethod
        def time() -> float:
            return time.time() + 31 * 86400

        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + 31 * 86400

    with server_on(tmp_path) as server, server.client() as client:

        def respond(**body: Any) -> str:
            asked = {"input": "Hello", "max_output_tokens": 4, **body}
            answer = client.post(PATH, json=asked)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["id"])

        def found(*ids: str) -> list[int]:
            return [client.get(f"{PATH}/{each}").status_code for each in ids]

        first = respond()
        second = respond(previous_response_id=first)
        assert found(first, second) == [200, 200]
        for module in (sessions_module, sqlite_store):
            monkeypatch.setattr(module, "time", Later)
        third = respond(previous_response_id=second)
        assert found(first, second, third) == [404, 404, 200]
        turns = server.runtime.session(third).history()
        assert len(turns) == 3
        assert found(respond(previous_response_id=third)) == [200]


def test_events_come_in_order_with_numbers_and_rebuild_the_whole() -> None:
    call = '<tool_call>\n{"name": "light", "arguments": {"on": true}}\n</tool_call>'
    tools = [{"type": "function", "name": "light"}]
    with scripted(f"<think>Hm.</think>So:{call}", n_ctx=1024) as server, server.client() as client:
        found = streamed(client, input="Go", tools=tools)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    once = [kind for at, kind in enumerate(kinds) if not at or kind != kinds[at - 1]]
    assert once == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    assert found[0]["response"]["output"] == []
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == found[-1]["response"]["output"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]


def test_a_summary_that_is_asked_for_is_streamed_as_one() -> None:
    with scripted(SAID, n_ctx=1024) as server, server.client() as client:
        found = streamed(client, input="Go", reasoning={"summary": "auto"})
    kinds = {event["type"] for event in found}
    assert {"response.reasoning_summary_part.added", "response.reasoning_summary_text.delta"} <= kinds
    assert "response.reasoning_text.delta" not in kinds
    assert found[-1]["response"]["output"][0]["summary"] == [{"type": "summary_text", "text": "Hm, the sea."}]


def test_a_finished_stream_is_read_again_from_any_event_also_after_a_restart_h9(tmp_path: Path) -> None:
    """H9: the same events with the same numbers."""
    with scripted(SAID, n_ctx=1024, store=tmp_path / "s") as server, server.client() as client:
        found = streamed(client, input="Go")
        response_id = found[0]["response"]["id"]
        for after in range(-1, len(found) - 1):
            assert same(resumed(client, response_id, after)) == same(found[after + 1 :])
    with server_on(tmp_path / "s", template=THINKS) as server, server.client() as client:
        for after in (-1, 3, len(found) - 2):
            assert same(resumed(client, response_id, after)) == same(found[after + 1 :])


@pytest.mark.parametrize("heard", [1, 2, 4, 7, 12])
def test_a_stream_that_broke_goes_on_where_it_was_h9(tmp_path: Path, heard: int) -> None:
    """H9: the client left in the middle of it, and comes back, or another process of it does."""
    asked = {"input": "Go", "temperature": 1.0, "max_output_tokens": 24, "seed": 5}
    with opened(toy(), n_ctx=1024, store=tmp_path / "s") as rt, live_server(rt) as server:
        with (
            server.client() as client,
            client.stream("POST", PATH, json={**asked, "stream": True}) as response,
        ):
            first = []
            for event in events(response):
                first.append(event)
                if len(first) == heard:
                    break
        response_id, last = first[0]["response"]["id"], first[-1]["sequence_number"]
        with server.client() as client:
            rest = resumed(client, response_id, last)
            whole = client.get(f"{PATH}/{response_id}").json()
    assert [event["sequence_number"] for event in first + rest] == list(range(len(first + rest)))
    assert text_of(first + rest) == whole["output"][-1]["content"][0]["text"]
    assert rest[-1]["response"]["output"] == whole["output"]


def test_a_response_that_the_end_of_the_server_interrupted_is_made_as_it_would_have_been_h9(
    tmp_path: Path,
) -> None:
    """H9: what was heard before is what the new server begins with; by polling, too."""
    asked = {"input": "Go", "temperature": 1.0, "max_output_tokens": 24, "seed": 5}
    with server_on(tmp_path / "s") as server, server.client() as client:
        # What it would have been: the same request with the same seed.
        expected = client.post(PATH, json={**asked, "seed": 5}).json()["output"][-1]["content"][0]["text"]
        with client.stream("POST", PATH, json={**asked, "seed": 5, "stream": True}) as response:
            found = events(response)
            heard = [next(found) for _ in range(8)]
    response_id, last = heard[0]["response"]["id"], heard[-1]["sequence_number"]
    with server_on(tmp_path / "s") as server, server.client() as client:
        rest = resumed(client, response_id, last)
        assert text_of(heard + rest) == expected
        assert client.get(f"{PATH}/{response_id}").json()["status"] in ("completed", "incomplete")


def test_a_reply_is_made_with_the_seed_that_was_kept_for_it_before_h9(tmp_path: Path) -> None:
    """H9: so it comes out the same where it has to be made again, though its client gave no seed."""
    asked = {"input": "Go", "temperature": 1.0, "max_output_tokens": 4}
    with server_on(tmp_path / "s") as server, server.client() as client:
        session = server.runtime.session(client.post(PATH, json=asked).json()["id"])
        assert [turn.seed for turn in session.history()] == [session.origin["seed"]]


def test_a_background_response_survives_the_server_h9(tmp_path: Path) -> None:
    """H9."""
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=1024, store=tmp_path / "s") as rt, live_server(rt) as server:
        with server.client() as client:
            body = {"input": "Go", "background": True, "max_output_tokens": 8, "temperature": 0}
            response_id = client.post(PATH, json=body).json()["id"]
        gate.open()
        server.http_server.stop(now=True)
    with server_on(tmp_path / "s") as server, server.client() as client:
        status = "in_progress"
        while status == "in_progress":
            shown = client.get(f"{PATH}/{response_id}").json()
            status = shown["status"]
    assert status in ("completed", "incomplete")
    assert shown["output"]


def test_cancelling_ends_a_background_response() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=1024) as rt, live_server(rt) as server, server.client() as client:
        body = {"input": "Go", "background": True, "max_output_tokens": 500}
        response_id = client.post(PATH, json=body).json()["id"]
        gate.reached.wait()
        shown = client.post(f"{PATH}/{response_id}/cancel", json={}).json()
        assert shown["status"] == "cancelled"
        gate.open()
        assert client.get(f"{PATH}/{response_id}").json()["status"] == "cancelled"


def test_a_background_stream_is_followed_by_several_readers() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=1024) as rt, live_server(rt) as server, server.client() as client:
        body = {"input": "Go", "background": True, "max_output_tokens": 6, "temperature": 0, "stream": True}
        with client.stream("POST", PATH, json=body) as response:
            found = events(response)
            response_id = next(found)["response"]["id"]
            with server.client() as other:
                params: dict[str, str | int] = {"stream": "true", "starting_after": 0}
                with other.stream("GET", f"{PATH}/{response_id}", params=params) as second:
                    followed = events(second)
                    assert next(followed)["sequence_number"] == 1
                    gate.open()
                    rest = list(followed)
            mine = list(found)
    assert [event for event in mine if event["sequence_number"] > 1] == [
        event for event in rest if event["sequence_number"] > 1
    ]


@pytest.mark.parametrize("store", [True, False])
def test_a_full_context_is_told_within_the_stream(store: bool) -> None:
    """As Codex knows it: 200, and a response that failed by this code."""
    with opened(toy(), n_ctx=256) as rt, live_server(rt) as server, server.client() as client:
        found = streamed(client, input="x" * 5000, store=store)
        assert [event["type"] for event in found][-1] == "response.failed"
        failed = found[-1]["response"]
        assert (failed["status"], failed["error"]["code"]) == ("failed", "context_length_exceeded")
        if store:
            assert client.get(f"{PATH}/{failed['id']}").json()["error"]["code"] == "context_length_exceeded"
        whole = client.post(PATH, json={"input": "x" * 5000, "store": store})
        assert (whole.status_code, whole.json()["error"]["code"]) == (400, "context_length_exceeded")
        cut = client.post(
            PATH,
            json={
                "input": [{"role": role, "content": "x" * 50} for role in ("user", "assistant", "user") * 3],
                "truncation": "auto",
                "max_output_tokens": 8,
            },
        ).json()
        assert cut["perdure"]["dropped"] > 0


def test_ids_are_those_of_a_namespace_h5(tmp_path: Path) -> None:
    """H5, I5: an id of another's is no id."""
    (ada, ada_key), (bob, bob_key) = new_key("ada"), new_key("bob")
    with (
        opened(toy(), n_ctx=1024, store=tmp_path / "s") as rt,
        live_server(rt, keys=Keys([ada_key, bob_key])) as server,
        server.client(ada) as mine,
        server.client(bob) as theirs,
    ):
        first = mine.post(PATH, json={"input": "secret", "max_output_tokens": 4}).json()
        conversation = mine.post("/v1/conversations", json={}).json()["id"]
        for path in ("", "/input_items", "?stream=true"):
            assert theirs.get(f"{PATH}/{first['id']}{path}").status_code == 404
        assert theirs.post(f"{PATH}/{first['id']}/cancel", json={}).status_code == 404
        assert theirs.delete(f"{PATH}/{first['id']}").status_code == 404
        assert theirs.get(f"/v1/conversations/{conversation}/items").status_code == 404
        item = {"type": "item_reference", "id": first["output"][0]["id"]}
        for body in (
            {"input": "x", "previous_response_id": first["id"]},
            {"input": "x", "conversation": conversation},
            {"input": [item]},
        ):
            assert theirs.post(PATH, json=body).status_code == 404, body
        assert mine.get(f"{PATH}/{first['id']}").status_code == 200
        # A session that is no response cannot be had as one.
        mine.post("/v1/sessions", json={"name": "resp_x"}).raise_for_status()
        assert mine.get(f"{PATH}/resp_x").status_code == 404


def test_items_and_tools_that_nobody_knows_are_no_error() -> None:
    body = {
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Be brief."}],
            },
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "additional_tools", "tools": []},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": None,
                "encrypted_content": "foreign",
            },
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [{"type": "input_text", "text": "ok"}],
            },
            {"role": "user", "content": "Hi"},
        ],
        "tools": [{"type": "tool_search"}, {"type": "web_search"}, {"type": "local_shell"}],
        "include": ["reasoning.encrypted_content"],
        "client_metadata": {"x": "y"},
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "store": False,
        "max_output_tokens": 4,
        "tool_choice": {"type": "web_search"},
        "reasoning": {"effort": "medium", "summary": "auto", "context": "x"},
        "text": {"verbosity": "low"},
    }
    with opened(toy(), n_ctx=1024) as rt, live_server(rt) as server, server.client() as client:
        answer = client.post(PATH, json=body)
        assert answer.status_code == 200, answer.text
        image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}
        refused = client.post(PATH, json={"input": [image]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input.0.content.0")


def test_a_conversation_takes_one_response_at_a_time(server: LiveServer, gate: Turnstile) -> None:
    with server.client() as client, server.client() as other:
        conversation = client.post("/v1/conversations", json={}).json()["id"]
        body = {"input": "Hi", "conversation": conversation, "max_output_tokens": 4, "background": True}
        gate.shut()
        first = client.post(PATH, json=body).json()["id"]
        busy = other.post(PATH, json=body)
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "session_busy")
        gate.open()
        while client.get(f"{PATH}/{first}").json()["status"] == "in_progress":
            pass
        assert other.post(PATH, json={**body, "background": False}).status_code == 200


@pytest.fixture
def gate() -> Turnstile:
    return Turnstile(is_open=True)


@pytest.fixture
def rt(gate: Turnstile) -> Iterator[Any]:
    with open_toy(gate=gate, n_ctx=1024) as runtime:
        yield runtime


def test_stored_responses_are_not_listed_as_sessions(client: httpx.Client) -> None:
    client.post(PATH, json={"input": "Hi", "max_output_tokens": 2}).raise_for_status()
    assert client.get("/v1/sessions").json()["data"] == []


@pytest.mark.parametrize(
    ("path", "name", "item"),
    [(PATH, "resp_" + "a" * 32, "input_items"), ("/v1/conversations", "conv_" + "b" * 32, "items")],
)
def test_a_session_that_only_has_such_a_name_is_none(path: str, name: str, item: str, tmp_path: Path) -> None:
    """I5: sessions are named by their owners, who may call one like that."""
    with server_on(tmp_path) as server, server.client() as client:
        assert client.post("/v1/sessions", json={"name": name}).status_code == 201
        for url in (f"{path}/{name}", f"{path}/{name}/{item}"):
            assert client.get(url).status_code == 404, url
        assert client.delete(f"{path}/{name}").status_code == 404
        named = {"previous_response_id": name} if path == PATH else {"conversation": name}
        assert client.post(PATH, json={"input": "Hi", **named}).status_code == 404
        refers = [{"type": "item_reference", "id": f"msg_{name[5:]}"}]
        assert client.post(PATH, json={"input": refers}).status_code == 404
        assert client.get(f"/v1/sessions/{name}").status_code == 200


def test_items_that_name_items_that_name_items_are_bounded(tmp_path: Path) -> None:
    """I2: a few requests could have one ask for any number of look-ups."""
    said = {"role": "user", "content": "x"}
    with server_on(tmp_path) as server, server.client() as client:

        def respond(named: list[str]) -> httpx.Response:
            items = [{"type": "item_reference", "id": each} for each in named]
            return client.post(PATH, json={"input": [*items, said], "max_output_tokens": 1})

        def own_item(answer: httpx.Response) -> str:
            assert answer.status_code == 200, answer.text
            listed = client.get(f"{PATH}/{answer.json()['id']}/input_items").json()["data"]
            key = answer.json()["id"].removeprefix("resp_")
            return next(str(item["id"]) for item in listed if key in item["id"])

        item = own_item(respond([]))
        item = own_item(respond([item] * 40))
        refused = respond([item] * 40)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
        # In a row, too.
        answer = respond([])
        for _ in range(20):
            if (answer := respond([own_item(answer)])).status_code != 200:
                break
        assert answer.status_code == 400


def test_tools_in_namespaces_are_counted_too(tmp_path: Path) -> None:
    """I2."""
    many = [{"type": "function", "name": f"f{number}"} for number in range(1025)]
    with server_on(tmp_path) as server, server.client() as client:
        for store in (True, False):
            tools = [{"type": "namespace", "name": "n", "tools": many}]
            answer = client.post(PATH, json={"input": "Hi", "tools": tools, "store": store})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


def test_a_summary_that_was_empty_is_asked_for_again_and_each_try_is_paid_for() -> None:
    secret, key = new_key("ada", tokens_per_day=5)
    with opened(toy(), n_ctx=1024, template=THINKS) as rt:
        steer(rt, "", "The sea was spoken of.")
        with live_server(rt, keys=Keys([key])) as server, server.client(secret) as client:
            answer = client.post(f"{PATH}/compact", json={"input": "The sea is wide."})
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            # The second try asks in the same words.
            used = 2 * usage["input_tokens"] + usage["output_tokens"]
            refused = client.post(f"{PATH}/compact", json={"input": "Hi"})
    assert refused.status_code == 429
    assert f"has used {used} tokens today" in refused.json()["error"]["message"]
