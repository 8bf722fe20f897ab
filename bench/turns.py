"""Many conversations in turn: what the last turn costs when all that came before is still there.

All of them share a system prompt and are carried on round robin, each prompt being the tokens of the one
before, the reply to it and a new question. What is timed is the first token of the last turn's reply.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from bench.child import Child
from bench.engine import model_path
from bench.harness import Bench, Figure, Gauge, Pairs, Run, Target, at_least, at_most
from bench.machine import Machine, Watch
from bench.processes.conversations import SLOTS

THREADS = 2
FLOOR = at_least(0.91)
"""The floor divided by ours: within 1.10 times the floor."""

SYSTEM = """Session {number}. You are the help desk of a small public library by the sea. Visitors write \
to you from their phones, from the reading room and from the ferry, so keep every answer short enough to \
be read at a glance, and plain enough to be understood by somebody whose first language is another one. \
The library opens at nine in the morning from Tuesday to Saturday and closes at six, on Thursdays at \
eight. It is closed on Sundays, on Mondays and on public holidays. Books may be kept for four weeks and \
renewed twice unless somebody else is waiting for them; films and music may be kept for one week. \
Returning things late costs nothing for children and ten cents a day for everybody else, never more than \
two euros in all. The reading room has twelve desks, two of them with a screen, and nobody needs to book \
one. Printing is free up to ten pages a day. The local history collection lies in the cellar and is shown \
on request by Mrs Lindqvist, who is there in the afternoon. When a visitor asks about a subject rather \
than about the library, answer from general knowledge in one or two sentences, then name a shelf where \
more can be found: natural sciences are on shelf four, history and travel on shelf seven, crafts and \
cooking on shelf nine, novels along the windows. Never invent a title. When you do not know, say so and \
offer to ask a colleague."""
TOPICS = ("the tides", "bees", "old maps", "bread", "glaciers", "sailing knots", "the moon", "violins")
QUESTIONS = (
    "Hello! I have been reading about {topic} since the weekend. Where would I find something for beginners?",
    "Thank you. And what is the one thing about {topic} that most people get wrong, in your opinion?",
    "Could I keep a book on {topic} over the summer if I live on the island and come by only once a month?",
    "My daughter is nine and would like to know more about {topic} too. What would you say to her first?",
    "One last question: is there anything about {topic} in the local history collection, and who shows it?",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations of a number of turns. No two numbers have a beginning in common."""

    number: int
    conversations: int
    turns: int
    reply: int

    def said(self, conversation: int, turn: int) -> list[int]:
        """What is new in a prompt besides the last reply."""
        question = QUESTIONS[turn].format(topic=TOPICS[conversation])
        new = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        if turn == 0:
            return _tokens(f"<|im_start|>system\n{SYSTEM.format(number=self.number)}<|im_end|>\n{new}")
        return _tokens(f"<|im_end|>\n{new}")

    def carry_on(self, sides: Mapping[str, Child]) -> dict[str, list[float]]:
        """How long the first token of the last turn took on each side, by conversation, in ms."""
        prompts: dict[tuple[str, int], list[int]] = {}
        took: dict[str, list[float]] = {}
        for turn in range(self.turns):
            took = {name: [] for name in sides}
            for conversation in range(self.conversations):
                new = self.said(conversation, turn)
                # Each side goes first every other time.
                order = list(sides)[:: 1 if (conversation + turn) % 2 else -1]
                for name in order:
                    prompt = prompts.setdefault((name, conversation), [])
                    prompt += new
                    reply = sides[name].ask(
                        "reply", conversation=conversation, prompt=prompt, count=self.reply
                    )
                    took[name].append(reply["first"] * 1e3)
                    prompt += reply["tokens"]
        return took


class Workloads:
    """Makes workloads of one length, each with a number of its own."""

    def __init__(self, run: Run) -> None:
        self._turns = run.pick(len(QUESTIONS), 3)
        self._reply = run.pick(16, 4)
        self._number = 100

    def next(self, conversations: int) -> Workload:
        self._number += 1
        return Workload(self._number, conversations, self._turns, self._reply)

    def __str__(self) -> str:
        return f"turn {self._turns}"


