"""Models merged, adapters fused and converted: each against NumPy over whole tensors, or the engine."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cli.pty_user import piped
from inside import weights_of
from perdure import Model
from perdure.engine.llama.native import library
from perdure.engine.llama.native.declarations import Adapter, LlamaBatch
from perdure.errors import InvalidInputError, ModelFileError
from perdure.ext.weights import tensors as tensors_module
from perdure.ext.weights.merge import fuse, merge
from perdure.ext.weights.peft import convert_peft, rotated
from perdure.ext.weights.tensors import Planned, TensorFile, write_model

ZooPath = Callable[[str], Path]
Floats = NDArray[np.float32]
NAME = "blk.1.ffn_up.weight"


def numbers(path: Path, name: str) -> Floats:
    with TensorFile(path) as file:
        return file.floats(file.tensors[name]).copy()


def planned(name: str, table: Floats, kind: str = "F32") -> Planned:
    return Planned(
        name=name,
        type=kind,
        shape=table.shape[::-1],
        pieces=lambda: [tensors_module.from_floats(kind, table)],
    )


def cousin(source: Path, target: Path, seed: int, by: float = 0.1) -> Path:
    """A model of the same shapes with every number moved a little."""
    draw = np.random.default_rng(seed)
    with TensorFile(source) as file:
        tensors = [
            Planned(
                name=tensor.name,
                type=tensor.type,
                shape=tensor.shape,
                pieces=lambda tensor=tensor: [  # type: ignore[misc]
                    tensors_module.from_floats(
                        tensor.type,
                        file.floats(tensor)
                        + by * draw.standard_normal((tensor.rows, tensor.width)).astype(np.float32),
                    )
                ],
            )
            for tensor in file.tensors.values()
        ]
        write_model(target, tensors, like=file)
    return target


@pytest.fixture
def three(zoo_path: ZooPath, tmp_path: Path) -> list[Path]:
    base = zoo_path("llama")
    return [base, *(cousin(base, tmp_path / f"{seed}.gguf", seed) for seed in (1, 2))]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every tensor is read in several pieces."""
    monkeypatch.setattr(tensors_module, "CHUNK", 3000)


def logits(path: Path, adapter: Path | None = None) -> Floats:
    """The row after four tokens, by the library itself."""
    lib = library.load()
    with Model(path) as model:
        handle = weights_of(model).handle
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 64
        params.n_threads = params.n_threads_batch = 1
        context = lib.llama_init_from_model(handle, params)
        if adapter is not None:
            own = lib.llama_adapter_lora_init(handle, os.fsencode(adapter))
            assert own
            scales = (ctypes.c_float * 1)(1.0)
            assert lib.llama_set_adapters_lora(context, (Adapter * 1)(own), 1, scales) == 0
        assert lib.llama_decode(context, LlamaBatch.of((ctypes.c_int32 * 4)(5, 6, 7, 8))) == 0
        row = np.array(lib.llama_get_logits_ith(context, -1)[: model.n_vocab], np.float32)
        lib.llama_free(context)
    return row


def test_linear_is_the_weighted_mean(three: list[Path], tmp_path: Path) -> None:
    merge({three[0]: 1, three[1]: 3}, tmp_path / "out.gguf")
    expected = 0.25 * numbers(three[0], NAME) + 0.75 * numbers(three[1], NAME)
    np.testing.assert_allclose(numbers(tmp_path / "out.gguf", NAME), expected, atol=1e-6)
    assert np.isfinite(logits(tmp_path / "out.gguf")).all()


