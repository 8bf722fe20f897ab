"""Models in several files."""

from __future__ import annotations

from pathlib import Path

import pytest

import gguf_bytes as g
from perdure import models
from perdure.errors import ModelFileError, ModelNotFoundError
from perdure.models import read_card, read_parts
from perdure.models.parts import part_names


def part(number: int, count: int, tensors: int = 3) -> bytes:
    pairs = [
        g.text("general.architecture", "llama"),
        g.number("split.no", g.U16, number - 1),
        g.number("split.count", g.U16, count),
        g.number("split.tensors.count", g.I32, tensors),
    ]
    return g.file(pairs, [g.tensor(f"blk.{number}", [8], 0)], bytes(32))


@pytest.fixture
def first(tmp_path: Path) -> Path:
    for number in (1, 2, 3):
        (tmp_path / f"m-{number:05d}-of-00003.gguf").write_bytes(part(number, 3))
    return tmp_path / "m-00001-of-00003.gguf"


def test_the_parts_of_a_model_are_known_by_any_of_their_names() -> None:
    assert part_names("m.gguf") == ("m.gguf",)
    assert part_names("m-00002-of-00002.gguf") == ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")


@pytest.mark.parametrize("number", [1, 2, 3])
def test_any_part_leads_to_the_whole_model(number: int, first: Path) -> None:
    assert models.path(first.with_name(f"m-{number:05d}-of-00003.gguf")) == first
    card = read_card(first)
    assert (card.files, card.parameters, card.types[0].tensors) == (3, 24, 3)


def test_a_missing_part_is_named(first: Path) -> None:
    first.with_name("m-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelNotFoundError, match="one of 3 parts, and 1 are missing: m-00002-of-00003"):
        read_parts(first)


def test_a_part_that_is_cut_is_refused(first: Path) -> None:
    third = first.with_name("m-00003-of-00003.gguf")
    third.write_bytes(third.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match=r"00003-of-00003\.gguf is truncated"):
        read_parts(first)


def test_parts_that_swapped_names_are_refused(first: Path) -> None:
    first.with_name("m-00002-of-00003.gguf").write_bytes(part(3, 3))
    with pytest.raises(ModelFileError, match="holds part 3 of 3, its name says 2"):
        read_parts(first)


def test_a_part_of_another_count_is_refused(first: Path) -> None:
    first.with_name("m-00002-of-00003.gguf").write_bytes(part(2, 4))
    with pytest.raises(ModelFileError, match="has 4 parts, its name says 3"):
        read_parts(first)


def test_a_part_that_was_renamed_is_refused(first: Path) -> None:
    renamed = first.rename(first.with_name("model.gguf"))
    with pytest.raises(ModelFileError, match="has 3 parts, its name says 1"):
        read_parts(renamed)


def test_parts_of_different_models_are_refused(first: Path) -> None:
    first.write_bytes(part(1, 3, tensors=9))
    with pytest.raises(ModelFileError, match="needs 9 tensors, its 3 parts have 3"):
        read_parts(first)


def test_a_part_number_that_cannot_be_is_refused() -> None:
    with pytest.raises(ModelFileError, match="part 4 of 3"):
        part_names("m-00004-of-00003.gguf")
