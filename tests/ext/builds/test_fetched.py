"""Which build is fetched where there is none, and what is said when none can be."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

import perdure.ext.builds as libraries
from engine.test_source import build
from engine.test_source import home as home
from perdure.engine.llama.native.choice import find_library
from perdure.engine.llama.native.source import candidates
from perdure.errors import EngineLibraryError
from perdure.ext.builds import fetched
from perdure.ext.builds.machine import Gpu, Machine


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
    monkeypatch.setattr(fetched, "install", install)
    agree = None if agrees is None else lambda what, nbytes: agrees
    with caplog.at_level(logging.WARNING, "perdure.engine"), pytest.raises(Fetched) as asked:
        find_library(agree=agree)
    assert asked.value.args == (backend,)
    assert [line for line in caplog.messages if told in line] if told else not caplog.messages