def floor(run: Run) -> Iterator[Figure]:
    """Against decoding only what is new, with as many conversations as slots, and with twice as many."""
    workloads = Workloads(run)
    with ExitStack() as held:
        sides = {"ours": _side(held, "ours"), "floor": _side(held, "floor")}
        for conversations, repeats in ((SLOTS, run.pick(5, 1)), (2 * SLOTS, run.pick(3, 1))):
            name = f"first token of {workloads}, {conversations} conversations on {SLOTS} slots"
            with Watch() as watch:
                took = _together(workloads.next(conversations).carry_on(sides) for _ in range(repeats))
            yield _against(took, "floor", name, "decoding only what is new", FLOOR, watch.machine)


def peers(run: Run) -> Iterator[Figure]:
    """Against llama-cpp-python, which has one sequence."""
    if run.quick:
        _left_out("llama-cpp-python, with and without its RAM cache")
        return
    workloads = Workloads(run)
    with ExitStack() as held:
        sides = {
            "ours": _side(held, "ours"),
            "bare": _side(held, "llama-cpp-python"),
            "cached": _side(held, "llama-cpp-python", ram_cache=True),
        }
        name = f"first token of {workloads}, {SLOTS} conversations"
        with Watch() as watch:
            took = _together(workloads.next(SLOTS).carry_on(sides) for _ in range(2))
        yield _against(took, "bare", name, "llama-cpp-python", at_least(4), watch.machine)
        yield _against(
            took, "cached", name, "llama-cpp-python with its RAM cache", at_least(1), watch.machine
        )


def slowdown(run: Run) -> Iterator[Figure]:
    """From one conversation to twice as many as slots, each side against itself: the builds differ."""
    if run.quick:
        _left_out("llama-server, and the slowdown from one conversation to eight")
        return
    workloads = Workloads(run)
    many = 2 * SLOTS
    factors: dict[str, list[float]] = {"ours": [], "llama-server": []}
    with ExitStack() as held:
        sides = {name: _side(held, name) for name in factors}
        with Watch() as watch:
            for _ in range(2):
                # One alone before and after, so that a machine that slows down shows in both.
                before = workloads.next(1).carry_on(sides)
                crowd = workloads.next(many).carry_on(sides)
                after = workloads.next(1).carry_on(sides)
                for name, values in factors.items():
                    alone = statistics.mean(before[name] + after[name])
                    values.append(statistics.median(crowd[name]) / alone)
    yield Figure(
        name=f"slowdown of the first token of {workloads} from 1 conversation to {many} on {SLOTS} slots",
        against="llama-server",
        unit="times",
        gauge=Gauge.COST,
        pairs=Pairs(tuple(factors["ours"]), tuple(factors["llama-server"])),
        target=at_most(1.1, "times"),
        machine=watch.machine,
    )


main = Bench("turns", (floor, peers, slowdown))


def _side(held: ExitStack, kind: str, **settings: Any) -> Child:
    child = held.enter_context(Child("bench.processes.conversations", kind))
    child.ask("open", path=model_path(), threads=THREADS, **settings)
    # Like one that is running, not like its first turn.
    child.ask("reply", conversation=0, prompt=list(range(1000, 1016)), count=4)
    return child


def _together(rounds: Iterator[dict[str, list[float]]]) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {}
    for each in rounds:
        for name, values in each.items():
            took.setdefault(name, []).extend(values)
    return took


def _against(
    took: Mapping[str, Sequence[float]], peer: str, name: str, against: str, target: Target, machine: Machine
) -> Figure:
    return Figure(
        name=name,
        against=against,
        unit="ms",
        gauge=Gauge.COST,
        pairs=Pairs(tuple(took["ours"]), tuple(took[peer])),
        target=target,
        machine=machine,
    )


def _left_out(what: str) -> None:
    print(f"   left out of a quick run: {what}", flush=True)


def _tokens(text: str) -> list[int]:
    return _tokenize()(text, special=True, bos=False)


@functools.cache
def _tokenize() -> Callable[..., list[int]]:
    from perdure import Model

    return Model(model_path()).tokenize


if __name__ == "__main__":
    sys.exit(main())
