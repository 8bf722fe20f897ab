"""E4: files that lie: headers, sizes and parts drawn at random; and many requests, with memory flat.

PERDURE_FUZZ_SECONDS=600 pytest -s -m soak tests/ext/images/test_fuzz.py -k files
PERDURE_IMAGE_REQUESTS=10000 pytest -s -m soak tests/ext/images/test_fuzz.py -k requests
"""

from __future__ import annotations

import os
import random
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import perdure
from perdure import Image, InvalidInputError, TooLargeError
from perdure.ext.images.encoder import Encoder

from .pictures import as_file, picture, pixels, sound

Toy = Callable[[str], tuple[Path, Path]]

FORMS = ("PNG", "JPEG", "WEBP", "GIF")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour: int, data: bytes) -> bytes:
    """A PNG whose header says this, with whole checksums."""
    head = struct.pack(">IIBBBBB", width & 0xFFFFFFFF, height & 0xFFFFFFFF, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def drawn(rng: random.Random, whole: list[bytes]) -> bytes:
    """A file: one that is whole with some bytes changed, cut, repeated or put into another; or a PNG whose
    header says anything."""
    way = rng.randrange(7)
    if way == 0:
        sides = [0, 1, 2, 9, 65535, 1 << 20, 1 << 31, rng.randrange(1 << 32)]
        filler = bytes(rng.randrange(2000))
        return png(
            rng.choice(sides),
            rng.choice(sides),
            rng.choice((0, 1, 2, 4, 8, 16, 77)),
            rng.randrange(8),
            filler,
        )
    data = bytearray(rng.choice(whole))
    if way == 1:
        return bytes(data[: rng.randrange(len(data))])
    if way == 2:
        at = rng.randrange(len(data))
        return bytes(data[:at] + rng.randbytes(rng.randrange(1, 64)) + data[at:])
    if way == 3:
        other = rng.choice(whole)
        return bytes(data[: rng.randrange(len(data))] + other[rng.randrange(len(other)) :])
    # The header above all.
    reach = len(data) if way == 4 else min(len(data), 64)
    for _ in range(rng.randrange(1, 12)):
        data[rng.randrange(reach)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
    return bytes(data)


def fuzz(toy: Toy, kind: str, rounds: Callable[[int], bool], seed: int) -> dict[str, int]:
    """Have files encoded: each is read, or is an error of its own that says so. How many of each."""
    model, projector = toy(kind)
    sounds = kind == "qwen2a"
    small = pixels(64, 48)
    whole = [sound(0.2), sound(0.1, 8000, 2)] if sounds else [as_file(small, form) for form in FORMS]
    ended: dict[str, int] = {}
    with Encoder(model, projector, threads=1) as encoder:
        encoder.encode(whole[0], "audio" if sounds else "image")
        first = psutil.Process(encoder.pid).memory_info().rss
        pid, at = encoder.pid, 0
        while rounds(at):
            rng = random.Random(seed + at)
            data = drawn(rng, whole)
            how = "read"
            try:
                if sounds or rng.random() < 0.8:
                    encoder.encode(data, "audio" if sounds else "image")
                else:
                    encoder.count(data)
            except (InvalidInputError, TooLargeError) as error:
                how = type(error).__name__
            ended[how] = ended.get(how, 0) + 1
            at += 1
        # No file of these has cost the process, nor memory that stays.
        assert encoder.pid == pid
        assert psutil.Process(encoder.pid).memory_info().rss < first + (400 << 20)
        assert encoder.encode(whole[0], "audio" if sounds else "image").tokens
    return ended


@pytest.mark.parametrize("kind", ["llava", "qwen2a"])
def test_files_that_lie_are_read_or_refused(toy: Toy, kind: str) -> None:
    ended = fuzz(toy, kind, lambda at: at < 60, seed=20261119)
    assert ended["InvalidInputError"] > 5


@pytest.mark.soak
def test_many_files_that_lie(toy: Toy) -> None:
    seed, ends = (
        random.randrange(1 << 30),
        time.monotonic() + float(os.environ.get("PERDURE_FUZZ_SECONDS", "60")),
    )
    print(f"from seed {seed}: {fuzz(toy, 'llava', lambda at: time.monotonic() < ends, seed)}")


def test_a_bomb_is_refused_by_its_header(toy: Toy) -> None:
    """A few kilobytes that say to be 30,000 × 30,000 pixels; and a text chunk of a gigabyte of zeros."""
    model, projector = toy("llava")
    bomb = png(30_000, 30_000, 8, 2, bytes(1 << 20))
    text = zlib.compress(bytes(64 << 20), 9)
    small = as_file(pixels(64, 48))
    swollen = small[:33] + chunk(b"zTXt", b"a\0\0" + text) + small[33:]
    with Encoder(model, projector, threads=1) as encoder:
        encoder.encode(small)
        before = psutil.Process(encoder.pid).memory_info().rss
        with pytest.raises(TooLargeError, match="pixels"):
            encoder.encode(bomb)
        with pytest.raises((InvalidInputError, TooLargeError)):
            encoder.encode(swollen)
        assert psutil.Process(encoder.pid).memory_info().rss < before + (200 << 20)


@pytest.mark.soak
def test_many_requests_take_no_memory_that_stays(toy: Toy, tmp_path: Path) -> None:
    count = int(os.environ.get("PERDURE_IMAGE_REQUESTS", "1000"))
    images = [Image(picture(seed=seed)) for seed in range(20)]
    here = psutil.Process()
    with perdure.open(toy("llava")[0], store=tmp_path, n_ctx=512, slots=2, threads=1) as rt:
        sizes = []
        for number in range(count):
            said = {"role": "user", "content": [images[number % 20], "?"]}
            rt.chat([said], max_tokens=1, temperature=0)
            if (number + 1) % max(1, count // 10) == 0:
                sizes.append(here.memory_info().rss)
    print([size >> 20 for size in sizes])
    # The first tenths fill caches of a bounded size.
    assert sizes[-1] < sizes[len(sizes) // 2] + (32 << 20)
