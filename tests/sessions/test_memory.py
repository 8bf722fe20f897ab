"""Memories: labelled points that are woken by their address; and folding."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure import AmbiguousError, CorruptStateError, InvalidInputError, SessionError, SessionNotFoundError
from perdure.sessions.info import parse_address
from perdure.sessions.store.sql import memories as memory_rows
from perdure.sessions.store.sql.tables import MEMORY_COLUMNS
from perdure.store.index import Index
from sessions.database import index_of
from sessions.talking import ASK, said, talking, terse
from subjects import Subject


def test_a_memory_is_woken_by_its_address(subject: Subject, tmp_path: Path) -> None:
    with talking(subject, tmp_path) as talk:
        s = talk.session("ali?ce #1")
        talk.say(s, "My name is Alice")
        memory = s.label("the name", kind="fact", note="who she is")
        talk.say(s, "Let us talk of something else")
    with talking(subject, tmp_path) as talk:
        found = talk.rt.memories.search(label="the name")
        assert [each.address for each in found] == [memory.address]
        t = talk.rt.memories.wake(memory.address, "later")
        assert [ask for ask, _ in said(t)] == ["My name is Alice"]
        assert dict(t.origin) == {"how": "wake", "session": "ali?ce #1", "turn": 1, "label": "the name"}
        assert talk.say(t, "Who am I?").reuse.reused > 0


def test_memories_are_found_by_label_kind_and_text(toy: Subject) -> None:
    with talking(toy) as talk:
        s = talk.session("alice")
        talk.say(s, "The door is GREEN")
        s.label("door", kind="fact")
        talk.say(s, "The cat sleeps")
        s.label("cat", kind="fact", note="where the cat was")
        s.label("end", kind="place")
        search = talk.rt.memories.search
        assert [m.label for m in search(kind="fact")] == ["door", "cat"]
        assert [m.label for m in search(text="green")] == ["door"]
        assert [m.label for m in search(text="WHERE THE")] == ["cat"]
        assert [m.label for m in search(label="end")] == ["end"]
        assert search(kind="fact", label="end") == []
        assert search(namespace="elsewhere") == []


def not_for_searches(*_: object) -> list[tuple[object, ...]]:
    raise AssertionError("others wait for this reader")


def test_x7_a_text_is_looked_for_in_a_few_memories_at_a_time(
    toy: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I2: whoever has many memories, with long texts, keeps nobody else waiting for the index: a search has a
    reader of its own."""
    monkeypatch.setattr(memory_rows, "_SEARCHED", 3)
    with talking(toy, tmp_path) as talk:
        s = talk.session("alice")
        talk.say(s, "The cat is on the mat")
        for number in range(10):
            s.label(f"l{number}", note="odd" if number % 2 else "even")
        memories = talk.rt.memories
        with monkeypatch.context() as others:
            others.setattr(Index, "rows", not_for_searches)
            assert [m.label for m in memories.search(text="ODD")] == ["l1", "l3", "l5", "l7", "l9"]
            assert talk.rt.sessions.list(text="nowhere") == []
            assert [info.name for info in talk.rt.sessions.list(text="CAT IS")] == ["alice"]
        assert [m.label for m in memories.search(text="odd", limit=2)] == ["l1", "l3"]
        after = memories.search(label="l3")[0].address
        assert [m.label for m in memories.search(text="odd", after=after, limit=2)] == ["l5", "l7"]
        assert len(memories.search(text="cat")) == 10
        assert memories.search(text="cat", namespace="bob") == []


def test_an_index_with_several_needs_one_named(toy: Subject) -> None:
    """S3: with exactly one it is chosen; none is a typed error."""
    with talking(toy) as talk:
        memories = talk.rt.memories
        with pytest.raises(SessionNotFoundError, match="no memory yet"):
            memories.wake(None, "x")
        s = talk.session("alice")
        talk.say(s, "Hello")
        first = s.label("one")
        assert said(memories.wake(None, "woken")) == said(s)
        second = s.label("two")
        with pytest.raises(AmbiguousError) as raised:
            memories.wake(None, "again")
        assert raised.value.found == (first.address, second.address)
        with pytest.raises(SessionNotFoundError):
            memories.wake("perdure://alice/1#three", "again")
        memories.forget(second.address)
        assert said(memories.wake(None, "again")) == said(s)


