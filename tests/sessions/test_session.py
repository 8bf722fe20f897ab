"""Sessions: say, fork, rewind, edit, regenerate, sleep and wake."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import perdure
from decode.observed import Turnstile, trouble
from inside import inside
from perdure import (
    ClosedError,
    CorruptStateError,
    InvalidInputError,
    LogitsView,
    Message,
    Runtime,
    Session,
    SessionBusyError,
    SessionError,
    SessionExistsError,
    SessionNotFoundError,
    StoreFullError,
    StoreLockedError,
)
from perdure.backend import LocalBackend
from perdure.engine_config import EngineConfig
from perdure.sessions.store.sqlite.store import SqliteStore
from perdure.sessions.turn import Turn
from perdure.testing.toy import Faults, ToyModel
from sessions.database import index_of
from sessions.talking import ASK, Hold, said, talking
from subjects import NARROW, Noise, Subject

NAMES = [
    "alice",
    "Ünïcode 🙂",
    "a..c",
    " ",
    "x" * 200,
    "per%2Fcent",
    "'; DROP TABLE session",
]


# Talking.


def test_a_session_goes_on_where_it_was(subject: Subject, tmp_path: Path) -> None:
    """W≡C over turns, and from the second turn on nothing is computed twice."""
    with talking(subject, tmp_path) as talk:
        s = talk.session("alice", system="Be terse.")
        first = talk.say(s, "Hello")
        second = talk.say(s, "And then?")
        assert (first.kept, second.kept) == (True, True)
        assert s.turns == 2
        # The last token that was drawn, and the mark that ends a turn, were never fed.
        assert second.reuse.reused >= first.usage.prompt_tokens + len(first.tokens) - 1
        assert said(s) == [("Hello", first.text), ("And then?", second.text)]


def test_a_session_lives_on_after_a_restart(subject: Subject, tmp_path: Path) -> None:
    """S1: turns, tokens and settings are there, the state comes from the disk, the answer is the same."""
    with talking(subject, tmp_path) as talk:
        s = talk.session("alice", system="Be terse.", seed=7)
        talk.say(s, "Hello there, how is everybody today?")
        before = (said(s), s.tokens, s.system, dict(s.settings))
    with talking(subject, tmp_path) as talk:
        s = talk.session("alice")
        assert (said(s), s.tokens, s.system, dict(s.settings)) == before
        again = talk.say(s, "Go on")
        assert again.reuse.tiers.get("disk", 0) > 0
        assert again.reuse.reused >= len(before[1]) - 2


def test_a_name_is_any_line_without_a_slash(toy: Subject, tmp_path: Path) -> None:
    with talking(toy, tmp_path) as talk:
        for number, name in enumerate(NAMES):
            talk.say(talk.session(name), f"I am number {number}")
    with talking(toy, tmp_path) as talk:
        assert {row.name for row in talk.rt.sessions.list()} == set(NAMES)
        for number, name in enumerate(NAMES):
            assert said(talk.session(name))[0][0] == f"I am number {number}"


@pytest.mark.parametrize(
    "name", ["", "lone \ud800 surrogate", 7, None, "my plans/2026", "two\nlines", "x" * 201, "a\x7f"]
)
def test_what_is_no_name_is_refused_however_a_session_gets_one(toy: Subject, name: Any) -> None:
    with talking(toy) as talk:
        session = talk.session("plain")
        talk.say(session, "Hello")
        memory = session.label("here")
        for make in (
            talk.session,
            session.fork,
            lambda name: talk.rt.memories.wake(memory.address, name),
        ):
            with pytest.raises(InvalidInputError):
                make(name)
        assert [row.name for row in talk.rt.sessions.list()] == ["plain"]


def test_a_session_that_has_a_slash_already_is_still_read_forked_and_deleted(
    toy: Subject, tmp_path: Path
) -> None:
    with talking(toy, tmp_path) as talk:
        talk.say(talk.session("plain"), "Hello")
        # As it was written before there was a rule.
        session = talk.rt.sessions.get("plain")
        talk.rt.sessions.store.create("", "old/name", session.standing().turns)
    with talking(toy, tmp_path) as talk:
        old = talk.session("old/name")
        assert said(old)[0][0] == "Hello"
        assert old.fork("new name").turns == 1
        talk.rt.sessions.delete("old/name")
        assert {row.name for row in talk.rt.sessions.list()} == {"plain", "new name"}


@pytest.mark.parametrize("stored", [False, True])
def test_after_close_every_call_says_that_it_is_closed(toy: Subject, tmp_path: Path, stored: bool) -> None:
    with talking(toy, tmp_path if stored else None) as talk:
        session = talk.session("alice")
        talk.say(session, "Hello")
        rt = talk.rt
    for call in (
        lambda: session.say("again"),
        lambda: session.submit_unkept("again"),
        lambda: session.fork("bob"),
        lambda: session.rewind(),
        lambda: session.sleep(),
        lambda: session.delete(),
        lambda: rt.session("alice"),
        lambda: rt.session("new"),
        lambda: rt.sessions.list(),
    ):
        with pytest.raises(ClosedError):
            call()


@pytest.mark.parametrize(
    "message",
    [
        "",
        "   ",
        [],
        {"role": "user", "content": " \n"},
        Message(role="user", content=""),
        [{"role": "user", "content": "x"}, {"role": "user", "content": ""}],
        [{"role": "user"}],
        {"role": "king", "content": "x"},
        "\ud800",
    ],
)
def test_a_bad_message_changes_nothing(toy: Subject, message: Any) -> None:
    with talking(toy) as talk:
        s = talk.session("alice")
        talk.say(s, "Hello")
        before = s.tokens
        with pytest.raises(InvalidInputError):
            s.say(message, **ASK)
        assert s.tokens == before
        assert talk.say(s, "Still there?").kept


def test_a_bad_setting_changes_nothing(toy: Subject) -> None:
    with talking(toy) as talk:
        s = talk.session("alice")
        for bad in ({"temperature": -1}, {"max_tokens": 0}, {"nonsense": 1}, {"n": 2}, {"overflow": "hope"}):
            with pytest.raises(InvalidInputError):
                s.say("Hello", **bad)
        assert s.turns == 0
        assert talk.say(s, "Hello").kept


def test_streams_and_asyncio_give_the_same_turns(toy: Subject) -> None:
    with talking(toy) as talk:
        right = talk.say(talk.session("plain"), "Hello").text
        s = talk.session("stream")
        assert "".join(delta.text for delta in s.stream("Hello", **ASK)) == right
        a, b = talk.session("asay"), talk.session("astream")

        async def both() -> tuple[str, str]:
            one = await a.asay("Hello", **ASK)
            other = [delta.text async for delta in b.astream("Hello", **ASK)]
            return one.text, "".join(other)

        assert asyncio.run(both()) == (right, right)
        assert s.tokens == a.tokens == b.tokens
        assert (s.turns, a.turns, b.turns) == (1, 1, 1)
        assert s.last is not None
        assert s.last.kept


def test_no_event_loop_waits_for_a_summary_or_for_the_disk(
    toy: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: set[int] = set()
    add, submit = SqliteStore.add, Session.submit

    def adding(self: SqliteStore, *given: Any, **more: Any) -> Sequence[int]:
        waited.add(threading.get_ident())
        return add(self, *given, **more)

    def submitting(self: Session, *given: Any, **settings: Any) -> Any:
        waited.add(threading.get_ident())
        return submit(self, *given, **settings)

    monkeypatch.setattr(SqliteStore, "add", adding)
    monkeypatch.setattr(Session, "submit", submitting)
    with talking(toy) as talk:
        s = talk.session("alice")

        async def both() -> None:
            assert (await s.asay("Hello", **ASK)).kept
            async for _ in s.astream("And?", **ASK):
                pass
            async with contextlib.aclosing(s.astream("What else?", keep_partial=True, **ASK)) as deltas:
                async for _ in deltas:
                    break

        asyncio.run(both())
        assert s.turns == 3
    assert waited
    assert threading.get_ident() not in waited


def test_who_leaves_a_stream_early_has_not_had_the_turn(toy: Subject) -> None:
    with talking(toy) as talk:
        s = talk.session("alice")

        async def leave() -> None:
            async with contextlib.aclosing(s.astream("Hello", **ASK)) as deltas:
                async for _ in deltas:
                    # The engine may be done with all of it: what counts is what was read.
                    await asyncio.sleep(0.1)
                    break

        asyncio.run(leave())
        assert s.turns == 0
        assert talk.say(s, "Hello").kept


def test_one_turn_at_a_time(toy: Subject) -> None:
    with talking(toy) as talk:
        s = talk.session("alice")
        started, go_on = threading.Event(), threading.Event()

        def hold(_: Any, view: Any) -> Any:
            started.set()
            go_on.wait()
            return view.copy()

        job = s.submit("Hello", processors=(hold,), **ASK)
        started.wait()
        for change in (
            lambda: s.say("Me too", **ASK),
            s.rewind,
            s.sleep,
            s.wake,
            s.delete,
            lambda: s.fold(summary="x"),
        ):
            with pytest.raises(SessionBusyError, match="another turn"):
                change()
        go_on.set()
        assert job.reply().kept
        assert talk.say(s, "Now me").kept


# C1: a turn is a transaction.


LONG: dict[str, Any] = {"max_tokens": 50, "temperature": 0, "ignore_eos": True}


def test_a_turn_that_is_cancelled_before_it_is_read_leaves_the_session_as_it_was(
    subject: Subject, tmp_path: Path
) -> None:
    """C1: while another has the engine."""
    with talking(subject, tmp_path) as talk:
        s = talk.session("alice")
        talk.say(s, "Hello")
        before, hold = s.tokens, Hold()
        other = talk.session("bob").submit("Hello", processors=(hold,), **LONG)
        hold.reached.wait()
        job = s.submit("A message that is read for a while, for it is rather long", **ASK)
        job.cancel()
        hold.release()
        reply = job.reply()
        assert (reply.finish_reason, reply.tokens) == ("cancelled", ())
        assert (reply.kept, reply.not_kept) == (False, "the turn ended by cancelled")
        assert (s.turns, s.tokens) == (1, before)
        assert other.reply().kept
        assert talk.say(s, "What now?").kept


@pytest.mark.parametrize("read", [0, 1, 7, 20])
def test_a_turn_that_is_cancelled_while_it_is_read_leaves_the_session_as_it_was(
    read: int, tmp_path: Path
) -> None:
    """C1, in prefill."""
    gate = Turnstile(is_open=True)
    held = Subject("toy-full", ToyModel(faults=Faults(gate=gate)), Noise(0.0, 0.0))
    with talking(held, tmp_path) as talk:
        s = talk.session("alice")
        s.say("Hello", **ASK)
        before = s.tokens
        gate.shut()
        job = s.submit("A message that is read for a while, for it is rather long", **ASK)
        gate.reached.wait()
        if read:
            gate.pass_through(read)
        job.cancel()
        reply = job.reply()
        assert (reply.finish_reason, reply.tokens, reply.kept) == ("cancelled", (), False)
        assert (s.turns, s.tokens) == (1, before)
        gate.open()
        assert talk.say(s, "What now?").kept


def test_a_turn_that_is_cancelled_in_its_reply_leaves_the_session_as_it_was(
    subject: Subject, tmp_path: Path
) -> None:
    """C1: a stream that is left early."""
    with talking(subject, tmp_path) as talk:
        s = talk.session("alice")
        talk.say(s, "Hello")
        before, hold = s.tokens, Hold(at=5)
        stream = s.stream("And this one?", processors=(hold,), **LONG)
        next(stream)
        hold.reached.wait()
        stream.close()
        hold.release()
        assert (s.turns, s.tokens) == (1, before)
        assert talk.say(s, "What now?").kept
        assert s.turns == 2


def test_a_partial_reply_is_kept_where_that_was_asked_for(subject: Subject, tmp_path: Path) -> None:
    """C1: a stated partial state."""
    with talking(subject, tmp_path) as talk:
        s = talk.session("alice")
        gate = threading.Event()

        def hold(tokens: Sequence[int], view: LogitsView) -> NDArray[np.float32]:
            told.append(0)
            if len(told) == 5:
                gate.wait()
            return view.copy()

        told: list[int] = []
        settings: dict[str, Any] = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
        job = s.submit("Tell me more", keep_partial=True, processors=(hold,), **settings)
        deltas = iter(job)
        seen = next(deltas).text + next(deltas).text
        job.cancel()
        gate.set()
        reply = job.reply()
        assert (reply.kept, reply.finish_reason, s.turns) == (True, "cancelled", 1)
        assert s.history()[0].finish_reason == "cancelled"
        assert s.history()[0].text.startswith(seen)
        assert talk.say(s, "Go on").kept


@pytest.mark.parametrize("when", ["at the start of prefill", "in prefill", "in the reply"])
def test_a_turn_whose_engine_fails_leaves_the_session_as_it_was(
    toy: Subject, tmp_path: Path, when: str
) -> None:
    """C1: and then it can be sent again."""
    with talking(toy, tmp_path) as talk:
        s = talk.session("alice")
        talk.say(s, "Hello")
        before, faults = s.tokens, trouble(talk.rt)
        drawn: list[int] = []

        def fail_later(_: Sequence[int], view: LogitsView) -> NDArray[np.float32]:
            drawn.append(0)
            if when == "in the reply" and len(drawn) == 3:
                faults.fail_decode()
            return view.copy()

        if when == "at the start of prefill":
            faults.fail_decode()
        elif when == "in prefill":
            faults.fail_decode(after=1, ahead=5)
        with pytest.raises(perdure.EngineError):
            s.say("Once more, with feeling", processors=(fail_later,), **LONG)
        assert len(drawn) == (3 if when == "in the reply" else 0)
        assert (s.turns, s.tokens) == (1, before)
        assert talk.say(s, "Once more, with feeling").kept


def test_a_store_that_fails_costs_the_turn_not_the_reply(
    toy: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C6: all tokens arrive, and the reply says that it was not kept."""
    with talking(toy, tmp_path) as talk:
        right = talk.say(talk.session("right"), "Hello").text
        s = talk.session("alice")

        def full(*_: Any, **__: Any) -> int:
            raise StoreFullError("no room left", needed=1)

        monkeypatch.setattr(SqliteStore, "add", full)
        reply = s.say("Hello", **ASK)
        assert (reply.text, reply.kept, reply.not_kept) == (right, False, "no room left")
        assert "".join(delta.text for delta in s.stream("Hello", **ASK)) == right
        assert s.turns == 0
        monkeypatch.undo()
        assert talk.say(s, "Hello").kept


