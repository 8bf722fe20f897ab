"""Where the llama.cpp library is looked for, in which order, and what is said when there is none."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from perdure import libraries
from perdure.engine.llama.native import fetched, source
from perdure.engine.llama.native.backends import backends
from perdure.engine.llama.native.choice import find_library
from perdure.engine.llama.native.source import candidates, library_file, library_folder
from perdure.errors import EngineLibraryError
from perdure.libraries.machine import Gpu, Machine


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


def test_with_none_and_no_network_the_error_names_the_ways_to_get_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_FIND_LINKS", str(home))
    with pytest.raises(EngineLibraryError, match=r"PERDURE_LLAMA.*compile.*perdure engine install --from"):
        find_library()


def test_the_last_one_installed_is_first_and_other_folders_are_none(home: Path, tmp_path: Path) -> None:
    one = libraries.install_folder(build(tmp_path / "one", "libllama.so", "libggml.so"))
    other = libraries.install_folder(build(tmp_path / "other", "libllama.so"))
    build(home / "engines" / "cpu-9.9.9")
    assert [each.version for each in candidates()] == [other.name, one.name]
    assert find_library().kind == "installed"


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


H200 = Machine(
    system="linux",
    cpu="x86_64",
    cuda=(13, 0),
    cards=(Gpu("NVIDIA H200", (9, 0), 139 << 30),),
    runtimes=frozenset({12}),
)


@pytest.mark.parametrize(
    ("machine", "engine", "agrees", "backend", "told"),
    [
        (H200, None, None, None, "which is not used: `perdure engine install` fetches"),
        (H200, None, False, None, "which is not used"),
        (H200, None, True, "cuda12", "taking @node-llama-cpp/linux-x64-cuda-ext@3.22.1 (187 MB)"),
        (H200, "auto", None, "cuda12", "taking"),
        (H200, "vulkan", None, "vulkan", ""),
        (Machine(system="linux", cpu="x86_64", vulkan=("Radeon",)), None, None, "vulkan", "taking"),
        (Machine(system="linux", cpu="x86_64"), None, None, None, ""),
    ],
    ids=["nobody to ask", "no", "yes", "auto", "named", "small", "no GPU"],
)
def test_the_first_library_fits_the_machine_and_its_size_is_agreed_to(
    machine: Machine,
    engine: str | None,
    agrees: bool | None,
    backend: str | None,
    told: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Fetched(Exception):
        pass

    def install(backend: str | None = None, progress: object = None) -> libraries.Installed:
        raise Fetched(backend)

    if engine is not None:
        monkeypatch.setenv("PERDURE_ENGINE", engine)
    monkeypatch.setattr(fetched, "read_machine", lambda: machine)
    monkeypatch.setattr(libraries, "install", install)
    agree = None if agrees is None else lambda what, nbytes: agrees
    with caplog.at_level(logging.WARNING, "perdure.engine"), pytest.raises(Fetched) as asked:
        find_library(agree=agree)
    assert asked.value.args == (backend,)
    assert [line for line in caplog.messages if told in line] if told else not caplog.messages
