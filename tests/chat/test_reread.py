"""Tokens that are read again in a conversation with tools and reasoning (C2)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from bench.processes.reread import Reread, reread, table

from perdure import Template

FOLDER = Path(__file__).parent / "templates" / "llama.cpp"
ALL = sorted(FOLDER.glob("*.jinja"))
SWITCHES = {"GLM-4.7-Flash", "LFM2.5-8B-A1B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"}


@cache
def found(path: Path) -> Reread:
    return reread(Template.from_file(path, bos="<s>", eos="</s>"))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_only_what_the_template_rewrites_is_read_again_c2(path: Path) -> None:
    """C2: none before the last mark up to which its text stayed, and none with `keep_reasoning`."""
    assert found(path).beyond == 0
    assert (found(path).kept is not None) is (path.stem in SWITCHES)
    assert not found(path).kept


@pytest.mark.extension("families")
def test_the_table_of_the_docs_is_what_the_command_makes() -> None:
    assert table(ALL) in (Path(__file__).parents[2] / "docs" / "measurements" / "templates.md").read_text()
