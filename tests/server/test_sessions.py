"""Sessions, memories and kept prefixes as resources."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode.observed import Turnstile, toy
from perdure import Model
from perdure.sessions.turn import Turn
from server.live_server import LiveServer, check_freed, hello, live_server, opened, streamed, text_of

SESSIONS = "/v1/sessions"
FILE = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def here(zoo_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    store = tmp_path_factory.mktemp("store")
    with (
        opened(Model(zoo_path("llama")), threads=1, store=store, n_ctx=1024) as rt,
        live_server(rt) as server,
    ):
        yield server


@pytest.fixture
def name(request: pytest.FixtureRequest, client: httpx.Client) -> str:
    """A fresh session."""
    name = request.node.name[:100]
    assert client.post(SESSIONS, json={"name": name, "system": "You are terse."}).status_code == 201
    return str(name)


def say(client: httpx.Client, name: str, text: str, **more: Any) -> dict[str, Any]:
    body = {"message": text, "max_tokens": 8, "temperature": 0, **more}
    response = client.post(f"{SESSIONS}/{name}/turns", json=body)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def said(client: httpx.Client, name: str) -> list[tuple[str, str]]:
    """Questions and answers of a session."""
    turns = client.get(f"{SESSIONS}/{name}/turns").json()["data"]
    return [(turn["messages"][-1]["content"], (turn["reply"] or {}).get("content", "")) for turn in turns]


def test_a_session_is_made_once_read_and_deleted(client: httpx.Client, name: str) -> None:
    assert client.post(SESSIONS, json={"name": name}).status_code == 409
    session = client.get(f"{SESSIONS}/{name}").json()
    assert session["system"] == "You are terse."
    assert session["turns"] == 0
    assert name in [each["name"] for each in client.get(SESSIONS).json()["data"]]
    assert client.delete(f"{SESSIONS}/{name}").json() == {"deleted": 1}
    assert client.get(f"{SESSIONS}/{name}").status_code == 404
    assert client.get(f"{SESSIONS}/{name}").json()["error"]["code"] == "session_not_found"


def test_turns_are_kept_and_reuse_what_was_read(client: httpx.Client, name: str) -> None:
    first = say(client, name, "Hello")
    second = say(client, name, "And then?")
    assert first["perdure"]["kept"]
    assert second["perdure"]["session"] == name
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    answers = [each["choices"][0]["message"]["content"] for each in (first, second)]
    assert said(client, name) == list(zip(["Hello", "And then?"], answers, strict=True))


def test_a_turn_says_later_why_not_more_was_reused(client: httpx.Client, name: str) -> None:
    told = [say(client, name, text)["perdure"]["reuse"]["why"] for text in ("Hello", "And then?")]
    turns = client.get(f"{SESSIONS}/{name}/turns").json()["data"]
    assert [turn["why"] for turn in turns] == told
    assert all(told)


@pytest.mark.parametrize(
    ("header", "agent"),
    [
        ("claude-cli/2.1.0 (external, cli)", "claude-cli"),
        ("codex_cli_rs/0.5", "codex_cli_rs"),
        ("Mozilla/5.0 (X11; Linux x86_64)", "browser"),
        ("", ""),
        ("(only a comment)", ""),
        ("x" * 500, "x" * 64),
    ],
)
def test_a_session_says_which_program_made_it(client: httpx.Client, header: str, agent: str) -> None:
    headers = {"user-agent": header}
    for name in ("made", "chatted"):
        client.delete(f"{SESSIONS}/{name}")
    assert client.post(SESSIONS, json={"name": "made"}, headers=headers).status_code == 201
    body = hello(perdure={"session": "chatted"})
    assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    # Who goes on with it changes nothing.
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    listed = {each["name"]: each for each in client.get(SESSIONS).json()["data"]}
    for name in ("made", "chatted"):
        assert (listed[name]["agent"], listed[name]["origin"]) == (agent, None)


def test_a_streamed_turn_is_kept_when_its_end_is_seen(client: httpx.Client, name: str) -> None:
    chunks = streamed(client, f"{SESSIONS}/{name}/turns", {"message": "Hello", "max_tokens": 8})
    assert chunks[-1]["perdure"]["kept"]
    assert said(client, name) == [("Hello", text_of(chunks))]


def test_chat_completions_can_go_on_with_a_session(client: httpx.Client, name: str) -> None:
    fresh = f"{name}-by-chat"
    messages = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Hello"}]
    body = hello(messages=messages, perdure={"session": fresh})
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["perdure"] | {"session": fresh, "kept": True} == answer["perdure"]
    assert client.get(f"{SESSIONS}/{fresh}").json()["system"] == "You are terse."
    client.post("/v1/chat/completions", json=hello(perdure={"session": fresh}))
    assert len(said(client, fresh)) == 2


def test_forks_part_and_rewinding_goes_back(client: httpx.Client, name: str) -> None:
    say(client, name, "One")
    say(client, name, "Two")
    other = f"{name}-b"
    made = client.post(f"{SESSIONS}/{name}/fork", json={"name": other, "turn": 1})
    assert made.status_code == 201
    assert made.json()["origin"] == {"how": "fork", "session": name, "turn": 1}
    say(client, other, "Three")
    assert [question for question, _ in said(client, other)] == ["One", "Three"]
    assert client.post(f"{SESSIONS}/{name}/rewind", json={"turns": 1}).json()["turns"] == 1
    assert [question for question, _ in said(client, name)] == ["One"]
    assert client.post(f"{SESSIONS}/{name}/rewind", json={"turns": 9}).status_code == 400


def test_a_turn_can_be_edited_and_answered_again(client: httpx.Client, name: str) -> None:
    say(client, name, "One")
    say(client, name, "Two")
    edited = client.post(
        f"{SESSIONS}/{name}/edit", json={"turn": 1, "message": "Uno", "max_tokens": 4, "temperature": 0}
    )
    assert edited.status_code == 200
    assert [question for question, _ in said(client, name)] == ["Uno"]
    again = client.post(f"{SESSIONS}/{name}/regenerate", json={"max_tokens": 2, "temperature": 0})
    assert again.status_code == 200
    [(question, answer)] = said(client, name)
    assert (question, answer) == ("Uno", again.json()["choices"][0]["message"]["content"])


def test_a_session_sleeps_and_wakes_as_planned(client: httpx.Client, name: str) -> None:
    say(client, name, "Hello", max_tokens=40)
    assert client.post(f"{SESSIONS}/{name}/sleep", json={}).status_code == 200
    plan = client.get(f"{SESSIONS}/{name}/plan").json()
    woken = client.post(f"{SESSIONS}/{name}/wake", json={}).json()
    assert woken["computed"] == plan["computed"]
    assert sum(woken["tiers"].values()) == sum(plan["tiers"].values())


def test_a_label_is_a_memory_that_can_be_woken(client: httpx.Client, name: str) -> None:
    say(client, name, "My cat is called Otto")
    memory = client.post(f"{SESSIONS}/{name}/label", json={"label": "cat", "kind": "fact", "note": "pets"})
    assert memory.status_code == 201
    address = memory.json()["address"]
    found = client.get("/v1/memories", params={"text": "Otto", "session": name}).json()["data"]
    assert [each["address"] for each in found] == [address]
    woken = client.post("/v1/memories/wake", json={"name": f"{name}-woken", "address": address})
    assert woken.status_code == 201
    assert said(client, f"{name}-woken") == said(client, name)
    assert client.delete("/v1/memories", params={"address": address}).json() == {"deleted": 1}
    gone = client.post("/v1/memories/wake", json={"name": f"{name}-x", "address": address})
    assert gone.status_code == 404
    bad = client.post("/v1/memories/wake", json={"name": f"{name}-x", "address": "nowhere"})
    assert bad.status_code == 400


@pytest.mark.extension("upkeep")
@pytest.mark.parametrize("state", ["true", "false"])
def test_a_session_can_be_taken_elsewhere(client: httpx.Client, name: str, state: str) -> None:
    say(client, name, "Hello")
    exported = client.get(f"{SESSIONS}/{name}/export", params={"state": state})
    assert exported.status_code == 200
    assert "attachment" in exported.headers["content-disposition"]
    taken = client.post(
        f"{SESSIONS}/import", params={"name": f"{name}-taken"}, content=exported.content, headers=FILE
    )
    assert taken.status_code == 201, taken.text
    assert said(client, f"{name}-taken") == said(client, name)
    assert client.post(f"{SESSIONS}/import", content=exported.content, headers=FILE).status_code == 409
    broken = exported.content[:2000]
    refused = client.post(f"{SESSIONS}/import", params={"name": f"{name}-no"}, content=broken, headers=FILE)
    assert refused.status_code == 422
    assert client.get(f"{SESSIONS}/{name}-no").status_code == 404


def test_a_transcript_is_text_to_read(client: httpx.Client, name: str) -> None:
    say(client, name, "Hello")
    assert "**user**" in client.get(f"{SESSIONS}/{name}/transcript").text
    lines = client.get(f"{SESSIONS}/{name}/transcript", params={"form": "jsonl"}).text.splitlines()
    assert len(lines) == 3


def test_prefixes_are_warmed_listed_and_cleared(client: httpx.Client) -> None:
    text = "A long and winding system prompt that many requests begin with."
    record = client.post("/v1/cache/warm", json={"prompt": text, "labels": ["house", "style"]})
    assert record.status_code == 201
    assert record.json()["labels"] == ["house", "style"]
    listed = client.get("/v1/cache").json()
    assert record.json() in listed["records"]
    assert listed["totals"]["nbytes"] > 0
    answer = client.post("/v1/completions", json={"prompt": text + " And", "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= record.json()["tokens"] - 1
    assert client.delete("/v1/cache", params={"label": "house"}).json() == {"deleted": 1}
    assert record.json() not in client.get("/v1/cache").json()["records"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("turns", {}),
        ("turns", {"message": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("turns", {"message": ""}),
        ("edit", {"turn": 1, "message": "a"}),
        ("edit", {"turn": 0, "message": "a"}),
        ("fork", {"name": "a/b"}),
        ("fork", {"name": ""}),
        ("fork", {"name": "later", "turn": 5}),
        ("rewind", {"turns": -1}),
        ("label", {"label": ""}),
    ],
)
def test_what_makes_no_sense_is_400_and_changes_nothing(
    client: httpx.Client, name: str, path: str, body: dict[str, Any]
) -> None:
    assert client.post(f"{SESSIONS}/{name}/{path}", json=body).status_code == 400
    assert client.get(f"{SESSIONS}/{name}").json()["turns"] == 0


def test_a_session_answers_one_turn_at_a_time(tmp_path: Path) -> None:
    gate = Turnstile()
    with opened(toy(gate=gate), store=tmp_path) as rt, live_server(rt) as server, server.client() as client:
        client.post(SESSIONS, json={"name": "one"})
        answers: list[int] = []

        def ask() -> None:
            with server.client() as other:
                body = {"message": "first", "max_tokens": 4}
                answers.append(other.post(f"{SESSIONS}/one/turns", json=body).status_code)

        asking = threading.Thread(target=ask)
        asking.start()
        assert gate.reached.wait(60)
        busy = client.post(f"{SESSIONS}/one/turns", json={"message": "second", "max_tokens": 4})
        assert busy.status_code == 409
        assert busy.json()["error"]["code"] == "session_busy"
        gate.open()
        asking.join()
        assert answers == [200]
        assert [question for question, _ in said(client, "one")] == ["first"]


def test_a_turn_whose_client_leaves_is_no_part_of_the_session_c1(tmp_path: Path) -> None:
    """C1: its turns are as they were, and it goes on. The next turn keeps what was asked (C12)."""
    gate = Turnstile(is_open=True)
    endless = {"logit_bias": {"256": -100, "258": -100}, "max_tokens": 300}
    with opened(toy(gate=gate), store=tmp_path) as rt, live_server(rt) as server, server.client() as client:
        client.post(SESSIONS, json={"name": "one"})
        say(client, "one", "kept")
        gate.shut()
        gate.admit(120)
        body = {"message": "left", "stream": True, **endless}
        with server.client() as other, other.stream("POST", f"{SESSIONS}/one/turns", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert gate.reached.wait(60)
        check_freed(rt)
        gate.open()
        assert [question for question, _ in said(client, "one")] == ["kept"]
        say(client, "one", "goes on")
        assert [question for question, _ in said(client, "one")] == ["kept", "left", "goes on"]


def test_lists_come_in_pages(client: httpx.Client, name: str) -> None:
    for text in ("One", "Two", "Three"):
        say(client, name, text)
    first = client.get(f"{SESSIONS}/{name}/turns", params={"limit": 2}).json()
    assert ([turn["turn"] for turn in first["data"]], first["has_more"]) == ([1, 2], True)
    rest = client.get(f"{SESSIONS}/{name}/turns", params={"limit": 2, "after": 2}).json()
    assert ([turn["turn"] for turn in rest["data"]], rest["has_more"]) == ([3], False)
    client.post(f"{SESSIONS}/{name}/fork", json={"name": f"{name}-b"})
    page = client.get(SESSIONS, params={"limit": 1}).json()
    assert ([each["name"] for each in page["data"]], page["has_more"]) == ([f"{name}-b"], True)
    page = client.get(SESSIONS, params={"limit": 1, "after": f"{name}-b"}).json()
    assert [each["name"] for each in page["data"]] == [name]
    assert client.get(SESSIONS, params={"after": "nobody"}).status_code == 404
    assert client.get(SESSIONS, params={"limit": 0}).status_code == 400


@pytest.mark.extension("upkeep")
def test_w3_an_import_says_what_was_taken_and_never_trusts_state(
    client: httpx.Client, name: str, tmp_path: Path, zoo_path: Callable[[str], Path]
) -> None:
    """I4: state that this server's store wrote is known again; that of another is left out."""
    say(client, name, "Hello")
    own = client.get(f"{SESSIONS}/{name}/export").content
    mine = client.post(f"{SESSIONS}/import", params={"name": f"{name}-own"}, content=own, headers=FILE)
    assert mine.json()["left_out"] == {}
    assert mine.json()["taken"]["state_tokens"] > 0
    with opened(Model(zoo_path("llama")), threads=1, store=tmp_path / "theirs", n_ctx=1024) as rt:
        rt.session("x").say("Hello", max_tokens=8)
        theirs = rt.session("x").export(tmp_path / "theirs.perdure").read_bytes()
    answer = client.post(
        f"{SESSIONS}/import", params={"name": f"{name}-theirs"}, content=theirs, headers=FILE
    ).json()
    assert answer["taken"]["state_tokens"] == 0
    assert "another store wrote it" in answer["left_out"]["state"]


