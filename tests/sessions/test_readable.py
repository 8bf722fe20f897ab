"""I7: what a surface accepted is read back: after a restart, an export and import, a backup and restore."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure import InvalidInputError, Message, PerdureError, SessionError, StoreFullError, Turn
from perdure.chat.formats.registry import family
from perdure.chat.message import Tool, ToolCall
from perdure.chat.parsing import Malformed
from perdure.sessions.responses import respond
from perdure.sessions.sessions import Sessions
from perdure.sessions.store.sqlite.store import SqliteStore
from perdure.testing.toy import ToyModel
from server.live_server import live_server, opened
from sessions.database import index_of
from sessions.talking import ASK, talking
from subjects import Subject

HALF = "half a pair: \ud83d"
START = Turn(kind="start", messages=())


def everything(sessions: Sessions) -> dict[tuple[str, str], Any]:
    """All that can be read of a store, as it would be shown."""
    found: dict[tuple[str, str], Any] = {}
    for info in sessions.store.list():
        session = sessions.get(info.name, info.namespace)
        shown = {
            "turns": [turn.to_json() for turn in session.history()],
            "system": session.system,
            "messages": [message.to_dict() for message in session.messages()],
            "settings": dict(session.settings),
            "origin": dict(session.origin),
            "memories": [
                (memory.label, memory.kind, memory.note, memory.turn)
                for memory in sessions.memories.search(session=info.name, namespace=info.namespace)
            ],
        }
        session.transcript().encode()
        found[info.namespace, info.name] = json.loads(json.dumps(shown, allow_nan=False, ensure_ascii=False))
    return found


# Text of any kind, halves of surrogate pairs and control characters included.
TEXT = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from([HALF, "", "\0", "Hello"])
NUMBERS = st.floats() | st.integers(-(2**70), 2**70)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
CALLS = st.lists(st.builds(ToolCall, id=TEXT, name=TEXT, arguments=TEXT), max_size=2).map(tuple)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer", "nobody"])
MESSAGES = st.builds(
    Message,
    role=ROLES,
    content=st.none() | TEXT,
    reasoning=st.none() | TEXT,
    tool_calls=CALLS,
    tool_call_id=st.none() | TEXT,
    name=st.none() | TEXT,
) | st.fixed_dictionaries({"role": ROLES, "content": st.none() | TEXT | PLAIN}, optional={"name": PLAIN})
SAID = TEXT | MESSAGES | st.lists(MESSAGES, max_size=3)
ACTS: dict[str, st.SearchStrategy[Any]] = {
    "create": st.tuples(TEXT, st.none() | TEXT | PLAIN, st.dictionaries(TEXT, PLAIN, max_size=2), TEXT),
    "append": SAID,
    "fold": st.tuples(TEXT | PLAIN, st.integers(-1, 3)),
    "label": st.tuples(TEXT, TEXT, TEXT | PLAIN),
    "note": st.dictionaries(TEXT, PLAIN, max_size=2),
    "fork": TEXT,
    "respond": st.tuples(TEXT, st.dictionaries(TEXT, PLAIN, max_size=2)),
}


def act(sessions: Sessions, what: str, value: Any) -> None:
    session = sessions.open("s")
    if what == "create":
        name, system, options, agent = value
        sessions.create(name, system=system, settings=options, agent=agent, namespace=name)
    elif what == "append":
        session.append(value)
    elif what == "fold":
        session.fold(summary=value[0], keep=value[1])
    elif what == "label":
        session.label(value[0], kind=value[1], note=value[2])
    elif what == "note":
        session.note(value)
    elif what == "fork":
        session.fork(value)
    else:
        respond(sessions, value[0], value[1], after=session, kind="session")


@pytest.mark.extension("upkeep")
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.sampled_from(sorted(ACTS)).flatmap(lambda what: st.tuples(st.just(what), ACTS[what])), max_size=6
    )
)
def test_i7_whatever_the_library_accepts_is_read_back(acts: list[tuple[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with Sessions(folder / "store") as sessions:
            for what, value in acts:
                # Refused as the caller's mistake, and then nothing of it is there; nothing else may happen.
                with suppress(InvalidInputError, SessionError):
                    act(sessions, what, value)
            written = everything(sessions)
        check_read_back(folder, written)


def check_read_back(folder: Path, written: dict[tuple[str, str], Any]) -> None:
    from perdure.ext.upkeep.backup import back_up, restore

    with Sessions(folder / "store") as sessions:
        assert everything(sessions) == written
        for number, (namespace, name) in enumerate(written):
            file = sessions.get(name, namespace).export(folder / f"{number}.perdure", state=False)
            with Sessions(None) as other:
                read = other.import_(file, namespace=namespace).session
                assert [turn.messages for turn in read.history()] == [
                    turn.messages for turn in sessions.get(name, namespace).history()
                ]
                assert (read.system, dict(read.settings)) == (
                    written[namespace, name]["system"],
                    written[namespace, name]["settings"],
                )
    back_up(folder / "store", folder / "backup")
    assert restore(folder / "backup", folder / "restored").left_out == ()
    with Sessions(folder / "restored", readonly=True) as sessions:
        assert everything(sessions) == written


# What protocols are sent: JSON, in which a half of a pair is an escape that every parser takes.
ITEMS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT},
) | st.fixed_dictionaries(
    {
        "type": st.sampled_from(["function_call", "function_call_output", "message", "reasoning", "odd"]),
        "call_id": TEXT,
        "name": TEXT,
        "arguments": TEXT,
        "output": TEXT,
        "role": st.just("user"),
        "content": TEXT,
    }
)
CHAT = st.fixed_dictionaries(
    {"messages": st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXT}), min_size=1, max_size=2)},
    optional={"logit_bias": st.dictionaries(st.sampled_from(["5", "6"]), st.floats(-100, 100), max_size=2)},
)
POSTS = st.one_of(
    st.tuples(st.just("/v1/conversations"), st.fixed_dictionaries({"items": st.lists(ITEMS, max_size=2)})),
    st.tuples(
        st.just("/v1/responses"),
        st.fixed_dictionaries(
            {"input": TEXT | st.lists(ITEMS, max_size=2), "max_output_tokens": st.just(16)},
            optional={"instructions": TEXT, "metadata": st.dictionaries(TEXT, TEXT, max_size=1)},
        ),
    ),
    st.tuples(
        st.just("/v1/chat/completions"),
        CHAT.map(lambda body: {**body, "max_tokens": 1, "session": "chat"}),
    ),
    st.tuples(
        st.just("/v1/messages"),
        CHAT.map(lambda body: {"messages": body["messages"], "max_tokens": 1, "session": "claude"}),
    ),
    st.tuples(
        st.just("/api/chat"),
        CHAT.map(lambda body: {**body, "model": "toy", "stream": False, "options": {"num_predict": 1}}),
    ),
)


@pytest.mark.extension("upkeep")
def test_i7_whatever_a_protocol_accepts_is_read_back(tmp_path: Path) -> None:
    with opened(ToyModel(), n_ctx=512, store=tmp_path / "store") as rt:
        with live_server(rt) as server, server.client() as client:

            @settings(max_examples=40, deadline=None, derandomize=True, database=None)
            @given(POSTS)
            def post(request: tuple[str, dict[str, Any]]) -> None:
                path, body = request
                answer = client.post(
                    path,
                    content=json.dumps(body),
                    headers={"content-type": "application/json", "x-perdure-session": "named"},
                )
                assert answer.status_code < 500, answer.text
                made = answer.json() if answer.status_code == httpx.codes.OK else {}
                if path in ("/v1/responses", "/v1/conversations") and "id" in made:
                    client.get(f"{path}/{made['id']}").raise_for_status()

            post()
        written = everything(rt.sessions)
    assert written
    check_read_back(tmp_path, written)


# X2.

REFUSED: dict[str, Callable[[Any], Any]] = {
    "append": lambda s: s.append(HALF),
    "append a message": lambda s: s.append(Message(role="user", content=HALF)),
    "say": lambda s: s.say(HALF, **ASK),
    "say a call": lambda s: s.say(
        [
            Message(role="assistant", tool_calls=(ToolCall(id="1", name=HALF, arguments="{}"),)),
            {"role": "user", "content": "x"},
        ],
        **ASK,
    ),
    "fold": lambda s: s.fold(summary=HALF),
    "fold into another": lambda s: s.fold("other", summary=HALF),
    "label": lambda s: s.label(HALF),
    "note": lambda s: s.note({"x": HALF}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_x2_what_could_not_be_read_again_is_not_stored(what: str, toy: Subject, tmp_path: Path) -> None:
    with talking(toy, tmp_path) as talk:
        session = talk.session("alice")
        talk.say(session, "One")
        with pytest.raises(InvalidInputError):
            REFUSED[what](session)
        talk.say(session, "Two")
    with talking(toy, tmp_path) as talk:
        assert [turn.messages[0].content for turn in talk.session("alice").history()] == ["One", "Two"]


@pytest.mark.extension("upkeep")
def test_x2_a_backup_with_a_turn_that_cannot_be_read_brings_the_others_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.ext.upkeep.backup import back_up, restore

    with Sessions(tmp_path / "store") as sessions:
        for name in ("alice", "bob"):
            sessions.create(name, namespace=name).append("Hello")
        # As an older version did.
        monkeypatch.setattr(Turn, "check_readable", lambda turn: None)
        alice = sessions.get("alice", "alice")
        messages = (Message(role="user", content=HALF),)
        bad = Turn(kind="turn", messages=messages, before=alice.history()[-1].digest)
        head = sessions.store.find("alice", "alice").head
        sessions.store.add(alice.info, [bad], parent=head, expected=head)
    back_up(tmp_path / "store", tmp_path / "backup")
    found = restore(tmp_path / "backup", tmp_path / "restored")
    assert (found.sessions, found.turns) == (2, 2)
    [lost] = found.left_out
    assert "'alice'" in lost
    assert "stands after turn 1" in lost
    with Sessions(tmp_path / "restored") as sessions:
        for name in ("alice", "bob"):
            assert [turn.messages[0].content for turn in sessions.get(name, name).history()] == ["Hello"]


@pytest.mark.extension("families")
@pytest.mark.parametrize(
    ("name", "opener", "text"),
    [
        ("hermes", "<tool_call>", '{"name": "look\\ud83d", "arguments": {}}'),
        ("hermes", "<tool_call>", '{"id": "\\udc00", "name": "look", "arguments": {}}'),
        ("hermes", "<tool_call>", '{"name": "look", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}'),
        (
            "command",
            "<|START_ACTION|>",
            '[{"tool_call_id": "\\ud83d", "tool_name": "look", "parameters": {}}]',
        ),
        ("apertus", "<|tools_prefix|>", '[{"look\\ud83d": {}}]'),
    ],
)
def test_x3_a_call_whose_name_or_id_does_not_encode_is_malformed(name: str, opener: str, text: str) -> None:
    calls = family(name).calls
    assert calls is not None
    parser = calls.parser(opener, [Tool(name="look")])
    with pytest.raises(Malformed):
        parser.push(text)


@pytest.mark.extension("upkeep")
def test_x4_a_turn_with_an_infinite_bias_is_exported_and_imported(toy: Subject, tmp_path: Path) -> None:
    with talking(toy, tmp_path / "store") as talk:
        session = talk.session("alice")
        assert session.say("Hello", logit_bias={5: -math.inf, 6: 1.5}, **ASK).kept
        file = session.export(tmp_path / "file", state=False)
        [turn] = talk.rt.sessions.import_(file, "copy").session.history()
        assert turn.settings["logit_bias"] == {"5": -100.0, "6": 1.5}
        json.dumps(turn.to_json(), allow_nan=False)


@pytest.mark.extension("upkeep")
def test_x4_what_older_versions_wrote_is_exported_and_imported(tmp_path: Path) -> None:
    odd = {"logit_bias": {"5": -math.inf}, "note": HALF}
    with Sessions(tmp_path / "store") as sessions:
        said = (Message(role="user", content="Hello"),)
        turn = Turn(kind="turn", messages=said, settings=odd, before=START.digest)
        sessions.store.create("", "old", [START, turn])
        file = sessions.get("old").export(tmp_path / "file", state=False)
        [read] = sessions.import_(file, "new").session.history()
    assert read == turn


@pytest.mark.extension("upkeep")
def test_x16_a_backup_needs_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from perdure.ext.upkeep.backup import back_up, restore

    with Sessions(tmp_path / "store") as sessions:
        sessions.create("alice").append("Hello")

    def link(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    assert back_up(tmp_path / "store", tmp_path / "backup").sessions == 1
    assert (tmp_path / "backup").stat().st_mode & 0o777 == 0o600
    with pytest.raises(InvalidInputError, match="exists already"):
        back_up(tmp_path / "store", tmp_path / "backup")
    assert restore(tmp_path / "backup", tmp_path / "restored").turns == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup", "restored", "store"]


def test_x18_a_copy_that_fails_leaves_the_session_that_it_was_to_replace(tmp_path: Path) -> None:
    with Sessions(tmp_path / "store") as sessions, Sessions(None) as elsewhere:
        sessions.create("alice").append("Kept")
        elsewhere.create("alice").append("New")
        elsewhere.create("long").append("x" * 200_000)
        index = index_of(sessions)
        with index.writing():
            index.rows(f"PRAGMA max_page_count = {index.rows('PRAGMA page_count')[0][0] + 4}")
        with pytest.raises(StoreFullError):
            sessions.copy(elsewhere.get("long"), "alice", replace=True)
        assert [turn.messages[0].content for turn in sessions.get("alice").history()] == ["Kept"]
        good = elsewhere.get("alice").fork("other", turn=1)
        old = sessions.get("alice")
        copied = sessions.copy(good, "alice", replace=True)
        assert [turn.messages[0].content for turn in copied.history()] == ["New"]
        assert [info.name for info in sessions.list()] == ["alice"]
        with pytest.raises(PerdureError, match="was deleted"):
            old.append("More")
    with closing(SqliteStore(tmp_path / "store", readonly=True)) as store:
        assert len(store.chain(store.find("", "alice").head, "alice")[0]) == 2
