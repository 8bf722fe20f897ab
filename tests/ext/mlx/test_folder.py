"""Folders are judged before anything of them is loaded, and no code of theirs is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.engine.registry import open_model
from perdure.errors import ModelFileError, ModelLoadError, ModelNotFoundError, PerdureError
from perdure.ext.mlx.folder import INDEX, is_folder, read_folder
from perdure.ext.weights.safetensors import read_safetensors


def changed(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))


def index(path: Path, shard: str) -> None:
    names = [tensor.name for tensor in read_safetensors(path / "model.safetensors").tensors]
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))


def twice(path: Path) -> None:
    (path / "model-2.safetensors").write_bytes((path / "model.safetensors").read_bytes())


def cut(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-100])


HOSTILE: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no weights": (lambda path: (path / "model.safetensors").unlink(), ModelNotFoundError, "no weights"),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), ModelNotFoundError, "tokenizer.json"),
    "a missing shard": (
        lambda path: index(path, "model-00002-of-00002.safetensors"),
        ModelNotFoundError,
        "lacks 1 of 1",
    ),
    "a shard elsewhere": (
        lambda path: index(path, "../model.safetensors"),
        ModelFileError,
        "impossible file",
    ),
    "weights twice": (twice, ModelFileError, "is in model-2.safetensors and in"),
    "cut weights": (cut, ModelFileError, "fetch or copy it again"),
    "a long header": (
        lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 64),
        ModelFileError,
        "header claims",
    ),
    "no JSON": (lambda path: (path / "config.json").write_text("{"), ModelFileError, "no JSON"),
    "deep JSON": (
        lambda path: (path / "config.json").write_text("[" * 200_000),
        ModelFileError,
        "no JSON",
    ),
    "its own code": (lambda path: changed(path, model_file="evil.py"), ModelFileError, "never runs code"),
    "a path as its type": (lambda path: changed(path, model_type="../evil"), ModelFileError, "model_type"),
    "a billion layers": (
        lambda path: changed(path, num_hidden_layers=10**9),
        ModelFileError,
        "num_hidden_layers 1000000000",
    ),
    "a huge number": (lambda path: changed(path, vocab_size=10**30), ModelFileError, "vocab_size"),
    "other sizes": (lambda path: changed(path, hidden_size=128), ModelLoadError, "mlx-lm refused"),
    "an unknown type": (lambda path: changed(path, model_type="nobodys"), ModelLoadError, "nobodys"),
    "another tokenizer": (
        lambda path: (path / "tokenizer.json").write_text("{}"),
        ModelFileError,
        "no usable tokenizer",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_folder_that_is_not_whole_is_refused(name: str, own: Path) -> None:
    harm, error, words = HOSTILE[name]
    harm(own)
    (own / "evil.py").write_text(f"open({str(own / 'ran')!r}, 'w')")
    with pytest.raises(error, match=words):
        open_model_at(own)
    assert not (own / "ran").exists()


def open_model_at(path: Path) -> None:
    """Judge and load, also where the registry would give the folder to another engine."""
    from perdure.ext.mlx.engine import ENGINE

    ENGINE.open(str(path), cells=0).close()


def test_only_folders_with_weights_are_claimed(own: Path, tmp_path: Path) -> None:
    assert is_folder(own)
    (own / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert not is_folder(own)
    assert not is_folder(tmp_path / "nowhere")


def test_the_digest_changes_with_every_file_that_counts(own: Path) -> None:
    before = read_folder(own).digest()
    changed(own, rope_theta=20000.0)
    after = read_folder(own).digest()
    (own / "README.md").write_text("nothing that counts")
    assert before != after == read_folder(own).digest()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_damage_to_a_config_is_more_than_a_typed_error(data: st.DataObject, own: Path) -> None:
    original = (own / "config.json").read_bytes()
    text = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    (own / "config.json").write_bytes(text)
    try:
        read_folder(own)
    except PerdureError:
        pass
    finally:
        (own / "config.json").write_bytes(original)


def test_a_good_folder_opens(llama: Path) -> None:
    model = open_model(llama, {}, cells=0)
    assert (model.info.architecture, model.info.file_format) == ("llama", "mlx")
    assert model.info.nbytes == (llama / "model.safetensors").stat().st_size
    model.close()
