"""Libraries with GPU backends: moved from where they were built, and with parts of a C++ runtime (M1)."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from engine.shims import needs_compiler
from perdure.engine.llama.native import library

pytestmark = needs_compiler

_LOCALE = "_ZNSt6localeC1Ev"
"""`std::locale::locale()`, which only a C++ runtime has."""


def build(folder: Path, name: str, source: str, *options: object) -> Path:
    path = folder / f"lib{name}.so"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", str(path), *map(str, options)]
    subprocess.run(command, input=source.encode(), check=True)
    return path


def test_m1_a_build_that_was_moved_finds_the_backends_that_lie_beside_it(tmp_path: Path) -> None:
    # Not the names of real ones: those that this process has loaded would be found.
    for name, value in (("one", 30), ("two", 12)):
        build(
            tmp_path,
            f"ggml-{name}",
            f"int {name}(void) {{ return {value}; }}",
            f"-Wl,-soname,libggml-{name}.so.0",
        )
    needed = (tmp_path / "libggml-one.so", tmp_path / "libggml-two.so")
    source = "int one(void); int two(void); int both(void) { return one() + two(); }"
    path = build(tmp_path, "ggml", source, "-Wl,--no-as-needed", *needed)
    with pytest.raises(OSError, match="libggml-one"):
        ctypes.CDLL(str(path))
    assert library.load_file(path).both() == 42


def test_what_is_missing_elsewhere_is_said(tmp_path: Path) -> None:
    build(tmp_path, "other", "int other(void) { return 1; }", "-Wl,-soname,libother.so.0")
    path = build(
        tmp_path, "ggml", "int other(void); int us(void) { return other(); }", tmp_path / "libother.so"
    )
    with pytest.raises(OSError, match="libother"):
        library.load_file(path)


def test_m1_the_c_plus_plus_runtime_of_the_system_is_found_before_that_of_a_gpu_backend() -> None:
    """A library that is loaded later finds what is global before what its own dependencies bring."""
    program = f"""
import ctypes
from perdure.engine.llama.native import library
assert not hasattr(ctypes.CDLL(None), "{_LOCALE}")
library._share_cpp_runtime()
assert hasattr(ctypes.CDLL(None), "{_LOCALE}")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
