"""Sampling: rows of logits, drawn from by ours for all streams at once and by the library's chain in turn.

The library's chain is given what `llama_sampler_sample` gives it: all tokens, filled anew for each row.

`--only steps`: what everything around the engine takes of a step, with an engine that computes nothing and
only takes its time. A step of the small model of `bench.gpu` takes 5 ms on an H200 and one of 8B 12.5 ms.
Replies are read by one event loop in the same process.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator

import numpy as np

import perdure
from bench.harness import Bench, Figure, Gauge, Run, at_least
from bench.processes.library_sampler import LibrarySampler
from bench.processes.timed_engine import TimedModel, step_rate
from perdure import Sampling
from perdure.decode.sampling.sampler import CompiledChain, Sampler, draw_together

VOCABULARIES = (49_152, 128_256)
STREAMS = (1, 64)
_MODELS = (("small", 49_152, 0.005), ("8B", 128_256, 0.0125))


def rows(run: Run) -> Iterator[Figure]:
    for n_vocab in VOCABULARIES:
        for streams in STREAMS:
            yield _figure(run, n_vocab, streams)


def _figure(run: Run, n_vocab: int, streams: int) -> Figure:
    dice = np.random.default_rng(1)
    logits = dice.normal(0, 3, (streams, n_vocab)).astype(np.float32)
    samplings = [Sampling(seed=seed) for seed in range(streams)]
    mine = [(sampler, _rule(sampler)) for sampler in (Sampler(each, n_ctx=4096) for each in samplings)]
    theirs = [LibrarySampler(sampling, n_vocab=n_vocab, n_ctx=4096) for sampling in samplings]
    steps = max(1, 64 // streams)

    def ours() -> float:
        started = time.perf_counter()
        for step in range(steps):
            draw_together([(sampler, rule, step) for sampler, rule in mine], logits)
        return (time.perf_counter() - started) / steps / streams * 1e6

    def peer() -> float:
        started = time.perf_counter()
        for _ in range(steps):
            for each, row in zip(theirs, logits, strict=True):
                each.apply(row)
        return (time.perf_counter() - started) / steps / streams * 1e6

    return run.compare(
        f"a row of {n_vocab:,}, {streams} streams at once",
        ours=ours,
        peer=peer,
        against="the library's chain",
        unit="µs",
        gauge=Gauge.COST,
        target=at_least(3),
        repeats=run.pick(21, 5),
    )


def _rule(sampler: Sampler) -> CompiledChain:
    rule = CompiledChain.of(sampler)
    assert rule is not None, "the usual settings look at nothing but the largest of a row"
    return rule


def steps(run: Run) -> Iterator[Figure]:
    """The time of a step, against what the engine takes of it."""
    count = run.pick(96, 32)
    for name, n_vocab, seconds in _MODELS:
        for streams in run.pick((1, 16, 64), (1, 64)):
            with (
                TimedModel(n_vocab=n_vocab, seconds=seconds) as model,
                perdure.open(model, n_ctx=512, slots=streams, cache=0) as runtime,
            ):
                asyncio.run(step_rate(runtime, streams, 8))
                yield run.compare(
                    f"a step of {streams} streams over {n_vocab:,} tokens, as of {name}",
                    ours=lambda runtime=runtime, streams=streams: _step(runtime, streams, count),  # type: ignore[misc]
                    peer=lambda seconds=seconds: 1e3 * seconds,  # type: ignore[misc]
                    against="the engine's part of it",
                    unit="ms",
                    gauge=Gauge.COST,
                    target=at_least(0.75),
                    repeats=run.pick(5, 3),
                )


def _step(runtime: perdure.Runtime, streams: int, count: int) -> float:
    """Milliseconds a step."""
    return 1e3 * streams / asyncio.run(step_rate(runtime, streams, count))


main = Bench("sampling", [rows, steps])

if __name__ == "__main__":
    sys.exit(main())