# Moving about.


def test_a_fork_goes_its_own_way(subject: Subject, tmp_path: Path) -> None:
    """S6: forks share storage, keep their lineage, and neither disturbs the other."""
    with talking(subject, tmp_path) as talk:
        s = talk.session("alice", system="Be terse.")
        talk.say(s, "Hello, I have something to tell you that takes a while")
        talk.say(s, "It is this")
        rows = len(index_of(talk.rt.sessions).rows("SELECT 1 FROM turn"))
        t = s.fork("bob", turn=1)
        assert len(index_of(talk.rt.sessions).rows("SELECT 1 FROM turn")) == rows
        assert dict(t.origin) == {"how": "fork", "session": "alice", "turn": 1}
        reply = talk.say(t, "It was that")
        assert reply.reuse.reused > 0
        talk.say(s, "And more")
        assert [ask for ask, _ in said(t)][-1] == "It was that"
        assert [ask for ask, _ in said(s)][1:] == ["It is this", "And more"]
        kept = said(t)
        s.delete()
    with talking(subject, tmp_path) as talk:
        t = talk.session("bob", create=False)
        assert said(t) == kept
        assert talk.say(t, "Are you there?").reuse.reused > 0
        with pytest.raises(SessionNotFoundError):
            talk.rt.sessions.get("alice")


