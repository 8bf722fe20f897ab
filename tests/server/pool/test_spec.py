"""What `--model` takes: texts, folders and TOML files, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gguf_bytes as g
from perdure.engine_config import EngineConfig
from perdure.errors import InvalidInputError, PerdureError
from perdure.server.pool import check_aliases, parse_duration, parse_size, read_selection


def test_a_name_a_file_and_options() -> None:
    [spec] = read_selection(
        ["small=a,b.gguf,ctx=8192,slots=auto,gpu_layers=0,kv_type=q8_0,keep_alive=5m,pin"]
    ).models
    assert (spec.name, spec.source) == ("small", "a,b.gguf")
    assert spec.config == EngineConfig(n_ctx=8192, slots="auto", gpu_layers=0, kv_type="q8_0")
    assert spec.keep_alive == 300.0
    assert spec.pinned


def test_a_file_without_a_name_has_its_own() -> None:
    [spec] = read_selection(["some/where/model-Q4.gguf,memory=4G"]).models
    assert (spec.name, spec.memory) == ("model-Q4", 4 << 30)


def test_a_folder_is_its_files_but_for_further_parts(tmp_path: Path) -> None:
    parts = {"a-00001-of-00002.gguf": 0, "a-00002-of-00002.gguf": 1}
    for name, number in parts.items():
        (tmp_path / name).write_bytes(
            g.tiny([g.number("split.no", g.U16, number), g.number("split.count", g.U16, 2)])
        )
    for name in ("b.gguf", "mmproj-b.gguf", "x.txt"):
        (tmp_path / name).write_bytes(g.tiny())
    found = read_selection([str(tmp_path)]).models
    assert [Path(spec.source).name for spec in found] == ["a-00001-of-00002.gguf", "b.gguf"]


def test_a_file_of_a_folder_that_cannot_be_read_is_left_out_y17(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Y17: one damaged file stopped the whole server."""
    whole = g.tiny()
    (tmp_path / "good.gguf").write_bytes(whole)
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "lost.gguf").symlink_to(tmp_path / "nowhere")
    damaged = {
        "empty": b"",
        "short": whole[:-1],
        "head": whole[:40],
        "other": b"PK" + bytes(100),
        "magic": b"GGUF",
        "part-00001-of-00002": whole,
        "-name": g.tiny([g.text("general.author", "somebody")]),
    }
    for name, content in damaged.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
    found = read_selection([str(tmp_path)]).models
    assert [spec.name for spec in found] == ["good"]
    for name in (*damaged, "folder", "lost"):
        assert any(f"{name}.gguf is left out: " in line for line in caplog.messages), name
    # One that somebody names is an error, as before; and so is a folder without a whole one.
    (tmp_path / "good.gguf").unlink()
    with pytest.raises(InvalidInputError, match="none of its 9"):
        read_selection([str(tmp_path)])


def test_a_copy_in_a_folder_is_left_out_y10(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.gguf").write_bytes(g.tiny())
    (tmp_path / "b.gguf").write_bytes(g.tiny())
    (tmp_path / "c.gguf").symlink_to(tmp_path / "a.gguf")
    # As long, and another model.
    (tmp_path / "d.gguf").write_bytes(g.tiny(data=bytes(256)))
    assert [spec.name for spec in read_selection([str(tmp_path)]).models] == ["a", "d"]
    assert sum("is a copy of" in line for line in caplog.messages) == 2


def test_a_toml_file(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    path = tmp_path / "models.toml"
    path.write_text(
        'memory = "6G"\n[models.small]\nfile = "small.gguf"\nctx = 4096\npin = true\n'
        '[models.large]\nfile = "qwen3:4b"\nkeep_alive = "1h"\n[aliases]\n"gpt-*" = "small"\n'
    )
    found = read_selection([str(path)])
    assert found.memory == 6 << 30
    assert found.aliases == ("gpt-*=small",)
    assert [spec.name for spec in found.models] == ["small", "large"]
    assert found.models[0].source == str(tmp_path / "small.gguf")
    assert found.models[0].pinned


@pytest.mark.parametrize(
    "given",
    [
        "=x.gguf",
        "a=",
        "a=x.gguf,ctx=0",
        "a=x.gguf,ctx=many",
        "a=x.gguf,slots=1.5",
        "a=x.gguf,gpu_layers=-1",
        "a=x.gguf,keep_alive=soon",
        "a=x.gguf,memory=-3",
        "a=x.gguf,pin=perhaps",
        "a b=x.gguf",
        "nowhere.toml",
    ],
)
def test_what_is_wrong_is_told(given: str) -> None:
    with pytest.raises(InvalidInputError):
        read_selection([given])


@pytest.mark.parametrize(
    "text", ["", "x = [", "models = 3", "[models]", "[models.a]", "[models.a]\nfile = 3", "[other]\na = 1"]
)
def test_what_is_wrong_with_a_file_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(InvalidInputError):
        read_selection([str(path)])


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="two models are called"):
        read_selection(["a=x.gguf", "a=y.gguf"])


def test_an_alias_names_a_model_that_is_there() -> None:
    check_aliases(["gpt-*", "gpt-*=a"], ["a"])
    with pytest.raises(InvalidInputError, match="none of the models"):
        check_aliases(["gpt-*=b"], ["a"])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), (0, 0), ("90", 90), ("1h30m", 5400), ("-1", -1), (-1, -1), ("1.5s", 1.5), ("250ms", 0.25)],
)
def test_durations(text: str | int, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@given(st.text() | st.floats() | st.integers() | st.booleans() | st.none())
def test_whatever_comes_is_a_number_or_an_error(value: object) -> None:
    for parse in (parse_duration, parse_size):
        try:
            found = parse(value)
        except PerdureError:
            continue
        assert abs(found) < float("inf")
