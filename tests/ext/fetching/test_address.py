"""Models from an address on the web."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import gguf_bytes as g
from perdure import models
from perdure.errors import FetchError
from serving import Page, Site, site

MODEL = g.file([g.text("general.architecture", "llama")], [g.tensor("a", [8], 0)], bytes(32))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Site]:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    with site() as up:
        up.pages["/files/it.gguf"] = Page(body=MODEL)
        yield up


def test_a_model_is_fetched_once_from_its_address_listed_and_removed(here: Site, tmp_path: Path) -> None:
    name = f"{here.url}/files/it.gguf"
    first = models.path(name)
    assert first.read_bytes() == MODEL
    assert tmp_path / "models" / "web" in first.parents
    assert models.path(name) == first
    assert len(here.gets("/files/it.gguf")) == 1
    [entry] = [entry for entry in models.entries() if entry.source == "web"]
    assert entry.path == first
    assert models.remove(name) == (first,)
    assert not first.exists()


def test_an_address_with_nothing_behind_it_is_told(here: Site) -> None:
    with pytest.raises(FetchError, match="answered 404"):
        models.path(f"{here.url}/files/other.gguf")
