"""Rows in columns: in a narrow terminal what people copy has a separate line, and is whole."""

from __future__ import annotations

import os

import pytest

from perdure.cli.output.terminal import write_columns

ROWS = [("name", "size", "where"), ("a", "98.4 MB", "/models/a.gguf"), ("한국", "7 kB", "/b.gguf")]


def test_in_a_pipe_each_row_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    write_columns(ROWS, right=frozenset({1}))
    assert capsys.readouterr().out.splitlines() == [
        "name     size  where",
        "a     98.4 MB  /models/a.gguf",
        "한국     7 kB  /b.gguf",
    ]


def test_in_a_narrow_terminal_the_last_column_has_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((24, 24)))
    monkeypatch.setattr("sys.stdout.fileno", lambda: 1)
    write_columns(ROWS, right=frozenset({1}))
    assert capsys.readouterr().out.splitlines() == [
        "name     size  where",
        "a     98.4 MB",
        "    /models/a.gguf",
        "한국     7 kB  /b.gguf",
    ]
