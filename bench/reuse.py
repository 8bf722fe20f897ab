"""What keeping state costs, and what it saves: swapping, forks, going back, and nothing to reuse."""

from __future__ import annotations

import importlib
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.child import ROOT, Child
from bench.engine import model_path
from bench.harness import Bench, Figure, Gauge, Measure, Pairs, Run, at_least
from bench.machine import Watch

if TYPE_CHECKING:
    from perdure import Runtime

THREADS = 2
LENGTH = 2048
FORKS, TAIL = 16, 16
BACK = 8


class Swapping:
    """One sequence of a working set, which another prompt drives out and which then comes back."""

    def __init__(self, length: int) -> None:
        from perdure import Model
        from perdure.cache.slots.cache import SlotCache

        self._tokens = _tokens(1, length)
        self._other = _tokens(2, 16)
        self._context = Model(model_path()).context(n_ctx=length, threads=THREADS)
        self._places = SlotCache(self._context, budget=1 << 30)

    def compute(self) -> float:
        self._context.clear()
        return _seconds(lambda: self._context.decode(self._tokens)) * 1e3

    def swap(self) -> float:
        """Out and in again, with all that belongs to it: choosing, copying, checksums both ways."""
        self._places.tier.clear()
        return _seconds(self._out_and_in) * 1e3

    def _out_and_in(self) -> None:
        for tokens in (self._other, self._tokens):
            place: Any = self._places.acquire(np.array(tokens, np.int32))
            self._places.release(place.seq)
        if place.cached != len(self._tokens):
            raise RuntimeError(f"only {place.cached} of {len(self._tokens)} tokens came back: {place.report}")

    def kept_bytes(self) -> float:
        """What a token costs in memory, its share of names, tokens and checksums included."""
        return self._places.tier.nbytes / len(self._tokens)

    def state_bytes(self) -> float:
        """What a token takes in the engine's own form."""
        core: Any = self._context._core
        return float(core.read(0, partial=False).nbytes / len(self._tokens))


def swap(run: Run) -> Iterator[Figure]:
    swapping = Swapping(LENGTH)
    computed, swapped = [], []
    with Watch() as watch:
        for _ in range(run.pick(3, 1)):
            computed.append(swapping.compute())
            # The first goes to pages that were never touched.
            swapped.append(statistics.median([swapping.swap() for _ in range(7)]))
    yield Figure(
        name=f"swapping {LENGTH:,} tokens out and in",
        against="computing them",
        unit="ms",
        gauge=Gauge.COST,
        pairs=Pairs(tuple(swapped), tuple(computed)),
        target=at_least(300),
        machine=watch.machine,
    )
    yield Figure(
        name="bytes kept a token",
        against="the state itself",
        unit="bytes",
        gauge=Gauge.COST,
        pairs=Pairs((swapping.kept_bytes(),), (swapping.state_bytes(),)),
        target=at_least(0.99),
        machine=watch.machine,
    )


def forks(run: Run) -> Iterator[Figure]:
    """A quick run takes a toy model: it counts bytes, not seconds."""
    import perdure

    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        path = _toy_model("llama", folder) if run.quick else model_path()
        n_ctx = LENGTH + 2 * TAIL
        runtime = held.enter_context(perdure.open(path, n_ctx=n_ctx, threads=THREADS, cache=1 << 30))
        size = runtime.model.n_vocab
        prefix = _tokens(3, LENGTH, size)
        with Watch() as watch:
            runtime.generate(prefix, max_tokens=1)
            runtime.cache.warm(prefix)
            one = runtime.cache.stats().state_bytes
            for number in range(FORKS):
                prompt = prefix + _tokens(100 + number, TAIL, size)
                reply = runtime.generate(prompt, max_tokens=1)
                if reply.reuse.reused < LENGTH:
                    raise RuntimeError(f"fork {number} was not one: {reply.reuse}")
                if runtime.cache.warm(prompt).kept < len(prompt):
                    raise RuntimeError(f"fork {number} was not kept")
        stored = runtime.cache.stats().state_bytes
    yield Figure(
        name=f"state kept of {FORKS} forks of {LENGTH:,} tokens, {TAIL} tokens further each",
        against="one copy plus the tails",
        unit="MB",
        gauge=Gauge.COST,
        pairs=Pairs((stored / 1e6,), (one / LENGTH * (LENGTH + FORKS * TAIL) / 1e6,)),
        target=at_least(0.952),
        machine=watch.machine,
    )


