"""Adapters in one batch: what it costs to serve two of them at once, against one after the other.

A step computes with one set of adapters, so two sets take turns on the engine. Each turn costs a plan of the
library's memory; `decode/scheduler.py` has a set keep the engine for a time.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import perdure
from bench.engine import model_path
from bench.harness import Bench, Figure, Gauge, Run, at_least, at_most

THREADS = 2
RANK = 16
CHANGED = ("attn_q.weight", "attn_v.weight", "ffn_down.weight")
PROMPT = list(range(100, 132))


def batch(run: Run) -> Iterator[Figure]:
    count, each = run.pick(64, 16), 2
    with tempfile.TemporaryDirectory() as folder:
        names = {name: str(write_lora(Path(folder) / f"{name}.gguf", seed)) for seed, name in enumerate("ab")}
        # With the cache that people have: a sequence that has ended stays in its slot. Without it, streams of
        # one adapter would have the K/V cells to themselves: a step over half of these is a fifth shorter.
        with perdure.open(
            model_path(), n_ctx=512, slots=2 * each, threads=THREADS, adapter_names=names
        ) as runtime:
            numbers = itertools.count(200)

            def serve(adapters: Sequence[str]) -> float:
                started = time.perf_counter()
                streams = [
                    runtime.submit(
                        [*PROMPT, next(numbers)],
                        max_tokens=count,
                        temperature=0,
                        ignore_eos=True,
                        adapters={adapter: 1.0},
                    )
                    for adapter in adapters
                ]
                for stream in streams:
                    stream.reply()
                return time.perf_counter() - started

            serve("ab")
            yield run.compare(
                f"(a) two adapters, {each} streams each, {count} tokens: at once",
                ours=lambda: serve("ab" * each),
                peer=lambda: serve("a" * each) + serve("b" * each),
                against="one adapter after the other",
                unit="s",
                gauge=Gauge.COST,
                # At most 1.1 times the time.
                target=at_least(1 / 1.1),
                repeats=run.pick(15, 3),
            )
            yield run.compare(
                f"(b) one adapter, {2 * each} streams, {count} tokens",
                ours=lambda: serve("a" * 2 * each),
                peer=lambda: serve("ab" * each),
                against="the same streams of two adapters",
                unit="s",
                gauge=Gauge.GROWTH,
                target=at_most(4.0),
                repeats=run.pick(15, 3),
            )


def write_lora(path: Path, seed: int) -> Path:
    """A LoRA of random numbers for the default model."""
    from gguf import GGUFReader, GGUFWriter

    dice = np.random.default_rng(seed)
    writer = GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    for tensor in GGUFReader(model_path()).tensors:
        if tensor.name.endswith(CHANGED):
            wide, tall = (int(size) for size in tensor.shape[:2])
            for half, shape in (("lora_a", (RANK, wide)), ("lora_b", (tall, RANK))):
                values = dice.standard_normal(shape).astype(np.float32) * np.float32(0.02)
                writer.add_tensor(f"{tensor.name}.{half}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


main = Bench("adapters", [batch])
