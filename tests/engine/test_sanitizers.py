"""The row kernels under AddressSanitizer and UndefinedBehaviorSanitizer: no access beside what was given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import perdure

SOURCE = Path(perdure.__file__).parent / "engine" / "row_kernels"
FLAGS = ("-std=c11", "-shared", "-fPIC", "-O1", "-g", "-fno-omit-frame-pointer", "-ffp-contract=off")
TESTS = Path(__file__).parents[1]
RUNTIMES = ("libasan.so", "libubsan.so")
PLANTED = "long perdure_planted(long at) { long here[4] = {1, 2, 3, 4}; return here[at]; }\n"


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which("gcc")
    if found is None:
        pytest.skip("there is no gcc here")
    return found


def runtimes(compiler: str) -> str:
    """The libraries that have to be loaded before Python."""
    paths = []
    for name in RUNTIMES:
        path = subprocess.run(
            [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        if not Path(path).is_absolute():
            pytest.skip(f"gcc has no {name}")
        paths.append(path)
    return ":".join(paths)


def build(compiler: str, folder: Path, planted: str = "") -> Path:
    source = folder / "row_kernels.c"
    source.write_text((SOURCE / "row_kernels.c").read_text() + planted)
    library = folder / "librow_kernels.so"
    sanitizers = "-fsanitize=address,undefined"
    subprocess.run(
        [compiler, *FLAGS, sanitizers, "-fno-sanitize-recover=undefined", source, "-o", library],
        check=True,
    )
    return library


def under_sanitizers(compiler: str, *arguments: str, library: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with these kernels in the place of its own."""
    environment = {
        **os.environ,
        "LD_PRELOAD": runtimes(compiler),
        # Python leaves memory to the end of its process, and so do its libraries.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PERDURE_TEST_ROW_KERNELS": str(library),
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(SOURCE.parents[2])]),
    }
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.soak
def test_the_row_kernels_touch_nothing_beside_what_they_are_given(compiler: str, tmp_path: Path) -> None:
    """All tests of the kernels, on kernels that check each access."""
    library = build(compiler, tmp_path)
    ran = under_sanitizers(
        compiler,
        *("-m", "pytest", "-q", "-x", "-p", "engine.sanitized_kernels"),
        *(str(TESTS / "engine" / "test_row_kernels.py"), "-m", "not soak"),
        library=library,
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    assert "AddressSanitizer" not in ran.stderr
    assert "runtime error" not in ran.stderr


@pytest.mark.soak
def test_an_access_beside_an_array_is_noticed(compiler: str, tmp_path: Path) -> None:
    """A planted fault: the sanitizers are really there."""
    library = build(compiler, tmp_path, PLANTED)
    reads = f"import ctypes; ctypes.CDLL({str(library)!r}).perdure_planted(ctypes.c_long(7))"
    ran = under_sanitizers(compiler, "-c", reads, library=library)
    assert ran.returncode != 0
    assert "out of bounds" in ran.stderr or "AddressSanitizer" in ran.stderr
