"""Events: the same reply with an observer and without, one after the other in one process.

`decode` is on the default model: tokens a second of one stream. `steps` has an engine that computes nothing
and only takes its time: what an observer adds to a step of several streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import perdure
from bench.harness import Bench, Figure, Gauge, Run, at_least
from bench.processes.timed_engine import TimedModel, step_rate
from perdure.events.event import Event

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


def steps(run: Run) -> Iterator[Figure]:
    count = run.pick(96, 32)
    for streams, n_vocab, seconds in ((1, 49_152, 0.0125), (16, 49_152, 0.0125)):
        with (
            TimedModel(n_vocab=n_vocab, seconds=seconds) as model,
            perdure.open(model, n_ctx=512, slots=streams, cache=0) as runtime,
        ):

            def speed(runtime: perdure.Runtime = runtime, streams: int = streams) -> float:
                return asyncio.run(step_rate(runtime, streams, count))

            def observed(runtime: perdure.Runtime = runtime, streams: int = streams) -> float:
                with runtime.observe(Counted()):
                    return asyncio.run(step_rate(runtime, streams, count))

            speed()
            yield run.compare(
                f"a step of {streams} streams over {n_vocab:,} tokens, with an observer",
                ours=observed,
                peer=speed,
                against="the same without",
                unit="tok/s",
                gauge=Gauge.RATE,
                target=at_least(0.99),
                repeats=run.pick(9, 3),
            )


main = Bench("events", [decode, steps])
