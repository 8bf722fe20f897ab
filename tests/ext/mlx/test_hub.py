"""Folders on a hub: fetched whole by `pull`, then known by the name of their repository."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import perdure
from perdure import ModelNotFoundError, models
from perdure.cli.app import app
from perdure.engine import registry
from perdure.engine_config import EngineConfig
from perdure.ext.fetching import download, hub
from perdure.ext.fetching.hub import folder_files
from perdure.ext.mlx.engine import ENGINE
from perdure.models.ways_to_open import memory_needed
from serving import Site, put_repo, site


@pytest.fixture
def files(llama: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in llama.iterdir() if file.name != "done"}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, bytes]) -> Iterator[Site]:
    """A hub with a folder in a repository, and code beside it."""
    from huggingface_hub import constants

    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PERDURE_MODELS", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with site() as up:
        fetch = hub.fetch_hub
        monkeypatch.setattr(hub, "fetch_hub", lambda *given, **named: fetch(*given, **named, endpoint=up.url))
        put_repo(up, "me/toy", {**files, "modeling_toy.py": b"raise SystemExit", "README.md": b"hello"})
        yield up


def test_a_folder_is_pulled_whole_and_known_by_its_name(here: Site, files: dict[str, bytes]) -> None:
    with pytest.raises(ModelNotFoundError, match="perdure pull me/toy"):
        models.path("me/toy")
    assert registry.engine_for("me/toy") is not ENGINE
    pulled = CliRunner().invoke(app, ["pull", "me/toy"])
    assert pulled.exit_code == 0, pulled.output
    folder = models.pull("me/toy")
    assert {file.name for file in folder.iterdir() if file.is_file()} == set(files)
    assert all((folder / name).read_bytes() == data for name, data in files.items())
    for name in ("me/toy", "hf:me/toy"):
        assert registry.engine_for(name) is ENGINE
    with perdure.open("me/toy", n_ctx=64, slots=1) as rt:
        assert rt.generate("Hi", max_tokens=3, temperature=0, ignore_eos=True).tokens
    assert [entry.path for entry in models.entries() if entry.name == "hf:me/toy"] == [folder]
    removed = CliRunner().invoke(app, ["rm", "me/toy", "--yes"])
    assert removed.exit_code == 0, removed.output
    assert not folder.exists()
    assert registry.engine_for("me/toy") is not ENGINE


def test_what_was_not_fetched_whole_is_no_folder(
    here: Site, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config comes last: until it is there, the name is nobody's."""
    fetched: list[str] = []
    publish = download.publish

    def stop(part: Path, target: Path) -> None:
        if target.name == "config.json":
            raise KeyboardInterrupt
        fetched.append(target.name)
        publish(part, target)

    monkeypatch.setattr(hub, "publish", stop)
    with pytest.raises(KeyboardInterrupt):
        models.pull("me/toy")
    assert set(fetched) == set(files) - {"config.json"}
    assert registry.engine_for("me/toy") is not ENGINE
    assert not models.is_here("me/toy")


def test_only_what_a_model_is_made_of_is_fetched() -> None:
    whole = ["config.json", "model.safetensors", "tokenizer.json"]
    assert folder_files([*whole, "modeling.py", "../model.safetensors", "a/model.safetensors", ".git"]) == [
        "model.safetensors",
        "tokenizer.json",
        "config.json",
    ]
    assert folder_files(whole[1:]) == folder_files(whole[:1]) == []
    # A repository with both is one of GGUF files, as it was before.
    assert folder_files([*whole, "toy-Q4_K_M.gguf"]) == []


def test_fit_says_what_a_folder_takes(llama: Path) -> None:
    (found,) = perdure.fit_all(str(llama))
    weights = (llama / "model.safetensors").stat().st_size
    assert 0 <= weights - found.weights < 10_000
    # Three layers, two heads of 32 numbers of 4 bytes, K and V.
    cells = found.setup.n_ctx * found.setup.slots
    assert found.machine.cache == cells * 3 * 2 * 32 * 4 * 2
    shown = CliRunner().invoke(app, ["fit", str(llama), "--json"])
    assert shown.exit_code == 0, shown.output
    (said,) = json.loads(shown.output)
    assert said["verdict"] == "fits"
    options: dict[str, Any] = {**found.options, "n_ctx": 64}
    with perdure.open(str(llama), **options) as rt:
        assert rt.generate("Hi", max_tokens=2, temperature=0, ignore_eos=True).tokens


def test_what_a_server_sets_aside_is_what_fit_says(llama: Path) -> None:
    room = perdure.fit(str(llama)).room
    sizes = ENGINE.sizes(str(llama))
    assert sizes is not None
    machine, device = memory_needed(sizes, room, EngineConfig(n_ctx=256, slots=1))
    assert machine > (llama / "model.safetensors").stat().st_size
    assert device == 0
