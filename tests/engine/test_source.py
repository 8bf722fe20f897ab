"""Where the llama.cpp library is looked for, in which order, and what is said when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.engine.llama.native import source
from perdure.engine.llama.native.backends import backends
from perdure.engine.llama.native.choice import find_library
from perdure.engine.llama.native.source import candidates, library_file, library_folder
from perdure.errors import EngineLibraryError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty PERDURE_HOME on a machine without llama-cpp-python."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PERDURE_LLAMA", raising=False)
    monkeypatch.setattr(source, "llama_cpp_python", lambda: None)
    return tmp_path / "home"


def build(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names or ("libllama.so", "libggml.so"):
        (folder / name).touch()
    return folder


def test_the_users_own_build_is_the_only_one_that_is_tried(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(home / "engines" / "cpu-3.22.1")
    own = build(tmp_path / "llama.cpp" / "build" / "bin")
    monkeypatch.setenv("PERDURE_LLAMA", str(tmp_path / "llama.cpp"))
    assert [(each.kind, each.folder) for each in candidates()] == [("own", own)]


def test_an_own_folder_without_a_library_is_an_error_not_the_next_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(home / "engines" / "cpu-3.22.1")
    monkeypatch.setenv("PERDURE_LLAMA", str(tmp_path))
    with pytest.raises(EngineLibraryError, match="no libllama"):
        find_library()


def test_llama_cpp_python_is_found_without_being_imported() -> None:
    found = source.llama_cpp_python()
    if found is None:
        pytest.skip("llama-cpp-python is not installed")
    assert found.file("llama") is not None
    assert found.version[0].isdigit()


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["libllama.so"], "libllama.so"),
        (["libllama.v0.5.0.so", "libllama-common.so"], "libllama.v0.5.0.so"),
        (["libllama.so.0.5.0", "libllama.so.0", "libllama.so"], "libllama.so"),
        (["libllama.0.dylib"], "libllama.0.dylib"),
        (["libllama.vulkan.v0.5.0.so", "libllama-common.so"], "libllama.vulkan.v0.5.0.so"),
        (["libllama.metal.v0.4.0.dylib"], "libllama.metal.v0.4.0.dylib"),
        (["llama.v0.4.0.dll"], "llama.v0.4.0.dll"),
        (["llama.dll", "llama-common.dll"], "llama.dll"),
        (["libllama-common.so", "llama-addon.node"], None),
    ],
)
def test_the_file_is_found_by_its_name_whatever_its_version(
    names: list[str], found: str | None, tmp_path: Path
) -> None:
    build(tmp_path / "lib", *names)
    assert library_file(tmp_path / "lib", "llama") == (tmp_path / "lib" / found if found else None)
    assert library_folder(tmp_path) == (tmp_path / "lib" if found else None)
    assert library_file(tmp_path / "absent", "llama") is None


def test_backends_are_told_from_the_other_files(tmp_path: Path) -> None:
    build(
        tmp_path / "lib",
        *("libggml-base.so", "libggml.v0.5.0.so", "libggml-cpu-armv8.2_1.so", "libggml-cpu-haswell.so"),
        *("libggml-cuda.so", "ggml-cpu-x64.dll", "libggml-metal.dylib", "libllama.so"),
    )
    assert sorted((each.kind, each.variant) for each in backends(tmp_path / "lib")) == [
        ("cpu", "armv8.2_1"),
        ("cpu", "haswell"),
        ("cpu", "x64"),
        ("cuda", "default"),
        ("metal", "default"),
    ]