def test_another_session_at_the_address_is_refused(toy: Subject) -> None:
    """S2: a valid chain, but not the one that the entry's digest names; nothing is changed."""
    with talking(toy) as talk:
        s, other = talk.session("alice"), talk.session("bob")
        talk.say(s, "Hello")
        talk.say(other, "Something quite different")
        memory = s.label("here")
        index = index_of(talk.rt.sessions)
        with index.writing():
            index.run("UPDATE memory SET turn = (SELECT head FROM session WHERE name = 'bob')")
            index.run(f"UPDATE memory SET seal = seal({', '.join(MEMORY_COLUMNS)})")
        names = [row.name for row in talk.rt.sessions.list()]
        with pytest.raises(CorruptStateError, match="digest differs"):
            talk.rt.memories.wake(memory.address, "woken")
        assert [row.name for row in talk.rt.sessions.list()] == names


def test_a_memory_outlives_its_session(toy: Subject, tmp_path: Path) -> None:
    with talking(toy, tmp_path) as talk:
        s = talk.session("alice")
        talk.say(s, "Remember this")
        address = s.label("this").address
        s.rewind()
        s.delete()
    with talking(toy, tmp_path) as talk:
        assert [ask for ask, _ in said(talk.rt.memories.wake(address, "alice"))] == ["Remember this"]


@pytest.mark.parametrize(
    "address",
    [
        "",
        "alice",
        "perdure://alice",
        "perdure://alice/x#l",
        "perdure:///1#l",
        "perdure://a/1#",
        "http://a/1#l",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidInputError, match="no address"):
        parse_address(address)


@pytest.mark.parametrize("label", ["", 7, None])
def test_what_is_no_label_is_refused(toy: Subject, label: object) -> None:
    with talking(toy) as talk:
        s = talk.session("alice")
        talk.say(s, "Hello")
        with pytest.raises(InvalidInputError):
            s.label(label)  # type: ignore[arg-type]


# Folding.


def test_a_fold_goes_on_from_a_summary_and_the_last_turns(subject: Subject, tmp_path: Path) -> None:
    with talking(subject, tmp_path) as talk:
        s = talk.session("alice", system="Be terse.")
        for text in ("One", "Two", "Three"):
            talk.say(s, text)
        t = s.fold("alice, folded", summary="She counted.", keep=1)
        assert (t.kind, dict(t.origin)) == ("fold", {"how": "fold", "session": "alice", "turn": 3})
        words = t.messages()
        assert words[0].content == "Be terse.\n\nSummary of the conversation so far:\nShe counted."
        assert [message.content for message in words[1:]] == ["Three", s.history()[2].text]
        assert talk.say(t, "Four").kept
        # What was before stays reachable.
        assert [ask for ask, _ in said(t)][:3] == ["One", "Two", "Three"]
        assert s.turns == 3


def test_the_model_writes_the_summary_itself() -> None:
    with talking(terse()) as talk:
        s = talk.session("alice")
        with pytest.raises(SessionError, match="nothing to fold"):
            s.fold()
        talk.say(s, "One")
        talk.say(s, "Two")
        s.fold()
        assert s.turns == 3
        summary = s.messages()[0].content
        assert summary is not None
        assert summary.startswith("Summary of the conversation so far:\n")
        assert talk.say(s, "Three").kept
        s.rewind(to=2)
        assert [ask for ask, _ in said(s)] == ["One", "Two"]


def test_a_full_session_folds_itself_where_that_was_chosen(tmp_path: Path) -> None:
    """C4: 30 turns at a small context under the fold policy; every one is answered."""
    with talking(terse(), tmp_path, n_ctx=512) as talk:
        s = talk.session("alice", overflow="fold")
        for number in range(30):
            text = f"This is message number {number}, and it is of some length"
            assert talk.say(s, text, max_tokens=20, ignore_eos=True).kept
        assert sum(turn.kind == "fold" for turn in s.history()) >= 2
        assert sum(turn.kind == "turn" for turn in s.history()) == 30


def test_a_session_that_cannot_be_folded_small_enough_says_so(toy: Subject) -> None:
    from perdure import ContextOverflow

    with talking(toy, n_ctx=512) as talk:
        s = talk.session("alice", overflow="fold")
        talk.say(s, "Hello")
        before = s.turns
        with pytest.raises(ContextOverflow):
            s.say("x" * 2000, **ASK)
        assert s.turns == before
