"""What somebody sees: a terminal's screen, after all that was sent to it."""

from __future__ import annotations

from typing import Any

import pytest

from cli.pty_user import PtyUser

pyte: Any = pytest.importorskip("pyte", reason="screens are drawn by pyte, of the dev extra")


def screen(user: PtyUser, columns: int, rows: int) -> list[str]:
    """The lines that are on the screen now, and those that have scrolled away above them."""
    drawn = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.5)
    pyte.ByteStream(drawn).feed(user.shown)
    above = ["".join(line[at].data for at in range(columns)) for line in drawn.history.top]
    lines = [line.rstrip() for line in (*above, *drawn.display)]
    while lines and not lines[-1]:
        lines.pop()
    return lines
