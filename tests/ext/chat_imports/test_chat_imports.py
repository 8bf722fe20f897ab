"""Chats of other programs as sessions: what is taken, what is marked, and what no file can do."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import perdure
from perdure import InvalidInputError, Message, Runtime, TooLargeError
from perdure.cli.app import app
from perdure.ext.chat_imports import export_file
from perdure.ext.chat_imports.importing import ImportedChats, import_chats
from perdure.server.core.keys import Keys, new_key
from perdure.testing.toy import ToyModel
from server.live_server import live_server

from .exports import CHATGPT, CLAUDE, OPEN_WEBUI, chatgpt_node

BODY = {"content-type": "application/octet-stream"}


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with perdure.open(ToyModel(reply_tokens=8), n_ctx=2048, store=tmp_path / "store") as rt:
        yield rt


def written(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def zipped(**files: Any) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for name, value in files.items():
            made.writestr(f"{name}.json", value if isinstance(value, str) else json.dumps(value))
    return out.getvalue()


def taken(runtime: Runtime, tmp_path: Path, value: Any) -> ImportedChats:
    return import_chats(runtime.sessions, written(tmp_path / "chats.json", value))


def said(runtime: Runtime, name: str) -> list[tuple[str, str]]:
    turns = runtime.session(name).history()
    return [("\n".join(each.content or "" for each in turn.messages), turn.text) for turn in turns]


def test_a_chat_of_chatgpt_comes_with_its_branches_and_its_thoughts(runtime: Runtime, tmp_path: Path) -> None:
    made = taken(runtime, tmp_path, [CHATGPT])
    assert (made.names, made.branches, made.left_out) == (["why-the-sky-is-blue"], 1, [])
    assert said(runtime, "why-the-sky-is-blue") == [
        ("Why is the sky blue?", "Short waves scatter more."),
        ("And on Mars?", "Dust makes it butterscotch."),
    ]
    assert said(runtime, "why-the-sky-is-blue~2") == [
        ("Why is the sky blue?", "Short waves scatter more."),
        ("And at sunset?", "The path is longer, so red is left."),
        ("[image]\n\nAnd this?", ""),
    ]
    session = runtime.session("why-the-sky-is-blue")
    [first, _] = session.history()
    assert first.reply is not None
    assert first.reply.reasoning == "Think of scattering."
    assert (session.origin["title"], session.origin["folder"]) == ("Why the sky is blue", "ChatGPT")
    tree = runtime.sessions.tree(session.name)
    assert {each.name for each in tree.sessions} == {"why-the-sky-is-blue", "why-the-sky-is-blue~2"}
    # The turn that both begin with is in the store once.
    assert len([each for each in tree.turns if each.said == "Why is the sky blue?"]) == 1


def test_a_chat_of_claude_comes_with_its_files(runtime: Runtime, tmp_path: Path) -> None:
    made = taken(runtime, tmp_path, [CLAUDE])
    assert (made.names, made.branches) == (["notes-on-gardens"], 1)
    [(question, reply)] = said(runtime, "notes-on-gardens")
    assert (
        question == "notes.txt:\n````\nFerns like ```shade```.\n````\n\n[photo.png]\n\nWhat do the notes say?"
    )
    assert reply == "They are about shade."
    [turn] = runtime.session("notes-on-gardens~2").history()
    assert turn.reply == Message(
        role="assistant", content="They praise ferns.", reasoning="The notes are short."
    )


def test_a_claude_chat_without_parents_is_one_line(runtime: Runtime, tmp_path: Path) -> None:
    messages = [
        {"uuid": str(at), "sender": who, "text": f"{who} {at}", "content": []}
        for at, who in enumerate(["human", "assistant", "human", "assistant"])
    ]
    made = taken(runtime, tmp_path, [{"uuid": "1", "name": "", "chat_messages": messages}])
    assert made.branches == 0
    assert said(runtime, made.names[0]) == [("human 0", "assistant 1"), ("human 2", "assistant 3")]


def test_a_chat_of_open_webui_comes_with_its_system_message(runtime: Runtime, tmp_path: Path) -> None:
    # One chat by itself, as its menu exports it.
    made = taken(runtime, tmp_path, OPEN_WEBUI)
    assert (made.names, made.branches) == (["ships"], 1)
    session = runtime.session("ships")
    assert session.messages()[0] == Message(role="system", content="Be brief.")
    assert said(runtime, "ships") == [("[image]\n\nWhy do ships float?", "They displace water.")]
    [turn] = session.history()
    assert turn.reply is not None
    assert turn.reply.reasoning == "Archimedes & water."
    assert said(runtime, "ships~2") == [("[image]\n\nWhy do ships float?", "Buoyancy.")]


def test_an_imported_chat_goes_on(runtime: Runtime, tmp_path: Path) -> None:
    taken(runtime, tmp_path, [CHATGPT])
    reply = runtime.session("why-the-sky-is-blue").say("And on Venus?")
    assert reply.kept
    assert runtime.session("why-the-sky-is-blue").turns == 3


def test_what_came_before_does_not_come_again(runtime: Runtime, tmp_path: Path) -> None:
    taken(runtime, tmp_path, [CHATGPT])
    again = taken(runtime, tmp_path, [CHATGPT, CLAUDE])
    assert (again.known, again.names) == (1, ["notes-on-gardens"])


def test_what_is_no_chat_is_named_and_the_others_come(runtime: Runtime, tmp_path: Path) -> None:
    empty = {**CHATGPT, "id": "2", "conversation_id": "2", "title": "Nothing", "mapping": {}}
    made = taken(runtime, tmp_path, [{"what": 1}, empty, 7, CLAUDE])
    assert made.names == ["notes-on-gardens"]
    assert [title for title, _ in made.left_out] == ["chat 1", "Nothing", "chat 3"]


def test_parents_in_a_circle_end(runtime: Runtime, tmp_path: Path) -> None:
    nodes = (
        chatgpt_node("a", "b", "user", "One"),
        chatgpt_node("b", "a", "user", "Two"),
        chatgpt_node("c", "b", "assistant", "Three"),
    )
    chat = {"title": "Circle", "id": "3", "mapping": {each["id"]: each for each in nodes}}
    made = taken(runtime, tmp_path, [chat])
    assert said(runtime, made.names[0]) == [("One\nTwo", "Three")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no export"),
        (b"hello", "no export"),
        (b'[{"mapping": {}', "no export"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"[" * 100_000, "no"),
        (zipped(user={}), "no conversations.json"),
        (zipped(conversations="[{")[:-30], "no"),
    ],
)
def test_a_file_that_is_none_is_refused_in_words(
    runtime: Runtime, tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "chats").write_bytes(content)
    with pytest.raises(InvalidInputError, match=words):
        import_chats(runtime.sessions, tmp_path / "chats")
    assert runtime.sessions.list() == []


def test_a_zip_that_grows_without_end_is_left(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bomb.zip").write_bytes(zipped(conversations=" " * (8 << 20)))
    monkeypatch.setattr(export_file, "MOST_BYTES", 4 << 20)
    with pytest.raises(TooLargeError):
        import_chats(runtime.sessions, tmp_path / "bomb.zip")


def test_one_chat_that_is_too_long_is_refused(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_file, "MOST_CHARACTERS", 1000)
    monkeypatch.setattr(export_file, "_READ", 400)
    with pytest.raises(TooLargeError):
        taken(runtime, tmp_path, [CHATGPT])


def test_chats_are_read_one_by_one_whatever_the_pieces(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_file, "_READ", 7)
    made = taken(runtime, tmp_path, [CHATGPT, CLAUDE, OPEN_WEBUI])
    assert made.names == ["why-the-sky-is-blue", "notes-on-gardens", "ships"]


def test_over_http_they_belong_to_the_key_that_sent_them(runtime: Runtime) -> None:
    (ada_secret, ada), (bob_secret, bob) = (new_key(name) for name in ("ada", "bob"))
    content = zipped(conversations=[CHATGPT], user={})
    with live_server(runtime, keys=Keys([ada, bob])) as server:
        with server.client(ada_secret) as client:
            answer = client.post("/v1/chats/import", content=content, headers=BODY)
            assert answer.status_code == 201
            assert answer.json()["names"] == ["why-the-sky-is-blue"]
            assert client.post("/v1/chats/import", content=b"no", headers=BODY).status_code == 400
            assert client.post("/v1/chats/import", json={}).status_code == 415
        with server.client(bob_secret) as client:
            assert client.get("/v1/sessions").json()["data"] == []
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            assert client.post("/v1/chats/import", content=content, headers=BODY).status_code == 401


def test_the_command_says_what_came(tmp_path: Path) -> None:
    file = written(tmp_path / "chat-export-1.json", [OPEN_WEBUI, {"no": "chat"}])
    arguments = ["sessions", "import-chats", str(file), "--store", str(tmp_path / "store")]
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 0, ended.output
    assert "1 chat came with 2 turns and 1 further branch" in ended.output
    assert "left out: chat 2" in ended.output
    assert "1 chat had come before" in CliRunner().invoke(app, arguments).output
