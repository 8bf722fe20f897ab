"""Speculation: replies with guesses (`speculate=-1`) against the same replies without, in one run.

    python -m bench.speculation [MODEL] [--quick] [--threads N] [--streams N] [--planted] [--cpu]

An edit of a file of about 1,000 tokens that is repeated back with changes, JSON under a schema, free text,
and many streams at once. `--planted` has every guess right but one in five instead of asking n-grams: what
the machine could gain with a model that repeats, for models of random weights. Each pair is two replies right
after one another. JSON is compared with a reply of which every token is drawn.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.machine import Watch
from perdure import Model, Runtime
from perdure.backend import LocalBackend
from perdure.decode.request import Reply
from perdure.decode.sequence import TokenSequence
from perdure.decode.speculation.drafter import Draft
from perdure.request_options import ADAPT

_FUNCTION = '''def {name}(values, limit):
    """Return the {name} of all values that are below the limit."""
    total = 0
    for value in values:
        if value < limit:
            total += value * {number}
    return total


'''
_NAMES = ("price", "weight", "volume", "height", "length", "width", "depth", "speed", "power", "energy")
_FILE = "".join(
    _FUNCTION.format(name=name, number=at + 2) for at, name in enumerate((*_NAMES, "score", "rank"))
)
_EDITED = _FILE.replace("limit", "bound")
EDIT = f"# The file:\n\n{_FILE}# The same file, with `limit` renamed to `bound`:\n\n{_EDITED[:400]}"
FREE = "The history of the lighthouse is long. It began when a keeper"
SCHEMA = {
    "type": "object",
    "properties": {
        name: {"type": "string", "maxLength": 12}
        for name in ("first_name", "family_name", "place_of_birth", "favourite_colour", "profession")
    },
    "required": ["first_name", "family_name", "place_of_birth", "favourite_colour", "profession"],
    "additionalProperties": False,
}


class Planted:
    """Guesses what the reply without guesses was, with one mistake in five tokens."""

    name = "planted"

    def __init__(self) -> None:
        self.replies: dict[tuple[int, ...], Sequence[int]] = {}
        self._dice = random.Random(1)

    def draft(self, sequence: TokenSequence, count: int) -> Draft | None:
        reply = self.replies.get(tuple(sequence.request.prompt))
        if reply is None:
            return None
        tokens = [
            token if self._dice.random() < 0.8 else (token + 1) % 256
            for token in reply[sequence.written :][:count]
        ]
        return Draft(tokens, 0.8, self.name) if tokens else None

    def forget(self, sequence: TokenSequence) -> None:
        pass

    def close(self) -> None:
        pass


def _speed(replies: Sequence[Reply], seconds: float | None) -> float:
    """Tokens a second of replies that were written together, by their own clocks or in so many seconds."""
    longest = max(reply.timings.decode for reply in replies) if seconds is None else seconds
    return sum(reply.timings.decoded_tokens - 1 for reply in replies) / max(longest, 1e-9)


def _compare(
    name: str,
    target: float,
    repeats: int,
    ours: Callable[[], Sequence[Reply]],
    peer: Callable[[], Sequence[Reply]],
    *,
    cpu: bool,
) -> None:
    ratios, speeds, guessed, right, forced = [], [], 0, 0, 0
    with Watch() as watch:
        for at in range(repeats + 1):
            sides = [(ours, True), (peer, False)][:: -1 if at % 2 else 1]
            speed = {}
            for side, is_ours in sides:
                started = time.process_time()
                replies = side()
                took = time.process_time() - started if cpu else None
                speed[is_ours] = _speed(replies, took)
                if is_ours:
                    guessed += sum(reply.timings.drafted_tokens for reply in replies)
                    right += sum(reply.timings.accepted_tokens for reply in replies)
                    forced += sum(reply.timings.forced_tokens for reply in replies)
            # The first pair warms both up.
            if at:
                ratios.append(speed[True] / speed[False])
                speeds.append((speed[True], speed[False]))
    ratio = statistics.median(ratios)
    with_, without = (statistics.median(each) for each in zip(*speeds, strict=True))
    print(
        f"{ratio:7.3f}  {name}: {with_:.1f} tok/s, without {without:.1f} | at least {target:g}: "
        f"{'ok' if ratio >= target else 'MISS'} | {guessed} guessed, {right} right, {forced} forced | "
        f"{watch.machine}, {repeats} pairs, from {min(ratios):.3f} to {max(ratios):.3f}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("model", nargs="?", help="a file or a name; else the default model")
    parser.add_argument("--quick", action="store_true", help="3 pairs of short replies")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--only", default="", help="only the parts with this in their name")
    parser.add_argument("--cpu", action="store_true", help="processor time: for 1 thread on a busy machine")
    parser.add_argument("--planted", action="store_true", help="guess right four times in five")
    options = parser.parse_args(argv)
    repeats, count = (3, 96) if options.quick else (9, 256)
    planted = Planted() if options.planted else None
    model = Model(options.model)
    backend = LocalBackend(
        model,
        n_ctx=2560,
        slots=max(1, options.streams),
        stall=0.05,
        threads=options.threads,
        cache=256 << 20,
        own_model=True,
        drafters=None if planted is None else [planted],
    )
    with Runtime(backend) as rt:
        _run(rt, options, planted, repeats, count)
    return 0


def _run(rt: Runtime, options: argparse.Namespace, planted: Planted | None, repeats: int, count: int) -> None:
    def asked(prompts: Sequence[str], **request: Any) -> Sequence[Reply]:
        jobs = [rt.submit(prompt, **request) for prompt in prompts]
        return [job.reply() for job in jobs]

    def pair(name: str, target: float, prompts: Sequence[str], **request: Any) -> None:
        if options.only not in name:
            return
        if planted is not None:
            for prompt, reply in zip(prompts, asked(prompts, **request), strict=True):
                planted.replies[tuple(rt.model.tokenize(prompt))] = reply.tokens
        _compare(
            name,
            target,
            repeats,
            lambda: asked(prompts, **request, speculate=ADAPT),
            lambda: asked(prompts, **request, speculate=0),
            cpu=options.cpu,
        )

    plain: dict[str, Any] = {"max_tokens": count, "ignore_eos": True, "seed": 1}
    pair("edit, greedy", 2.5, [EDIT], **plain, temperature=0)
    pair("edit, temperature 0.8", 2.5, [EDIT], **plain, temperature=0.8)
    pair("free text, greedy", 0.98, [FREE], **plain, temperature=0)
    pair("free text, temperature 0.8", 0.98, [FREE], **plain, temperature=0.8)
    if options.streams > 1 and f"{options.streams} streams".find(options.only) >= 0:
        many = [f"{FREE} number {at}" for at in range(options.streams)]
        pair(f"{options.streams} streams", 0.99, many, **{**plain, "max_tokens": count // 4}, temperature=0.8)
    if options.only in "json, drawn":
        request: dict[str, Any] = {"schema": SCHEMA, "temperature": 0, "max_tokens": 160}
        prompt = "A person as JSON:\n"
        _compare(
            "json, against draws",
            1.3,
            repeats,
            lambda: asked([prompt], **request, speculate=ADAPT),
            # Log probabilities have every token drawn.
            lambda: asked([prompt], **request, logprobs=0),
            cpu=options.cpu,
        )
