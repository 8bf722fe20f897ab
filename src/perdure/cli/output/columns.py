"""Rows in columns, whose last one is never cut: it holds what people copy."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from perdure.cli.output import terminal

_GAP = "  "


def write_columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> None:
    """Write rows under each other, the columns in `right` flush right.

    In a terminal that is too narrow for a row, its last column has a line of its own.
    """
    widths = [max(cell_len(cell) for cell in column) for column in zip(*rows, strict=True)]
    space = _columns()
    for row in rows:
        *others, last = row
        cells = [
            " " * (width - cell_len(cell)) + cell if at in right else set_cell_size(cell, width)
            for at, (cell, width) in enumerate(zip(others, widths, strict=False))
        ]
        start = _GAP.join(cells)
        if space is not None and cell_len(start) + len(_GAP) + cell_len(last) > space and others:
            terminal.write(f"{start.rstrip()}\n{_GAP * 2}{last}\n")
        else:
            terminal.write(f"{start}{_GAP}{last}".rstrip() + "\n")


def _columns() -> int | None:
    """How wide the terminal is that standard output goes to, if it is one."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError, AttributeError):
        return None
