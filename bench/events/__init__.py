"""Events: the same reply with an observer and without, one after the other in one process.

`decode` is on the default model: tokens a second of one stream and of several. `steps` has an engine that
computes nothing and only takes its time: what an observer adds to a step of several streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import perdure
from bench.harness import Bench, Figure, Gauge, Run, at_least
from bench.processes.timed_engine import TimedModel, step_rate
from perdure.events.event import Event

STREAMS = 16
_PROMPT = "The history of the lighthouse begins with"


class Counted:
    """An observer that does nothing but count."""

    def __init__(self) -> None:
        self.events = 0

    def __call__(self, event: Event) -> None:
        self.events += 1


def decode(run: Run) -> Iterator[Figure]:
    count = run.pick(256, 64)
    with perdure.open(n_ctx=1024, slots=1, cache=0) as runtime:

        def speed() -> float:
            reply = runtime.generate(_PROMPT, max_tokens=count, seed=1, ignore_eos=True)
            return reply.timings.decode_speed

        def observed() -> float:
            counted = Counted()
            with runtime.observe(counted):
                found = speed()
            assert counted.events > 0, "nothing was observed"
            return found

        speed()
        yield run.compare(
            "one stream of the default model, with an observer",
            ours=observed,
            peer=speed,
            against="the same without",
            unit="tok/s",
            gauge=Gauge.RATE,
            target=at_least(0.99),
            repeats=run.pick(31, 9),
        )
    with perdure.open(n_ctx=512, slots=STREAMS, cache=0) as runtime:
        yield _together(run, runtime, STREAMS, f"{STREAMS} streams of the default model", run.pick(64, 32))


def _together(run: Run, runtime: perdure.Runtime, streams: int, name: str, count: int) -> Figure:
    def speed() -> float:
        return asyncio.run(step_rate(runtime, streams, count))

    def observed() -> float:
        with runtime.observe(Counted()):
            return speed()

    speed()
    return run.compare(
        f"{name}, with an observer",
        ours=observed,
        peer=speed,
        against="the same without",
        unit="tok/s",
        gauge=Gauge.RATE,
        target=at_least(0.99),
        repeats=run.pick(9, 3),
    )


def steps(run: Run) -> Iterator[Figure]:
    n_vocab = 49_152
    for streams in 1, STREAMS:
        with (
            TimedModel(n_vocab=n_vocab, seconds=0.0125) as model,
            perdure.open(model, n_ctx=512, slots=streams, cache=0) as runtime,
        ):
            name = f"a step of {streams} streams over {n_vocab:,} tokens"
            yield _together(run, runtime, streams, name, run.pick(96, 32))


main = Bench("events", [decode, steps])
