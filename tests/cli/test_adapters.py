"""Adapters on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.options.groups import ChatEngine
from perdure.errors import InvalidInputError
from perdure.server.pool import named_adapter

Names = Callable[[str], Path]


def perdure(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perdure.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_show_reads_adapters(zoo_path: Names) -> None:
    shown = perdure("show", zoo_path("llama-alora"), "--json")
    facts = json.loads(shown.stdout)
    assert (facts["kind"], facts["architecture"], facts["rank"]) == ("aLoRA", "llama", 4)
    assert facts["invocation"] == [17, 29]
    words = perdure("show", zoo_path("llama-vector"))
    assert "control vector" in words.stdout
    assert "[1, 2]" in words.stdout


def test_run_takes_a_lora_and_a_control_vector(zoo_path: Names) -> None:
    usual = ("run", "--model", zoo_path("llama"), "--raw", "--no-keep", "-t", "0", "-n", "8", "Once")
    plain = perdure(*usual)
    lora = perdure(*usual, "--lora", f"{zoo_path('llama-lora')}:2")
    vector = perdure(*usual, "--control-vector", f"{zoo_path('llama-vector')}@1-2:4")
    assert plain.returncode == lora.returncode == vector.returncode == 0, (lora.stderr, vector.stderr)
    assert len({plain.stdout, lora.stdout, vector.stdout}) == 3
    wrong = perdure(*usual, "--lora", zoo_path("llama"))
    assert wrong.returncode != 0
    assert "is no adapter" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_options_become_one_set(zoo_path: Names) -> None:
    lora, vector = str(zoo_path("llama-lora")), str(zoo_path("llama-vector"))
    given: dict[str, Any] = {"lora": [f"{lora}:0.5"], "control_vector": [f"{vector}@1-2"]}
    assert ChatEngine(**given).config.adapters == {lora: 0.5, f"{vector}@1-2": 1.0}
    assert ChatEngine().config.adapters is None


def test_a_name_for_clients_is_a_name() -> None:
    assert named_adapter("pirate=p.gguf:0.5") == ("pirate", ("p.gguf", 0.5))
    for wrong in ("p.gguf", "a/b=p.gguf", "=p.gguf", "pirate=", "p.gguf=p.gguf"):
        with pytest.raises(InvalidInputError):
            named_adapter(wrong)


def test_the_config_file_has_adapters(
    zoo_path: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = ("run", "--model", zoo_path("llama"), "--raw", "--no-keep", "-t", "0", "-n", "8", "Once")
    lora = f"{zoo_path('llama-lora')}:2"
    named = perdure(*usual, "--lora", lora)
    (tmp_path / "config.toml").write_text(f"lora = ['{lora}']\n", encoding="utf-8")
    monkeypatch.setenv("PERDURE_CONFIG", str(tmp_path / "config.toml"))
    chosen = perdure(*usual)
    assert chosen.returncode == 0, chosen.stderr
    assert chosen.stdout == named.stdout
