"""Fairness: seven chatters beside one key that asks for 64 long prompts at once.

Each is a namespace with the weight 1. `beside` is the 95th percentile of a chatter's first token while the
greedy one asks, against the same without it, of the worst of the seven. `alone` is what the greedy one pays
for the order of namespaces where nobody else asks: tokens a second, against those without a namespace. In
full on the default model (`PERDURE_MODEL` names another), 30,000 tokens a prompt; quick on a toy of the zoo.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import perdure
from bench.engine import model_path
from bench.harness import Bench, Figure, Gauge, Pairs, Run, at_least, at_most
from bench.machine import Watch
from perdure import Runtime

CHATTERS = 7
SLOTS = 8
_CHAT = 200
"""Tokens of a chatter's turn."""
_REPLY = 24


def beside(run: Run) -> Iterator[Figure]:
    requests, length, turns = _size(run)
    with ExitStack() as held, Watch() as watch:
        rt = _opened(run, held, length)
        quiet = _chatted(rt, turns, first=0)
        greedy = [_long(rt, length, at, "greedy") for at in range(requests)]
        busy = _chatted(rt, turns, first=turns)
        if all(each.done for each in greedy):
            raise RuntimeError("the long prompts were read before the chatters were done: take more of them")
        for each in greedy:
            each.cancel()
    waits = [(_p95(with_it), _p95(without)) for with_it, without in zip(busy, quiet, strict=True)]
    worst = max(waits, key=lambda pair: pair[0] / pair[1])
    yield Figure(
        name=f"p95 first token of the worst chatter beside {requests} prompts of {length:,} tokens",
        against="without them",
        unit="s",
        gauge=Gauge.GROWTH,
        pairs=Pairs((worst[0],), (worst[1],)),
        target=at_most(1.5),
        machine=watch.machine,
    )


def alone(run: Run) -> Iterator[Figure]:
    requests, length, _ = _size(run)
    with ExitStack() as held:
        rt = _opened(run, held, length)
        count = run.pick(requests, 4)
        number = iter(range(10**6))

        def speed(namespace: str) -> Callable[[], float]:
            def measure() -> float:
                began = time.perf_counter()
                # New prompts each time: nothing of them is in the cache.
                jobs = [_long(rt, length, 1000 + next(number), namespace) for _ in range(count)]
                tokens = sum(length + len(job.reply().tokens) for job in jobs)
                return tokens / (time.perf_counter() - began)

            return measure

        yield run.compare(
            f"{count} prompts of {length:,} tokens of one key that is alone",
            ours=speed("greedy"),
            peer=speed(""),
            against="without a namespace",
            unit="tok/s",
            gauge=Gauge.RATE,
            target=at_least(0.95),
            repeats=run.pick(5, 3),
        )


def _size(run: Run) -> tuple[int, int, int]:
    """Long prompts, their tokens, and turns of each chatter."""
    return run.pick((64, 30_000, 20), (64, 1500, 5))


def _opened(run: Run, held: ExitStack, length: int) -> Runtime:
    model = model_path()
    if run.quick:
        from bench.agents.peer import toy_model

        model = toy_model(Path(held.enter_context(tempfile.TemporaryDirectory())))
    rt = perdure.open(model, n_ctx=length + 512, slots=SLOTS, threads=2, queue=512)
    return held.enter_context(rt)


def _prompt(rt: Runtime, length: int, number: int) -> list[int]:
    """No two of them begin alike."""
    return [1 + (number * 7919 + at * 31 + at * at * number) % (rt.model.n_vocab - 2) for at in range(length)]


def _long(rt: Runtime, length: int, number: int, namespace: str) -> Any:
    prompt = _prompt(rt, length, number)
    return rt.submit(prompt, max_tokens=_REPLY, temperature=0, ignore_eos=True, namespace=namespace)


def _chatted(rt: Runtime, turns: int, first: int) -> list[list[float]]:
    """Seconds to the first tokens of each chatter's turns; all chat at once, and think between turns."""
    waits: list[list[float]] = [[] for _ in range(CHATTERS)]

    def chat(chatter: int) -> None:
        for turn in range(first, first + turns):
            prompt = _prompt(rt, _CHAT, 1 + chatter + CHATTERS * turn)
            began = time.perf_counter()
            stream = rt.submit(
                prompt, max_tokens=_REPLY, temperature=0, ignore_eos=True, namespace=f"chatter {chatter}"
            )
            next(iter(stream))
            waits[chatter].append(time.perf_counter() - began)
            stream.reply()
            time.sleep(0.05 * (chatter + 1))

    threads = [threading.Thread(target=chat, args=(chatter,)) for chatter in range(CHATTERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return waits


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


main = Bench("fairness", [beside, alone])
