"""Events: what happens is told to whoever asked, in order, and no reply waits for whoever listens."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import threading
from collections.abc import Sequence

import numpy as np
import pytest

import perdure
from ext.workers.engines import isolated
from perdure import InvalidInputError, Runtime
from perdure.backend import LocalBackend
from perdure.decode.step_events import HELD
from perdure.engine import row_kernels
from perdure.engine.contract import Floats
from perdure.engine.row_kernels import measures
from perdure.engine_config import EngineConfig
from perdure.events.event import (
    KINDS,
    BlocksLoaded,
    BlocksStored,
    CachePressure,
    ChunkRead,
    Ended,
    Event,
    Masked,
    MemoryPressure,
    Placed,
    Queued,
    Restarted,
    Slept,
    Swapped,
    TokenDrawn,
    Woken,
    event_of,
)
from perdure.events.hub import EventHub
from perdure.events.subscription import Subscription
from perdure.testing.toy import ToyModel


def toy(**settings: object) -> Runtime:
    return Runtime(LocalBackend(ToyModel(), EngineConfig(n_ctx=256, slots=1, **settings)))  # type: ignore[arg-type]


def test_a_request_is_told_from_its_queue_to_its_end() -> None:
    with toy() as rt, rt.events() as events:
        reply = rt.generate("hello", max_tokens=8, temperature=0.9, seed=3, logprobs=3, ignore_eos=True)
        told = events.poll()
    kinds = [event.kind for event in told if event.kind not in ("BlocksStored", "Swapped")]
    assert kinds == ["Queued", "Placed", "ChunkRead", *["TokenDrawn"] * 8, "Ended"]
    assert len({event.request for event in told}) == 1
    assert [event.time for event in told] == sorted(event.time for event in told)
    drawn = [event for event in told if isinstance(event, TokenDrawn)]
    assert tuple(event.token for event in drawn) == reply.tokens
    assert [event.position for event in drawn] == list(range(5, 13))
    assert reply.logprobs is not None
    for event, known in zip(drawn, reply.logprobs, strict=True):
        assert event.surprisal == pytest.approx(-known.logprob, abs=1e-5)
        assert event.probability == pytest.approx(math.exp(known.logprob), rel=1e-5)
        assert [each.token for each in event.alternatives[:3]] == [each.token for each in known.top]
        assert event.rank == 1 or event.token != event.alternatives[0].token
        assert event.entropy > 0
    end = told[-1]
    assert isinstance(end, Ended)
    assert end.last
    assert end.completion_tokens == 8
    assert end.error is None
    queued, placed = told[0], told[1]
    assert isinstance(queued, Queued)
    assert queued.prompt_tokens == 5
    assert isinstance(placed, Placed)
    assert placed.computed == reply.reuse.computed


def test_off_costs_no_measure_and_on_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    drawn = measures.Measures.drawn

    def counting(self: measures.Measures, rows: Floats, tokens: Sequence[int]) -> None:
        measured.extend(tokens)
        drawn(self, rows, tokens)

    monkeypatch.setattr(measures.Measures, "drawn", counting)
    with toy() as rt:
        plain = rt.generate("hello", max_tokens=6, seed=1, ignore_eos=True)
        assert not measured
        assert not rt.backend.events.on
        with rt.events():
            watched = rt.generate("hello", max_tokens=6, seed=1, ignore_eos=True)
        assert len(measured) == 6
        assert rt.generate("hello", max_tokens=6, seed=1, ignore_eos=True).tokens == plain.tokens
        with rt.events(["Queued", "Ended"]):
            rt.generate("hello", max_tokens=6, seed=1, ignore_eos=True)
        assert len(measured) == 6
    assert watched.tokens == plain.tokens


def test_a_request_has_observers_of_its_own_and_others_are_not_told() -> None:
    told: list[Event] = []
    ended = threading.Event()

    def observe(event: Event) -> None:
        told.append(event)
        if isinstance(event, Ended):
            ended.set()

    with toy() as rt:
        rt.generate("other", max_tokens=3)
        rt.generate("mine", max_tokens=3, observe=observe, ignore_eos=True)
        rt.generate("other", max_tokens=3)
        assert ended.wait(30)
        assert not rt.backend.events.on
    assert len({event.request for event in told}) == 1
    assert sum(isinstance(event, TokenDrawn) for event in told) == 3


def test_tokens_of_several_samples_are_told_each_with_its_own_row() -> None:
    """Tokens are held back for a few steps, and told in order before anything else is."""
    with Runtime(LocalBackend(ToyModel(), EngineConfig(n_ctx=256, slots=3))) as rt, rt.events() as events:
        stream = rt.submit("hello", max_tokens=20, temperature=1.5, seed=4, n=3, logprobs=1, ignore_eos=True)
        replies = stream.replies()
        told = events.poll()
    assert [event.time for event in told] == sorted(event.time for event in told)
    for index, sample in enumerate(replies):
        drawn = [event for event in told if isinstance(event, TokenDrawn) and event.index == index]
        assert tuple(event.token for event in drawn) == sample.tokens
        assert [event.position for event in drawn] == list(range(5, 25))
        assert sample.logprobs is not None
        assert [event.surprisal for event in drawn] == pytest.approx(
            [-known.logprob for known in sample.logprobs], abs=1e-5
        )


def test_tokens_are_told_while_a_reply_is_written() -> None:
    with toy() as rt, rt.events(["TokenDrawn"]) as events:
        stream = rt.submit("hello", max_tokens=100, seed=1, ignore_eos=True)
        seen = 0
        for count, _ in enumerate(stream, 1):
            seen += len(events.poll())
            if count == 60:
                break
        # The first comes at once; later ones wait for a few others.
        assert seen >= 60 - 2 * HELD
        stream.cancel()


def test_an_observer_that_fails_or_hangs_breaks_no_reply() -> None:
    go = threading.Event()

    def hang(event: Event) -> None:
        go.wait(60)

    def fail(event: Event) -> None:
        raise RuntimeError("no")

    with toy() as rt:
        before = rt.generate("hello", max_tokens=40, seed=2, ignore_eos=True)
        hung = rt.observe(hang, limit=10)
        rt.observe(fail)
        after = rt.generate("hello", max_tokens=40, seed=2, observe=fail, ignore_eos=True)
        assert after.tokens == before.tokens
        assert hung.dropped > 20
        go.set()


def test_more_than_the_limit_are_dropped_and_counted() -> None:
    subscription = Subscription(limit=3)
    for _ in range(5):
        subscription.push(("Queued", 0.0, "a", 1, 1, ""))
    assert len(subscription.poll()) == 3
    assert subscription.dropped == 2
    subscription.push(("Queued", 0.0, "a", 1, 1, ""))
    assert len(subscription.poll()) == 1


def test_only_the_kinds_that_were_asked_for_come() -> None:
    with toy() as rt:
        with rt.events(["TokenDrawn"]) as events:
            rt.generate("hello", max_tokens=2, ignore_eos=True)
            assert [event.kind for event in events.poll()] == ["TokenDrawn"] * 2
        with pytest.raises(InvalidInputError, match="no event 'Tokens'; there are Queued"):
            rt.events(["Tokens"])
        with pytest.raises(InvalidInputError, match="observe is a function"):
            rt.generate("a", observe=3)  # type: ignore[arg-type]


def test_a_grammar_tells_how_many_tokens_it_allows() -> None:
    with toy() as rt, rt.events(["Masked"]) as events:
        rt.generate("hello", max_tokens=4, regex="[ab]{4}", temperature=0)
        told = events.poll()
    assert [event.allowed for event in told if isinstance(event, Masked)] == [2] * 4


def test_swaps_sleep_and_wake_are_told(tmp_path: object) -> None:
    with toy() as rt, rt.events() as events:
        rt.generate("a long prompt " * 6, max_tokens=2, ignore_eos=True)
        rt.generate("another long prompt " * 5, max_tokens=2, ignore_eos=True)
        rt.generate("a long prompt " * 6, max_tokens=2, ignore_eos=True)
        tokens = rt.model.tokenize("a long prompt " * 6)
        rt.cache.sleep(tokens)
        rt.cache.wake(tokens)
        told = events.poll()
    found = {type(event) for event in told}
    assert {BlocksStored, BlocksLoaded, Swapped, Slept, Woken} <= found
    loaded = next(event for event in told if isinstance(event, BlocksLoaded))
    assert loaded.tiers["memory"] > 0
    assert loaded.seconds["memory"] > 0
    assert loaded.nbytes > 0
    assert {event.direction for event in told if isinstance(event, Swapped)} == {"in", "out"}
    woken = next(event for event in told if isinstance(event, Woken))
    assert sum(woken.tiers.values()) > 0


def test_short_memory_and_a_full_cache_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.system.available_memory", lambda: 1 << 20)
    with toy(cache=4096) as rt, rt.events(["CachePressure", "MemoryPressure"]) as events:
        for number in range(12):
            rt.generate(f"{number} is a separate prompt " * 4, max_tokens=2, ignore_eos=True)
        told = events.poll()
    short = next(event for event in told if isinstance(event, MemoryPressure))
    assert short.available == 1 << 20
    assert short.total > 16 << 20
    full = next(event for event in told if isinstance(event, CachePressure))
    assert full.tier == "memory"
    assert full.evicted > 0
    assert full.nbytes <= full.budget == 4096


@pytest.mark.extension("workers")
def test_events_cross_the_worker_in_order() -> None:
    with isolated("full") as rt:
        own: list[Event] = []
        ended = threading.Event()

        def observe(event: Event) -> None:
            own.append(event)
            if isinstance(event, Ended):
                ended.set()

        with rt.events() as events:
            reply = rt.generate("hello", max_tokens=5, seed=3, observe=observe, ignore_eos=True)
            assert ended.wait(30)
            told = events.poll()
        drawn = [event for event in own if isinstance(event, TokenDrawn)]
        assert tuple(event.token for event in drawn) == reply.tokens
        assert [event for event in told if event.request] == own
        assert [type(own[0]), type(own[1])] == [Queued, Placed]
        assert any(isinstance(event, ChunkRead) for event in own)


@pytest.mark.extension("workers")
def test_a_death_and_the_new_start_are_told() -> None:
    import os
    import signal

    with isolated("full") as rt, rt.events(["Restarted", "Ended"]) as events:
        pid = rt.backend.health().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        rt.generate("hello", max_tokens=2, ignore_eos=True)
        told: list[Event] = []
        while not any(isinstance(event, Ended) for event in told):
            assert events.wait(30)
            told += events.poll()
    assert isinstance(told[0], Restarted)
    assert told[0].restarts == 1


def test_every_kind_survives_its_way_as_a_tuple_and_as_json() -> None:
    hub = EventHub()
    with hub.subscribe() as events:
        for kind in KINDS.values():
            fields = [each.name for each in dataclasses.fields(kind)][2:]
            values: list[object] = [
                () if name == "alternatives" else {} if name == "tiers" else 1 for name in fields
            ]
            hub.emit(kind, "r", *values)
        told = events.poll()
    assert [type(event) for event in told] == list(KINDS.values())
    for event in told:
        assert json.loads(json.dumps(event.to_dict()))["kind"] == event.kind
        with pytest.raises(dataclasses.FrozenInstanceError):
            event.time = 1.0  # type: ignore[misc]
    plain = ("TokenDrawn", 1.0, "r", 0, 3, 7, "x", 0.5, 1.0, 0.7, 1, ((7, "x", 0.5),))
    assert event_of(plain).alternatives[0].text == "x"  # type: ignore[attr-defined]


def measured(row: Floats, token: int, k: int) -> measures.Measure:
    """The same in NumPy."""
    ids, values = row_kernels.top_k(row[None], k)
    below = row.astype(np.float64) - float(values[0, 0])
    weights = np.exp(below)
    total = float(weights.sum())
    moment = float(np.sum(weights * np.where(weights > 0, below, 0.0)))
    norm = math.log(total)
    return measures.Measure(
        token,
        float(below[token]) - norm,
        max(0.0, norm - moment / total),
        int(np.count_nonzero(row > row[token])) + 1,
        ids[0].tolist(),
        np.exp(values[0].astype(np.float64) - float(values[0, 0]) - norm).tolist(),
    )


@pytest.mark.parametrize("size", [1, 5, 15, 16, 127, 128, 129, 2047, 2049, 49152])
def test_what_is_told_of_a_token_equals_numpy(size: int) -> None:
    rng = np.random.default_rng(size)
    row = (rng.standard_normal(size) * 5).astype(np.float32)
    if size > 3:
        row[size // 2] = -np.inf
    token = int(rng.integers(size))
    if row[token] == -np.inf:
        token = 0
    here, there = measures.measure(row, token, 5), measured(row, token, min(5, size))
    assert here.rank == there.rank
    assert here.ids == there.ids
    assert here.logprob == pytest.approx(there.logprob, abs=1e-5)
    assert here.entropy == pytest.approx(there.entropy, abs=1e-5)
    assert here.probabilities == pytest.approx(there.probabilities, abs=1e-5)


@pytest.mark.parametrize("spread", [0.1, 3.0, 60.0])
def test_rows_are_measured_together_as_each_alone(spread: float) -> None:
    """Also tokens so far down that the sums have to begin again, and one that is ruled out."""
    rng = np.random.default_rng(5)
    # So large that other threads help.
    rows = (rng.standard_normal((9, 33_001)) * spread).astype(np.float32)
    rows[3, 17] = -np.inf
    tokens = [int(row.argmin() if at % 2 else row.argmax()) for at, row in enumerate(rows)]
    together = measures.Measures(rows, 5)
    together.drawn(rows, tokens)
    for at in range(len(rows)):
        here, there = together[at], measured(rows[at], tokens[at], 5)
        assert here.rank == there.rank
        assert here.ids == there.ids
        assert here.logprob == pytest.approx(there.logprob, abs=1e-4)
        assert here.entropy == pytest.approx(there.entropy, abs=1e-4)
        assert here.probabilities == pytest.approx(there.probabilities, abs=1e-5)
    assert tokens[3] == 17


def test_what_is_told_is_read_when_everything_is_closed() -> None:
    with toy() as rt:
        events = rt.events(["TokenDrawn"])
        reply = rt.generate("hello", max_tokens=4, ignore_eos=True)
    told = events.poll()
    assert tuple(event.token for event in told if isinstance(event, TokenDrawn)) == reply.tokens


def test_what_is_no_number_is_refused() -> None:
    row = np.zeros(300, np.float32)
    for strange in (np.nan, np.inf):
        for place in (7, 299):
            row[:] = 0
            row[place] = strange
            for token in (0, place):
                with pytest.raises(perdure.EngineError):
                    measures.measure(row, token, 5)
    with pytest.raises(perdure.EngineError):
        measures.measure(np.full(300, -np.inf, np.float32), 0, 5)


def test_tokens_that_were_guessed_ahead_are_told_with_their_own_rows() -> None:
    with toy() as rt, rt.events(["TokenDrawn"]) as events:
        ask = {"max_tokens": 24, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
        plain = rt.generate("abcd" * 12, speculate=0, **ask)  # type: ignore[arg-type]
        first = [dataclasses.replace(event, time=0.0, request="") for event in events.poll()]
        # What was written before is what is guessed now.
        again = rt.generate("abcd" * 12, speculate=8, **ask)  # type: ignore[arg-type]
        second = [dataclasses.replace(event, time=0.0, request="") for event in events.poll()]
    assert again.tokens == plain.tokens
    assert first == second


def test_tokens_are_told_in_order_while_others_come_and_go() -> None:
    """Whoever comes or goes has what was held back told, in a separate thread."""
    interval, over = sys.getswitchinterval(), threading.Event()
    with toy() as rt, rt.events(limit=100_000) as events:

        def come_and_go() -> None:
            while not over.is_set():
                rt.events(["Ended"]).close()

        others = [threading.Thread(target=come_and_go) for _ in range(2)]
        try:
            sys.setswitchinterval(1e-6)
            for other in others:
                other.start()
            lengths = [len(rt.generate("hello", max_tokens=40, ignore_eos=True).tokens) for _ in range(20)]
        finally:
            over.set()
            sys.setswitchinterval(interval)
            for other in others:
                other.join()
        told = events.poll()
    by_request: dict[str, list[Event]] = {}
    for event in told:
        if isinstance(event, (TokenDrawn, Ended)):
            by_request.setdefault(event.request, []).append(event)
    assert len(by_request) == len(lengths)
    for length, mine in zip(lengths, by_request.values(), strict=True):
        positions = [event.position for event in mine[:-1] if isinstance(event, TokenDrawn)]
        assert positions == list(range(5, 5 + length))
        assert isinstance(mine[-1], Ended)
