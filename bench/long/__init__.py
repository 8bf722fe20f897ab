"""Long: what a turn, a wake and memory cost at 8k, 32k and 100k tokens, and what of it is Python's.

    python -m bench.long [--lengths 8192 32768 100000] [--model FILE] [--quick]

A session of one model grows to each length. There a turn of a few new tokens is timed, with the time inside
of the engine's steps taken apart: the rest is Python's. Then the runtime is closed and opened again, and
the next turn wakes the session from disk. On a machine without a GPU the model is a toy of small width, so
that 100,000 tokens can be read at all; with a GPU it is the 8B of random weights.

Python's share of a turn must not grow faster than the tokens (exponent at most 1.1), and not with the number
of turns at all: the same length in 10 times as many turns.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import perdure
from bench.machine import Watch
from bench.processes.random_model import EIGHT_BILLION, Shape, write
from perdure.backend import LocalBackend
from perdure.engine.llama.core import LlamaCore
from perdure.engine.llama.native import library

LENGTHS = (8192, 32_768, 100_000)
NARROW = Shape(layers=2, width=64, inner=128, heads=2, kv_heads=1, vocabulary=1024, type="q8_0")
_WORD = "word "
_REPLY = 8
_TURNS = 9


class EngineClock:
    """Seconds inside of native steps, while it is on."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._decode = LlamaCore.decode

    def __enter__(self) -> EngineClock:
        clock, decode = self, self._decode

        def timed(core: LlamaCore, batch: Any) -> Any:
            started = time.perf_counter()
            try:
                outcome = decode(core, batch)
                core.synchronize()
                return outcome
            finally:
                clock.seconds += time.perf_counter() - started

        LlamaCore.decode = timed  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        LlamaCore.decode = self._decode  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was measured at one length."""

    tokens: int
    turns: int
    turn: float
    python: float
    """Of a turn: seconds outside of the engine's steps."""
    wake: float
    resident: int
    """Bytes of this process, at most so far."""

    def __str__(self) -> str:
        return (
            f"| {self.tokens:,} | {self.turns} | {self.turn * 1e3:,.1f} | {self.python * 1e3:,.1f} "
            f"| {self.wake * 1e3:,.1f} | {self.resident / 2**20:,.0f} |"
        )


def measure(path: Path, tokens: int, turns: int, *, threads: int | None) -> Point:
    """A session of so many tokens, that many turns old, and what the next turns cost."""
    settings: dict[str, Any] = {"n_ctx": tokens + 4096, "slots": 1, "threads": threads}
    with tempfile.TemporaryDirectory() as store:
        with perdure.open(path, store=store, **settings) as rt, EngineClock() as clock:
            assert isinstance(rt.backend, LocalBackend)
            session = rt.session("long")
            share = tokens // turns
            while session.token_count < tokens - share:
                session.say(_text(rt, share - 32), max_tokens=1, ignore_eos=True, temperature=0)
            session.say(
                _text(rt, max(16, tokens - session.token_count - 32)),
                max_tokens=1,
                ignore_eos=True,
                temperature=0,
            )
            reached = session.token_count
            walls, pythons = [], []
            for _ in range(_TURNS):
                before, started = clock.seconds, time.perf_counter()
                session.say("And then?", max_tokens=_REPLY, ignore_eos=True, temperature=0)
                walls.append(time.perf_counter() - started)
                pythons.append(walls[-1] - (clock.seconds - before))
        with perdure.open(path, store=store, **settings) as rt:
            session = rt.session("long")
            started = time.perf_counter()
            reply = session.say("And then?", max_tokens=1, ignore_eos=True, temperature=0)
            wake = time.perf_counter() - started
            assert reply.reuse is not None
            assert reply.reuse.reused > 0.9 * reached, reply.reuse
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return Point(
        tokens=reached,
        turns=turns,
        turn=statistics.median(walls),
        python=statistics.median(pythons),
        wake=wake,
        resident=resident,
    )


def _text(rt: perdure.Runtime, tokens: int) -> str:
    """A text of about so many tokens."""
    each = max(1, len(rt.model.tokenize(_WORD * 64)) // 64)
    return _WORD * max(1, tokens // each)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.long", description=__doc__)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="the least first")
    parser.add_argument("--model", type=Path, help="a file, instead of one of random weights")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="1,024 and 4,096 tokens")
    options = parser.parse_args(argv)
    lengths = (1024, 4096) if options.quick else options.lengths
    if len(lengths) < 2 or lengths[0] >= lengths[-1]:
        parser.error("growth needs two lengths, the least first")
    gpu = any(device.offloads for device in library.loaded().device_list)
    with tempfile.TemporaryDirectory() as folder, Watch() as watch:
        path = options.model or write(Path(folder) / "long.gguf", EIGHT_BILLION if gpu else NARROW)
        print(f"{path.name} ({'GPU' if gpu else 'CPU'})")
        print("| tokens | turns before | a turn, ms | of that Python, ms | wake, ms | memory, MiB |")
        print("|---|---|---|---|---|---|")
        points = []
        for tokens in lengths:
            points.append(measure(path, tokens, 4, threads=options.threads))
            print(points[-1], flush=True)
        many = measure(path, lengths[0], 40, threads=options.threads)
        print(many, flush=True)
    print(watch.machine)
    first, last = points[0], points[-1]
    exponent = math.log(last.python / first.python) / math.log(last.tokens / first.tokens)
    by_turns = many.python / first.python
    good = exponent <= 1.1 and by_turns <= 1.5
    print(f"Python's share grows as n^{exponent:.2f} with tokens (at most 1.1)")
    print(f"and {by_turns:.2f} times with 10 times as many turns (at most 1.5): {'ok' if good else 'MISS'}")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
