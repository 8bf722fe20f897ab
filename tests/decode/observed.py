"""A runtime on the toy engine that a test can hold, count, fault, and check from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import perdure
from inside import core_of, inside
from perdure import Delta, Reply, Runtime, Stream
from perdure.decode.sequence import SlotAssignment
from perdure.decode.stops import TextStream
from perdure.memory import FullAttention, MemorySpec
from perdure.testing.toy import Faults, Gate, ToyCore, ToyModel
from perdure.testing.toy.core import Trouble


class Turnstile(Gate):
    """Lets as many tokens through as it was told to, then holds the engine in the middle of a step."""

    def __init__(self, *, is_open: bool = False) -> None:
        super().__init__()
        self._open = is_open
        self._permits = 0

    def admit(self, tokens: int) -> None:
        with self._change:
            self._permits += tokens
            self.reached.clear()
            self._change.notify_all()

    def pass_through(self, tokens: int) -> None:
        """Let `tokens` more be computed; returns with the engine held before the next."""
        self.reached.wait()
        self.admit(tokens)
        self.reached.wait()

    def wait(self, stop: threading.Event) -> None:
        with self._change:
            if not self._open and not self._permits:
                self.reached.set()
                self._change.wait_for(lambda: self._open or self._permits or stop.is_set())
            if self._permits and not self._open:
                self._permits -= 1


class Clock:
    """Stands in for the module `time` in the engine loop: it moves when it is told to. It starts now, since
    grammars are compiled by the real one."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now


def toy(
    kind: type[MemorySpec] = FullAttention, *, gate: Gate | None = None, faults: Faults | None = None
) -> ToyModel:
    return ToyModel(kind, faults=faults or Faults(gate=gate))


def open_toy(
    kind: type[MemorySpec] = FullAttention,
    *,
    gate: Gate | None = None,
    faults: Faults | None = None,
    **settings: Any,
) -> Runtime:
    return perdure.open(
        toy(kind, gate=gate, faults=faults), **{"n_ctx": 256, "slots": 2, "stall": 0, **settings}
    )


def core(rt: Runtime) -> ToyCore:
    found = core_of(inside(rt).context)
    assert isinstance(found, ToyCore)
    return found


def trouble(rt: Runtime) -> Trouble:
    return core(rt).faults


# Reading what comes.


@dataclass
class Seen:
    """All that a consumer got of a request."""

    deltas: list[Delta] = field(default_factory=list)
    error: Exception | None = None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def reasons(self) -> list[str]:
        return [delta.finish_reason for delta in self.deltas if delta.finish_reason is not None]


def read(job: Stream[Any, Any]) -> Seen:
    """Everything to the end, and the error where there is one."""
    seen = Seen()
    try:
        for delta in job:
            seen.deltas.append(delta)
    except Exception as error:
        seen.error = error
    return seen


def outcome(job: Stream[Any, Any]) -> list[Reply]:
    """All samples, also where one has an error."""
    job.output.wait(finish=True)
    return job.output.replies


# Invariants.


def check_delivery(
    deltas: Sequence[Delta], replies: Sequence[Reply], model: Any, stops: Sequence[str] = ()
) -> None:
    """No token lost or doubled, one reason each, and the text is that of the tokens."""
    assert [reply.index for reply in replies] == list(range(len(replies)))
    for reply in replies:
        mine = [delta for delta in deltas if delta.index == reply.index]
        assert "".join(delta.text for delta in mine) == reply.text
        assert tuple(token for delta in mine for token in delta.tokens) == reply.tokens
        assert [delta.finish_reason for delta in mine if delta.finish_reason] == [reply.finish_reason]
        assert mine[-1].finish_reason == reply.finish_reason
        assert reply.usage.completion_tokens == len(reply.tokens)
        assert (reply.error is not None) == (reply.finish_reason == "error")
        text = TextStream(stops)
        said = "".join([text.push(model.piece(token)) for token in reply.tokens])
        assert said + text.finish() == reply.text
        assert text.stopped == reply.stop


def check_idle(rt: Runtime) -> None:
    """Nobody is served, every sequence can be had again, and the ledger says what the engine holds."""
    assert rt.load == (0, 0)
    slots = inside(rt).engine_loop.slots

    def take_all() -> list[int]:
        taken: list[int] = []
        for _ in range(rt.slots):
            slot = slots.acquire(np.empty(0, np.int32), reuse=False)
            assert isinstance(slot, SlotAssignment), f"only {len(taken)} of {rt.slots} slots are free"
            taken.append(slot.seq)
        assert slots.acquire(np.empty(0, np.int32), reuse=False) is None
        for seq in taken:
            slots.release(seq)
        return taken

    check_ledger(rt)
    assert sorted(inside(rt).engine_loop.call(take_all)) == list(range(rt.slots))


def check_ledger(rt: Runtime) -> None:
    """B6: what the ledger says is what the engine holds, on the toy engine cell by cell."""
    native = core_of(inside(rt).context)
    for seq in range(rt.slots):
        tokens = inside(rt).context.tokens(seq)
        assert native.newest(seq) == len(tokens) - 1
        if isinstance(native, ToyCore) and (held := native.tokens(seq)) is not None:
            assert held == tokens


def alone(kind: type[MemorySpec], prompt: str | Sequence[int], **request: Any) -> list[Reply]:
    """What a fresh engine that keeps nothing answers to this request and no other."""
    with open_toy(kind, slots=1, cache=0) as rt:
        return rt.submit(prompt, **request).replies()
