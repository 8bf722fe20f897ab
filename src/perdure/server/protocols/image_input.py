"""Images and sounds in requests: base64, or a data: URL. What lies behind other URLs is never fetched.

sha256:1f3a…    the image of that digest, which a session of the caller names"""

from __future__ import annotations

import base64
import binascii
import re

from perdure.chat.media.sound import Sound
from perdure.chat.message import Detail, Image
from perdure.errors import InvalidInputError
from perdure.server.core.api_error import invalid

KEPT = "sha256:"
"""Before the digest of a file that is in the store, in hex."""
_DATA_URL = re.compile(r"data:(image/[\w.+-]+)?(;[\w=.+-]+)*;base64,", re.IGNORECASE)


def image_of_url(url: object, where: str, *, detail: Detail = "auto") -> Image:
    """The image in a data: URL, or one in a session of the caller: its file is in the store."""
    if isinstance(url, str) and url.startswith(KEPT):
        return Image.kept(url[len(KEPT) :], where, detail)
    if not isinstance(url, str) or not (head := _DATA_URL.match(url[:200])):
        raise invalid(
            where,
            "images are not fetched from URLs; send one as data:image/png;base64,…",
            code="unsupported_content",
        )
    return image_of_base64(url[head.end() :], where, detail=detail)


def sound_of_base64(data: object, where: str) -> Image:
    """The WAV file in base64, or one in a session of the caller."""
    if isinstance(data, str) and data.startswith(KEPT):
        return Image.kept(data[len(KEPT) :], where, "sound")
    try:
        if isinstance(data, str):
            return Sound(base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError, InvalidInputError):
        pass
    raise invalid(where, "a WAV file in base64", code="invalid_audio")


def image_of_base64(data: object, where: str, *, detail: Detail = "auto") -> Image:
    """The image in base64."""
    try:
        if isinstance(data, str) and (content := base64.b64decode(data, validate=True)):
            return Image(content, detail=detail)
    except (binascii.Error, ValueError):
        pass
    raise invalid(where, "an image in base64", code="invalid_image")
