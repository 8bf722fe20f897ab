"""Random lives of a runtime on the toy engine, and what must hold through all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule

from decode.observed import Clock, Turnstile, alone, check_delivery, check_idle, open_toy, outcome, trouble
from inside import inside
from perdure import BusyError, ContextOverflow, Delta, EngineError, Reply, Runtime, Stream
from perdure.decode import engine_loop as module
from perdure.engine.contract import Outcome
from perdure.memory import MemorySpec

PROMPTS = [
    "a",
    "short one",
    "a prompt that is long enough to take several chunks " * 3,
    "a prompt that is long enough to take several chunks but goes on otherwise",
]
STOPS = ["", "e", "in", " t", "\n"]
CHUNK = 16
QUEUE = 4


@dataclass(eq=False)
class Asked:
    """A request, what its consumer did, and what it saw."""

    job: Stream[Any, Any] | None
    settings: dict[str, Any]
    seen: list[Delta] = field(default_factory=list)
    may_be_cancelled: bool = False
    deadline: float | None = None

    @property
    def key(self) -> str:
        return repr(sorted(self.settings.items()))


class Life(RuleBasedStateMachine):
    """Requests come, are read, slowly or not at all, are cancelled, run late, and meet faults.

    The engine is held in the middle of its steps, so that everything happens there too.
    """

    kind: type[MemorySpec]
    exact: bool
    known: dict[str, list[Reply]] = {}  # noqa: RUF012

    jobs: Bundle[Asked] = Bundle("jobs")

    @initialize(slots=st.integers(1, 3), cache=st.sampled_from([0, 1 << 16, 1 << 24]))
    def begin(self, slots: int, cache: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.clock = Clock()
        self.patch.setattr(module, "time", self.clock)
        self.gate = Turnstile()
        self.rt = open_toy(
            self.kind, gate=self.gate, slots=slots, exact=self.exact, queue=QUEUE, cache=cache, n_batch=32
        )
        inside(self.rt).engine_loop.pacer.chunk = CHUNK
        self.faults = 0
        self.asked: list[Asked] = []

    # What happens.

    @rule(
        target=jobs,
        prompt=st.sampled_from(PROMPTS),
        n=st.integers(1, 4),
        max_tokens=st.integers(1, 12),
        stop=st.sampled_from(STOPS),
        sampling=st.sampled_from(
            [
                {"temperature": 0, "seed": 0},
                {"seed": 1},
                {"seed": 5, "repeat_penalty": 1.3, "temperature": 1.5},
            ]
        ),
        extra=st.sampled_from([{}, {}, {"logprobs": 2}, {"prompt_logprobs": 0}, {"regex": "[a-z ]{0,9}"}]),
        timeout=st.sampled_from([None, None, 100.0, 300.0]),
    )
    def ask(
        self,
        prompt: str,
        n: int,
        max_tokens: int,
        stop: str,
        sampling: dict[str, Any],
        extra: dict[str, Any],
        timeout: float | None,
    ) -> Asked:
        settings: dict[str, Any] = {"prompt": prompt, "n": n, "max_tokens": max_tokens, "stop": stop or None}
        asked = Asked(None, {**settings, **sampling, **extra})
        refused: BusyError | None = None
        try:
            asked.job = self.rt.submit(**asked.settings, timeout=timeout)
        except BusyError as error:
            refused = error
        if refused is not None:
            # Counted when it was refused: the engine goes on meanwhile.
            assert refused.waiting >= refused.limit == QUEUE
            return asked
        asked.deadline = None if timeout is None else self.clock.now + timeout
        self.asked.append(asked)
        return asked

    @rule(tokens=st.integers(1, 60))
    def go_on(self, tokens: int) -> None:
        self.gate.admit(tokens)

    @rule(asked=jobs)
    def cancel(self, asked: Asked) -> None:
        if asked.job is not None:
            asked.may_be_cancelled = True
            asked.job.cancel()

    @rule(asked=consumes(jobs))
    def vanish(self, asked: Asked) -> None:
        """The consumer is gone, with all that it knew."""
        if asked.job is not None:
            self.asked.remove(asked)
            asked.job = None

    @rule(asked=jobs, count=st.integers(1, 5))
    def read_some(self, asked: Asked, count: int) -> None:
        """A slow consumer: it takes what is there, and waits for nothing."""
        if asked.job is not None:
            output = asked.job.output
            with output.lock:
                asked.seen += [output.deltas.popleft() for _ in range(min(count, len(output.deltas)))]

    @rule(seconds=st.sampled_from([50.0, 100.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(
        result=st.sampled_from([Outcome.FAILED, Outcome.ABORTED, Outcome.FULL, Outcome.REJECTED]),
        after=st.integers(0, 20),
        ahead=st.integers(1, 4),
    )
    def a_decode_will_fail(self, result: Outcome, after: int, ahead: int) -> None:
        self.faults += 1
        trouble(self.rt).fail_decode(result, after=after, ahead=ahead)

    @rule(ahead=st.integers(1, 6))
    def a_write_will_be_refused(self, ahead: int) -> None:
        self.faults += 1
        trouble(self.rt).refuse_write(ahead)

    @rule(by=st.sampled_from([-1, 1]), ahead=st.integers(1, 30))
    def a_position_will_be_wrong(self, by: int, ahead: int) -> None:
        self.faults += 1
        trouble(self.rt).lie(by, ahead)

    # What holds.

    def teardown(self) -> None:
        if not hasattr(self, "rt"):
            return
        try:
            self.gate.open()
            for asked in self.asked:
                self.check(asked)
            with _waited_for(self.rt):
                trouble(self.rt).forget()
                check_idle(self.rt)
            settings: dict[str, Any] = {"prompt": PROMPTS[2], "max_tokens": 5, "temperature": 0}
            reply = self.rt.submit(**settings).reply()
            assert reply.tokens == self.expected(Asked(None, settings))[0].tokens
        finally:
            self.rt.close()
            self.patch.undo()

    def check(self, asked: Asked) -> None:
        assert asked.job is not None
        replies = outcome(asked.job)
        asked.seen += asked.job.output.deltas
        stops = [asked.settings["stop"]] if asked.settings["stop"] else []
        check_delivery(asked.seen, replies, self.rt.model, stops)
        late = asked.deadline is not None and self.clock.now >= asked.deadline
        for reply, right in zip(replies, self.expected(asked), strict=True):
            match reply.finish_reason:
                case "cancelled":
                    assert asked.may_be_cancelled or late
                    assert reply.tokens == right.tokens[: len(reply.tokens)]
                case "error":
                    assert self.faults
                    assert isinstance(reply.error, (EngineError, ContextOverflow))
                    assert reply.tokens == right.tokens[: len(reply.tokens)]
                case _:
                    assert _content(reply) == _content(right)

    def expected(self, asked: Asked) -> list[Reply]:
        """What the same request gets alone, on a fresh engine that keeps nothing."""
        found = self.known.get(asked.key)
        if found is None:
            found = self.known[asked.key] = alone(self.kind, **asked.settings)
        return found


def _content(reply: Reply) -> Any:
    said = (reply.text, reply.tokens, reply.finish_reason, reply.stop, reply.end, reply.seed, reply.index)
    return said, reply.logprobs, reply.prompt_logprobs


@contextmanager
def _waited_for(rt: Runtime) -> Iterator[None]:
    """Requests whose consumers vanished end within a step: a call after that finds them gone."""
    while rt.load != (0, 0):
        inside(rt).engine_loop.call(lambda: None)
    yield


def life(kind: type[MemorySpec], *, exact: bool) -> type[Life]:
    name = f"{kind.name}_{'exact' if exact else 'default'}"
    return type(name, (Life,), {"kind": kind, "exact": exact, "known": {}})
