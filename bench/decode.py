"""The decode loop: what it adds to the bare library's loop, and what it saves against llama-cpp-python."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.child import Child
from bench.engine import model_path
from bench.harness import Bench, Figure, Gauge, Measure, Pairs, Run, at_least, at_most, tokens_a_second
from bench.machine import Watch
from bench.processes import headers

THREADS = 2
TOP = 20
BIASED = 100
# What is timed does not depend on what the tokens say.
PROMPT = list(range(1000, 1032))
LONG = [(7919 * index) % 49_000 for index in range(2000)]


class Side:
    """A writer in a process of its own."""

    def __init__(self, held: ExitStack, kind: str, **settings: Any) -> None:
        self._child = held.enter_context(Child("bench.processes.streams", kind))
        self._settings = settings
        self._writers: dict[tuple[tuple[str, Any], ...], int] = {}

    def _writer(self, **settings: Any) -> int:
        key = tuple(sorted(settings.items()))
        if key not in self._writers:
            opened = {"path": model_path(), "threads": THREADS, **self._settings, **settings}
            self._writers[key] = self._child.ask("open", **opened)
        return self._writers[key]

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        *,
        n_ctx: int = 512,
        exact: bool = False,
        **more: Any,
    ) -> Any:
        settings = {"streams": len(prompts), "n_ctx": n_ctx} | ({"exact": True} if exact else {})
        number = self._writer(**settings)
        return self._child.ask("write", number=number, prompts=prompts, count=count, **more)

    def interrupt(self, long: Sequence[int]) -> list[float]:
        number = self._writer(streams=2, n_ctx=len(long) + 512)
        gaps: list[float] = self._child.ask("interrupt", number=number, prompt=PROMPT, long=long)
        return gaps


def one(run: Run) -> Iterator[Figure]:
    count = run.pick(64, 24)
    with ExitStack() as held:
        ours, bare = Side(held, "ours"), Side(held, "bare")
        _agree(ours, bare, count)
        yield run.compare(
            f"(a) one stream, {count} tokens",
            ours=lambda: _rate(ours.write([PROMPT], count)),
            peer=lambda: _rate(bare.write([PROMPT], count)),
            against="a bare llama_decode and sampler loop",
            unit="tok/s",
            gauge=Gauge.RATE,
            target=at_least(1.0),
            repeats=run.pick(31, 9),
        )


def many(run: Run) -> Iterator[Figure]:
    count = run.pick(64, 10)
    for streams in (4, 8):
        prompts = _prompts(streams)
        # A process each: a second engine thread in one would cost the first its speed.
        with ExitStack() as held:
            ours, bare = Side(held, "ours"), Side(held, "bare")
            for side in (ours, bare):
                side.write(prompts, 8)
            yield run.compare(
                f"(b) {streams} streams, {count} tokens each",
                ours=lambda prompts=prompts, ours=ours: _rate(ours.write(prompts, count)),  # type: ignore[misc]
                peer=lambda prompts=prompts, bare=bare: _rate(bare.write(prompts, count)),  # type: ignore[misc]
                against="a bare batched loop",
                unit="tok/s",
                gauge=Gauge.RATE,
                target=at_least(1.0),
                repeats=run.pick(15, 3),
            )


def length(run: Run) -> Iterator[Figure]:
    """What a token costs late in a reply against early in it, less what the bare loop's costs grow by."""
    near, far, window = 50, run.pick(2000, 200), 32
    kinds = ("ours", "bare", "llama-cpp-python")
    with ExitStack() as held:
        sides = {kind: Side(held, kind) for kind in kinds}
        costs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        with Watch() as watch:
            for _ in range(run.pick(3, 1)):
                for kind, side in sides.items():
                    times = side.write([PROMPT], far + window, n_ctx=far + 256)["times"][0]
                    steps = np.diff(times) * 1e3
                    costs[kind].append((_around(steps, near, window), _around(steps, far, window)))
        grown = [late - early for early, late in costs["bare"]]
        for kind, target in (("ours", at_most(1.03)), ("llama-cpp-python", at_least(0))):
            early = tuple(early for early, _ in costs[kind])
            late = tuple(late - more for (_, late), more in zip(costs[kind], grown, strict=True))
            yield Figure(
                name=f"(c) a token at reply length {far:,}, less attention's growth, {kind}",
                against=f"at {near}",
                unit="ms",
                gauge=Gauge.GROWTH,
                pairs=Pairs(late, early),
                target=target,
                machine=watch.machine,
            )


def _around(steps: Any, at: int, window: int) -> float:
    return float(np.median(steps[at - window : at + window]))