def unrelated(run: Run) -> Iterator[Figure]:
    """Prompts that have nothing in common, with the cache and without it."""
    length, count = run.pick((128, 16), (48, 4))
    with ExitStack() as held:
        sides = []
        for cache in (None, 0):
            child = held.enter_context(Child("bench.processes.conversations", "ours"))
            child.ask("open", path=model_path(), threads=THREADS, cache=cache)
            sides.append(child)
        ours, peer = (_reply(side, length, count) for side in sides)
        for _ in range(run.pick(6, 2)):
            ours()
            peer()
        yield run.compare(
            f"nothing to reuse: a reply of {count} tokens to {length} unrelated ones",
            ours=ours,
            peer=peer,
            against="with the cache off",
            unit="ms",
            gauge=Gauge.COST,
            target=at_least(0.99),
            repeats=run.pick(51, 9),
        )


def back(run: Run) -> Iterator[Figure]:
    """On a sliding window that keeps no more than it needs, where the engine itself cannot go back.

    The model is a toy, and so its tokens cost next to nothing: on a real one the ratio is larger.
    """
    import perdure

    length = run.pick(3800, 2000)
    settings: dict[str, Any] = {"n_ctx": 4096, "slots": 1, "threads": 1, "swa_full": False}
    with ExitStack() as held:
        path = _toy_model("gemma3", Path(held.enter_context(tempfile.TemporaryDirectory())))
        ours = held.enter_context(perdure.open(path, **settings))
        peer = held.enter_context(perdure.open(path, **settings, cache=0))
        prompt = _tokens(4, length, ours.model.n_vocab)
        for name, edit in (
            (f"answering again after {BACK} tokens of a reply", 0),
            (f"a prompt whose last {BACK} tokens change", BACK),
        ):
            yield run.compare(
                f"{name}, sliding window, {length:,} tokens",
                ours=_returning(ours, prompt, edit),
                peer=_returning(peer, prompt, edit),
                against="computing the prompt",
                unit="ms",
                gauge=Gauge.COST,
                target=at_least(3),
                repeats=run.pick(15, 5),
            )


main = Bench("reuse", (swap, forks, unrelated, back))


def _returning(runtime: Runtime, prompt: list[int], edit: int) -> Measure:
    """Writes a reply, goes back to the prompt less its last `edit` tokens, and gives the time to go on."""
    numbers = itertools.count(1000)

    def measure() -> float:
        runtime.generate(prompt, max_tokens=BACK, temperature=0, ignore_eos=True)
        changed = _tokens(next(numbers), edit, runtime.model.n_vocab)
        again = prompt[: len(prompt) - edit] + changed
        return _seconds(lambda: runtime.generate(again, max_tokens=1, temperature=0)) * 1e3

    return measure


def _reply(side: Child, length: int, count: int) -> Measure:
    seeds = itertools.count()

    def measure() -> float:
        prompt = _tokens(next(seeds), length)
        return float(side.ask("reply", conversation=0, prompt=prompt, count=count)["last"]) * 1e3

    return measure


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _tokens(seed: int, count: int, n_vocab: int = 49_000) -> list[int]:
    """Tokens that have no beginning in common with those of another seed."""
    return np.random.default_rng(seed).integers(0, n_vocab, count).tolist()  # type: ignore[no-any-return]


def _toy_model(name: str, folder: Path) -> str:
    """A model of the tests' zoo."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        zoo = importlib.import_module("zoo")
    finally:
        sys.path.remove(str(ROOT / "tests"))
    return str(zoo.write(name, folder))


if __name__ == "__main__":
    sys.exit(main())
