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
        if not self.is_sound:
            raise InvalidInputError("a sound is a WAV file, and this is none: convert it")
