"""The encoder's process: what it gives, and what files cannot do to it."""

from __future__ import annotations

import random
import signal
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from perdure import (
    ClosedError,
    EngineDiedError,
    InvalidInputError,
    ModelFileError,
    PerdureError,
    TooLargeError,
)
from perdure.ext.images import pixels as reader
from perdure.ext.images.encoder import Encoder, Patience
from perdure.ext.images.library import find_library
from perdure.ext.images.media import MediumKind

from .pictures import as_file, picture, pixels, sound
from .toys import KINDS

Toy = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def encoder(toy: Toy) -> Iterator[Encoder]:
    with Encoder(*toy("llava"), threads=1) as encoder:
        yield encoder


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_model_encodes(toy: Toy, kind: str) -> None:
    form: MediumKind = "audio" if kind == "qwen2a" else "image"
    files = [sound()] if kind == "qwen2a" else [picture(), picture(104, 72)]
    with Encoder(*toy(kind), threads=1) as encoder:
        for data in files:
            encoded = encoder.encode(data, form)
            tokens = np.array(encoded.tokens, np.int32)
            media = list(encoded.media)
            assert (tokens < 0).sum() == sum(map(len, media)) > 0
            assert all(np.isfinite(medium.rows).all() and medium.rows.std() > 0.1 for medium in media)
            if form == "image":
                assert encoder.count(data) == len(tokens)
            if "qwen" in kind and form == "image":
                assert all(medium.grid[0] * medium.grid[1] == len(medium) for medium in media)
                assert all(medium.n_pos == max(medium.grid) for medium in media)
            else:
                assert all(medium.n_pos == len(medium) for medium in media)
            assert all(medium.causal == (kind != "gemma3") for medium in media)


def test_the_same_file_gives_the_same_bits_in_any_process(toy: Toy, encoder: Encoder) -> None:
    first = encoder.encode(picture())
    encoder.encode(picture(seed=8))
    with Encoder(*toy("llava"), threads=2) as other:
        assert other.identity == encoder.identity
        again = other.encode(picture())
    assert again.tokens == first.tokens
    assert [medium.rows.tobytes() for medium in again.media] == [
        medium.rows.tobytes() for medium in first.media
    ]


def test_e3_pixels_tell_media_apart(encoder: Encoder) -> None:
    content = pixels()
    changed = content.copy()
    changed[80, 60] ^= 255
    same_bytes = content.reshape(120, 160, 3)
    ids = {tuple(encoder.encode(as_file(each)).tokens) for each in (content, changed, same_bytes)}
    assert len(ids) == 3
    # A file of another form with the same pixels has the same rows.
    assert (
        encoder.encode(as_file(content, "WEBP", lossless=True)).tokens
        == encoder.encode(as_file(content)).tokens
    )


