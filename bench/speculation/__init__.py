"""Speculation: replies with guesses (`speculate=-1`) against the same replies without, in one run.

    python -m bench.speculation [MODEL] [--quick] [--threads N] [--streams N] [--only PART] [--cpu] [--server]

MODEL is a file or a name (the default model without it), or `32b-q8`, `32b`, `8b`, `small` or `tiny`: a model
of that shape that needs no network. It is written under PERDURE_HOME when it is first needed (4.5 GB for 8b,
18 GB for 32b, 34 GB for 32b-q8), computes all that a model of its size does, and writes token n + 1 behind
token n. So an edit, a misleading text and a right guess are known:

    on a GPU, about 3 minutes with the writing:   python -m bench.speculation 8b --quick
    the same in small, on a CPU:                  python -m bench.speculation small --quick --threads 1

First it says what a step of k tokens costs, in steps of one, and how much faster a reply could be at most if
every guess were right: no way of guessing gains more on this machine. Then, each with and without guesses in
turn: an edit of a file of about 1,000 tokens that is repeated back with changes (one token in 20 with models
that count); free text; many streams at once; JSON under a schema. `--server` has llama-server's own guesses
beside them, with and without, on the same prompts (llama-server out of the folder that PERDURE_LLAMA names,
else out of `xllamacpp`).

For models that count, a second file of that shape has a next-token layer (MTP) that is right behind four of
five tokens; it is compared with a runtime that does not use that layer.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import perdure
from bench.machine import Watch
from bench.processes.random_model import EIGHT_BILLION, SMALL, Shape, write
from bench.speculation.peer import SpeculatingServer
from bench.speculation.prompts import SCHEMA, Prompt, Prompts, counted, texts
from perdure import Model, Runtime
from perdure.backend import LocalBackend
from perdure.config import settings
from perdure.decode.request import Reply
from perdure.engine.context import Feed
from perdure.engine_config import EngineConfig
from perdure.request_options import ADAPT

N_CTX = 2048
_TINY = Shape(layers=4, width=256, inner=768, heads=4, kv_heads=2, vocabulary=8192, type="q8_0")
_LARGE = Shape(
    layers=64, width=5120, inner=25_600, heads=64, kv_heads=8, vocabulary=151_936, type="q4_0", head=128
)
_SHAPES = {
    "32b-q8": replace(_LARGE, type="q8_0"),
    "32b": _LARGE,
    "8b": EIGHT_BILLION,
    "small": SMALL,
    "tiny": _TINY,
}
_NEXT_TOKEN = "next-token layer"


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
    parser = argparse.ArgumentParser(
        prog="python -m bench.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        help="a file or a name, `32b-q8`, `32b`, `8b`, `small` or `tiny`; else the default model",
    )
    parser.add_argument("--quick", action="store_true", help="3 pairs of short replies")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--only", default="", help="only the parts with this in their name")
    parser.add_argument("--cpu", action="store_true", help="processor time: for 1 thread on a busy machine")
    parser.add_argument("--server", action="store_true", help="llama-server's own guesses beside them")
    options = parser.parse_args(argv)
    counts = options.model in _SHAPES
    if counts and options.only and options.only in _NEXT_TOKEN:
        _next_token(options)
        return 0
    path = _written(options.model) if options.model in _SHAPES else options.model
    model = Model(path)
    prompts = counted(model.n_vocab, options.streams) if counts else texts(options.streams)
    if options.only in "steps":
        _steps(model, options.threads, cpu=options.cpu)
    backend = LocalBackend(
        model,
        EngineConfig(
            n_ctx=N_CTX,
            slots=max(1, options.streams),
            stall=0.05,
            threads=options.threads,
            cache=256 << 20,
        ),
        own_model=True,
    )
    with Runtime(backend) as rt:
        _run(rt, options, prompts)
        if options.server:
            with SpeculatingServer(str(model.path), threads=options.threads or 1, n_ctx=N_CTX) as server:
                _beside(rt, server, prompts, options)
    if counts:
        _next_token(options)
    return 0


def _written(name: str, *, next_token: bool = False) -> Path:
    folder = settings().home / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{'mtp' if next_token else 'counts'}.gguf"
    return write(file, replace(_SHAPES[name], counts=True, next_token=next_token))


def _next_token(options: argparse.Namespace) -> None:
    """Guesses of a model's own next-token layer against the same model without."""
    titles = {temperature: f"{_NEXT_TOKEN}, temperature {temperature:g}" for temperature in (0.0, 0.8)}
    if not any(options.only in title for title in titles.values()):
        return
    path = _written(options.model, next_token=True)
    count, repeats = (192, 5) if options.quick else (256, 9)
    shared: dict[str, Any] = {"n_ctx": N_CTX, "slots": 1, "stall": 0.05, "threads": options.threads}
    with perdure.open(path, draft="mtp", **shared) as rt, perdure.open(path, **shared) as plain:
        for temperature, title in titles.items():
            if options.only in title:
                request = {"max_tokens": count, "ignore_eos": True, "seed": 1, "temperature": temperature}
                ours, peer = _replies(rt, ADAPT, count, request), _replies(plain, 0, count, request)
                _compare(title, 1.8, repeats, ours, peer, cpu=options.cpu)


