"""The library is loaded once, with its threads tamed, and speaks only through `logging`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from promises import children

ZooPath = Callable[[str], Path]


@pytest.fixture
def path(zoo_path: ZooPath) -> Path:
    zoo_path("llama-lora")
    return zoo_path("llama")


@pytest.mark.parametrize(("own", "expected"), [("", "20000"), ("7", "7")])
def test_the_spin_count_is_set_before_the_library_loads_unless_the_user_set_one(
    own: str, expected: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    ended = children.run("quiet", "spin", path, **({"GOMP_SPINCOUNT": own} if own else {}))
    assert ended.code == 0, str(ended)
    assert json.loads(ended.lines[-1]) == {"spin": expected, "loaded before": False, "environ": expected}


def test_nothing_is_printed_by_loading_decoding_refusing_or_leaving(path: Path) -> None:
    ended = children.run("quiet", "use", path, PYTHONWARNINGS="default::DeprecationWarning")
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_the_librarys_lines_arrive_whole_in_logging(path: Path) -> None:
    ended = children.run("quiet", "log", path, PYTHONWARNINGS="default::DeprecationWarning")
    assert (ended.code, ended.err) == (0, "")
    lines = json.loads(ended.lines[-1])
    assert any("llama_context" in line for line in lines)
    assert any("context_length" in line for line in lines)
    assert not [line for line in lines if "\n" in line or not line.strip()]
