"""Packing: whether K/V state at rest gets smaller without loss, and what that takes beside the disk.

    python -m bench.packing [MODEL] [--tokens N] [--threads N]

The rows of a text's K/V cache in f16 and q8_0, packed by zlib, and by zstd and lz4 where they are installed:
as they are, and with the bytes of values split into planes, which helps floats most. For each: packed size,
and GiB a second to pack and to unpack, on one core.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bench.machine import Watch
from perdure import Model
from perdure.ext.fit.kv_loss import TEXT

GIB = 1 << 30
Bytes = NDArray[np.uint8]


def codecs() -> Iterator[tuple[str, Callable[[bytes], bytes], Callable[[bytes], bytes]]]:
    yield "zlib 1", lambda data: zlib.compress(data, 1), zlib.decompress
    try:
        import zstandard

        for level in (1, 3):
            packer = zstandard.ZstdCompressor(level=level)
            yield f"zstd {level}", packer.compress, zstandard.ZstdDecompressor().decompress
    except ModuleNotFoundError:
        pass
    try:
        import lz4.frame

        yield "lz4", lz4.frame.compress, lz4.frame.decompress
    except ModuleNotFoundError:
        pass


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.packing", description=__doc__)
    parser.add_argument("model", nargs="?", help="a file or a name; else the default model")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="64 tokens")
    options = parser.parse_args(argv)
    count = 64 if options.quick else options.tokens
    with Model(options.model) as model, Watch() as watch:
        ids = model.tokenize(TEXT)[:count]
        print(f"{model.path.name}, {len(ids)} tokens")
        print("| K/V | codec | packed to | pack GiB/s | unpack GiB/s |\n|---|---|---|---|---|")
        for kind in ("f16", "q8_0"):
            settings = {"k_type": kind, "v_type": kind, "threads": options.threads}
            with model.context(n_ctx=len(ids) + 1, **settings) as context:
                context.decode(ids)
                state = np.frombuffer(context.save(0), np.uint8)
            for planes in (1, 2) if kind == "f16" else (1,):
                data = _split(state, planes)
                for name, pack, unpack in codecs():
                    _print(kind, name + (", in planes" if planes > 1 else ""), data, pack, unpack)
    print(watch.machine)
    return 0


def _split(state: Bytes, planes: int) -> bytes:
    """First the low bytes of all values, then the high ones: exponents of neighbours are alike."""
    whole = state[: len(state) // planes * planes]
    return whole.reshape(-1, planes).T.tobytes()


def _print(
    kind: str, name: str, data: bytes, pack: Callable[[bytes], bytes], unpack: Callable[[bytes], bytes]
) -> None:
    started = time.perf_counter()
    packed = pack(data)
    middle = time.perf_counter()
    assert unpack(packed) == data
    ended = time.perf_counter()
    size = len(data) / GIB
    print(
        f"| {kind} | {name} | {len(packed) / len(data):.1%} | {size / (middle - started):.2f} "
        f"| {size / (ended - middle):.2f} |",
        flush=True,
    )
