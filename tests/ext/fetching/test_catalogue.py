"""The catalogue of models: names, what fits, other programs' models, and the comparison with a hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tools import check_catalogue

import gguf_bytes as g
from ollama_files import put_ollama
from perdure import models
from perdure.config import settings
from perdure.engine import registry as engines
from perdure.errors import ModelNotFoundError
from perdure.ext.fetching.catalogue import (
    CatalogueModel,
    catalogue,
    data_file,
    find,
    fit_of,
    names_of,
    near,
    ranked,
    recommended,
)
from perdure.models import FileSource, HubSource, resolve
from perdure.models.registry import ALIASES
from serving import Site, put_repo, site

GIB = 1 << 30


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home of somebody who has Ollama and LM Studio."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "perdure"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path


def test_every_entry_is_whole_and_no_name_stands_for_two() -> None:
    names = [name for model in catalogue() for name in model.names]
    assert len(names) == len(set(names)) >= 30
    assert not set(names) & set(ALIASES), "names of the registry come first"
    for model in catalogue():
        assert ":" in model.name, model.name
        assert model.file.endswith(".gguf")
        assert 0 < model.active <= model.size < model.memory
        assert min(model.kv, model.context - 4095, model.quality) > 0
        assert model.purpose
        assert model.licence


@pytest.mark.parametrize("name", ["llama3.2", "LLAMA3.2:3b", "llama3.2:latest"])
def test_a_short_name_is_the_file_on_the_hub(name: str, home: Path) -> None:
    source = resolve(name)
    assert source == HubSource(
        repo="bartowski/Llama-3.2-3B-Instruct-GGUF", file="Llama-3.2-3B-Instruct-Q4_K_M.gguf"
    )
    assert engines.engine_for(name).name == "llama.cpp"


def test_a_name_that_looks_like_a_function_is_the_model(home: Path) -> None:
    assert find("gemma4:e4b") is not None
    assert engines.engine_for("gemma4:e4b").name == "llama.cpp"
    assert engines.engine_for("mistral:latest").name == "llama.cpp"
    assert engines.engine_for("made_up:model").name == "factory"


def test_a_name_that_is_not_known_is_told_with_those_like_it(home: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"did you mean qwen3:0\.6b or"):
        resolve("qwen3:5b")
    assert near("lama3.2")[0] == "llama3.2"


def test_the_best_that_fits_is_first_and_what_cannot_run_is_last() -> None:
    listed = ranked(4 * GIB)
    best = recommended(4 * GIB)
    assert best is not None
    assert listed[0] == (best, "fits")
    assert best.quality == max(model.quality for model, fit in listed if fit == "fits")
    fits = [fit for _, fit in listed]
    assert fits == sorted(fits, key=("fits", "tight", "not").index)
    assert {fit_of(best.memory, free) for free in (best.memory, 0)} == {"tight", "not"}
    assert recommended(0) is None


def test_ollamas_and_lm_studios_models_are_listed_and_run_where_they_are(home: Path) -> None:
    ollama = home / ".ollama" / "models"
    blob = put_ollama(ollama, "tinyllama", g.tiny())
    studio = home / ".lmstudio" / "models" / "me" / "one-GGUF" / "one.gguf"
    studio.parent.mkdir(parents=True)
    studio.write_bytes(g.tiny())
    (studio.parent / "mmproj-one.gguf").write_bytes(g.tiny())
    (ollama / "manifests" / "registry.ollama.ai" / "library" / "broken").mkdir()
    (ollama / "manifests" / "registry.ollama.ai" / "library" / "broken" / "latest").write_text("{")
    listed = [each for each in models.entries() if each.source in ("Ollama", "LM Studio")]
    theirs = {each.name: each.path for each in listed if each.path is not None}
    assert theirs == {"ollama:tinyllama:latest": blob, "lmstudio:me/one-GGUF/one.gguf": studio}
    for name, path in [*theirs.items(), ("tinyllama", blob), ("ollama:tinyllama", blob)]:
        assert resolve(name) == FileSource(path=path)
        assert models.path(name) == path
    assert engines.engine_for("ollama:tinyllama").label(str(blob)) == "tinyllama:latest"
    for name in ("ollama:../../x", "ollama:none", "lmstudio:../secret.gguf"):
        with pytest.raises(ModelNotFoundError):
            resolve(name)


def test_of_a_name_of_the_catalogue_our_copy_is_run_then_ollamas(home: Path) -> None:
    blob = put_ollama(home / ".ollama" / "models", "llama3.2", g.tiny())
    assert resolve("llama3.2") == FileSource(path=blob)
    hub = resolve("llama3.2", own=True)
    assert isinstance(hub, HubSource)
    assert hub.file is not None
    own = settings().models / "hub" / hub.repo / hub.file
    own.parent.mkdir(parents=True)
    own.write_bytes(g.tiny())
    assert resolve("llama3.2") == hub
    assert models.path("llama3.2") == own
    [entry] = [each for each in models.entries() if each.path == own]
    assert entry.aliases == ("llama3.2:3b", "llama3.2") == names_of(own)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with site() as up:
        yield up


def stand_in(monkeypatch: pytest.MonkeyPatch, *entries: CatalogueModel) -> None:
    monkeypatch.setattr(check_catalogue, "catalogue", lambda: entries)


def entry(name: str, size: int, repo: str, file: str) -> CatalogueModel:
    return CatalogueModel(
        name=name, repo=repo, file=file, size=size, active=size, kv=1, context=4096, quality=1,
        purpose="x", licence="x",
    )  # fmt: skip


def test_the_check_finds_what_the_hub_has_otherwise_or_not(
    hub: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_repo(hub, "me/one", {"one.gguf": b"x" * 1000})
    parts = {f"two-0000{n}-of-00002.gguf": b"x" * 500 for n in (1, 2)}
    put_repo(hub, "me/two", parts)
    right = [entry("one:1b", 990, "me/one", "one.gguf"), entry("two:1b", 1000, "me/two", next(iter(parts)))]
    stand_in(monkeypatch, *right)
    assert check_catalogue.main(["--endpoint", hub.url]) == 0
    stand_in(monkeypatch, entry("one:1b", 500, "me/one", "one.gguf"), entry("no:1b", 1, "me/one", "no.gguf"))
    assert check_catalogue.main(["--endpoint", hub.url]) == 1
    told = capsys.readouterr().out
    assert "one:1b: the catalogue has 500 bytes, the hub 1000" in told
    assert "no:1b: the hub did not give hf:me/one/no.gguf" in told


def test_sizes_are_written_into_the_file_and_nothing_else_changes() -> None:
    text = data_file().read_text(encoding="utf-8")
    changed = check_catalogue.with_sizes(text, {"qwen3:4b": 2_497_281_312, "gpt-oss:20b": 12_109_566_560})
    assert "size = 2_497_281_312\nactive = 2_497_281_312\n" in changed
    assert "size = 12_109_566_560\nactive = 2_400_000_000\n" in changed
    differing = [a for a, b in zip(text.splitlines(), changed.splitlines(), strict=True) if a != b]
    assert len(differing) == 3
