"""I5, D1: a handle, number or address of something deleted never reaches anything else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import InvalidInputError, Session, SessionBusyError, SessionNotFoundError
from perdure.sessions import sessions as sessions_module
from perdure.sessions.history import TurnReference
from perdure.sessions.store.sqlite.store import SqliteStore
from perdure.sessions.turn import Turn
from sessions.database import index_of
from sessions.talking import ASK, said, talking
from subjects import Subject

START = Turn(kind="start", messages=())


USES: dict[str, Callable[[Session], Any]] = {
    "say": lambda s: s.say("Hello", **ASK),
    "edit": lambda s: s.edit(1, "Hello", **ASK),
    "regenerate": lambda s: s.regenerate(**ASK),
    "fork": lambda s: s.fork("forked"),
    "fork back": lambda s: s.fork("forked", turn=1),
    "rewind": lambda s: s.rewind(1),
    "label": lambda s: s.label("here"),
    "fold": lambda s: s.fold(summary="x"),
    "delete": lambda s: s.delete(),
    "sleep": lambda s: s.sleep(),
    "wake": lambda s: s.wake(),
    "plan": lambda s: s.plan_wake(),
    "export": lambda s: s.export("never"),
}


@pytest.mark.parametrize("use", USES)
def test_d1_the_handle_of_a_deleted_session_refuses(use: str, toy: Subject, tmp_path: Path) -> None:
    """I5: whatever has its name, its number or its turns now is as it was."""
    with talking(toy, tmp_path) as talk:
        old = talk.session("alice")
        talk.say(old, "One")
        talk.say(old, "Two")
        old.delete()
        # One of its name, one of another namespace, both with as many turns.
        new, other = talk.session("alice"), talk.rt.session("bob", namespace="b")
        for session in (new, other):
            talk.say(session, "Not yours")
            talk.say(session, "Nor this")
        with pytest.raises(SessionNotFoundError, match="'alice' was deleted"):
            USES[use](old)
        assert [ask for ask, _ in said(new)] == [ask for ask, _ in said(other)] == ["Not yours", "Nor this"]
        assert [each.name for each in talk.rt.sessions.list()] == ["alice"]
    with talking(toy, tmp_path) as talk:
        assert talk.session("alice").turns == talk.rt.session("bob", namespace="b").turns == 2


def test_d1_numbers_are_never_given_out_again(toy: Subject, tmp_path: Path) -> None:
    """Not after a deletion, not after a restart, not in another namespace."""
    seen: dict[str, set[int]] = {"session": set(), "turn": set(), "memory": set()}
    for opening in range(3):
        with talking(toy, tmp_path) as talk:
            for namespace in ("", "other"):
                session = talk.rt.session("alice", namespace=namespace)
                talk.say(session, f"Hello number {opening}")
                session.label("here")
                for table, known in seen.items():
                    new = {row[0] for row in index_of(talk.rt.sessions).rows(f"SELECT number FROM {table}")}
                    assert not new & known
                    known |= new
                talk.rt.memories.forget("perdure://alice/1#here", namespace)
                session.delete()
                assert not index_of(talk.rt.sessions).rows("SELECT number FROM turn")


def test_d1_a_change_checks_number_namespace_and_name(tmp_path: Path) -> None:
    """Were a number given out again all the same, what has it now would still be safe."""
    store = SqliteStore(tmp_path)
    old = store.create("", "alice", [START])
    store.delete(old)
    with store.index.writing():
        store.index.run("UPDATE counter SET last = 0, seal = seal(name, 0)")
    new = store.create("other", "bob", [START])
    assert new.number == old.number
    turn = Turn(kind="turn", messages=(), before=START.digest)
    changes: list[Callable[[], object]] = [
        lambda: store.delete(old),
        lambda: store.move(old, new.head, digest=START.digest, expected=old.head),
        lambda: store.add(old, [turn], parent=new.head, expected=old.head),
        lambda: store.label(old, TurnReference(new.head, START.digest, 0), "x", "memory", ""),
    ]
    for change in changes:
        with pytest.raises(SessionNotFoundError):
            change()
    assert store.find("other", "bob") == new
    store.close()


def test_d1_a_memory_that_was_replaced_is_not_the_one_that_is_forgotten(toy: Subject, tmp_path: Path) -> None:
    with talking(toy, tmp_path) as talk:
        store = talk.rt.sessions.store
        session = talk.session("alice")
        first = session.label("here")
        second = session.label("here", note="another")
        assert first.number != second.number
        for use in (store.forget, store.locate):
            with pytest.raises(SessionNotFoundError):
                use(first)
        assert talk.rt.memories.get(second.address) == second


def test_d1_two_deletions_cost_nobody_else_a_session(toy: Subject, tmp_path: Path) -> None:
    """Two callers delete one session while a third makes another, again and again."""
    with talking(toy, tmp_path) as talk:
        sessions = talk.rt.sessions
        for number in range(30):
            mine = sessions.create(f"mine {number}", namespace="a")
            gate = threading.Barrier(3)
            gone: list[bool] = []

            def delete(mine: Session = mine, gate: threading.Barrier = gate, gone: list[bool] = gone) -> None:
                gate.wait()
                try:
                    mine.delete()
                    gone.append(True)
                except SessionNotFoundError:
                    gone.append(False)

            threads = [threading.Thread(target=delete) for _ in range(2)]
            for thread in threads:
                thread.start()
            gate.wait()
            sessions.create(f"theirs {number}", namespace="b")
            for thread in threads:
                thread.join()
            assert sorted(gone) == [False, True]
            assert sessions.get(f"theirs {number}", "b").turns == 0
        assert len(sessions.list("b")) == 30


def test_d4_reading_a_cancelled_reply_undoes_nothing_that_came_after_it(toy: Subject, tmp_path: Path) -> None:
    """Also where a part of it was to be kept: the session has moved on."""
    with talking(toy, tmp_path) as talk:
        session = talk.session("alice")
        talk.say(session, "One")
        talk.say(session, "Two")
        job = session.submit("Three", keep_partial=True, max_tokens=100, temperature=0, ignore_eos=True)
        next(iter(job))
        job.cancel()
        session.rewind(1)
        reply = job.reply()
        assert not reply.kept
        assert "another turn began before this one was read to its end" in reply.not_kept
        assert [ask for ask, _ in said(session)] == ["One"]
    with talking(toy, tmp_path) as talk:
        assert [ask for ask, _ in said(talk.session("alice"))] == ["One"]


def test_a_cancelled_reply_that_nothing_came_after_is_kept_in_part(toy: Subject) -> None:
    with talking(toy) as talk:
        session = talk.session("alice")
        job = session.submit("One", keep_partial=True, max_tokens=100, temperature=0, ignore_eos=True)
        next(iter(job))
        job.cancel()
        session.plan_wake()
        assert job.reply().kept
        assert session.turns == 1


@pytest.mark.parametrize(
    "address",
    ["perdure://alice/" + "9" * digits + "#here" for digits in (10, 20, 5000)] + ["perdure://alice/1²#here"],
)
def test_an_address_with_a_huge_number_is_none(address: str, toy: Subject) -> None:
    """SQLite knows no such number, and Python reads none of so many digits."""
    with talking(toy) as talk:
        for use in (talk.rt.memories.get, talk.rt.memories.forget):
            with pytest.raises(InvalidInputError, match="is no address"):
                use(address)
        with pytest.raises(InvalidInputError, match="is no address"):
            talk.rt.memories.wake(address, "x")


def test_text_that_is_not_unicode_is_refused_wherever_it_is_looked_for(toy: Subject) -> None:
    bad = "\ud800"
    with talking(toy) as talk:
        memories, sessions = talk.rt.memories, talk.rt.sessions
        uses: list[Callable[[], object]] = [
            lambda: sessions.get(bad),
            lambda: sessions.delete(bad),
            lambda: sessions.list(bad),
            lambda: sessions.list(after=bad),
            lambda: memories.search(text=bad),
            lambda: memories.search(label=bad),
            lambda: memories.get(f"perdure://{bad}/1#x"),
            lambda: talk.session("alice").label(bad),
            lambda: talk.session("alice").label("x", note=bad),
            lambda: talk.session("alice").fork(bad),
        ]
        for use in uses:
            with pytest.raises(InvalidInputError):
                use()


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 2**70},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"stop": 5},
        {"tools": 5},
        {"namespace": "bob"},
        {"then": 1},
        {"deadline": 1.0},
        {"nonsense": 1},
        {"n": 2},
        {"processors": [1]},
    ],
)
def test_settings_that_no_turn_could_have_are_refused_at_once(settings: dict[str, Any], toy: Subject) -> None:
    """Not a failure at each turn."""
    with talking(toy) as talk:
        with pytest.raises(InvalidInputError):
            talk.rt.sessions.open("alice", settings=settings)
        assert talk.rt.sessions.list() == []


def test_c8_a_second_turn_is_refused_while_the_first_is_only_being_prepared(
    toy: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: it does not wait until the first message is rendered and tokenised."""
    with talking(toy) as talk:
        session = talk.session("alice")
        plan = talk.rt.chat_format.plan
        refused: list[BaseException] = []

        def preparing(*given: Any, **settings: Any) -> Any:
            with pytest.raises(SessionBusyError) as caught:
                session.submit("Me too", **ASK)
            refused.append(caught.value)
            return plan(*given, **settings)

        monkeypatch.setattr(talk.rt.chat_format, "plan", preparing)
        assert session.say("Hello", **ASK).kept
        assert len(refused) == 1


def test_sessions_at_hand_are_bounded_by_the_bytes_of_their_turns(
    toy: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X20: those that were not asked for the longest are let go, and read again when they are."""
    monkeypatch.setattr(sessions_module, "_AT_HAND_BYTES", 100_000)
    text = "x" * 20_000
    with talking(toy, tmp_path) as talk:
        for number in range(8):
            talk.session(f"s{number}").append(text)
            # Asking for any other finds out what this one has come to.
            talk.session("small")
            assert talk.rt.sessions.at_hand[1] <= 100_000
        assert talk.rt.sessions.at_hand[0] < 8
        assert [talk.session(f"s{number}").messages()[-1].content for number in range(8)] == [text] * 8