def test_going_back_forgets_and_goes_on(subject: Subject, tmp_path: Path) -> None:
    with talking(subject, tmp_path) as talk:
        s = talk.session("alice")
        talk.say(s, "One")
        middle = s.tokens
        talk.say(s, "Two")
        talk.say(s, "Three")
        s.rewind(2)
        assert (s.turns, s.tokens) == (1, middle)
        talk.say(s, "Two, again")
        s.rewind(to=0)
        assert s.tokens == ()
        # Turns that nothing leads to are gone.
        assert len(index_of(talk.rt.sessions).rows("SELECT 1 FROM turn")) == 1
        assert talk.say(s, "Afresh").kept


def test_an_edit_and_another_reply_replace_what_was_there(subject: Subject, tmp_path: Path) -> None:
    with talking(subject, tmp_path) as talk:
        s = talk.session("alice")
        talk.say(s, "One")
        talk.say(s, "Two")
        talk.checked(lambda record: s.edit(2, "Zwei", processors=(record,), **ASK), s)
        assert [ask for ask, _ in said(s)] == ["One", "Zwei"]
        talk.checked(
            lambda record: s.regenerate(processors=(record,), **{**ASK, "seed": 3, "temperature": 1}), s
        )
        assert [ask for ask, _ in said(s)] == ["One", "Zwei"]
        talk.checked(lambda record: s.edit(1, "Eins", processors=(record,), **ASK), s)
        assert [ask for ask, _ in said(s)] == ["Eins"]


