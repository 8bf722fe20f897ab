"""A reply on its way to whoever reads it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from perdure.cli.output import terminal
from perdure.cli.output.markdown import Markdown

if TYPE_CHECKING:
    from perdure import ChatDelta

_FAINT, _OFF = "\x1b[2m", "\x1b[0m"


class ReplyView:
    """Shows one reply as it comes, on standard output: as Markdown where that can be shown, else as it is.

    A pipe gets the text to the last character, then the end of the line, even of an empty one; reasoning is
    not part of it.
    """

    def __init__(self, *, think: bool) -> None:
        self._watched = sys.stdout.isatty()
        self._styled = terminal.styled()
        self._markdown = Markdown(_width()) if self._styled else None
        self._reasoning = Markdown(_width()) if self._styled else None
        self._think = think and self._watched
        self._thinking = False
        self._ended = False
        """Whether the last line has."""
        self.thought = False
        """Whether there was reasoning."""

    def add(self, delta: ChatDelta) -> None:
        if delta.reasoning:
            self._reason(delta.reasoning)
        if delta.text:
            self._answer()
            self._write(delta.text)

    def end(self) -> None:
        """End the last line, if it has not ended."""
        self._answer()
        if self._markdown is not None:
            terminal.emit(self._markdown.finish())
        elif not self._ended:
            terminal.emit("\n")

    def _reason(self, text: str) -> None:
        self.thought = True
        if not self._think:
            return
        if not self._thinking and not self._styled:
            terminal.emit("(thinking)\n")
        self._thinking = True
        shown = terminal.harmless(text)
        if self._reasoning is None:
            terminal.emit(shown)
        else:
            self._emit_faint(self._reasoning.add(shown))

    def _answer(self) -> None:
        if not self._thinking:
            return
        self._thinking = False
        if self._reasoning is None:
            terminal.emit("\n(answer)\n")
        else:
            self._emit_faint(self._reasoning.finish().rstrip("\n"))
            terminal.emit("\n\n")

    def _emit_faint(self, text: str) -> None:
        """Show a part of the reasoning, paler than the reply."""
        if text:
            # Where a style of its own ends, it is pale again.
            terminal.emit(f"{_FAINT}{text.replace(_OFF, _OFF + _FAINT)}{_OFF}")

    def _write(self, text: str) -> None:
        if self._markdown is not None:
            terminal.emit(self._markdown.add(terminal.harmless(text)))
        else:
            terminal.write(text)
        self._ended = text.endswith("\n")


def _width() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except OSError:
        return 80
