"""Build hook: compiles what of perdure is C, with this machine's compiler or else with one from a package.

`pip install` runs it. `python tools/build_hook.py` compiles into the checkout.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path("src/perdure/engine/row_kernels")
_FLAGS = ["-O3", "-std=c11", "-shared", "-fPIC", "-ffreestanding", "-ffp-contract=off"]
"""It needs no headers but a compiler's own, and rounds alike everywhere."""
if sys.platform == "linux":
    # Nor does it need a library: a compiler that leaves something open is none for it.
    _FLAGS += ["-nostdlib", "-Wl,-z,defs"]
    if platform.machine() == "aarch64":
        _FLAGS.append("-mno-outline-atomics")


_PACKAGED = [sys.executable, "-m", "ziglang", "cc"]


class CompilePart(BuildHookInterface[Any]):
    """Compiles the C part before a wheel, or an editable one, is put together."""

    def dependencies(self) -> list[str]:
        """A compiler as a package, where this machine has none that works."""
        return [] if own_compiler(Path(self.root)) else ["ziglang>=0.13"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        compile_part(root, root / _FOLDER / "librow_kernels.so")
        build_data["artifacts"].append(f"{_FOLDER}/librow_kernels.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tags()}"


def compile_part(root: Path, target: Path) -> None:
    """Compile into `target`; a process that has the old one loaded keeps that."""
    compiler = own_compiler(root) or _PACKAGED
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, target.name)
        _run(compiler, root, made, check=True)
        os.replace(made, target)


def own_compiler(root: Path) -> list[str] | None:
    """This machine's compiler, as a command, if it can compile the part."""
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            with tempfile.TemporaryDirectory() as folder:
                if _run(command, root, Path(folder, "tried.so")):
                    return command
    return None


def _run(compiler: list[str], root: Path, target: Path, *, check: bool = False) -> bool:
    command = [*compiler, *_FLAGS, "-o", str(target), str(root / _FOLDER / "row_kernels.c")]
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        sys.exit(f"{shlex.join(command)}\n{done.stderr}")
    return done.returncode == 0


def platform_tags() -> str:
    """The tag of machines where the result runs: on Linux, of any C library."""
    machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    if machine.startswith("linux_"):
        kind = machine.removeprefix("linux_")
        return f"manylinux_2_17_{kind}.musllinux_1_1_{kind}"
    return machine


if __name__ == "__main__":
    here = Path(__file__).parents[1]
    compile_part(here, here / _FOLDER / "librow_kernels.so")
