"""A trace of agents at work: main conversations, their subagents, titles and compactions.

    main       a system prompt with tools, turns that go on, after some of them a compaction
    subagents  the beginning of the main one, a task, a few turns, and never again
    titles     a prompt of their own, once

What each asks for is a prompt of tokens. Which tokens they are does not matter, only which are the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt and what is written behind it."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    namespace: str = ""
    conversation: str = ""
    side: bool = False


class _Talk:
    """A conversation whose template drops the reasoning: half of each reply is gone in the next prompt."""

    def __init__(self, text: Iterator[int], beginning: list[int], name: str, namespace: str) -> None:
        self._text = text
        self._said = list(beginning)
        self.name = name
        self.namespace = namespace

    def turn(self, said: int, reply: int) -> Ask:
        self._said += _take(self._text, said)
        prompt, reasoning, answer = (
            tuple(self._said),
            _take(self._text, reply // 2),
            _take(self._text, reply // 2),
        )
        self._said += answer
        return Ask(prompt, (*reasoning, *answer), self.namespace, self.name)

    def compact(self, beginning: list[int], summary: int) -> None:
        self._said = [*beginning, *_take(self._text, summary)]


def trace(turns: int, *, seed: int, users: int = 3) -> list[Ask]:
    """What `users` agents ask for, each with a namespace of its own, in turns of the main conversations."""
    draw = random.Random(seed)
    text = _numbers(draw)
    asks: list[Ask] = []
    mains = []
    for user in range(users):
        beginning = _take(text, 1024)
        mains.append((beginning, _Talk(text, beginning, f"main {user}", f"user {user}")))
    for turn in range(turns):
        for user, (beginning, main) in enumerate(mains):
            # Not all of them work all the time.
            if draw.random() < 0.3:
                continue
            asks.append(main.turn(draw.randint(100, 400), 200))
            if draw.random() < 0.5:
                asks.append(Ask(tuple(_take(text, 600)), tuple(_take(text, 16)), f"user {user}", "", True))
            if draw.random() < 0.4:
                agent = _Talk(text, beginning, f"agent {turn} of {user}", f"user {user}")
                asks += [agent.turn(draw.randint(100, 300), 100) for _ in range(draw.randint(1, 3))]
            if turn % 12 == 11:
                main.compact(beginning, 300)
    return asks


def _numbers(draw: random.Random) -> Iterator[int]:
    while True:
        yield draw.randrange(1, 250)


def _take(text: Iterator[int], count: int) -> list[int]:
    return [next(text) for _ in range(count)]
