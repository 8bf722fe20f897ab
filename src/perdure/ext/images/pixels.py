"""Reads image files into pixels, in the encoder's process alone: what is in them is not trusted.

PNG, JPEG, WebP and GIF (its first frame), turned as their EXIF orientation says; palettes, greys and 16 bits
become RGB, and what is transparent stands on white. The size is judged before a pixel is decoded.
"""

from __future__ import annotations

import io
import math
import struct
import warnings

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, ImageOps

from perdure import InvalidInputError, TooLargeError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_PIXELS = 50_000_000
"""Of one image: 8000 × 6000, and 150 MB while it is decoded."""
VERSION = f"Pillow {PIL.__version__}, RGB on white, oriented"
"""What pixels depend on besides the file."""


_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, ArithmeticError, struct.error)
"""What Pillow raises for files that are not what they say."""


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height of an image as it will be, by its header alone."""
    with _opened(data) as image:
        width, height = image.size
        try:
            # A PNG without one in its header would be decoded to look for it.
            exif = image.getexif() if image.format != "PNG" or "exif" in image.info else {}
            turned = exif.get(0x0112, 1) in (5, 6, 7, 8)
        except _DAMAGED as error:
            raise InvalidInputError(f"the image is damaged: {error}") from None
        # 5 to 8 stand for quarter turns.
        return (height, width) if turned else (width, height)


def pixels_of(data: bytes) -> NDArray[np.uint8]:
    """The pixels of an image, in an array of height × width × 3."""
    with _opened(data) as image:
        try:
            image.load()
            turned = ImageOps.exif_transpose(image)
            return np.array(_as_rgb(turned), np.uint8)
        except _DAMAGED as error:
            raise InvalidInputError(f"the image is damaged: {error}") from None


def resized(pixels: NDArray[np.uint8], size: tuple[int, ...]) -> NDArray[np.uint8]:
    """An image at another width and height."""
    width, height = size
    if (height, width) == pixels.shape[:2]:
        return pixels
    return np.array(Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS), np.uint8)


def _opened(data: bytes) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise _too_large() from None
    except Exception as error:
        raise InvalidInputError(
            f"this is no image that can be read; {', '.join(FORMATS)} can: {type(error).__name__}"
        ) from None
    if math.prod(image.size) > MOST_PIXELS:
        raise _too_large()
    return image


def _too_large() -> TooLargeError:
    return TooLargeError(
        f"the image has more than the {MOST_PIXELS} pixels that are read of one; make it smaller",
        limit=MOST_PIXELS,
    )


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        greys = np.asarray(image).astype(np.float32)
        # 16 bits a pixel, whatever the file calls them.
        return Image.fromarray((np.clip(greys, 0, 65535) / 257 + 0.5).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        transparent = image.convert("RGBA")
        white = Image.new("RGBA", transparent.size, "white")
        return Image.alpha_composite(white, transparent).convert("RGB")
    return image.convert("RGB")
