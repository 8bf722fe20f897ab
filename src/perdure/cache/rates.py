"""How fast state is read and computed here, as measured."""

from __future__ import annotations

_WEIGHT = 0.25
"""Of the latest measurement, against all before it."""


class Rates:
    """Seconds a byte read from the lower tier and seconds a token computed, both learned in use."""

    def __init__(self) -> None:
        self._read: float | None = None
        self._computed: float | None = None

    def read(self, nbytes: int, seconds: float) -> None:
        if nbytes > 0:
            self._read = _mixed(self._read, seconds / nbytes)

    def computed(self, tokens: int, seconds: float) -> None:
        if tokens > 0:
            self._computed = _mixed(self._computed, seconds / tokens)

    def cost(self, nbytes: int) -> float:
        """What reading so many bytes costs, in tokens computed; 0 while either rate is unknown."""
        if self._read is None or not self._computed:
            return 0.0
        return nbytes * self._read / self._computed


def _mixed(before: float | None, latest: float) -> float:
    return latest if before is None else before + _WEIGHT * (latest - before)
