"""Several samples of one prompt on their way to a reader."""

from __future__ import annotations

from perdure import ChatDelta, Delta
from perdure.cli.output import terminal


class SampleView:
    """Samples one below the other: the first unfinished one shows as it comes, later ones wait for it."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._shown = 0
        self._kept = [""] * samples
        self._ended = [False] * samples
        self._at_line_start = True
        self._head()

    def add(self, delta: Delta | ChatDelta) -> None:
        self._kept[delta.index] += delta.text
        self._ended[delta.index] = delta.finish_reason is not None
        while self._shown < self._samples:
            text, self._kept[self._shown] = self._kept[self._shown], ""
            self._write(text)
            if not self._ended[self._shown]:
                break
            if not self._at_line_start:
                self._write("\n")
            self._shown += 1
            self._head()

    def end(self) -> None:
        """Nothing is held back: what is shown has ended its line."""

    def _head(self) -> None:
        if 1 < self._samples > self._shown:
            self._write(f"[{self._shown + 1} of {self._samples}]\n")

    def _write(self, text: str) -> None:
        if text:
            terminal.write(text)
            self._at_line_start = text.endswith("\n")
