"""Libraries that misbehave on purpose, compiled around the real one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.engine.llama.native import library
from perdure.engine.llama.native.backends import backends
from perdure.engine.llama.native.source import LibrarySource

needs_compiler = pytest.mark.skipif(
    shutil.which("gcc") is None or sys.platform != "linux", reason="needs gcc and Linux"
)


def shim(folder: Path, **defines: object) -> Path:
    """A folder with the library of this process, but for what `defines` change (see shim.c)."""
    folder.mkdir(parents=True)
    real = library.loaded().source
    libllama = real.file("llama")
    assert libllama is not None
    for path in real.folder.iterdir():
        if path.name.startswith("libggml"):
            (folder / path.name).symlink_to(path)
    subprocess.run(
        [
            *("gcc", "-shared", "-fPIC", "-O1", "-o", folder / "libllama.so", _SOURCE),
            *(f'-DREAL="{libllama}"', *(f"-D{name}={value}" for name, value in defines.items())),
            *("-Wl,--no-as-needed", libllama, f"-Wl,-rpath,{libllama.parent}", "-ldl"),
        ],
        check=True,
    )
    return folder


def empty_library(path: Path) -> None:
    """A shared library with nothing in it."""
    subprocess.run(["gcc", "-shared", "-o", path, "-x", "c", "/dev/null"], check=True)


def cpu_variants(source: LibrarySource) -> list[str]:
    """The CPU variants of a library by name, in no order of merit; none where they are built in."""
    return [backend.variant for backend in backends(source.folder) if backend.kind == "cpu"]


_SOURCE = Path(__file__).with_name("shim.c")