@pytest.mark.extension("upkeep")
@pytest.mark.parametrize("bad", ["a/b", "x" * 201, "line\nend", "end\n"])
def test_a_name_in_a_file_must_be_one_that_can_be_asked_for(
    bad: str, client: httpx.Client, tmp_path: Path
) -> None:
    from perdure.ext.upkeep.export import write_export

    start = Turn(kind="start", messages=())
    path = write_export(tmp_path / "x", [start], None, name=bad, kind="session", settings={})
    refused = client.post(f"{SESSIONS}/import", content=path.read_bytes(), headers=FILE)
    assert refused.status_code == 422
    assert refused.json()["error"]["param"] == "name"
    named = client.post(
        f"{SESSIONS}/import",
        params={"name": "another name"},
        content=path.read_bytes(),
        headers=FILE,
    )
    assert named.status_code == 201
    assert client.delete(f"{SESSIONS}/{named.json()['name']}").status_code == 200


@pytest.mark.extension("upkeep")
@pytest.mark.parametrize("settings", [{"seed": 2**70}, {"namespace": "bob"}, {"stop": 5}])
def test_settings_in_a_file_that_no_turn_could_have_are_refused(
    settings: dict[str, Any], client: httpx.Client, tmp_path: Path
) -> None:
    from perdure.ext.upkeep.export import write_export

    start = Turn(kind="start", messages=())
    path = write_export(tmp_path / "x", [start], None, name="odd", kind="session", settings=settings)
    assert client.post(f"{SESSIONS}/import", content=path.read_bytes(), headers=FILE).status_code == 400
    assert client.get(f"{SESSIONS}/odd").status_code == 404