def _replies(
    rt: Runtime, speculate: int, count: int, request: Mapping[str, Any]
) -> Callable[[], Sequence[Reply]]:
    """Replies to one prompt after the other: each counts on from elsewhere."""
    starts = itertools.count(4000, 2 * count)
    return lambda: [rt.submit([next(starts)], **request, speculate=speculate).reply()]


def _steps(model: Model, threads: int | None, *, cpu: bool) -> None:
    """What a step of several tokens costs, with a row of logits for each."""
    clock = time.process_time if cpu else time.perf_counter
    depth, found = 512, {}
    with model.context(n_ctx=N_CTX, n_seq=1, threads=threads) as context, Watch() as watch:
        context.decode([1000 + at for at in range(depth)], 0)
        for count in (1, 2, 4, 8, 16, 32):
            times = []
            for _ in range(7):
                started = clock()
                context.step([Feed(0, list(range(2000, 2000 + count)), range(count))])
                context.synchronize()
                times.append(clock() - started)
                context.truncate(depth, 0)
            # The least: on a busy machine others are in the rest.
            found[count] = min(times)
    costs = ", ".join(f"{count}: {seconds / found[1]:.2f}" for count, seconds in found.items())
    most = max(count * found[1] / seconds for count, seconds in found.items())
    print(
        f"{most:7.3f}  the most that guessing could gain here | steps of k tokens, in steps of one: {costs} "
        f"| one takes {1e3 * found[1]:.2f} ms | {watch.machine}",
        flush=True,
    )


def _run(rt: Runtime, options: argparse.Namespace, prompts: Prompts) -> None:
    repeats, count = (3, 96) if options.quick else (9, 256)

    def asked(prompts: Sequence[Prompt], **request: Any) -> Sequence[Reply]:
        jobs = [rt.submit(prompt, **request) for prompt in prompts]
        return [job.reply() for job in jobs]

    def pair(name: str, target: float, prompts: Sequence[Prompt], **request: Any) -> None:
        if options.only in name:
            _compare(
                name,
                target,
                repeats,
                lambda: asked(prompts, **request, speculate=ADAPT),
                lambda: asked(prompts, **request, speculate=0),
                cpu=options.cpu,
            )

    plain: dict[str, Any] = {"max_tokens": count, "ignore_eos": True, "seed": 1}
    longer = {**plain, "max_tokens": 2 * count}
    pair("edit, greedy", 2.5, [prompts.edit], **longer, temperature=0)
    pair("edit, temperature 0.8", 2.5, [prompts.edit], **longer, temperature=0.8)
    pair("free text, greedy", 0.98, [prompts.free], **longer, temperature=0)
    pair("free text, temperature 0.8", 0.98, [prompts.free], **longer, temperature=0.8)
    if options.streams > 1:
        few = {**plain, "max_tokens": count // 2}
        pair(f"{options.streams} streams", 0.99, prompts.many, **few, temperature=0.8)
    pair("json", 1.3, ["A person as JSON:\n"], schema=SCHEMA, temperature=0, max_tokens=160)


def _beside(rt: Runtime, server: SpeculatingServer, prompts: Prompts, options: argparse.Namespace) -> None:
    """llama-server on the same prompts, with its own guesses and without."""
    count, repeats = (192, 3) if options.quick else (512, 5)
    for name, prompt in (("edit", prompts.edit), ("free text", prompts.free)):
        tokens = rt.model.tokenize(prompt) if isinstance(prompt, str) else prompt
        with Watch() as watch:
            pairs = [
                [server.speed(tokens, count, guessing=guessing) for guessing in (True, False)]
                for _ in range(repeats + 1)
            ][1:]
        ratio = statistics.median(ours.speed / peer.speed for ours, peer in pairs)
        guessed, right = pairs[-1][0].guessed, pairs[-1][0].right
        print(
            f"{ratio:7.3f}  {name}, greedy, by {server.name}: "
            f"{statistics.median(ours.speed for ours, _ in pairs):.1f} tok/s, "
            f"without {statistics.median(peer.speed for _, peer in pairs):.1f} | {guessed} guessed, "
            f"{right} right | {watch.machine}, {repeats} pairs",
            flush=True,
        )
