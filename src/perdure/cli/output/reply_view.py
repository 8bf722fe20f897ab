"""A reply as it is shown while it is written."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

from rich.cells import cell_len

from perdure.cli.output import terminal

if TYPE_CHECKING:
    from perdure import ChatDelta


_FAINT, _OFF = "\x1b[2m", "\x1b[0m"


class ReplyView:
    """Shows one reply as it comes, on standard output: as Markdown where that can be shown, else unchanged.

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
            # Where a style inside the text ends, the text is pale again.
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


# Markdown for a terminal, as it comes.
#
# Kept by hand: rich renders a whole text again for every piece of it, and repaints what has scrolled away.
# This prints each word once.

_RESET = "\x1b[0m"
_BOLD, _DIM, _ITALIC, _CODE = "1", "2", "3", "36"

# As long as a line is nothing but one of these, it may still become something else than text.
_UNDECIDED = re.compile(r" *(?:#{1,6}|[-*+_]+|\d{1,3}[.)]?|`+|~+)?")
_HEADING = re.compile(r" *#{1,6} ")
_ITEM = re.compile(r"( *)([-*+]|\d{1,3}[.)]) ")
_QUOTE = re.compile(r" *>")
_RULE = re.compile(r" *(?:-{3,}|\*{3,}|_{3,})\n")
_FENCE = re.compile(r" *(`{3,}|~{3,})")
_TABLE = re.compile(r" *\|")
_RULE_LENGTH = 40
_TAB = 4


class Markdown:
    """Lays text out for a terminal of `width` columns, word by word.

    What was given out is never taken back, so nothing flickers and the window may have any size. A mark
    waits for the character that decides what it means, a word for its end; nothing waits for longer.
    """

    def __init__(self, width: int) -> None:
        self._width = max(1, width)
        self._out: list[str] = []
        self._line: str | None = ""
        """The line so far, while it is open what kind of line it is."""
        self._fence = ""
        self._verbatim = False
        self._heading = self._quote = self._bold = self._italic = False
        self._code = ""
        """The marks that opened code, and will close it."""
        self._marks = ""
        self._before = " "
        self._word, self._wide, self._gap = "", 0, 0
        self._column, self._indent = 0, 0

    def add(self, text: str) -> str:
        """What can be shown now that `text` has come."""
        for character in text:
            self._take(character)
        return self._given()

    def finish(self) -> str:
        """What was held back, once nothing more will come. It ends with a whole line."""
        if self._line:
            self._begin(self._line)
        self._mean("")
        if self._line is None:
            self._end_word()
            self._end_line()
        self._fence = ""
        return self._given()

    def _given(self) -> str:
        text, self._out = "".join(self._out), []
        return text

    # Lines.

    def _take(self, character: str) -> None:
        if self._line is None:
            self._read(character)
            return
        self._line += character
        if not _UNDECIDED.fullmatch(self._line):
            self._begin(self._line)

    def _begin(self, line: str) -> None:
        """Decide what kind of line it is, and read what there is of it."""
        self._line = None
        if self._fence:
            mark, self._verbatim = line.strip(), True
            if mark.startswith(self._fence) and not mark.strip(self._fence[0]):
                self._fence, self._quote = "", True
            else:
                self._code = self._fence
            self._restyle()
        elif match := _FENCE.match(line):
            self._fence, self._verbatim, self._quote = match[1], True, True
            self._restyle()
        elif _TABLE.match(line):
            self._verbatim = True
        elif match := _HEADING.match(line):
            self._heading, line = True, line[match.end() :]
            self._restyle()
        elif match := _ITEM.match(line):
            mark = match[2] if match[2][0].isdigit() else "•"
            self._put_all(f"{match[1]}{mark} ")
            self._column = self._indent = cell_len(match[1]) + len(mark) + 1
            line = line[match.end() :]
        elif match := _QUOTE.match(line):
            self._quote, line = True, line[match.end() :]
            self._restyle()
            self._put("│")
        elif _RULE.fullmatch(line):
            self._put_all("─" * min(_RULE_LENGTH, self._width))
            line = "\n"
        for character in line:
            self._read(character)

    def _end_line(self) -> None:
        styled = self._style()
        self._heading = self._quote = self._bold = self._italic = self._verbatim = False
        self._code, self._before, self._gap, self._column, self._indent = "", " ", 0, 0, 0
        self._put_all(f"{_OFF if styled else ''}\n")
        self._line = ""

    # Within a line.

    def _read(self, character: str) -> None:
        if self._verbatim:
            self._end_word()
            if character == "\n":
                self._end_line()
            else:
                self._put_all(character)
            return
        if character == "`" or (character == "*" and not self._code):
            if self._marks and self._marks[0] != character:
                self._mean(character)
            self._marks += character
            return
        self._mean(character)
        if character == "\n":
            self._end_word()
            self._end_line()
        elif character in " \t":
            self._end_word()
            self._gap += 1 if character == " " else _TAB
        else:
            self._put(character)
        self._before = character

    def _mean(self, following: str) -> None:
        """Give a run of marks its meaning, now that it is known what follows it."""
        marks, self._marks = self._marks, ""
        if not marks:
            return
        # In the middle of a word a star is a star: 2*3, 2**8.
        opens = following not in ("", " ", "\n") and (marks[0] == "`" or not self._before.isalnum())
        closes = self._before not in (" ", "\n")
        if marks[0] == "`":
            if self._code == marks:
                self._code = ""
            elif not self._code and opens:
                self._code = marks
            else:
                self._put_plain(marks)
                return
        elif len(marks) == 2 and (closes if self._bold else opens):
            self._bold = not self._bold
        elif len(marks) == 1 and (closes if self._italic else opens):
            self._italic = not self._italic
        elif len(marks) == 3 and (closes if self._bold and self._italic else opens):
            self._bold = self._italic = not (self._bold and self._italic)
        else:
            self._put_plain(marks)
            return
        self._restyle()
        self._before = marks[-1]

    def _style(self) -> str:
        codes = {
            _BOLD: self._bold or self._heading,
            _DIM: self._quote,
            _ITALIC: self._italic,
            _CODE: bool(self._code),
        }
        return ";".join(code for code, on in codes.items() if on)

    def _restyle(self) -> None:
        style = self._style()
        self._word += f"\x1b[0;{style}m" if style else _RESET

    def _put_plain(self, text: str) -> None:
        for character in text:
            self._put(character)

    def _put(self, character: str) -> None:
        self._word += character
        self._wide += cell_len(character)
        if self._wide >= self._width - self._indent:
            # It will not fit a line anyhow: the terminal breaks it.
            self._end_word()

    def _end_word(self) -> None:
        if not self._wide:
            self._put_all(self._word)
            self._word = ""
            return
        if self._column > self._indent and self._column + self._gap + self._wide > self._width:
            self._put_all("\n" + " " * self._indent)
            self._column = self._indent
        else:
            self._put_all(" " * self._gap)
            self._column += self._gap
        self._put_all(self._word)
        self._column += self._wide
        self._word, self._wide, self._gap = "", 0, 0

    def _put_all(self, text: str) -> None:
        if text:
            self._out.append(text)