@pytest.mark.extension("upkeep")
def test_a_file_of_a_newer_format_is_the_files_fault(client: httpx.Client, tmp_path: Path) -> None:
    """I4: one flipped bit of a file says so as well, and nobody should try it again later."""
    from perdure.ext.upkeep.export import write_export

    start = Turn(kind="start", messages=())
    path = write_export(tmp_path / "x", [start], None, name="new", kind="session", settings={})
    data = path.read_bytes()
    newer = data.replace(b'"format": 1', b'"format": 9')
    assert newer != data
    refused = client.post(f"{SESSIONS}/import", content=newer, headers=FILE)
    assert refused.status_code == 422
    assert "update perdure" in refused.json()["error"]["message"]


def test_a_memory_address_with_a_huge_number_is_400(client: httpx.Client) -> None:
    for digits in (20, 5000):
        address = f"perdure://x/{'9' * digits}#here"
        woken = client.post("/v1/memories/wake", json={"name": "w", "address": address})
        assert woken.status_code == 400
    address = f"perdure://x/{'9' * 20}#here"
    assert client.delete("/v1/memories", params={"address": address}).status_code == 400


def test_a_session_is_given_a_title_a_folder_and_a_pin(client: httpx.Client, name: str) -> None:
    def listed(which: str) -> tuple[str, str, bool]:
        [row] = [each for each in client.get(SESSIONS).json()["data"] if each["name"] == which]
        return row["title"], row["folder"], row["pinned"]

    assert listed(name) == ("", "", False)
    answer = client.patch(f"{SESSIONS}/{name}", json={"title": "A walk", "folder": "Home"})
    assert answer.status_code == 200, answer.text
    assert client.patch(f"{SESSIONS}/{name}", json={"pinned": True}).status_code == 200
    assert listed(name) == ("A walk", "Home", True)
    assert client.get(f"{SESSIONS}/{name}").json()["title"] == "A walk"
    # A fork begins with its title and folder.
    assert client.post(f"{SESSIONS}/{name}/fork", json={"name": f"{name}~2"}).status_code == 201
    assert listed(f"{name}~2") == ("A walk", "Home", False)
    assert client.patch(f"{SESSIONS}/{name}", json={"folder": "", "pinned": False}).status_code == 200
    assert listed(name) == ("A walk", "", False)
    assert client.patch(f"{SESSIONS}/{name}", json={"title": "x" * 201}).status_code == 400
    assert client.patch(f"{SESSIONS}/nobody", json={"title": "x"}).status_code == 404