def test_slerp_goes_along_the_arc(three: list[Path], tmp_path: Path) -> None:
    merge({three[0]: 1, three[1]: 1}, tmp_path / "out.gguf", method="slerp", t=0.3)
    a, b = (numbers(path, NAME).astype(np.float64) for path in three[:2])
    angle = np.arccos((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
    expected = (np.sin(0.7 * angle) * a + np.sin(0.3 * angle) * b) / np.sin(angle)
    np.testing.assert_allclose(numbers(tmp_path / "out.gguf", NAME), expected, atol=1e-5)


def ties(base: Floats, models: Sequence[Floats], weights: Sequence[float], density: float) -> Floats:
    """The method as its paper has it, on whole arrays."""
    kept = []
    for model in models:
        change = model - base
        order = np.argsort(-np.abs(change), axis=None, kind="stable")
        trimmed = np.zeros(change.size, np.float32)
        chosen = order[: round(density * change.size)]
        trimmed[chosen] = change.reshape(-1)[chosen]
        kept.append(trimmed.reshape(change.shape))
    weighted = [w * k for w, k in zip(weights, kept, strict=True)]
    sign = np.sign(sum(weighted))
    agree = [(np.sign(w) == sign) & (w != 0) for w in weighted]
    total = sum(np.where(m, w, 0) for m, w in zip(agree, weighted, strict=True))
    share = sum(np.where(m, w, 0) for m, w in zip(agree, weights, strict=True))
    result: Floats = base + np.where(share > 0, total / np.maximum(share, 1e-9), 0)
    return result


def test_ties_keeps_the_largest_changes_that_agree(three: list[Path], tmp_path: Path) -> None:
    merge({three[1]: 1, three[2]: 0.5}, tmp_path / "out.gguf", method="ties", base=three[0], density=0.3)
    base, *others = (numbers(path, NAME) for path in three)
    expected = ties(base, others, [1, 0.5], 0.3)
    found = numbers(tmp_path / "out.gguf", NAME)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    moved = np.mean(found != base)
    assert 0.3 < moved < 0.6


def test_a_merge_is_a_file_of_either_format(three: list[Path], tmp_path: Path) -> None:
    """Two safetensors files merged have the numbers of two GGUF files merged."""
    for at, path in enumerate(three[:2]):
        with TensorFile(path) as file:
            write_model(
                tmp_path / f"{at}.safetensors",
                [planned(NAME, file.floats(file.tensors[NAME]).copy(), "F16")],
            )
    out = tmp_path / "out.safetensors"
    merge({tmp_path / "0.safetensors": 1, tmp_path / "1.safetensors": 1}, out, kind="F32")
    expected = (numbers(three[0], NAME) + numbers(three[1], NAME)) / 2
    np.testing.assert_allclose(numbers(out, NAME), expected, atol=2e-3)


def test_what_does_not_belong_together_is_refused(
    three: list[Path], zoo_path: ZooPath, tmp_path: Path
) -> None:
    out = tmp_path / "out.gguf"
    with pytest.raises(InvalidInputError, match="one architecture and size"):
        merge({three[0]: 1, zoo_path("qwen3"): 1}, out)
    with pytest.raises(InvalidInputError, match="needs the base"):
        merge({three[0]: 1, three[1]: 1}, out, method="ties")
    with pytest.raises(InvalidInputError, match="two models"):
        merge({three[0]: 1}, out)
    with pytest.raises(InvalidInputError, match="sum to 0"):
        merge({three[0]: 1, three[1]: -1}, out)
    with pytest.raises(ModelFileError, match="no LoRA adapter"):
        fuse(three[0], three[1], out)
    with pytest.raises(InvalidInputError, match="for llama"):
        fuse(zoo_path("qwen3"), zoo_path("llama-lora"), out)
    assert not out.exists()


def test_a_fused_model_computes_what_base_and_adapter_do(zoo_path: ZooPath, tmp_path: Path) -> None:
    base, adapter = zoo_path("llama"), zoo_path("llama-lora")
    fuse(base, adapter, tmp_path / "fused.gguf")
    together, alone = logits(base, adapter), logits(base)
    fused = logits(tmp_path / "fused.gguf")
    assert np.abs(together - alone).max() > 0.5
    assert np.abs(together - fused).max() < 0.1
    fuse(base, adapter, tmp_path / "none.gguf", scale=0.0)
    np.testing.assert_array_equal(logits(tmp_path / "none.gguf"), alone)


def peft(folder: Path, source: Path, name: str, module: str, **settings: Any) -> tuple[Floats, Floats]:
    """A PEFT adapter of rank 4 on one matrix; gives A and B."""
    draw = np.random.default_rng(3)
    with TensorFile(source) as file:
        tensor = file.tensors[name]
    a = draw.standard_normal((4, tensor.width)).astype(np.float32)
    b = draw.standard_normal((tensor.rows, 4)).astype(np.float32)
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [module], **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    prefix = f"base_model.model.model.layers.1.{module}"
    write_model(
        folder / "adapter_model.safetensors",
        [planned(f"{prefix}.lora_A.weight", a), planned(f"{prefix}.lora_B.weight", b)],
    )
    return a, b


@pytest.mark.parametrize("rslora", [False, True])
def test_a_peft_adapter_adds_what_it_says(zoo_path: ZooPath, tmp_path: Path, rslora: bool) -> None:
    base = zoo_path("llama")
    a, b = peft(tmp_path / "peft", base, NAME, "mlp.up_proj", use_rslora=rslora)
    convert_peft(tmp_path / "peft", base, tmp_path / "lora.gguf")
    fuse(base, tmp_path / "lora.gguf", tmp_path / "fused.gguf")
    expected = numbers(base, NAME) + 8 / (2 if rslora else 4) * (b @ a)
    np.testing.assert_allclose(numbers(tmp_path / "fused.gguf", NAME), expected, atol=1e-4)
    # The engine takes it too, and computes the same.
    assert np.abs(logits(base, tmp_path / "lora.gguf") - logits(tmp_path / "fused.gguf")).max() < 0.1


def test_rows_that_rotate_are_put_into_ggufs_order(zoo_path: ZooPath, tmp_path: Path) -> None:
    """The head's first half and its second half in turn, as the converter of whole models does it."""
    base, name = zoo_path("llama"), "blk.1.attn_q.weight"
    a, b = peft(tmp_path / "peft", base, name, "self_attn.q_proj")
    convert_peft(tmp_path / "peft", base, tmp_path / "lora.gguf")
    change = 8 / 4 * (b @ a)
    expected = change.reshape(4, 2, 16, 64).swapaxes(1, 2).reshape(128, 64)
    fuse(base, tmp_path / "lora.gguf", tmp_path / "fused.gguf")
    np.testing.assert_allclose(
        numbers(tmp_path / "fused.gguf", name), numbers(base, name) + expected, atol=1e-4
    )
    assert rotated(np.arange(8, dtype=np.float32).reshape(8, 1), 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_folder_that_cannot_be_converted_is_named(zoo_path: ZooPath, tmp_path: Path) -> None:
    base, out = zoo_path("llama"), tmp_path / "out.gguf"
    with pytest.raises(ModelFileError, match="adapter_config"):
        convert_peft(tmp_path, base, out)
    peft(tmp_path / "dora", base, NAME, "mlp.up_proj", use_dora=True)
    with pytest.raises(InvalidInputError, match="use_dora"):
        convert_peft(tmp_path / "dora", base, out)
    peft(tmp_path / "other", base, NAME, "mlp.down_proj")
    with pytest.raises(InvalidInputError, match="ffn_down"):
        convert_peft(tmp_path / "other", base, out)
    peft(tmp_path / "odd", base, NAME, "mixer.in_proj")
    with pytest.raises(InvalidInputError, match="no name in GGUF"):
        convert_peft(tmp_path / "odd", base, out)
    with pytest.raises(InvalidInputError, match="mamba cannot be converted"):
        convert_peft(tmp_path / "odd", zoo_path("mamba"), out)
    assert not out.exists()


def test_the_commands_do_it(three: list[Path], zoo_path: ZooPath, tmp_path: Path) -> None:
    def run(*arguments: str) -> None:
        done = piped(os.environ, None, *arguments)
        assert done.returncode == 0, done.stderr

    run("merge", str(tmp_path / "m.gguf"), str(three[0]), f"{three[1]}:3")
    expected = 0.25 * numbers(three[0], NAME) + 0.75 * numbers(three[1], NAME)
    np.testing.assert_allclose(numbers(tmp_path / "m.gguf", NAME), expected, atol=1e-6)
    run("fuse", str(three[0]), str(zoo_path("llama-lora")), str(tmp_path / "f.gguf"), "--scale", "0.5")
    assert (tmp_path / "f.gguf").exists()