def logprobs(run: Run) -> Iterator[Figure]:
    """The work on one row: the likeliest tokens and the chance of the one drawn."""
    from llama_cpp import Llama

    from perdure import Model

    with tempfile.TemporaryDirectory() as folder, Model(headers.wide_model(Path(folder))) as model:
        context = model.context(n_ctx=256, n_batch=64, threads=THREADS)

        def ours() -> float:
            context.clear()
            # Each row is new: a view remembers its norm.
            context.decode(list(range(16)), rows="all")
            started = time.perf_counter()
            for row in range(16):
                view = context.logits(row)
                view.log_norm()
                view.top(TOP)
                float(view[7])
            return (time.perf_counter() - started) / 16 * 1e3

        context.decode([1])
        logits = context.logits().copy()

        def peer() -> float:
            started = time.perf_counter()
            chances = Llama.logits_to_logprobs(logits).tolist()
            ordered = list(sorted(zip(chances, range(len(chances)), strict=False), reverse=True))  # noqa: C413
            top = {str(token): chance for chance, token in ordered[:TOP]}
            top.update({"7": chances[7]})
            return (time.perf_counter() - started) * 1e3

        yield run.compare(
            f"(d) log probabilities, top {TOP} of {context.n_vocab:,}, a token",
            ours=ours,
            peer=peer,
            against="llama-cpp-python's way",
            unit="ms",
            gauge=Gauge.COST,
            target=at_least(50),
            repeats=run.pick(15, 3),
        )
        context.close()


def bias(run: Run) -> Iterator[Figure]:
    given = {str(token): 0.5 for token in range(2000, 2000 + BIASED)}
    count = run.pick(32, 16)
    with ExitStack() as held:
        side = Side(held, "ours")
        yield run.compare(
            f"(e) a step with a bias on {BIASED} tokens",
            ours=_step(lambda: side.write([PROMPT], count, bias=given)),
            peer=_step(lambda: side.write([PROMPT], count)),
            against="without",
            unit="ms",
            gauge=Gauge.GROWTH,
            target=at_most(1.02),
            repeats=run.pick(61, 15),
        )


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 5, "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "notes": {"type": "array", "minItems": 50, "items": {"type": "string", "maxLength": 60}},
    },
    "required": ["name", "age", "notes"],
    "additionalProperties": False,
}


def schema(run: Run) -> Iterator[Figure]:
    count = run.pick(64, 24)
    with ExitStack() as held:
        side = Side(held, "ours")
        side.write([PROMPT], 4, schema=SCHEMA)
        yield run.compare(
            "(f) a step with a JSON schema",
            ours=_step(lambda: side.write([PROMPT], count, schema=SCHEMA)),
            peer=_step(lambda: side.write([PROMPT], count)),
            against="without",
            unit="ms",
            gauge=Gauge.GROWTH,
            target=at_most(1.10),
            repeats=run.pick(31, 7),
        )


def gap(run: Run) -> Iterator[Figure]:
    long = LONG[: run.pick(2000, 256)]
    with ExitStack() as held:
        ours, bare = Side(held, "ours"), Side(held, "bare")
        for side in (ours, bare):
            side.interrupt(long[:64])
        yield run.compare(
            f"(g) worst gap in a reply while a prompt of {len(long):,} tokens arrives",
            ours=lambda: max(ours.interrupt(long)) * 1e3,
            peer=lambda: max(bare.interrupt(long)) * 1e3,
            against="one chunk, bare",
            unit="ms",
            gauge=Gauge.GROWTH,
            target=at_most(1.5),
            repeats=run.pick(3, 1),
        )


def exact(run: Run) -> Iterator[Figure]:
    # The prompts are read one after the other: shorter replies would hardly be written at the same time.
    count = run.pick(48, 32)
    for streams in (1, 4, 8):
        prompts = _prompts(streams)
        with ExitStack() as held:
            ours, peer = Side(held, "ours"), Side(held, "ours")
            ours.write(prompts, 8, exact=True)
            peer.write(prompts, 8)
            yield run.compare(
                f"(h) exact mode, {streams} stream{'s' if streams > 1 else ''}",
                ours=lambda prompts=prompts, side=ours: _rate(side.write(prompts, count, exact=True)),  # type: ignore[misc]
                peer=lambda prompts=prompts, side=peer: _rate(side.write(prompts, count)),  # type: ignore[misc]
                against="the default",
                unit="tok/s",
                gauge=Gauge.RATE,
                # What it costs is reported, not promised; alone it must cost nothing.
                target=at_least(0.98 if streams == 1 else 0),
                repeats=run.pick(9, 3),
            )


main = Bench("decode", (one, many, length, logprobs, bias, schema, gap, exact))


def _prompts(streams: int) -> list[list[int]]:
    return [list(range(1000 + 100 * index, 1008 + 100 * index)) for index in range(streams)]


def _rate(written: Any) -> float:
    return tokens_a_second(written["times"])


def _step(write: Callable[[], Any]) -> Measure:
    """The time of a step in ms: the median, so that a hiccup of the machine counts once."""
    return lambda: statistics.median(np.diff(write()["times"][0]).tolist()) * 1e3


def _agree(ours: Side, peer: Side, count: int) -> None:
    """Two loops must write as many tokens; this also warms them up."""
    drawn = [len(side.write([PROMPT], count)["times"][0]) for side in (ours, peer)]
    if drawn[0] != drawn[1]:
        raise RuntimeError(f"the loops do not do the same work: {drawn[0]} and {drawn[1]} tokens")


if __name__ == "__main__":
    sys.exit(main())
