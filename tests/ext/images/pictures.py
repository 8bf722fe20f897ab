"""Files of images and sounds. Where what encodes them is not installed, their tests are skipped."""

from __future__ import annotations

import importlib.util
import io
import wave
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

MISSING = [each for each in ("PIL", "xllamacpp") if importlib.util.find_spec(each) is None]
if MISSING:
    pytest.skip(f"images need {MISSING}: pip install 'perdure[images]'", allow_module_level=True)

from PIL import Image  # noqa: E402


def pixels(width: int = 120, height: int = 160, seed: int = 7) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def as_file(content: NDArray[np.uint8] | Image.Image, form: str = "PNG", **options: Any) -> bytes:
    image = content if isinstance(content, Image.Image) else Image.fromarray(content)
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def picture(width: int = 120, height: int = 160, seed: int = 7) -> bytes:
    """A PNG of noise."""
    return as_file(pixels(width, height, seed))


def sound(seconds: float = 1.0, rate: int = 16000, channels: int = 1, *, width: int = 2) -> bytes:
    """A WAV file of a tone."""
    samples = np.sin(np.arange(int(seconds * rate)) * 0.1) * 9000
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(np.repeat(samples, channels).astype("<i2" if width == 2 else "<i4").tobytes())
    return file.getvalue()
