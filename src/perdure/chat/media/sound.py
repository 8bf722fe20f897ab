"""Sounds in messages."""

from __future__ import annotations

import os

from perdure.chat.message import Image
from perdure.errors import InvalidInputError


class Sound(Image):
    """A sound: a WAV file, or its bytes. It stands in messages as images do, and is kept as they are."""

    __slots__ = ()

    def __init__(self, source: str | os.PathLike[str] | bytes) -> None:
        super().__init__(source)
        if not is_sound(self.data or b""):
            raise InvalidInputError("a sound is a WAV file, and this is none: convert it")


def is_sound(data: bytes) -> bool:
    """Whether a file says that it is a sound."""
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"