def test_images_are_read_as_people_see_them() -> None:
    content = pixels(40, 30)
    turned = Image.Exif()
    turned[0x0112] = 6
    data = as_file(content, exif=turned)
    assert reader.size_of(data) == (30, 40)
    assert (reader.pixels_of(data) == np.rot90(content, -1)).all()
    image = Image.fromarray(content)
    few = image.quantize(16)
    assert (reader.pixels_of(as_file(few)) == np.asarray(few.convert("RGB"))).all()
    grey = image.convert("L")
    assert (reader.pixels_of(as_file(grey))[..., 1] == np.asarray(grey)).all()
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    assert (reader.pixels_of(as_file(deep))[..., 2] == np.asarray(grey)).all()
    clear = Image.new("RGBA", (8, 8), (200, 0, 0, 0))
    assert (reader.pixels_of(as_file(clear)) == 255).all()
    frames = [Image.new("RGB", (8, 8), each) for each in ("red", "blue")]
    moving = as_file(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (reader.pixels_of(moving) == (254, 0, 0)).all() or (reader.pixels_of(moving) == (255, 0, 0)).all()


def _png_of_size(width: int, height: int) -> bytes:
    """A PNG that is said to be of that size, with a few bytes of pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
        + chunk(b"IEND", b"")
    )


def test_e4_a_bomb_is_refused_by_its_header(encoder: Encoder) -> None:
    for width, height in ((100_000, 100_000), (50_001, 1_000), (2**31 - 1, 1)):
        with pytest.raises(TooLargeError, match="pixels"):
            encoder.encode(_png_of_size(width, height))
    assert encoder.pid is not None


def test_e4_foreign_and_damaged_files_are_refused_in_words(encoder: Encoder) -> None:
    good = picture()
    svg = b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    for data in (b"", b"\0" * 100, b"%PDF-1.7", svg, good[:200], as_file(pixels(), "TIFF"), sound()):
        with pytest.raises(InvalidInputError):
            encoder.encode(data)
    with pytest.raises(InvalidInputError, match="no sounds"):
        encoder.encode(sound(), "audio")
    assert encoder.pid is not None


def test_e4_no_altered_file_does_harm(encoder: Encoder) -> None:
    """Bits are flipped and ends are cut; each is read, or refused by a typed error."""
    draw = random.Random(11)
    forms = [as_file(pixels(32, 24), form) for form in ("PNG", "JPEG", "WEBP", "GIF")]
    read = refused = 0
    for round_ in range(400):
        data = bytearray(forms[round_ % 4])
        for _ in range(draw.randint(1, 6)):
            data[draw.randrange(min(len(data), 400))] = draw.randrange(256)
        try:
            encoder.encode(bytes(data[: draw.randint(20, len(data))] if draw.random() < 0.3 else data))
            read += 1
        except EngineDiedError:
            raise
        except PerdureError:
            refused += 1
    assert read > 20
    assert refused > 100
    assert encoder.encode(forms[0]).tokens


def test_e4_a_crash_costs_the_next_file_a_start(encoder: Encoder) -> None:
    first = encoder.encode(picture())
    assert encoder.pid is not None
    psutil.Process(encoder.pid).send_signal(signal.SIGSEGV)
    assert encoder.encode(picture()).tokens == first.tokens


def test_e4_a_file_that_takes_too_long_is_given_up(toy: Toy) -> None:
    with Encoder(*toy("llava"), threads=1, patience=Patience(decode=1e-5)) as encoder:
        for _ in range(2):
            with pytest.raises(EngineDiedError, match="took more than"):
                encoder.encode(picture(2000, 2000))
            assert encoder.pid is None


@pytest.mark.parametrize("kind", ["qwen2vl", "idefics3", "llava"])
def test_e3_an_image_of_low_detail_is_scaled_down_where_it_takes_fewer_tokens_so(toy: Toy, kind: str) -> None:
    content = pixels(800, 64)
    small = Image.fromarray(content).resize((512, 41), Image.Resampling.LANCZOS)
    with Encoder(*toy(kind), threads=1) as encoder:
        low = encoder.encode(as_file(content), low=True).tokens
        assert encoder.count(as_file(content), low=True) == len(low)
        whole = encoder.encode(as_file(content)).tokens
        if kind == "qwen2vl":
            assert len(low) < len(whole)
            assert low == encoder.encode(as_file(small)).tokens
        else:
            # As many tokens at either size: it is left as it is.
            assert low == whole
        assert encoder.encode(picture(), low=True).tokens == encoder.encode(picture()).tokens


def test_it_ends_when_idle_and_starts_again(toy: Toy) -> None:
    with Encoder(*toy("llava"), threads=1, idle=0.3) as encoder:
        first = encoder.encode(picture())
        _, alive = psutil.wait_procs([psutil.Process(encoder.pid)], timeout=60)
        assert not alive
        assert encoder.encode(picture()).tokens == first.tokens
    with pytest.raises(ClosedError):
        encoder.encode(picture())


def test_a_projector_of_another_model_is_refused_in_words(toy: Toy) -> None:
    _, projector = toy("qwen3vl")
    model, _ = toy("llava")
    with Encoder(model, projector, threads=1) as encoder, pytest.raises(ModelFileError, match="projector"):
        encoder.encode(picture())
    with Encoder(model, model, threads=1) as encoder, pytest.raises(ModelFileError, match="projector"):
        encoder.encode(picture())


def test_the_library_of_the_engines_folder_goes_first(tmp_path: Path) -> None:
    packaged = find_library(None)
    assert find_library(tmp_path) == packaged
    (tmp_path / "libmtmd.so").symlink_to(packaged)
    assert find_library(tmp_path).parent == tmp_path


def test_rows_of_other_gpus_are_other_rows(toy: Toy, tmp_path: Path) -> None:
    """The engine's folder may compute on a GPU, and a GPU rounds in another way."""
    (tmp_path / "libmtmd.so").symlink_to(find_library(None))
    rows, identities = [], set()
    for gpus in (None, (), ("CUDA0 NVIDIA H200",), ("CUDA0 NVIDIA H200", "CUDA1 NVIDIA H200")):
        with Encoder(*toy("llava"), engine=tmp_path, gpus=gpus, threads=1) as encoder:
            identities.add(encoder.identity)
            rows.append(np.concatenate([medium.rows for medium in encoder.encode(picture()).media]))
    # This library has none.
    assert all(np.array_equal(each, rows[0]) for each in rows)
    assert len(identities) == 3


def test_sounds(toy: Toy) -> None:
    with Encoder(*toy("qwen2a"), threads=1) as encoder:
        one = encoder.encode(sound(), "audio")
        assert encoder.encode(sound(channels=2), "audio").tokens == one.tokens
        for data in (sound(rate=8000), sound(width=4), b"RIFF", picture(), sound(seconds=601)):
            with pytest.raises((InvalidInputError, TooLargeError)):
                encoder.encode(data, "audio")
        with pytest.raises(InvalidInputError, match="no images"):
            encoder.encode(picture())
