"""The ground floor: what our engine adds to the bare library, and what it saves against llama-cpp-python."""

from __future__ import annotations

import functools
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.child import Child, PeerMissingError
from bench.harness import Bench, Figure, Gauge, Measure, Run, Target, at_least, at_most
from bench.processes import headers

MIB = 1 << 20
THREADS = 2
STEP = 512
# What is timed does not depend on what the tokens say.
PROMPT = list(range(1000, 1032))
TOKENS = [(7919 * index) % 49_000 for index in range(STEP)]


@functools.cache
def model_path() -> str:
    from perdure import models

    return str(models.path())


def decode(run: Run) -> Iterator[Figure]:
    yield from _decode(run, "")


def _decode(run: Run, whose: str, **environment: str) -> Iterator[Figure]:
    count = run.pick(32, 16)
    with ExitStack() as held:
        ours, bare = (_loop(held, kind, **environment) for kind in ("ours", "bare"))
        _agree(ours, bare, "decode", count=count)
        yield run.compare(
            f"decode, {count} tokens one by one{whose}",
            ours=_rate(ours, count, "decode", count=count),
            peer=_rate(bare, count, "decode", count=count),
            against="a bare llama_decode loop",
            unit="tok/s",
            gauge=Gauge.RATE,
            target=at_least(0.98),
            repeats=run.pick(41, 15),
        )


def prefill(run: Run) -> Iterator[Figure]:
    tokens = TOKENS[: run.pick(STEP, 64)]
    with ExitStack() as held:
        ours, bare = (_loop(held, kind) for kind in ("ours", "bare"))
        _agree(ours, bare, "prefill", tokens=tokens)
        yield run.compare(
            f"prefill of {len(tokens)} tokens",
            ours=_rate(ours, len(tokens), "prefill", tokens=tokens),
            peer=_rate(bare, len(tokens), "prefill", tokens=tokens),
            against="a bare llama_decode",
            unit="tok/s",
            gauge=Gauge.RATE,
            target=at_least(0.98),
            repeats=run.pick(11, 7),
        )


