"""K/V types: what each costs a model against f16, and how fast it is behind contexts of several lengths.

    python -m bench.kv [MODEL] [--text FILE] [--tokens N] [--types q8_0 q8_0:f16] [--lengths 512 32768]

For each type: bytes a token, mean KL divergence, share of tokens with the same likeliest successor,
perplexity, share of a greedy reply before it differs, and tokens a second behind each length. What is
measured with the built-in text is remembered, as `perdure show --kv` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.machine import Watch
from perdure import Model
from perdure.engine_config import EXACT_TYPES, KvType
from perdure.errors import OutOfMemoryError
from perdure.ext.fit.kv_loss import TEXT, measure, remember, speed

LENGTHS = (512, 2048, 8192, 32_768)
TYPES = ("f16", "q8_0", "q8_0:f16", "q5_1", "q4_0")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kv", description=__doc__)
    parser.add_argument("model", nargs="?", help="a file or a name; else the default model")
    parser.add_argument("--text", type=Path, help="a text to measure on, instead of the built-in one")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of that text")
    parser.add_argument("--types", nargs="*", default=TYPES)
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS)
    parser.add_argument("--quick", action="store_true", help="64 tokens, two lengths, two types")
    options = parser.parse_args(argv)
    text = TEXT if options.text is None else options.text.read_text(encoding="utf-8")
    tokens = 64 if options.quick else options.tokens
    types = options.types[:2] if options.quick else options.types
    lengths = (64, 512) if options.quick else options.lengths
    with Model(options.model) as model, Watch() as watch:
        print(f"{model.path.name}, {model.gpu_layers} layers on a GPU, {tokens} tokens of text")
        print("| type | bytes a token | KL | same top | perplexity | greedy | " + _heads(lengths) + " |")
        print("|" + "---|" * (6 + len(lengths)))
        for name in types:
            kv = KvType.parse(name)
            try:
                loss = measure(model, *kv, text=text, tokens=tokens)
            except OutOfMemoryError as error:
                print(f"| {name} | not taken: {error} |")
                continue
            if text is TEXT and not options.quick and not set(kv) <= EXACT_TYPES:
                remember(model, loss)
            speeds = [speed(model, *kv, length) for length in lengths]
            print(
                f"| {name} | {loss.bytes_per_token:,} | {loss.kl:.5f} | {loss.same_top:.1%} "
                f"| {loss.perplexity:.3f} | {loss.greedy:.0%} | "
                + " | ".join(f"{each:.1f}" for each in speeds)
                + f" |{' LARGE' if loss.large else ''}",
                flush=True,
            )
    print(watch.machine)
    return 0


def _heads(lengths: Sequence[int]) -> str:
    return " | ".join(f"tok/s at {length:,}" for length in lengths)
