"""K/V types: measured on a model, remembered, and refused where they cost it much."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perdure
from perdure import InvalidInputError, Model, models
from perdure.engine_config import EngineConfig, KvType
from perdure.ext.fit import kv_loss
from perdure.ext.fit.kv_loss import check_kv_type, measure, recall

HEAD = 32


@pytest.fixture
def spoilt(zoo_path: Callable[[str], Path], tmp_path: Path) -> Path:
    """The toy llama with two large values in each key, and as small ones in each query: the same model, whose
    keys do not survive rounding in blocks of 32."""
    path = tmp_path / "spoilt.gguf"
    shutil.copy(zoo_path("llama"), path)
    for tensor in models.read_header(path).tensors:
        factor = {"attn_k": 1024.0, "attn_q": 1 / 1024}.get(tensor.name.split(".")[-2])
        if factor is not None:
            columns, rows = tensor.shape
            matrix = np.memmap(path, np.float32, "r+", tensor.offset, (rows, columns))
            # Two neighbours, which are rotated into one another.
            matrix[[row for row in range(rows) if row % HEAD < 2]] *= factor
            matrix.flush()
    return path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is remembered is this test's own; the library stays where it is."""
    monkeypatch.setattr(kv_loss, "_file", lambda: tmp_path / "kv_loss.json")
    return tmp_path


def test_t2_a_type_costs_one_model_nothing_and_another_one_much(
    zoo_path: Callable[[str], Path], spoilt: Path
) -> None:
    """T2: a type is offered with its measured loss for this model."""
    with Model(zoo_path("llama")) as model:
        good = measure(model, "q8_0", "q8_0", tokens=128, threads=1)
        same = measure(model, "f16", "f16", tokens=64, threads=1)
    with Model(spoilt) as model:
        bad = measure(model, "q8_0", "q8_0", tokens=128, threads=1)
    assert (same.kl, same.same_top, same.greedy) == (0, 1, 1)
    assert good.same_top > 0.95
    assert not good.large
    assert bad.large
    assert bad.kl > 10 * good.kl
    assert good.bytes_per_token < 0.6 * same.bytes_per_token


def test_t2_what_costs_much_is_refused_unless_it_is_forced(spoilt: Path) -> None:
    """T2: one that loses much is refused unless forced."""
    settings = {"n_ctx": 64, "slots": 1, "threads": 1}
    with pytest.raises(InvalidInputError, match=r"K/V in q8_0 costs this model too much: .*force_kv=True"):
        perdure.open(spoilt, kv_type="q8_0", **settings)  # type: ignore[arg-type]
    with perdure.open(spoilt, kv_type="q8_0", force_kv=True, **settings) as rt:  # type: ignore[arg-type]
        assert rt.cache.identity().k_type == "q8_0"
    with perdure.open(spoilt, kv_type="f16", **settings) as rt:  # type: ignore[arg-type]
        assert rt.cache.identity().k_type == "f16"


def test_t2_it_is_measured_once_a_model_and_type(
    zoo_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    with Model(zoo_path("llama")) as model:
        check_kv_type(model, EngineConfig(kv_type="q8_0:f16"))
        found = recall(model, "q8_0", "f16")
        assert found is not None
        assert (found.tokens, found.name) == (256, "q8_0:f16")
        assert list(json.loads((home / "kv_loss.json").read_text())) == [model.digest]
        monkeypatch.setattr(kv_loss, "measure", lambda *_, **__: pytest.fail("measured again"))
        check_kv_type(model, EngineConfig(kv_type="q8_0:f16"))
        check_kv_type(model, EngineConfig(kv_type="bf16:f32"))
        check_kv_type(model, EngineConfig(kv_type="q4_0", force_kv=True))
        assert recall(model, "q5_0", "q5_0") is None


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"a": 1}'])
def test_a_damaged_memory_of_measures_is_no_memory(
    text: str, zoo_path: Callable[[str], Path], home: Path
) -> None:
    (home / "kv_loss.json").write_text(text)
    with Model(zoo_path("llama")) as model:
        assert recall(model, "q8_0", "q8_0") is None


def test_one_word_is_for_both_types() -> None:
    assert KvType.parse("q8_0") == ("q8_0", "q8_0")
    assert KvType.parse("q8_0:f16") == ("q8_0", "f16")


def test_types_are_given_in_one_way(zoo_path: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidInputError, match="leave it or those out"):
        perdure.open(zoo_path("llama"), kv_type="q8_0", k_type="f16")
    with pytest.raises(InvalidInputError, match="k_type is one of"):
        perdure.open(zoo_path("llama"), kv_type="q9", force_kv=True, n_ctx=64)
    with Model(zoo_path("llama")) as model, pytest.raises(InvalidInputError, match="too short"):
        measure(model, "q8_0", "q8_0", text="")


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_type": 8},
        {"k_type": ["f16"]},
        {"kv_type": "q8_0:"},
        {"n_ctx": "auto", "k_type": "zz"},
        {"n_ctx": "auto", "n_batch": "x"},
        {"n_ctx": "auto", "slots": 0},
        {"n_ctx": "all"},
        {"slots": "some"},
    ],
    ids=str,
)
def test_what_is_no_setting_is_said(wrong: dict[str, Any], zoo_path: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidInputError):
        perdure.open(zoo_path("llama"), **{"n_ctx": 64, "slots": 1, "threads": 1, **wrong})


def test_the_command_takes_and_compares_types(zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PERDURE_MODEL": str(zoo_path("llama"))}
        return subprocess.run(
            [sys.executable, "-m", "perdure.cli", *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    done = command("run", "hello", "-n", "2", "--kv-type", "q8_0:f16", "--no-keep")
    assert done.returncode == 0, done.stderr
    assert "--kv-type" in command("run", "hello", "--kv-type", "q9").stderr
