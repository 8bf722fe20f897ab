"""`make models`: one model through everything, in a row of a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from bench.models import COLUMNS, Trial, main, table

from zoo import Recipe, encoders


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_a_model_that_writes_passes_every_column(name: str, zoo_path: Callable[[str], Path]) -> None:
    row = dict(zip(COLUMNS, Trial(str(zoo_path(name)), threads=1, quick=True).row(), strict=True))
    assert row["model"] == f"{name}.gguf"
    assert row["chat"] == row["fork"] == row["rewind"] == "yes"
    assert row["sleep and wake"].startswith("yes")
    assert row["warm is cold"].startswith("yes")
    assert float(row["q8_0 K/V"].removeprefix("x")) == pytest.approx(1.0, abs=0.1)
    assert int(row["decode tok/s"]) > 0


def test_an_encoder_and_a_file_that_is_none_have_rows_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Recipe(name="made", architecture="bert", memory="full", fill=encoders.bert).write(tmp_path)
    out = tmp_path / "table.md"
    assert main([str(path), str(tmp_path / "none.gguf"), "--out", str(out), "--threads", "1"]) == 0
    assert "vectors of 64" in out.read_text()
    assert "cannot be opened: there is no file" in out.read_text()
    assert "vectors of 64" in capsys.readouterr().out


def test_a_table_is_markdown() -> None:
    assert table([["a|b"] * len(COLUMNS)]).splitlines()[2].startswith("| a/b | a/b |")
