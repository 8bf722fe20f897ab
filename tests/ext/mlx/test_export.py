"""What was trained for MLX runs on llama.cpp too: an adapter and a whole model, as GGUF."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tools.mlx_folder import write
from typer.testing import CliRunner

from perdure import InvalidInputError, Model, ModelFileError
from perdure.cli.app import app
from perdure.engine.registry import open_model
from perdure.ext.weights.peft import convert_peft
from perdure.ext.weights.trained import convert_trained
from subjects import FINE, Row, divergence
from zoo.folders import write_adapter

TOKENS = [7, 80, 3, 200, 41, 9, 130, 22]
CLOSE = 1e-4
"""The KL that weights in f16, and another order of sums, make of the toy; an adapter makes more than 0.01."""


@pytest.fixture(scope="session")
def gguf(zoo_path: Callable[[str], Path]) -> Path:
    return zoo_path("llama")


@pytest.fixture
def folder(gguf: Path, tmp_path: Path) -> Path:
    """The toy llama of the zoo, as a folder."""
    return write(gguf, tmp_path / "folder", "float32")


def row(path: Path, lora: Path | None = None, settings: Mapping[str, Any] | None = None) -> Row:
    with closing(open_model(path, {}, cells=0)) as model, model.context(n_ctx=32, **(settings or {})) as ctx:
        if lora is not None:
            ctx.adapt({model.adapter(str(lora)): 1.0})
        ctx.decode(TOKENS)
        return ctx.logits().copy()


def test_an_adapter_adds_the_same_on_both_engines(gguf: Path, folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(folder, tmp_path / "lora")
    written = tmp_path / "lora.gguf"
    ended = CliRunner().invoke(app, ["convert", str(adapter), str(written), "--base", str(gguf)])
    assert ended.exit_code == 0, ended.output
    plain, changed = row(folder), row(folder, adapter)
    assert divergence(plain, changed) > 100 * CLOSE
    assert divergence(row(gguf, settings=FINE), plain) < CLOSE
    assert divergence(row(gguf, written, FINE), changed) < CLOSE


def test_a_fused_model_computes_what_the_two_did(gguf: Path, folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(folder, tmp_path / "lora")
    convert_peft(adapter, gguf, tmp_path / "lora.gguf")
    fused = tmp_path / "fused.gguf"
    words = ["fuse", str(gguf), str(tmp_path / "lora.gguf"), str(fused)]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert divergence(row(fused, settings=FINE), row(folder, adapter)) < CLOSE


def test_a_trained_model_is_written_as_the_file_it_came_from(
    gguf: Path, folder: Path, tmp_path: Path
) -> None:
    import mlx.core as mx

    path = folder / "model.safetensors"
    weights: dict[str, Any] = mx.load(str(path))  # type: ignore[assignment]
    random = np.random.default_rng(3)
    for name in list(weights):
        if ".q_proj." in name or ".k_proj." in name or ".down_proj." in name:
            weights[name] = weights[name] + mx.array(random.standard_normal(weights[name].shape) / 9)
    mx.eval(weights)
    mx.save_safetensors(str(tmp_path / "new.safetensors"), weights)
    shutil.move(tmp_path / "new.safetensors", path)
    written = tmp_path / "trained.gguf"
    ended = CliRunner().invoke(app, ["convert", str(folder), str(written), "--base", str(gguf)])
    assert ended.exit_code == 0, ended.output
    assert divergence(row(gguf, settings=FINE), row(folder)) > 100 * CLOSE
    assert divergence(row(written, settings=FINE), row(folder)) < CLOSE
    with Model(written) as model, Model(gguf) as base:
        assert model.tokenize("the text, 日本") == base.tokenize("the text, 日本")


def test_what_cannot_be_converted_is_said_and_nothing_is_written(
    gguf: Path, folder: Path, tmp_path: Path, zoo_path: Callable[[str], Path]
) -> None:
    out = tmp_path / "out.gguf"
    dora = write_adapter(folder, tmp_path / "dora", kind="dora")
    with pytest.raises(InvalidInputError, match="'dora'"):
        convert_peft(dora, gguf, out)
    adapter = write_adapter(folder, tmp_path / "lora")
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({"fine_tune_type": "lora", "lora_parameters": {"scale": "much"}}))
    with pytest.raises(ModelFileError, match="scale"):
        convert_peft(adapter, gguf, out)
    with pytest.raises(InvalidInputError, match="mamba"):
        convert_trained(folder, zoo_path("mamba"), out)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="embed_tokens"):
        convert_trained(folder, gguf, out)
    assert not out.exists()
