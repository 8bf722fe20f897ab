"""Pending turns: what was asked is durable before it is answered, and what was answered so far soon after."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import perdure
from perdure import ChatReply, LogitsView, Message, Runtime, Session, SessionError, Tool
from perdure.sessions.pending_info import PendingInfo
from perdure.sessions.sessions import Sessions
from perdure.testing.toy import ToyModel
from sessions.talking import said, talking, terse
from sessions.test_fold import ASK, TEXT, filled

LONG: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "ignore_eos": True, "seed": 5}


def opened(store: Path | None, **settings: Any) -> Runtime:
    return perdure.open(ToyModel(), store=store, **{"n_ctx": 512, "threads": 1, "exact": True, **settings})


def interrupted(session: Session, text: str = "And then?", tokens: int = 7, **settings: Any) -> ChatReply:
    """A turn whose client is lost after so many tokens."""
    stream = session.submit(text, **{**LONG, **settings})
    for delta in stream:
        tokens -= len(delta.tokens)
        if tokens <= 0:
            break
    stream.interrupt()
    return stream.reply()


def whole(text: str = "And then?", **settings: Any) -> ChatReply:
    """The same turn where nothing interrupts it."""
    with opened(None) as rt:
        session = rt.session("whole")
        session.say("Hello", **LONG)
        return session.say(text, **{**LONG, **settings})


def pending(session: Session) -> PendingInfo:
    info = session.pending
    assert info is not None
    return info


def left_behind(store: Path, tokens: int = 7, **settings: Any) -> tuple[int, ...]:
    """A store in which a turn was interrupted; what was written of it."""
    with opened(store) as rt:
        session = rt.session("s")
        session.say("Hello", **LONG)
        return interrupted(session, tokens=tokens, **settings).tokens


CONTINUED: dict[str, dict[str, Any]] = {
    "drawn": {},
    "greedy": {"temperature": 0},
    "steered": {"repeat_penalty": 1.3, "dry_multiplier": 0.8, "logit_bias": {70: -float("inf"), 71: 2.0}},
    "in an object": {"sampling": perdure.Sampling(temperature=0.9, seed=5, logit_bias={80: 1.5})},
    "held to a schema": {"schema": {"type": "string", "minLength": 30, "maxLength": 38}, "max_tokens": 60},
    "up to a stop": {"stop": ["zz", "q"]},
    "shifted": {"overflow": "shift", "max_tokens": 500},
    "ended when it repeats itself": {"temperature": 0, "loop_guard": 16, "ignore_eos": False},
}


@pytest.mark.parametrize("tokens", [1, 8, 29])
@pytest.mark.parametrize("how", CONTINUED)
def test_c12_an_interrupted_turn_is_continued_from_its_exact_token(
    how: str, tokens: int, tmp_path: Path
) -> None:
    settings = {"speculate": 0, **CONTINUED[how]}
    asked = {**LONG, **settings}
    if "sampling" in settings:
        asked = {name: value for name, value in asked.items() if name not in ("temperature", "seed")}
    with opened(None) as rt:
        session = rt.session("whole")
        session.say("Hello", **LONG)
        want = session.say("And then?", **asked)
    with opened(tmp_path) as rt:
        session = rt.session("s")
        session.say("Hello", **LONG)
        stream = session.submit("And then?", **asked)
        left = tokens
        for delta in stream:
            left -= len(delta.tokens)
            if left <= 0:
                break
        stream.interrupt()
        part = stream.reply()
        if part.kept:
            pytest.skip("it was over before")
    with opened(tmp_path) as rt:
        session = rt.session("s")
        info = pending(session)
        assert (info.messages[0].content, info.tokens) == ("And then?", part.tokens)
        assert want.tokens[: len(info.tokens)] == info.tokens
        shown = list(session.submit_resume())
        assert session.pending is None
        turn = session.history()[-1]
        assert (turn.text, turn.finish_reason) == (want.text, want.finish_reason)
        assert "".join(delta.text for delta in shown) == want.text
        assert sum((delta.tokens for delta in shown), ()) == want.tokens
        # It is a turn like any other: the next one goes on from it.
        assert session.say("Go on", overflow="drop_oldest", **LONG).kept
        rt.sessions.store.check_counts()  # type: ignore[attr-defined]


def test_c12_the_question_is_there_before_the_first_step(tmp_path: Path) -> None:
    with opened(tmp_path) as rt:
        session = rt.session("s")
        seen: list[PendingInfo | None] = []

        def look(_: Any, view: LogitsView) -> NDArray[np.float32]:
            other = Sessions(tmp_path, readonly=True)
            seen.append(other.get("s").pending)
            other.close()
            return view.copy()

        session.say("Hello", processors=(look,), **{**LONG, "max_tokens": 1})
        assert seen[0] is not None
        assert seen[0].messages == (Message(role="user", content="Hello"),)
        assert session.pending is None


def test_c12_what_was_written_follows_within_about_a_second(tmp_path: Path) -> None:
    with opened(tmp_path) as rt:
        session = rt.session("s")

        def slow(_: Any, view: LogitsView) -> NDArray[np.float32]:
            time.sleep(0.02)
            return view.copy()

        stream = session.submit("Hello", processors=(slow,), **{**LONG, "max_tokens": 400})
        end = time.monotonic() + 30
        # Nobody reads the stream.
        while not pending(session).tokens and time.monotonic() < end:
            time.sleep(0.05)
        info = pending(session)
        assert info.running
        assert info.tokens
        assert info.text
        stream.cancel()
        assert tuple(stream.reply().tokens[: len(info.tokens)]) == info.tokens


def test_cancelled_by_its_caller_a_turn_is_not_pending(tmp_path: Path) -> None:
    with opened(tmp_path) as rt:
        session = rt.session("s")
        for delta in session.stream("Hello", **LONG):
            assert delta
            break
        assert session.pending is None
        stream = session.submit("Hello", **LONG)
        stream.stop()
        assert not stream.reply().kept
        assert session.pending is None
        del stream
        unread = session.submit("Hello", **LONG)
        del unread
        assert session.pending is None
    with opened(tmp_path) as rt:
        assert rt.session("s").pending is None


def test_an_error_a_lost_task_and_the_end_of_the_runtime_leave_it_pending(tmp_path: Path) -> None:
    def fail(_: Any, view: LogitsView) -> NDArray[np.float32]:
        raise ValueError("no")

    async def lost(session: Session) -> None:
        settings = {**LONG, "max_tokens": 400}
        task = asyncio.create_task(session.asay("Wait", processors=(slow,), **settings))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    begun = threading.Event()

    def slow(_: Any, view: LogitsView) -> NDArray[np.float32]:
        begun.set()
        time.sleep(0.01)
        return view.copy()

    with opened(tmp_path) as rt:
        first, second, third = map(rt.session, ("first", "second", "third"))
        with pytest.raises(ValueError, match="no"):
            first.say("Hello", processors=(fail,), **LONG)
        assert "no" in pending(first).ended
        asyncio.run(lost(second))
        assert pending(second).messages[0].content == "Wait"
        stream = third.submit("Hello", processors=(slow,), **{**LONG, "max_tokens": 400})
        next(iter(stream))
    with opened(tmp_path) as rt:
        for name in ("first", "second", "third"):
            assert rt.session(name).turns == 0
            assert pending(rt.session(name)).messages
        # What no store can keep must be given again.
        with pytest.raises(SessionError, match="processors"):
            rt.session("first").resume()
        assert rt.session("first").resume(processors=(slow,)).kept
        rt.session("second").discard()
        assert rt.session("second").pending is None
        with pytest.raises(SessionError, match="no pending turn"):
            rt.session("second").resume()


def test_the_next_turn_keeps_the_question_and_the_part(tmp_path: Path) -> None:
    part = left_behind(tmp_path)
    with opened(tmp_path) as rt:
        session = rt.session("s")
        text = pending(session).text
        assert session.say("Something else", **LONG).kept
        assert [each for each, _ in said(session)] == ["Hello", "And then?", "Something else"]
        turn = session.history()[1]
        assert (turn.text, turn.finish_reason) == (text, "cancelled")
        assert part
        rt.sessions.store.check_counts()  # type: ignore[attr-defined]


def test_a_question_without_an_answer_is_kept_too(tmp_path: Path) -> None:
    with opened(tmp_path) as rt:
        session = rt.session("s")
        stream = session.submit("Hello", **LONG)
        stream.interrupt()
        stream.reply()
        session.append("More")
        assert [each.messages[0].content for each in session.history()] == ["Hello", "More"]
        assert session.say("Well?", **LONG).kept


@pytest.mark.parametrize(
    "next_turn",
    [
        lambda session: session.say("And then?", **LONG),
        lambda session: session.say("Other", pending="discard", **LONG),
        lambda session: session.edit(1, "Other", **LONG),
        lambda session: session.rewind(0),
        lambda session: session.delete(),
    ],
    ids=["the same again", "discard", "edit", "rewind", "delete"],
)
def test_what_takes_its_place_leaves_nothing_of_it(
    next_turn: Callable[[Session], object], tmp_path: Path
) -> None:
    left_behind(tmp_path)
    with opened(tmp_path) as rt:
        session = rt.session("s")
        next_turn(session)
        store = rt.sessions.store
        assert store.pending(session.info) is None
        store.check_counts()  # type: ignore[attr-defined]
        assert all(turn.finish_reason != "cancelled" for turn in rt.session("s").history())


@pytest.mark.parametrize("how", ["say", "resume"])
def test_c12_what_follows_at_once_has_all_that_was_written(how: str, tmp_path: Path) -> None:
    """Nobody asks for the reply of a client that was lost, and it is written down about once a second."""
    with opened(tmp_path) as rt:
        session = rt.session("s")
        session.say("Hello", **LONG)
        stream = session.submit("And then?", **LONG)
        shown = ""
        for delta in stream:
            shown += delta.text
            if len(shown) > 5:
                break
        stream.interrupt("its client left")
        info = pending(session)
        assert info.text.startswith(shown)
        assert info.ended == "its client left"
        if how == "say":
            session.say("Go on", **LONG)
            assert session.history()[1].text.startswith(shown)
        else:
            assert "".join(delta.text for delta in session.submit_resume()).startswith(shown)
        del stream


def test_a_refused_turn_leaves_the_pending_one_as_it_was(tmp_path: Path) -> None:
    left_behind(tmp_path)
    with opened(tmp_path) as rt:
        session = rt.session("s")
        before = pending(session)
        with pytest.raises(perdure.ContextOverflow):
            session.say("Too long " * 500, pending="discard", **LONG)
        assert pending(session).tokens == before.tokens
        fork = session.fork("fork")
        assert fork.pending is None


def test_again_answers_the_same_question_from_the_start(tmp_path: Path) -> None:
    part = left_behind(tmp_path)
    with opened(tmp_path) as rt:
        session = rt.session("s")
        reply = session.regenerate(seed=99)
        assert reply.tokens[: len(part)] != part
        assert [each for each, _ in said(session)] == ["Hello", "And then?"]


def test_an_edit_is_continued_in_its_place(tmp_path: Path) -> None:
    with opened(tmp_path) as rt:
        session = rt.session("s")
        session.say("Hello", **LONG)
        session.say("More", **LONG)
        stream = session.submit_edit(2, "Other", **LONG)
        next(iter(stream))
        stream.interrupt()
        stream.reply()
    with opened(tmp_path) as rt:
        session = rt.session("s")
        assert [each for each, _ in said(session)] == ["Hello", "More"]
        assert session.resume().kept
        assert [each for each, _ in said(session)] == ["Hello", "Other"]


def test_tools_are_asked_with_again(tmp_path: Path) -> None:
    tool = Tool(name="look", description="Look it up", parameters={"type": "object"})
    left_behind(tmp_path, tools=[tool])
    want = whole(tools=[tool])
    with opened(tmp_path) as rt:
        assert rt.session("s").resume().tokens == want.tokens


def test_another_model_does_not_continue_it(tmp_path: Path) -> None:
    left_behind(tmp_path)
    with perdure.open(ToyModel(seed=3), store=tmp_path, n_ctx=512, threads=1) as rt:
        session = rt.session("s")
        with pytest.raises(SessionError, match="another model"):
            session.resume()
        assert pending(session).text
        assert session.resume(again=True).kept


def test_a_fold_that_makes_room_is_part_of_what_is_pending(tmp_path: Path) -> None:
    with talking(terse(), tmp_path, exact=True) as talk:
        session = filled(talk)
        copy = session.fork("copy")
        copy.say(TEXT.format(99), **ASK)
        assert [turn.kind for turn in copy.history()][-2:] == ["fold", "turn"]
        want = copy.history()[-1].text
        stream = session.submit(TEXT.format(99), **ASK)
        for delta in stream:
            if delta.tokens:
                break
        stream.interrupt()
        assert not stream.reply().kept
    with talking(terse(), tmp_path, exact=True) as talk:
        session = talk.session("alice")
        assert pending(session).tokens
        assert session.resume().text == want
        assert [turn.kind for turn in session.history()][-2:] == ["fold", "turn"]


def test_c8_what_was_written_so_far_shows_no_control_token() -> None:
    with opened(None) as rt:
        model, chat_format = rt.model, rt.chat_format
        words = model.tokenize("one two")
        for mark in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
            [control] = (token for token, text in chat_format.tokenizer.control.items() if text == mark)
            shown = chat_format.part([*words, control, *words])
            assert shown.content == chat_format.part([*words, *words]).content, mark
