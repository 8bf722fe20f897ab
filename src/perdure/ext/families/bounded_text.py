"""A text that comes in pieces and has a longest size."""

from __future__ import annotations

from perdure.spi.chat import Malformed


class BoundedText:
    """A text that comes in pieces. Longer than `longest`, it is not what was expected."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._pieces: list[str] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __str__(self) -> str:
        return "".join(self._pieces)

    @property
    def last(self) -> str:
        """The piece that came last."""
        return self._pieces[-1] if self._pieces else ""

    def add(self, piece: str) -> None:
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > self._longest:
            raise Malformed

    def clear(self) -> None:
        self._pieces.clear()
        self._size = 0
