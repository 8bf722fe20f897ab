"""Chats of many turns: how much of each prompt is computed again, and what a turn costs besides."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack

from bench.child import Child
from bench.engine import model_path
from bench.harness import Bench, Figure, Gauge, Pairs, Run, at_least, at_most
from bench.machine import Watch

THREADS = 2
_ASKED = (
    "What is the sea?",
    "And why is it salty, do you think?",
    "Name one fish — any fish 🙂",
    "Is that so?",
    "Tell me something else, then.",
)


def reuse(run: Run) -> Iterator[Figure]:
    """The share of the tokens that were read or written before and were not computed again."""
    turns = run.pick(20, 6)
    found: dict[str, float] = {}
    with Watch() as watch:
        for kind in ("session", "stateless", "llama-cpp-python", "llama-server"):
            with Child("bench.processes.talkers", kind) as child:
                child.ask("open", path=model_path(), threads=THREADS)
                before = reused = possible = 0
                for turn in range(turns):
                    told = child.ask("turn", text=_ASKED[turn % len(_ASKED)], count=16)
                    # The last token of a reply is drawn, and never read; one token must always be read.
                    reused += told["prompt"] - told["computed"]
                    possible += min(before, told["prompt"] - 1)
                    before = told["prompt"] + told["reply"] - 1
                found[kind] = reused / possible
    for kind in ("session", "stateless"):
        for peer in ("llama-cpp-python", "llama-server"):
            yield Figure(
                name=f"share of what could be reused over {turns} turns, {kind}",
                against=peer,
                unit="of it",
                gauge=Gauge.RATE,
                pairs=Pairs((found[kind],), (found[peer],)),
                target=at_least(0.97, "of it"),
                machine=watch.machine,
            )


def outside(run: Run) -> Iterator[Figure]:
    """What a turn takes outside the engine's steps, late in a conversation against its first turn."""
    last = run.pick(200, 30)
    near = 9
    for kind in ("session", "stateless"):
        with ExitStack() as held, Watch() as watch:
            child = held.enter_context(Child("bench.processes.talkers", kind))
            child.ask("open", path=model_path(), threads=THREADS)
            first = []
            for _ in range(near):
                child.ask("anew")
                first.append(child.ask("turn", text=_ASKED[3], count=4)["outside"] * 1e3)
            child.ask("anew")
            late = [child.ask("turn", text=_ASKED[3], count=4)["outside"] * 1e3 for _ in range(last)][-near:]
        yield Figure(
            name=f"outside the engine in turn {last}, {kind}",
            against="in turn 1",
            unit="ms",
            gauge=Gauge.GROWTH,
            pairs=Pairs(tuple(late), tuple([statistics.median(first)] * near)),
            target=at_most(1.1) if kind == "session" else at_most(5, "ms"),
            machine=watch.machine,
        )
        if kind == "session":
            yield Figure(
                name=f"outside the engine in turn {last}, {kind}",
                against="in turn 1",
                unit="ms",
                gauge=Gauge.GROWTH,
                pairs=Pairs(tuple(late), tuple([statistics.median(first)] * near)),
                target=at_most(5, "ms"),
                machine=watch.machine,
            )


main = Bench("chat", (reuse, outside))

if __name__ == "__main__":
    sys.exit(main())
