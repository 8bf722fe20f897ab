"""Sampling: rows of logits, drawn from by ours for all streams at once and by the library's chain in turn.

The library's chain is given what `llama_sampler_sample` gives it: all tokens, filled anew for each row.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import numpy as np

from bench.harness import Bench, Figure, Gauge, Run, at_least
from bench.processes.library_sampler import LibrarySampler
from perdure import Sampling
from perdure.decode.sampling.sampler import Sampler, draw

VOCABULARIES = (49_152, 128_256)
STREAMS = (1, 64)


def rows(run: Run) -> Iterator[Figure]:
    for n_vocab in VOCABULARIES:
        for streams in STREAMS:
            yield _figure(run, n_vocab, streams)


def _figure(run: Run, n_vocab: int, streams: int) -> Figure:
    dice = np.random.default_rng(1)
    logits = dice.normal(0, 3, (streams, n_vocab)).astype(np.float32)
    samplings = [Sampling(seed=seed) for seed in range(streams)]
    mine = [Sampler(sampling, n_ctx=4096) for sampling in samplings]
    theirs = [LibrarySampler(sampling, n_vocab=n_vocab, n_ctx=4096) for sampling in samplings]
    steps = max(1, 64 // streams)

    def ours() -> float:
        started = time.perf_counter()
        for step in range(steps):
            draw([(each, each.select(row), step) for each, row in zip(mine, logits, strict=True)])
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


main = Bench("sampling", [rows])

if __name__ == "__main__":
    sys.exit(main())
