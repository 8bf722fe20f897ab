"""Runtimes whose sessions are checked: every row of every reply against a fresh context."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import perdure
from perdure import ChatReply, LogitsView, Runtime, Session
from perdure.testing.toy import Faults, ToyModel
from subjects import NARROW, Noise, Row, Subject, check

SETTINGS: dict[str, Any] = {"n_ctx": 512, "n_batch": NARROW, "threads": 1, "slots": 2}
ASK: dict[str, Any] = {"max_tokens": 6, "temperature": 0}


class TerseModel(ToyModel):
    """A toy that comes to an end soon, as models that were taught to answer do."""

    def __init__(self, *, ending: float = 1.0, faults: Faults | None = None) -> None:
        super().__init__(seed=int(10 * ending), faults=faults)
        assert self.eos is not None
        self._bias[self.eos] = ending


def terse(**options: Any) -> Subject:
    return Subject("toy-full", TerseModel(**options), Noise(0.0, 0.0))


class Hold:
    """Holds the engine when a reply has come to its `at`-th token, until it is let go."""

    def __init__(self, at: int = 1) -> None:
        self.reached, self._go_on = threading.Event(), threading.Event()
        self._left = at

    def __call__(self, _: Sequence[int], view: LogitsView) -> NDArray[np.float32]:
        self._left -= 1
        if not self._left:
            self.reached.set()
            self._go_on.wait()
        return view.copy()

    def release(self) -> None:
        self._go_on.set()


@contextmanager
def talking(subject: Subject, store: Path | None = None, **settings: Any) -> Iterator[Talk]:
    wanted = {**SETTINGS, **subject.narrow.settings, **settings}
    with perdure.open(subject.model, store=store, **wanted) as rt:
        yield Talk(subject, rt, wanted["n_ctx"])


class Talk:
    """A runtime with a store. What its sessions answer is checked: warm equals cold."""

    def __init__(self, subject: Subject, rt: Runtime, n_ctx: int) -> None:
        self.subject = subject
        self.rt = rt
        self._n_ctx = n_ctx

    def session(self, name: str, **settings: Any) -> Session:
        return self.rt.session(name, **settings)

    def say(self, session: Session, text: str, **settings: Any) -> ChatReply:
        return self.checked(
            lambda record: session.say(text, processors=(record,), **{**ASK, **settings}), session
        )

    def checked(self, ask: Callable[[Any], ChatReply], session: Session) -> ChatReply:
        rows: list[Row] = []

        def record(_: Sequence[int], view: LogitsView) -> NDArray[np.float32]:
            rows.append(view.copy())
            return view.copy()

        reply = ask(record)
        read = session.tokens[: reply.usage.prompt_tokens]
        assert len(read) == reply.usage.prompt_tokens, "the session does not hold what was read for it"
        narrow = self.subject.narrow
        with self.subject.context(n_seq=1, n_ctx=self._n_ctx, n_batch=NARROW, **narrow.settings) as ctx:
            ctx.decode(list(read))
            for number, warm in enumerate(rows):
                check(warm, ctx.logits().copy(), narrow.bound)
                if number + 1 < len(rows):
                    # The last token of a reply that fills the context has no place in it.
                    ctx.decode([reply.tokens[number]])
        return reply


def said(session: Session) -> list[tuple[str | None, str]]:
    """The conversation, as what was asked and what was answered."""
    return [(turn.messages[-1].content, turn.text) for turn in session.history()]
