"""Folding: one transaction with the turn it makes room for, and nobody waits for it but who asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from decode.observed import Turnstile
from perdure import Session, SessionBusyError, SessionError
from perdure.testing.toy import Faults
from sessions.talking import Hold, Talk, said, talking, terse

TEXT = "This is message number {}, and it is of some length"
ASK: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}


def filled(talk: Talk, name: str = "alice") -> Session:
    """A session that is folded with its next turn."""
    session = talk.session(name, overflow="fold")
    for number in range(20):
        text = TEXT.format(number)
        if len(session.tokens) + len(text) + 60 > talk.rt.n_ctx:
            break
        assert session.say(text, **ASK).kept
    assert all(turn.kind == "turn" for turn in session.history())
    return session


def rows(talk: Talk) -> list[str]:
    """The turns that are stored."""
    sessions = talk.rt.sessions
    return [turn.id for info in sessions.list() for turn in sessions.tree(info.name).turns]


def test_d2_a_fold_and_its_turn_are_one_transaction(tmp_path: Path) -> None:
    with talking(terse(), tmp_path) as talk:
        session = filled(talk)
        before = said(session)
        reply = session.say(TEXT.format(99), **ASK)
        assert reply.kept
        assert [turn.kind for turn in session.history()][-2:] == ["fold", "turn"]
        assert said(session)[: len(before)] == before


@pytest.mark.parametrize("how", ["say", "edit", "regenerate"])
@pytest.mark.parametrize("at", ["summary", "reply"])
def test_d2_a_turn_that_is_cancelled_leaves_all_turns_where_they_were(
    how: str, at: str, tmp_path: Path
) -> None:
    """Above all those that an edit or another reply would have replaced."""
    gate = Turnstile(is_open=True)
    with talking(terse(faults=Faults(gate=gate)), tmp_path) as talk:
        session = filled(talk)
        before, kept = said(session), rows(talk)
        hold = Hold(at=3)
        asked = {**ASK, "max_tokens": 200, "processors": (hold,)}
        job: Any = {
            "say": lambda: session.submit(TEXT.format(99), **asked),
            "edit": lambda: session.submit_edit(session.turns, TEXT.format(99), **asked),
            "regenerate": lambda: session.submit_regenerate(**asked),
        }[how]()
        if at == "summary":
            gate.shut()
            job.cancel()
            gate.open()
        else:
            next(iter(job))
            hold.reached.wait()
            job.cancel()
            hold.release()
        reply = job.reply()
        assert (reply.finish_reason, reply.kept, reply.text if at == "summary" else "") == (
            "cancelled",
            False,
            "",
        )
        assert said(session) == before
        assert rows(talk) == kept
    with talking(terse(), tmp_path) as talk:
        assert said(talk.session("alice")) == before


def test_c8_nobody_waits_for_a_summary(tmp_path: Path) -> None:
    """C8: a second turn is refused at once, and what only reads is answered at once."""
    gate = Turnstile(is_open=True)
    with talking(terse(faults=Faults(gate=gate)), tmp_path) as talk:
        session = filled(talk)
        turns = session.turns
        gate.shut()
        job = session.submit(TEXT.format(99), **ASK)
        gate.reached.wait()
        # Were the lock held, none of these would come back.
        for change in (
            lambda: session.say("Me too", **ASK),
            session.rewind,
            session.delete,
            lambda: session.fold(summary="x"),
        ):
            with pytest.raises(SessionBusyError):
                change()
        assert session.turns == len(session.history()) == turns
        assert session.fork("bob").turns == turns
        gate.open()
        assert job.reply().kept


def test_c8_a_fold_by_hand_holds_nobody_up_either(tmp_path: Path) -> None:
    gate = Turnstile(is_open=True)
    with talking(terse(faults=Faults(gate=gate)), tmp_path) as talk:
        session = filled(talk)
        gate.shut()
        folding = threading.Thread(target=session.fold)
        folding.start()
        gate.reached.wait()
        with pytest.raises(SessionBusyError):
            session.say("Me too", **ASK)
        gate.open()
        folding.join()
        assert session.history()[-1].kind == "fold"


def test_no_event_loop_waits_for_a_summary(tmp_path: Path) -> None:
    with talking(terse(), tmp_path) as talk:
        session, other = filled(talk), filled(talk, "bob")

        async def both() -> tuple[bool, str]:
            one = await session.asay(TEXT.format(99), **ASK)
            deltas = [delta.text async for delta in other.astream(TEXT.format(99), **ASK)]
            return one.kept, "".join(deltas)

        kept, text = asyncio.run(both())
        assert kept
        assert said(other)[-1] == (TEXT.format(99), text)


def test_a_task_that_is_cancelled_ends_the_summary(tmp_path: Path) -> None:
    gate = Turnstile(is_open=True)
    with talking(terse(faults=Faults(gate=gate)), tmp_path) as talk:
        session = filled(talk)
        before = said(session)

        async def leave() -> None:
            task = asyncio.ensure_future(session.asay(TEXT.format(99), **ASK))
            await asyncio.to_thread(gate.reached.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        gate.shut()
        asyncio.run(leave())
        gate.open()
        assert said(session) == before
        assert session.say(TEXT.format(99), **ASK).kept


def test_a_summary_that_was_cut_is_not_taken(tmp_path: Path) -> None:
    """One that its limit ended is half a summary: nothing is folded, and the error says so."""
    with talking(terse(ending=-20.0), tmp_path) as talk:
        session = filled(talk)
        kept = rows(talk)
        for fold in (session.fold, lambda: session.say(TEXT.format(99), **ASK)):
            with pytest.raises(SessionError, match="not finished within 64 tokens: nothing was folded"):
                fold()
        assert rows(talk) == kept
        assert session.fold(summary="We counted.").history()[-1].kind == "fold"


@pytest.mark.parametrize("how", ["fold", "say"])
def test_one_deadline_goes_through_the_summary_and_the_reply(how: str, tmp_path: Path) -> None:
    """A timeout is of everything that a request causes; each part gets what is left of it."""
    with talking(terse(), tmp_path) as talk:
        session = filled(talk)
        kept = rows(talk)
        asked: list[float | None] = []
        submit = talk.rt.backend.submit

        def seen(request: Any) -> Any:
            # A title may be written meanwhile.
            if not request.idle:
                asked.append(request.deadline)
            return submit(request)

        talk.rt.backend.submit = seen  # type: ignore[method-assign]
        if how == "say":
            assert session.say(TEXT.format(99), timeout=1000.0, **ASK).kept
        else:
            session.fold(timeout=1000.0)
        assert len(asked) > (how == "say")
        assert len(set(asked)) == 1
        assert asked[0] is not None
        assert rows(talk) != kept


@pytest.mark.parametrize("how", ["fold", "say"])
def test_a_summary_whose_time_is_up_is_not_taken(how: str, tmp_path: Path) -> None:
    gate = Turnstile(is_open=True)
    with talking(terse(faults=Faults(gate=gate)), tmp_path) as talk:
        session = filled(talk)
        kept = rows(talk)
        if how == "say":
            reply = session.say(TEXT.format(99), timeout=1e-9, **ASK)
            assert (reply.finish_reason, reply.kept, reply.text) == ("cancelled", False, "")
        else:
            with pytest.raises(SessionError, match="timeout: nothing was folded"):
                session.fold(timeout=1e-9)
        assert rows(talk) == kept
        assert session.say(TEXT.format(99), **ASK).kept


def test_several_readers_of_a_folding_turn_get_one_reply(tmp_path: Path) -> None:
    with talking(terse(), tmp_path) as talk:
        session = filled(talk)
        job = session.submit(TEXT.format(99), **ASK)
        replies: list[Sequence[Any]] = []
        readers = [threading.Thread(target=lambda: replies.append(job.replies())) for _ in range(4)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert len({id(each[0]) for each in replies}) == 1
        assert job.done
        assert [turn.kind for turn in session.history()].count("fold") == 1


def test_a_fold_reads_all_that_it_sums_up_x21(tmp_path: Path) -> None:
    """X21: where it does not fit at once, in passes; nothing is left out because it is the oldest."""
    with talking(terse(), tmp_path) as talk:
        session = filled(talk)
        prompts: list[str] = []
        submit = talk.rt.backend.submit

        def seen(request: Any) -> Any:
            prompts.append(talk.rt.model.detokenize(request.prompt))
            return submit(request)

        talk.rt.backend.submit = seen  # type: ignore[method-assign]
        turns = session.turns
        session.fold(keep=0)
    for number in range(turns):
        assert any(TEXT.format(number) in prompt.replace("\n", " ") for prompt in prompts), number