@pytest.mark.parametrize("turn", [0, 3, -1, True, "1", None])
def test_a_turn_that_is_not_there_is_refused(toy: Subject, turn: Any) -> None:
    with talking(toy) as talk:
        s = talk.session("alice")
        talk.say(s, "One")
        talk.say(s, "Two")
        with pytest.raises(InvalidInputError):
            s.edit(turn, "x", **ASK)
        if turn not in (0, None):
            with pytest.raises(InvalidInputError):
                s.fork("bob", turn=turn)
        with pytest.raises(InvalidInputError):
            s.rewind(3)
        assert s.turns == 2


def test_names_that_are_taken_and_names_that_are_not_there(toy: Subject) -> None:
    with talking(toy) as talk:
        s = talk.session("alice", system="A")
        talk.session("bob")
        with pytest.raises(SessionExistsError):
            s.fork("bob")
        with pytest.raises(SessionNotFoundError):
            talk.session("carol", create=False)
        with pytest.raises(SessionError, match="another system message"):
            talk.session("alice", system="B")
        with pytest.raises(SessionError, match="no reply to make again"):
            s.regenerate()
        assert talk.session("alice") is s


def test_namespaces_do_not_meet(toy: Subject, tmp_path: Path) -> None:
    with talking(toy, tmp_path) as talk:
        mine, yours = talk.session("alice", namespace="mine"), talk.session("alice", namespace="yours")
        talk.say(mine, "A secret that is long enough to be worth a block, or two, or even three of them")
        reply = talk.say(
            yours, "A secret that is long enough to be worth a block, or two, or even three of them"
        )
        assert reply.reuse.reused == 0
        assert [row.name for row in talk.rt.sessions.list("mine")] == ["alice"]
        assert talk.rt.sessions.list("") == []
        with pytest.raises(SessionNotFoundError):
            talk.session("alice", create=False)


