"""An engine whose step takes a given time and computes nothing, as a device does: what is left is ours.

A step returns at once and is over some time later; rows are waited for. They are random, and always the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import perdure
from bench.harness import tokens_a_second
from bench.processes.device import tokens
from perdure.engine.context import Context
from perdure.engine.contract import Batch, Capabilities, Capture, Floats, Outcome
from perdure.engine.core import Adapter
from perdure.identity import Identity
from perdure.memory import FullAttention
from perdure.testing.toy.model import ToyModel


class TimedCore:
    """Counts positions, and has one table of rows."""

    width = 1
    scratch_bytes = 0

    def __init__(self, *, n_vocab: int, n_seq: int, seconds: float) -> None:
        self.n_vocab = n_vocab
        self._seconds = seconds
        self._ends = [-1] * n_seq
        self._rows: Floats = np.random.default_rng(1).normal(0, 3, (n_seq, n_vocab)).astype(np.float32)
        self._places: list[int] = []
        self._over = 0.0

    def decode(self, batch: Batch) -> Outcome:
        size = batch.size
        for seq, position in zip(batch.seqs[:size].tolist(), batch.positions[:size].tolist(), strict=True):
            self._ends[seq] = position
        if len(self._places) < size or batch.outputs[:size].min() == 0:
            self._places = (np.cumsum(batch.outputs[:size]) - 1).tolist()
        else:
            self._places = list(range(size))
        self._over = time.perf_counter() + self._seconds
        return Outcome.DONE

    def synchronize(self) -> None:
        left = self._over - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def row(self, index: int) -> Floats:
        self.synchronize()
        row: Floats = self._rows[self._places[index]]
        return row

    def rows(self, indices: Sequence[int]) -> Floats:
        self.synchronize()
        places = [self._places[index] for index in indices]
        if places == list(range(places[0], places[0] + len(places))):
            return self._rows[places[0] : places[-1] + 1]
        return self._rows[places]

    def newest(self, seq: int) -> int:
        return self._ends[seq]

    def oldest(self, seq: int) -> int:
        return 0 if self._ends[seq] >= 0 else -1

    def remove(self, seq: int, start: int) -> None:
        self._ends[seq] = min(self._ends[seq], start - 1)

    def copy(self, src: int, dst: int) -> None:
        self._ends[dst] = self._ends[src]

    def clear(self) -> None:
        self._ends = [-1] * len(self._ends)

    def hidden(self, count: int) -> Floats:
        return np.zeros((count, self.width), np.float32)

    def read(self, seq: int, *, partial: bool) -> NDArray[np.uint8]:
        return np.zeros(0, np.uint8)

    def write(self, seq: int, state: NDArray[np.uint8], *, partial: bool) -> bool:
        return False

    def capture(self, seq: int) -> Capture:
        return Capture(None, None)

    def assemble(self, seq: int, pieces: Sequence[NDArray[np.uint8]], rest: NDArray[np.uint8] | None) -> bool:
        return False

    def row_bytes(self, seq: int) -> int | None:
        return None

    def adapt(self, adapters: Mapping[Adapter, float]) -> bool:
        return not adapters

    def limit_scratch(self, nbytes: int) -> int:
        return 0

    def prepare(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def rearm(self) -> None:
        pass

    def close(self) -> None:
        pass


class TimedModel(ToyModel):
    """A vocabulary of `n_vocab` words of four letters, and contexts whose steps take `seconds`."""

    def __init__(self, *, n_vocab: int, seconds: float) -> None:
        super().__init__()
        self.n_vocab = n_vocab
        self._seconds = seconds
        self._pieces = [b"%4d" % (token % 10_000) for token in range(n_vocab)]

    @property
    def ends(self) -> frozenset[int]:
        return frozenset({0, 2})

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return self._pieces[token]

    def context(self, *, n_ctx: int = 512, n_seq: int = 1, **_: Any) -> Context:
        words = Identity(
            **dict.fromkeys(
                ("weights", "tokenizer", "template", "k_type", "v_type", "attention", "rope", "window"),
                "timed",
            ),
            **dict.fromkeys(("adapters", "layout", "engine", "kernels", "devices"), "timed"),
        )
        return Context(
            TimedCore(n_vocab=self.n_vocab, n_seq=n_seq, seconds=self._seconds),
            memory=FullAttention(),
            capabilities=Capabilities(
                truncate=True,
                shift=False,
                abort=False,
                shared=False,
                max_outputs=max(16, n_seq),
                asynchronous=True,
            ),
            identity=lambda adapters: words,
            n_ctx=n_ctx,
            n_seq=n_seq,
            n_batch=512,
        )


async def step_rate(runtime: perdure.Runtime, streams: int, count: int) -> float:
    """Tokens a second of so many replies at once, from when all have begun to the end of the first."""
    times: list[list[float]] = [[] for _ in range(streams)]

    async def read(index: int) -> None:
        async for delta in runtime.astream(tokens(8, index), max_tokens=count, ignore_eos=True, seed=index):
            times[index] += [time.perf_counter()] * len(delta.tokens)

    await asyncio.gather(*(read(index) for index in range(streams)))
    return tokens_a_second(times)