def view(run: Run) -> Iterator[Figure]:
    """Taking a view: the first of a row, since the second is the same object again."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = [Rows(model_path()), Rows(headers.wide_model(Path(folder)))]
        for rows in sizes:
            yield run.compare(
                f"taking a view of {rows.n_vocab:,} logits",
                ours=rows.ours,
                peer=rows.bare,
                against="an unchecked array",
                unit="µs",
                gauge=Gauge.COST,
                target=at_most(10, "µs"),
                repeats=run.pick(25, 7),
            )
        small, large = sizes
        yield run.compare(
            f"taking a view of {large.n_vocab:,} logits against {small.n_vocab:,}",
            ours=large.ours,
            peer=small.ours,
            against=f"at {small.n_vocab:,}",
            unit="µs",
            gauge=Gauge.GROWTH,
            target=at_most(1.5),
            repeats=run.pick(25, 7),
        )


class Rows:
    """As many rows of logits as one native step of a model gives, and what it costs to take them."""

    def __init__(self, path: str) -> None:
        from perdure import Model
        from perdure.engine.llama.native import library

        self._lib = library.load()
        self._context = Model(path).context(n_ctx=256, n_batch=64, threads=THREADS)
        self.n_vocab = self._context.n_vocab
        self._count = min(64, self._context.capabilities.max_outputs)

    def _decode(self) -> None:
        self._context.clear()
        self._context.decode(TOKENS[: self._count], rows="all")
        # Like a loop that is running, not like its first turn.
        self._context.logits(row=0).argmax()

    def ours(self) -> float:
        self._decode()
        take = self._context.logits
        started = time.perf_counter()
        for row in range(1, self._count):
            take(row)
        return (time.perf_counter() - started) / (self._count - 1) * 1e6

    def bare(self) -> float:
        self._decode()
        context: Any = self._context._core
        handle, shape, take = context._context, (self.n_vocab,), self._lib.llama_get_logits_ith
        started = time.perf_counter()
        for row in range(1, self._count):
            np.ctypeslib.as_array(take(handle, row), shape=shape)
        return (time.perf_counter() - started) / (self._count - 1) * 1e6


def fill(run: Run) -> Iterator[Figure]:
    """From a list of ids to a filled batch, with the checks that a decode makes on the way."""
    from llama_cpp._internals import LlamaBatch

    from perdure import Model
    from perdure.engine.context.ledger import outputs
    from perdure.engine.contract import Batch, BatchPart

    context = Model(model_path()).context(n_ctx=STEP, threads=1)
    ours, peer = Batch(STEP), LlamaBatch(n_tokens=STEP, embd=0, n_seq_max=1, verbose=False)

    def fill_ours() -> None:
        ours.fill([BatchPart(0, 0, context._check_tokens(TOKENS), outputs("last", STEP))])

    yield run.compare(
        f"filling a batch of {STEP} tokens",
        ours=_cost(fill_ours, 100),
        peer=_cost(lambda: peer.set_batch(TOKENS, 0, False), 20),
        against="llama-cpp-python's set_batch",
        unit="µs",
        gauge=Gauge.COST,
        target=at_least(1.0),
        repeats=run.pick(25, 9),
    )


def memory(run: Run) -> Iterator[Figure]:
    """What a process grows by when it loads the model and decodes a step, in a context of 8192."""
    tokens = TOKENS[: run.pick(STEP, 128)]

    def growth(kind: str) -> float:
        with Child("bench.processes.loops", kind) as child:
            before = child.ask("resident")
            child.ask("open", path=model_path(), n_ctx=8192, threads=None, prompt=tokens)
            return float(child.ask("resident") - before) / MIB

    yield run.compare(
        f"resident memory at n_ctx 8192 after {len(tokens)} tokens",
        ours=lambda: growth("ours"),
        peer=lambda: growth("llama-cpp-python"),
        against="llama-cpp-python's Llama",
        unit="MiB",
        gauge=Gauge.COST,
        target=at_least(1.0),
        repeats=run.pick(3, 1),
    )


def header(run: Run) -> Iterator[Figure]:
    from gguf import GGUFReader

    from perdure.models import read_header

    with tempfile.TemporaryDirectory() as folder:
        path = headers.large_vocabulary(Path(folder), merges=not run.quick)
        yield run.compare(
            f"reading a GGUF header with {headers.VOCABULARY:,} tokens",
            ours=_cost(lambda: read_header(path), 5, unit=1e3),
            peer=_cost(lambda: GGUFReader(path), 1, unit=1e3),
            against="gguf.GGUFReader",
            unit="ms",
            gauge=Gauge.COST,
            target=at_least(10),
            repeats=run.pick(5, 1),
        )


def builds(run: Run) -> Iterator[Figure]:
    """The fetched library against the one that llama-cpp-python compiled here, both under our engine."""
    from perdure.engine.llama.native.source import llama_cpp_python

    compiled = llama_cpp_python()
    if compiled is None:
        raise PeerMissingError("llama-cpp-python")
    yield from _libraries(run, compiled.folder, "compiled by llama-cpp-python", at_least(1.0))


def versions(run: Run) -> Iterator[Figure]:
    """The fetched library against the newest llama.cpp on PyPI, both under our engine; then the newest one
    under our engine against a bare loop on it."""
    found = importlib.util.find_spec("xllamacpp")
    if found is None or found.origin is None:
        raise PeerMissingError("xllamacpp")
    newest = Path(found.origin).parent
    # Which version is faster is llama.cpp's affair: one that is half as fast is worth a look.
    yield from _libraries(run, newest, "xllamacpp's", at_least(0.5))
    yield from _decode(run, ", xllamacpp's library", PERDURE_LLAMA=str(newest))


def _libraries(run: Run, other: Path, against: str, target: Target) -> Iterator[Figure]:
    """Prefill and decoding of the fetched library beside another one."""
    import perdure.ext.builds as libraries

    tokens, count = TOKENS[: run.pick(STEP, 64)], run.pick(32, 16)
    with ExitStack() as held:
        fetched, peer = (
            _loop(held, "ours", PERDURE_LLAMA=str(folder)) for folder in (libraries.install().folder, other)
        )
        for name, work, call, arguments in (
            (f"prefill of {len(tokens)} tokens, fetched library", len(tokens), "prefill", {"tokens": tokens}),
            (f"decode, {count} tokens one by one, fetched library", count, "decode", {"count": count}),
        ):
            for side in (fetched, peer):
                side.ask(call, **arguments)
            yield run.compare(
                name,
                ours=_rate(fetched, work, call, **arguments),
                peer=_rate(peer, work, call, **arguments),
                against=against,
                unit="tok/s",
                gauge=Gauge.RATE,
                target=target,
                repeats=run.pick(15, 7),
            )


def busy(run: Run) -> Iterator[Figure]:
    """Decoding while one other process computes."""
    count = run.pick(32, 12)
    with ExitStack() as held:
        ours, peer = (_loop(held, kind) for kind in ("ours", "llama-cpp-python"))
        held.enter_context(Child("bench.processes.loops", "burn")).tell("burn")
        yield run.compare(
            f"decode beside one busy process, {THREADS} threads",
            ours=_rate(ours, count, "decode", count=count),
            peer=_rate(peer, count, "decode", count=count),
            against="llama-cpp-python as shipped",
            unit="tok/s",
            gauge=Gauge.RATE,
            target=at_least(2),
            repeats=run.pick(15, 5),
        )


main = Bench("engine", (decode, prefill, builds, versions, view, fill, memory, header, busy))


def _loop(held: ExitStack, kind: str, **env: str) -> Child:
    child = held.enter_context(Child("bench.processes.loops", kind, env=env))
    child.ask("open", path=model_path(), n_ctx=1024, threads=THREADS, prompt=PROMPT)
    return child


def _agree(ours: Child, peer: Child, call: str, **arguments: Any) -> None:
    """Two loops of one engine with one setting must choose the same tokens; this also warms them up."""
    chosen = [side.ask(call, **arguments)["tokens"] for side in (ours, peer)]
    if chosen[0] != chosen[1]:
        raise RuntimeError(f"the loops do not do the same work: {chosen[0]} and {chosen[1]}")


def _rate(side: Child, work: int, call: str, **arguments: Any) -> Measure:
    return lambda: work / float(side.ask(call, **arguments)["seconds"])


def _cost(call: Callable[[], object], times: int, unit: float = 1e6) -> Measure:
    """What one of `times` calls takes, in µs, or in other parts of a second."""

    def measure() -> float:
        started = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - started) / times * unit

    return measure


if __name__ == "__main__":
    sys.exit(main())