# Sleeping.


def test_a_plan_says_what_waking_does(subject: Subject, tmp_path: Path) -> None:
    """S8: the figures agree, awake, asleep and after a restart."""
    long = "A rather long message, so that there is more than one block of it to be put away and back"
    with talking(subject, tmp_path) as talk:
        s = talk.session("alice")
        assert s.plan_wake().tokens == 0
        reply = talk.say(s, long)
        assert set(s.plan_wake().tiers) == {"slot"}
        s.sleep()
        plan = s.plan_wake()
        assert set(plan.tiers) == {"disk"}
        assert plan.nbytes > 0
        report = s.wake()
        assert (dict(report.tiers), report.computed) == (dict(plan.tiers), plan.computed)
        assert set(s.plan_wake().tiers) == {"slot"}
        reuse = talk.say(s, "Good morning").reuse
        # Where the toy wrote what no prompt shows (a control token), a window goes back to a checkpoint.
        is_shown = reply.text == reply.raw.text
        assert reuse.tiers.keys() == {"slot"} or (not is_shown and "it went back to" in reuse.why)
        s.sleep()
    with talking(subject, tmp_path) as talk:
        s = talk.session("alice")
        plan = s.plan_wake()
        assert plan.tokens == len(s.tokens)
        report = s.wake()
        assert (dict(report.tiers), report.computed) == (dict(plan.tiers), plan.computed)
        assert talk.say(s, "Good morning again").reuse.reused >= len(s.history()[0].added.tokens) - 2


def test_sleep_lets_go_of_memory(toy: Subject, tmp_path: Path) -> None:
    with talking(toy, tmp_path) as talk:
        s = talk.session("alice")
        talk.say(
            s, "A rather long message, so that there is more than one block of it to be put away and back"
        )
        s.sleep()
        stats = talk.rt.cache.stats()
        assert (stats.blocks, stats.nbytes) == (0, 0)


