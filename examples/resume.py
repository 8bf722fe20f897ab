"""A long prompt, a long reply held to a JSON schema, again and again in one process, often cut off midway.

The workload that ends badly where native memory has no clear owner. Each run reads a career of 2,700 tokens
and writes it as JSON of about 1,000; some runs are cancelled while they read, some while they write. The
others must end by themselves with valid JSON, and the process must not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import perdure

STATIONS = ("Bergen", "Porto", "Gdańsk", "Lyon", "Kraków", "Aarhus", "Turin", "Ghent")
ROLES = ("a clerk", "a surveyor", "a bookbinder", "a pilot", "a nurse", "a baker", "an archivist", "a tuner")
TRAITS = ("patient", "exact", "cheerful", "stubborn", "curious", "quiet", "quick")
WORDS = "^[A-Za-z][A-Za-z ,]{19,59}$"
SAMPLE = '{"title":"Keeper of the northern records and maps","place":"A town by the cold sea","year":1987},'
WARM = 3
"""Runs after which the process has its size."""


@dataclass(frozen=True)
class Size:
    prompt: int
    reply: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=None, help="how many (default 20, or 6 with --quick)")
    parser.add_argument("--model", help="a .gguf file or a name (default: the default model)")
    parser.add_argument("--quick", action="store_true", help="a smaller prompt and reply, and fewer runs")
    parser.add_argument("--seed", type=int, default=1, help="decides which runs are cancelled, and when")
    options = parser.parse_args()
    size = Size(400, 120) if options.quick else Size(2700, 1000)
    runs = options.runs or (6 if options.quick else 20)
    chance = random.Random(options.seed)

    model = perdure.Model(options.model)
    prompt = career(model, size.prompt)
    schema = resume(model, size.reply)
    whole, cut, memory = 0, 0, []
    # Every string is bounded, and no character of them takes more than a token: this much always fits.
    n_ctx = size.prompt + 4 * size.reply + 200
    # No cache, so that each run reads all of its prompt again.
    with perdure.open(model, n_ctx=n_ctx, slots=1, cache=0) as runtime:
        reading = writing = 1.0
        for run in range(runs):
            # The first tells how long a run takes, the last must find everything in order.
            ends = "whole" if run in (0, runs - 1) else chance.choice(("whole", "reading", "writing"))
            job = runtime.submit(prompt, schema=schema, seed=run)
            after = {"reading": reading * chance.random(), "writing": reading + writing * chance.random()}
            timer = threading.Timer(after.get(ends, 0.0), job.cancel) if ends in after else None
            started = time.perf_counter()
            if timer is not None:
                timer.start()
            reply = job.reply()
            if timer is not None:
                timer.cancel()
            seconds = time.perf_counter() - started
            if reply.finish_reason == "cancelled":
                cut += 1
            else:
                assert reply.finish_reason == "stop", reply.finish_reason
                check(json.loads(reply.text), schema)
                whole += 1
                reading, writing = reply.timings.prefill, reply.timings.decode
            memory.append(resident())
            print(
                f"run {run + 1:2}: {reply.usage.prompt_tokens} tokens read, "
                f"{reply.usage.completion_tokens:4} written in {seconds:5.1f} s, "
                f"{reply.finish_reason:9}  {memory[-1]:6.1f} MiB",
                flush=True,
            )
    first = memory[min(WARM, len(memory)) - 1]
    flat = memory[-1] <= first * 1.05 + 8
    print(
        f"{runs} runs: {whole} whole with valid JSON, {cut} cancelled; "
        f"{first:.1f} MiB after run {min(WARM, runs)}, {memory[-1]:.1f} at the end: "
        f"{'ok' if flat else 'IT GREW'}"
    )
    return 0 if flat else 1


def career(model: perdure.Model, size: int) -> list[int]:
    """A prompt of exactly `size` tokens."""
    chance = random.Random(0)
    story = model.tokenize("The career of Maria Lind, as she told it.\n")
    question = model.tokenize("\nThe same career as JSON:\n", bos=False)
    year = 1950
    while len(story) < size:
        year += chance.randrange(1, 4)
        sentence = (
            f"In {year} she went to {chance.choice(STATIONS)} and worked as {chance.choice(ROLES)}; "
            f"they remember her as {chance.choice(TRAITS)} and {chance.choice(TRAITS)}. "
        )
        story += model.tokenize(sentence, bos=False)
    return story[: size - len(question)] + question


def resume(model: perdure.Model, size: int) -> dict[str, Any]:
    """A schema whose replies have about `size` tokens."""
    count = max(1, size // len(model.tokenize(SAMPLE, bos=False)))
    post = {
        "type": "object",
        "properties": {
            "title": {"type": "string", "pattern": WORDS},
            "place": {"type": "string", "pattern": WORDS},
            "year": {"type": "integer", "minimum": 1950, "maximum": 2020},
        },
        "required": ["title", "place", "year"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"posts": {"type": "array", "items": post, "minItems": count, "maxItems": count}},
        "required": ["posts"],
        "additionalProperties": False,
    }


def check(found: Any, schema: dict[str, Any]) -> None:
    assert len(found["posts"]) == schema["properties"]["posts"]["minItems"]
    for post in found["posts"]:
        assert post.keys() == {"title", "place", "year"}
        assert 20 <= len(post["title"]) <= 60
        assert 1950 <= post["year"] <= 2020


def resident() -> float:
    """MiB of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    sys.exit(main())
