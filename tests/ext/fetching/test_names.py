"""What names mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure import ModelNotFoundError
from perdure.models import FileSource, HubSource, Source, UrlSource, names_model, resolve


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("hf:me/it/a.gguf", HubSource(repo="me/it", file="a.gguf")),
        ("hf:me/it/sub/a.gguf", HubSource(repo="me/it", file="sub/a.gguf")),
        ("hf:me/it", HubSource(repo="me/it")),
        ("hf:me/it:Q8_0", HubSource(repo="me/it", tag="Q8_0")),
        ("hf:me/it@v1/a.gguf", HubSource(repo="me/it", file="a.gguf", revision="v1")),
        ("me/it", HubSource(repo="me/it")),
        ("me/it-1.5_B.x", HubSource(repo="me/it-1.5_B.x")),
        ("me/it:a.gguf", HubSource(repo="me/it", file="a.gguf")),
        ("me/it:sub/a.gguf", HubSource(repo="me/it", file="sub/a.gguf")),
        ("me/it:Q4_K_M", HubSource(repo="me/it", tag="Q4_K_M")),
        ("me/it@main:Q4_K_M", HubSource(repo="me/it", tag="Q4_K_M", revision="main")),
        ("hf.co/me/it:Q4_K_M", HubSource(repo="me/it", tag="Q4_K_M")),
        ("huggingface.co/me/it", HubSource(repo="me/it")),
        ("https://huggingface.co/me/it", HubSource(repo="me/it")),
        ("https://hf.co/me/it/tree/main", HubSource(repo="me/it")),
        (
            "https://huggingface.co/me/it/resolve/main/sub/a.gguf?download=true",
            HubSource(repo="me/it", file="sub/a.gguf"),
        ),
        (
            "https://huggingface.co/me/it/blob/v1/a.gguf",
            HubSource(repo="me/it", file="a.gguf", revision="v1"),
        ),
        ("https://example.org/x/a.gguf?sig=1", UrlSource(url="https://example.org/x/a.gguf?sig=1")),
        ("a.gguf", FileSource(path=Path("a.gguf"))),
        ("models/a.gguf", FileSource(path=Path("models/a.gguf"))),
        ("me/it/a.gguf", FileSource(path=Path("me/it/a.gguf"))),
        ("/x/y", FileSource(path=Path("/x/y"))),
        ("./smollm2", FileSource(path=Path("smollm2"))),
        (Path("default"), FileSource(path=Path("default"))),
    ],
)
def test_names_are_read_as_written(name: str | Path, source: Source) -> None:
    assert resolve(name) == source


def test_a_file_that_is_there_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me").mkdir()
    (tmp_path / "me" / "it").write_bytes(b"")
    assert resolve("me/it") == FileSource(path=Path("me/it"))


def test_home_is_expanded() -> None:
    assert resolve("~/a.gguf") == FileSource(path=Path.home() / "a.gguf")


@pytest.mark.parametrize(
    "name",
    [
        "gpt-5",
        "hf:",
        "hf:x",
        "hf:me/it/",
        "hf:me/it:",
        "hf:me/it/a.bin",
        "hf:me/it/../../etc/a.gguf",
        "me/it:../a.gguf",
        "hf:../../x",
        "hf:me/it//a.gguf",
        "hf:me/it/a\\b.gguf",
        "",
        "a b",
    ],
)
def test_what_is_no_name_is_refused_with_advice(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"owner/repo|does not name"):
        resolve(name)


@pytest.mark.parametrize("name", ["hf:me/it/a.gguf", "hf:me/it@v1/a.gguf", "hf:me/it", "hf:me/it@v1:Q8_0"])
def test_a_hub_source_is_written_as_it_is_read(name: str) -> None:
    assert str(resolve(name)) == name


@pytest.mark.parametrize(
    "name", ["https://example.org/page.html", "https://example.org/../a.gguf", "https://example.org/"]
)
def test_an_address_that_is_no_model_is_refused(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"not the address of a \.gguf file"):
        resolve(name)


@pytest.mark.parametrize(
    ("word", "model"),
    [
        ("smollm2", True),
        ("my.gguf", True),
        ("owner/repo", True),
        ("owner/repo:Q4_K_M", True),
        ("hf.co/owner/repo", True),
        ("https://example.org/a.gguf", True),
        ("llama3.2:1b", True),
        ("Hello", False),
        ("What is and/or?", False),
        ("summarise", False),
        ("", False),
        ("a/b/c", False),
    ],
)
def test_a_word_in_first_place_is_a_model_only_if_it_can_be_nothing_else(word: str, model: bool) -> None:
    assert names_model(word) is model
