"""The kernels are compiled with this machine's compiler, and where there is none with one from a package."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import pytest
from tools import build_hook
from tools.build_hook import CompilePart, compile_part

from perdure.engine import row_kernels

ROOT = Path(__file__).parent.parent
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="this machine has no compiler")


def hook() -> CompilePart:
    nothing: Any = None
    return CompilePart(str(ROOT), {}, nothing, nothing, "", "wheel")


@needs_compiler
def test_a_compiler_that_is_there_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert hook().dependencies() == []
    target = tmp_path / "made.so"
    target.write_bytes(b"the one before")
    compile_part(ROOT, target)
    assert ctypes.CDLL(str(target)).perdure_row_kernels_version() == row_kernels.VERSION
    assert [each.name for each in tmp_path.iterdir()] == ["made.so"]


@pytest.mark.parametrize("state", ["none there", "one that fails", "one that is not there"])
def test_without_one_a_package_has_it(state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if state == "one that fails":
        broken = tmp_path / "cc"
        broken.write_text("#!/bin/sh\nexit 1\n")
        broken.chmod(0o755)
    elif state == "one that is not there":
        monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert hook().dependencies() == ["ziglang>=0.13"]


def test_a_compile_that_fails_says_with_what_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build_hook, "_PACKAGED", ["/bin/sh", "-c", "echo no room >&2; exit 3"])
    target = tmp_path / "made.so"
    with pytest.raises(SystemExit, match=r"(?s)/bin/sh .*row_kernels\.c.*no room"):
        compile_part(ROOT, target)
    assert not target.exists()


def test_a_wheel_says_for_which_machines_it_is() -> None:
    kinds = build_hook.platform_tags().split(".")
    assert all(kind.startswith(("manylinux", "musllinux", "macosx", "win")) for kind in kinds)
