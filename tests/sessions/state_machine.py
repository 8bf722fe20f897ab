"""The life of a store full of sessions, at random: whatever happens, warm equals cold and nothing is lost."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from inside import inside
from perdure import ChatReply, ContextOverflow, Session, SessionNotFoundError
from perdure.extension import extensions
from perdure.sessions.turn import transcript
from sessions.talking import Talk, talking
from subjects import Subject

KEYS = (("", "alice"), ("", "bob"), ("b", "alice"), ("b", "carol 🙂"))
"""Namespaces and names."""
TEXTS = ("Hi", "And then?", "A longer message, so that a block or two of it can be put away and back again")

Key = tuple[str, str]
Turns = list[tuple[str, tuple[int, ...]]]
"""What was asked, and the tokens that were answered."""
STALE: Sequence[Callable[[Session], object]] = (
    lambda session: session.say("Hi", max_tokens=2),
    lambda session: session.rewind(0),
    lambda session: session.rewind(1) if session.turns else session.rewind(0),
    lambda session: session.fork("forked"),
    lambda session: session.label("x"),
    lambda session: session.fold(summary="x"),
    lambda session: session.delete(),
    lambda session: session.wake(),
)
"""What is tried with a session that was deleted."""


def life(subject: Subject, **settings: Any) -> type[RuleBasedStateMachine]:
    class Life(RuleBasedStateMachine):
        """The model is a dict of lists of turns. Every reply is checked against a fresh context."""

        def __init__(self) -> None:
            super().__init__()
            self.known: dict[Key, Turns] = {}
            self.marked: dict[Key, Turns] = {}
            self.stale: list[Session] = []
            self.held = ExitStack()
            self.base = Path(self.held.enter_context(tempfile.TemporaryDirectory()))
            self.number = 0
            self.harmed = False
            self.folder = self.base / "store"
            self.open()

        def open(self) -> None:
            self.running = ExitStack()
            self.talk: Talk = self.running.enter_context(talking(subject, self.folder, **settings))

        def teardown(self) -> None:
            try:
                self.check()
            finally:
                self.running.close()
                self.held.close()

        def settle(self) -> None:
            """Have no file come or go meanwhile; kills in the middle are in store/test_crash.py."""
            inside(self.talk.rt).slot_cache.tiers.flush()

        def session(self, key: Key) -> Session:
            return self.talk.rt.session(key[1], namespace=key[0])

        def told(self, name: Key, turns: Turns, text: str, reply: ChatReply) -> None:
            assert reply.kept, reply.not_kept
            self.known[name] = [*turns, (text, reply.tokens)]
            self.check(name)

        def check(self, *names: Key) -> None:
            for name in names or self.known:
                session = self.session(name)
                history = session.history()
                # The tokens, read by themselves, are the text that stands for them.
                whole = transcript(session.standing().turns).text
                if "\ufffd" not in whole:
                    assert self.talk.rt.model.detokenize(session.tokens, special=True) == whole
                assert [str(turn.messages[-1].content) for turn in history] == [
                    ask for ask, _ in self.known[name]
                ]
            if not names:
                for namespace in {key[0] for key in KEYS}:
                    found = {(namespace, info.name) for info in self.talk.rt.sessions.list(namespace)}
                    assert found == {key for key in self.known if key[0] == namespace}

        # What happens.

        @initialize()
        def start(self) -> None:
            self.session(KEYS[0])
            self.known[KEYS[0]] = []

        @rule(name=st.sampled_from(KEYS), text=st.sampled_from(TEXTS), temperature=st.sampled_from([0, 1]))
        def say(self, name: Key, text: str, temperature: float) -> None:
            turns = self.known.setdefault(name, [])
            session = self.session(name)
            try:
                reply = self.talk.say(session, text, temperature=temperature, seed=7, max_tokens=4)
            except ContextOverflow:
                self.check(name)
                return
            self.told(name, turns, text, reply)

        @rule(name=st.sampled_from(KEYS), read=st.integers(0, 3), text=st.sampled_from(TEXTS))
        def cancel(self, name: Key, read: int, text: str) -> None:
            if name in self.known:
                try:
                    stream = self.session(name).stream(text, max_tokens=60, temperature=0, ignore_eos=True)
                    for _ in range(read):
                        next(stream)
                    stream.close()
                except (ContextOverflow, StopIteration):
                    pass
                # Over before it was cancelled, if it was short.
                session = self.session(name)
                if session.turns > len(self.known[name]):
                    session.rewind(to=len(self.known[name]))
                self.check(name)

        @rule(name=st.sampled_from(KEYS), back=st.integers(0, 3))
        def rewind(self, name: Key, back: int) -> None:
            if back <= len(self.known.get(name, ())) and name in self.known:
                self.session(name).rewind(back)
                turns = self.known[name]
                self.known[name] = turns[: len(turns) - back]

        @rule(name=st.sampled_from(KEYS), other=st.sampled_from(KEYS), back=st.integers(0, 2))
        def fork(self, name: Key, other: Key, back: int) -> None:
            apart = name[0] != other[0]
            if name in self.known and not apart and other not in self.known and back <= len(self.known[name]):
                turns = self.known[name][: len(self.known[name]) - back]
                self.session(name).fork(other[1], turn=len(turns))
                self.known[other] = turns

        @rule(name=st.sampled_from(KEYS), text=st.sampled_from(TEXTS), which=st.integers(0, 20))
        def edit(self, name: Key, text: str, which: int) -> None:
            if self.known.get(name):
                turn = 1 + which % len(self.known[name])
                session = self.session(name)
                try:
                    reply = self.talk.checked(
                        lambda record: session.edit(
                            turn, text, processors=(record,), temperature=0, max_tokens=4
                        ),
                        session,
                    )
                except ContextOverflow:
                    self.check(name)
                    return
                self.told(name, self.known[name][: turn - 1], text, reply)

        @rule(name=st.sampled_from(KEYS), seed=st.integers(0, 3))
        def regenerate(self, name: Key, seed: int) -> None:
            if self.known.get(name):
                session, turns = self.session(name), self.known[name]
                reply = self.talk.checked(
                    lambda record: session.regenerate(
                        processors=(record,), temperature=1, seed=seed, max_tokens=4
                    ),
                    session,
                )
                self.told(name, turns[:-1], turns[-1][0], reply)

        @rule(name=st.sampled_from(KEYS))
        def sleep(self, name: Key) -> None:
            if name in self.known:
                self.session(name).sleep()

        @rule(name=st.sampled_from(KEYS))
        def wake(self, name: Key) -> None:
            if name in self.known:
                session = self.session(name)
                plan = session.plan_wake()
                report = session.wake()
                if self.harmed:
                    # A plan reads no state: what is damaged shows when it is woken.
                    assert report.computed >= plan.computed
                else:
                    assert (dict(report.tiers), report.computed) == (dict(plan.tiers), plan.computed)

        @rule()
        def restart(self) -> None:
            self.running.close()
            self.stale.clear()
            self.open()

        @rule()
        def die(self) -> None:
            """What is on the disk now is all that is left."""
            self.settle()
            self.number += 1
            after = self.base / f"store {self.number}"
            shutil.copytree(self.folder, after, ignore=shutil.ignore_patterns("*lock", "*.socket"))
            self.running.close()
            self.stale.clear()
            self.folder = after
            self.open()
            self.check()

        @rule(name=st.sampled_from(KEYS), label=st.sampled_from(["x", "y"]))
        def label(self, name: Key, label: str) -> None:
            if name in self.known:
                memory = self.session(name).label(label)
                self.marked[name[0], memory.address] = self.known[name]

        @precondition(lambda self: self.marked)
        @rule(other=st.sampled_from(KEYS), which=st.integers(0, 20))
        def remember(self, other: Key, which: int) -> None:
            marked = sorted(key for key in self.marked if key[0] == other[0])
            if other not in self.known and marked:
                key = marked[which % len(marked)]
                self.talk.rt.memories.wake(key[1], other[1], namespace=other[0])
                self.known[other] = self.marked[key]

        @rule(name=st.sampled_from(KEYS), other=st.sampled_from(KEYS), state=st.booleans())
        def move(self, name: Key, other: Key, state: bool) -> None:
            """Out into a file, and in under another name."""
            if "upkeep" in extensions() and name in self.known and other not in self.known:
                path = self.session(name).export(self.base / "moved", state=state)
                result = self.talk.rt.sessions.import_(path, other[1], namespace=other[0])
                assert "tokens" not in result.left_out
                self.known[other] = self.known[name]

        @rule(name=st.sampled_from(KEYS))
        def delete(self, name: Key) -> None:
            if name in self.known and len(self.known) > 1:
                self.stale.append(self.session(name))
                self.stale[-1].delete()
                del self.known[name]

        @rule(name=st.sampled_from(KEYS), text=st.sampled_from(TEXTS))
        def replace(self, name: Key, text: str) -> None:
            """Deleted, and made anew under the same name."""
            if name in self.known:
                self.stale.append(self.session(name))
                self.stale[-1].delete()
                self.known[name] = []
                reply = self.talk.say(self.session(name), text, max_tokens=4)
                self.told(name, [], text, reply)

        @precondition(lambda self: self.stale)
        @rule(which=st.integers(0, 20), how=st.sampled_from(STALE))
        def use_what_is_gone(self, which: int, how: Callable[[Session], object]) -> None:
            """I5: the handle of a session that was deleted reaches nothing."""
            try:
                how(self.stale[which % len(self.stale)])
            except SessionNotFoundError:
                self.check()
            else:
                raise AssertionError("a handle of something deleted was of use")

        @rule(which=st.integers(0, 1 << 20), where=st.integers(0, 1 << 20))
        def damage(self, which: int, where: int) -> None:
            """A block on the disk is not what it was."""
            self.settle()
            files = sorted(path for path in (self.folder / "blocks").rglob("*") if path.is_file())
            if files:
                path = files[which % len(files)]
                content = bytearray(path.read_bytes())
                if content:
                    self.harmed = True
                    content[where % len(content)] ^= 0x40
                    path.write_bytes(content)

    return Life