def test_what_was_lost_is_computed_and_said(subject: Subject, tmp_path: Path) -> None:
    """S4: without its blocks a session wakes from its tokens."""
    with talking(subject, tmp_path) as talk:
        s = talk.session("alice")
        talk.say(
            s, "A rather long message, so that there is more than one block of it to be put away and back"
        )
        s.sleep()
        for path in (tmp_path / "blocks").rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        report = s.wake()
        assert (dict(report.tiers), report.computed) == ({}, len(s.tokens))
        reply = talk.say(s, "Good morning")
        assert reply.kept


def test_a_turn_that_was_tampered_with_is_refused(toy: Subject, tmp_path: Path) -> None:
    """S2: its digest is recomputed from its parts before the engine is touched."""
    with talking(toy, tmp_path) as talk:
        s = talk.session("alice")
        talk.say(s, "Hello")
        index = index_of(talk.rt.sessions)
        for column, value in (("text", "x"), ("seed", 7), ("tokens", b"\x01\0\0\0"), ("reply", None)):
            before = (s.tokens, index.rows(f"SELECT {column} FROM turn WHERE kind = 'turn'")[0][0])
            with index.writing():
                index.run(f"UPDATE turn SET {column} = ? WHERE kind = 'turn'", value)
            with pytest.raises(CorruptStateError):
                s.wake()
            assert s.tokens == before[0]
            with index.writing():
                index.run(f"UPDATE turn SET {column} = ? WHERE kind = 'turn'", before[1])
        s.wake()


def test_a_store_has_one_engine_and_several_writers(toy: Subject, tmp_path: Path) -> None:
    with talking(toy, tmp_path) as talk:
        talk.say(talk.session("alice"), "Hello")
        with pytest.raises(StoreLockedError, match="in use by another runtime of this process"):
            Runtime(LocalBackend(toy.model, EngineConfig(n_ctx=64, slots=1)), store=tmp_path)
        with contextlib.closing(SqliteStore(tmp_path)) as writer:
            writer.create("", "bob", [Turn(kind="start", messages=())])
        assert [row.name for row in talk.rt.sessions.list()] == ["bob", "alice"]
        talk.rt.sessions.delete("bob")
        reader = SqliteStore(tmp_path, readonly=True)
        assert [row.name for row in reader.list()] == ["alice"]
        reader.close()
        assert talk.say(talk.session("alice"), "Still here").kept


def test_another_model_reads_the_words_not_the_tokens(toy: Subject, tmp_path: Path) -> None:
    """C11: tokens of another model are never taken for this one's."""
    with talking(toy, tmp_path) as talk:
        talk.say(talk.session("alice"), "Hello there, how is everybody today, if I may ask")
    other = Subject("toy-full", ToyModel(seed=5), toy.rounding)
    with talking(other, tmp_path) as talk:
        s = talk.session("alice")
        assert s.plan_wake().tokens == 0
        reply = talk.say(s, "Go on")
        assert reply.reuse.reused == 0
        assert [ask for ask, _ in said(s)] == ["Hello there, how is everybody today, if I may ask", "Go on"]


def test_w5_in_exact_mode_a_session_reuses_its_own_turns(subject: Subject) -> None:
    """W5: nothing was, not even what the turn before had read; the bits are those of a cold reply."""
    # Swap slots, which a GPU has, would make wider steps.
    with talking(subject, exact=True, slots=1, swap_slots=0) as talk:
        s = talk.session("alice")
        first = talk.say(s, "A message that is long enough to take several steps to be read as a whole")
        assert first.reuse.reused == 0
        second = talk.say(s, "And then?")
        step = NARROW
        assert second.reuse.reused == (first.usage.prompt_tokens - 1) // step * step
        assert "exact mode" in second.reuse.why


def test_what_was_not_written_before_a_crash_counts_as_new_for_the_next_process(
    toy: Subject, tmp_path: Path
) -> None:
    """S1: a conversation of short turns is written in time, however often the process dies in between."""
    first, second = tmp_path / "a", tmp_path / "b"
    with talking(toy, first, n_ctx=1024) as talk:
        talk.session("ada").say("x" * 150, max_tokens=4)
        # As if it had been killed: what is in memory is lost.
        shutil.copytree(first, second, ignore=shutil.ignore_patterns("*lock", "*.socket"))
    with talking(toy, second, n_ctx=1024) as talk:
        session = talk.session("ada")
        session.say("y" * 150, max_tokens=4)
        inside(talk.rt).engine_loop.call(lambda: None)
        inside(talk.rt).slot_cache.tiers.flush()
        assert session.held()["disk"].tokens > 256
