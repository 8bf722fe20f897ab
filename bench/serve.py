"""The server: what it adds to the library, and how it does beside llama-server and llama-cpp-python's.

One client speaks to all of them through OpenAI's chat route. Their builds of llama.cpp differ, and not by one
factor: what a batch costs, and how fast prompts are read, is each build's own. So a figure is divided by what
the server's own build does with nothing around it: writing, by a bare loop of as many streams that are as
long; first tokens, by a bare reading of a prompt.

llama-server is the one that `tools/compile_engine.py DIR --server` compiled with the library in use
(PERDURE_LLAMA=DIR), or else the one out of `xllamacpp`.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

from bench.child import Child
from bench.engine import model_path
from bench.harness import Bench, Figure, Gauge, Pairs, Run, at_least
from bench.machine import Machine, Watch
from bench.processes.servers import SLOTS, Bare, Server, ask_together, build_of

PEERS = ("llama-server", "llama-cpp-python")
TOPICS = ("the tides", "bees", "old maps", "bread", "glaciers", "sailing knots", "the moon", "violins")
QUESTIONS = (
    "Hello! I have been reading about {topic}. Where would I find something for beginners?",
    "Thank you. And what is the one thing about {topic} that most people get wrong?",
    "Could I keep a book on {topic} over the summer if I come by only once a month?",
    "My daughter is nine and would like to know more about {topic} too. What would you say to her?",
    "One last question: is there anything about {topic} in the local history collection?",
)
SYSTEM = """You are the help desk of a small public library by the sea. Number {number}. \
Visitors write to you from their phones and from the reading room, so keep every answer short and plain. \
Books may be kept for four weeks and renewed twice. Never invent a title."""
LONG = "The lighthouse keeper wrote down the weather, the ships and the birds of the day. "
"""About 17 tokens."""


def aggregate(run: Run) -> Iterator[Figure]:
    """Tokens a second of all replies together, at 1, 4 and 8 clients. The prompts were read before."""
    # The fewer clients, the less time a reply takes, and the more of it is chance.
    count, *all_repeats = run.pick((64, 9, 5, 5), (16, 1, 1, 1))
    sides = _sides(run.quick)
    for clients, repeats in zip((1, 4, 8), all_repeats, strict=True):
        asked = [f"Tell me a long story about {topic}." for topic in TOPICS[:clients]]
        taken: dict[str, list[float]] = {side.kind: [] for side in sides}
        for side in sides:
            side.together([_body(_user(each), 1) for each in asked])
        with Watch() as watch:
            for number in range(repeats):
                for side in sides[:: 1 if number % 2 else -1]:
                    # All are asked at once. To take apart what came is the client's own work, afterwards.
                    heard = side.together([_body(_user(each), count) for each in asked])
                    seconds = max(each.end for each in heard)
                    bare = side.bare.writing(min(clients, SLOTS), count)
                    taken[side.kind].append(clients * count / seconds / bare)
        name = f"tokens a second of {clients} clients together, against a bare loop of {min(clients, SLOTS)}"
        yield from _figures(name, taken, "of bare", Gauge.RATE, watch.machine)


def turns(run: Run) -> Iterator[Figure]:
    """The first token of the last of five turns, for as many conversations as slots and for twice as many."""
    rounds = run.pick(len(QUESTIONS), 2)
    sides = _sides(run.quick)
    for conversations in run.pick((SLOTS, 2 * SLOTS), (SLOTS,)):
        with Watch() as watch:
            taken = {side.kind: _carried_on(side, conversations, rounds) for side in sides}
        name = f"first token of turn {rounds}, {conversations} conversations on {SLOTS} slots"
        yield from _figures(name, taken, "tokens read bare", Gauge.COST, watch.machine)


def _carried_on(side: Server, conversations: int, rounds: int) -> list[float]:
    """Conversations round robin: the first token of the last turn of each, in tokens that could be read."""
    system = {"role": "system", "content": SYSTEM.format(number=conversations)}
    said: list[list[dict[str, str]]] = [[system] for _ in range(conversations)]
    firsts: list[float] = []
    for turn in range(rounds):
        for conversation, messages in enumerate(said):
            messages += _user(QUESTIONS[turn].format(topic=TOPICS[conversation]))
            [heard] = side.together([_body(messages, 8)])
            if turn == rounds - 1:
                firsts.append(heard.first * side.bare.reading())
            messages.append({"role": "assistant", "content": heard.text})
    return firsts


def overhead(run: Run) -> Iterator[Figure]:
    """A step of one reply: with the engine in another process, and over HTTP, against the library."""
    count, repeats = run.pick((128, 11), (32, 5))
    with ExitStack() as held:
        library = held.enter_context(Child("bench.processes.servers", "library"))
        library.ask("open", path=model_path(), isolated=False)
        worker = held.enter_context(Child("bench.processes.servers", "library"))
        worker.ask("open", path=model_path(), isolated=True)
        server = _sides(run.quick)[0]
        body = _body(_user("Tell me a long story about the sea."), count)

        def over_http() -> float:
            [heard] = server.together([body])
            return (heard.last - heard.first) / (count - 1) * 1e3

        def step(side: Child) -> float:
            return float(side.ask("step", body=body)) * 1e3

        sides: tuple[tuple[str, Callable[[], float]], ...] = (
            ("a step with the engine in another process", lambda: step(worker)),
            ("a step over HTTP", over_http),
        )
        for name, measure in sides:
            yield run.compare(
                name,
                ours=measure,
                peer=lambda: step(library),
                against="the library",
                unit="ms",
                gauge=Gauge.COST,
                target=at_least(0.97),
                repeats=repeats,
            )


def direct_write(run: Run) -> Iterator[Figure]:
    """The fast path of an event (`server/direct_write.py`), against uvicorn's own way: what the server
    computes for an event of 64 streams at once. The toy engine writes thousands of tokens a second, as a GPU
    does, so a server that computes more is a server that writes less."""
    clients, count, repeats = 64, *run.pick((200, 9), (100, 3))
    body = {"model": "toy", "max_tokens": count, "seed": 7, "messages": _user("Hello there.")}
    with ExitStack() as held:
        sides = {}
        for kind in ("direct", "plain"):
            child = held.enter_context(Child("bench.processes.toy_server", kind))
            sides[kind] = child, urlsplit(child.ask("open", slots=clients))

        def microseconds(kind: str) -> float:
            child, url = sides[kind]
            before = child.ask("cpu_seconds")
            answers = ask_together(url, [body] * clients).came
            events = sum(data.count(b"data: {") for came in answers for _, data in came)
            return float(child.ask("cpu_seconds") - before) / events * 1e6

        for kind in sides:
            microseconds(kind)
        yield run.compare(
            f"CPU time for an event of {clients} streams, toy engine",
            ours=functools.partial(microseconds, "direct"),
            peer=functools.partial(microseconds, "plain"),
            against="without direct write",
            unit="µs",
            gauge=Gauge.COST,
            target=at_least(1.02),
            repeats=repeats,
        )


def crowding(run: Run) -> Iterator[Figure]:
    """The slowest first token in a hundred of short prompts, while a long prompt is read."""
    length, repeats = run.pick((2000, 2), (600, 1))
    sides = _sides(run.quick)
    taken: dict[str, list[float]] = {side.kind: [] for side in sides}
    with Watch() as watch:
        for number in range(repeats):
            for side in sides:
                long = _body(_user(f"Log {number}. " + LONG * (length // 17)), 1)
                firsts = side.beside(long, lambda at: _body(_user(f"Say {at}."), 1))
                worst = statistics.quantiles([*firsts, firsts[-1]], n=100, method="inclusive")[-1]
                taken[side.kind].append(worst * side.bare.reading())
    name = f"p99 of the first token of short prompts beside one of {length:,} tokens"
    yield from _figures(name, taken, "tokens read bare", Gauge.COST, watch.machine)


@functools.cache
def _sides(quick: bool) -> list[Server]:
    """Ours and its peers, until this process ends."""
    held = ExitStack()
    atexit.register(held.close)
    kinds = ["ours", *PEERS]
    if quick:
        kinds.remove("llama-cpp-python")
        _left_out("llama-cpp-python's server")
    elif not importlib.util.find_spec("starlette_context"):
        kinds.remove("llama-cpp-python")
        _left_out("llama-cpp-python's server: pip install 'perdure[bench]'")
    bares: dict[str, Bare] = {}
    for kind in kinds:
        if build_of(kind) not in bares:
            bares[build_of(kind)] = Bare(held, build_of(kind))
    return [Server(held, kind, bares[build_of(kind)]) for kind in kinds]


def _left_out(what: str) -> None:
    print(f"   left out: {what}", flush=True)


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _body(messages: Sequence[Mapping[str, str]], count: int) -> dict[str, Any]:
    # Greedy, with no way to the end: all sides then write as much as they are asked for.
    never = dict.fromkeys(map(str, _ends()), -100)
    settings = {"model": "default", "max_tokens": count, "temperature": 0, "logit_bias": never}
    return {**settings, "messages": list(messages)}


@functools.cache
def _ends() -> list[int]:
    from perdure import Model

    model = Model(model_path())
    return [token for token in range(model.n_vocab) if model.is_end(token)]


def _figures(
    name: str, taken: Mapping[str, Sequence[float]], unit: str, gauge: Gauge, machine: Machine
) -> Iterator[Figure]:
    for peer in taken:
        if peer != "ours":
            yield Figure(
                name=name,
                against=peer,
                unit=unit,
                gauge=gauge,
                pairs=Pairs(tuple(taken["ours"]), tuple(taken[peer])),
                target=at_least(1.0),
                machine=machine,
            )


main = Bench("serve", (aggregate, turns, overhead, direct_write, crowding))


if __name__ == "__main__":
    sys.exit(main())
