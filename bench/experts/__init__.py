"""Experts on the CPU: a mixture that is 1.5 times as large as a pretended card, against the CPU alone.

    python -m bench.experts [MODEL] [--card GIB]

Without a model one of random weights is written under PERDURE_HOME: 30B with 3B active (17 GB) where there is
a GPU, else a small one. The card is pretended: what fits is planned as if it had that much free, and the
buffers that the library reports on the device must stay below it. Without a GPU only that experts can be kept
apart is shown, and what that costs.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from bench.fit import reported
from bench.harness import Figure, Gauge, Pairs, at_least
from bench.machine import Watch
from bench.processes.random_model import MIXTURE, SMALL_MIXTURE, write
from perdure import Model, models
from perdure.config import settings
from perdure.engine.llama.layer_plan import plan_offload
from perdure.engine.llama.native import library
from perdure.models.placement import ModelPlacement, Sizes

GIB = 1 << 30
N_CTX = 4096
TIMES_THE_CARD = 1.5
_PROMPT = 512


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.experts", description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="a mixture of experts")
    parser.add_argument("--card", type=float, help="GiB of the pretended card; else 1/1.5 of the model")
    parser.add_argument("--quick", action="store_true", help="a few tokens")
    options = parser.parse_args(argv)
    gpus = [device for device in library.loaded().device_list if device.offloads]
    path = options.model or _usual(bool(gpus))
    sizes = Sizes.of(models.read_parts(path))
    card = int(options.card * GIB) if options.card else int(sizes.weights / TIMES_THE_CARD)
    count, repeats = (8, 2) if options.quick else (64, 5)
    if gpus:
        pretended = dataclasses.replace(gpus[0], free=card, total=card)
        plan = plan_offload("auto", [pretended], sizes, path.name, setup=ModelPlacement(n_ctx=N_CTX))
        print(plan.note or "all of it fits on this card")
        layers, experts = plan.layers, plan.cpu_experts
    else:
        layers, experts = 0, len(sizes.layers)
        print("no GPU here: all experts are kept apart, and nothing is faster by that")
    print(f"{path.name}: {sizes.weights / GIB:.1f} GiB of weights, a card of {card / GIB:.1f} GiB")
    with Watch() as watch:
        with reported() as buffers:
            ours = _speeds(path, layers, experts, count, repeats)
        cpu = _speeds(path, 0, 0, count, repeats)
    target = at_least(3.0 if gpus else 0.5)
    figures = [
        Figure(
            name=f"{what}, {layers} layers on the GPU and experts of {experts} layers here",
            against="the CPU alone",
            unit="tok/s",
            gauge=Gauge.RATE,
            pairs=Pairs(tuple(ours[what]), tuple(cpu[what])),
            target=target,
            machine=watch.machine,
        )
        for what in ("decode", "prompt")
    ]
    for figure in figures:
        print(figure)
    taken = buffers.device
    print(f"device buffers {taken / GIB:.2f} of {card / GIB:.2f} GiB: {'ok' if taken <= card else 'MISS'}")
    return int(taken > card or not figures[0].ok)


def _usual(gpu: bool) -> Path:
    folder = settings().home / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    if gpu:
        return write(folder / "mixture-30b.gguf", MIXTURE)
    return write(folder / "mixture-small.gguf", SMALL_MIXTURE)


def _speeds(path: Path, layers: int, experts: int, count: int, repeats: int) -> dict[str, list[float]]:
    """Tokens a second of a reply and of a prompt."""
    found: dict[str, list[float]] = {"decode": [], "prompt": []}
    prompt = [1 + at * 7919 % 5000 for at in range(_PROMPT)]
    with (
        Model(path, gpu_layers=layers, cpu_experts=experts, cells=N_CTX) as model,
        model.context(n_ctx=N_CTX) as context,
    ):
        context.decode(prompt[:64])
        for _ in range(repeats):
            context.clear()
            started = time.perf_counter()
            context.decode(prompt)
            context.synchronize()
            found["prompt"].append(_PROMPT / (time.perf_counter() - started))
            times = []
            for _ in range(count):
                started = time.perf_counter()
                context.decode([int(context.logits().argmax())])
                context.synchronize()
                times.append(time.perf_counter() - started)
            found["decode"].append(1 / statistics.median(times))
    return found
