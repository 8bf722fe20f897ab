"""What `perdure doctor` says about llama.cpp: which library is used and why, and for what it was compiled."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from perdure import EngineLibraryError
from perdure.ext.builds.machine import ranked, read_machine
from perdure.ext.builds.package import package_for
from perdure.spi.base import system
from perdure.spi.engine import Finding
from perdure.spi.libraries import HIDING, ChosenLibrary, candidates, choose
from perdure.spi.llama import library

_SLOWER = "it works, perhaps slower; `perdure engine install` or a build of your own may do better"
_WANTED = ("AVX2", "FMA", "F16C", "AVX512", "NEON", "DOTPROD", "SVE")
"""What llama.cpp gains most from, where a processor has it."""
_FLAGS = {
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "AVX512": "avx512f",
    "NEON": "asimd",
    "DOTPROD": "asimddp",
    "SVE": "sve",
}
"""The same, as the kernel calls it."""


def findings() -> Iterator[Finding]:
    """Which library is used and why, and what died on the way to it. Nothing is fetched by looking."""
    try:
        if not any(candidates()):
            package = package_for()
            text = f"there is no llama.cpp library yet; {package} is fetched when it is first needed"
            yield Finding("engine", "ok", text)
            return
        choice = choose()
        lib = library.load()
    except EngineLibraryError as error:
        yield Finding("engine", "bad", str(error), "`perdure engine install` fetches one that was tested")
        return
    for failed in choice.passed:
        if not failed.usable:
            yield Finding("engine", "warn", f"a library cannot run here: {failed}", "`perdure engine ls`")
    deaths = "; ".join(map(str, choice.result.deaths))
    if deaths:
        used = f"used instead: {choice.result.attempts[-1]}"
        yield Finding("engine", "warn", f"{library.build()}. {deaths}; {used}", _SLOWER)
    else:
        yield Finding("engine", "ok", f"{library.build()} at {choice.source.folder}")
    yield _features(lib.llama_print_system_info().decode(), system.cpu_flags())
    for device in library.loaded().device_list:
        yield Finding("device", "ok", device.shown)
    yield from _gpus(choice)


def _gpus(choice: ChosenLibrary) -> Iterator[Finding]:
    """The GPUs of this machine: found, usable by which library, used, and if not why."""
    machine = read_machine()
    hidden = [f"{name}={value}" for name in HIDING if (value := os.environ.get(name)) is not None]
    hides = f"; {', '.join(hidden)} is set" if hidden else ""
    used = choice.result.devices
    if not machine.has_gpu and not used:
        yield Finding("gpu", "ok", f"none was found{hides}")
        return
    yield Finding("gpu", "ok", f"found: {machine}{hides}")
    for result in (choice.result, *choice.passed):
        if result.devices:
            name = Path(result.folder).name
            yield Finding("gpu", "ok", f"{name} can use {', '.join(result.devices)}")
    if used:
        driver = choice.result.attempts[-1].driver
        yield Finding("gpu", "ok", f"used: {', '.join(used)}" + (f", with {driver}" if driver else ""))
        return
    problem = library.loaded().gpu_problem or "the library in use has no GPU backend"
    best = next(iter(ranked(machine)), None)
    advice = "build llama.cpp for it and point PERDURE_LLAMA at the build"
    if best is not None and best.package.backend != "cpu":
        advice = f"`perdure engine install` fetches {best.package} ({best.megabytes}): {best.reason}"
    yield Finding("gpu", "warn", f"not used: {problem}", advice)


def _features(text: str, processor: frozenset[str]) -> Finding:
    """What the library was compiled for, against what the processor can do."""
    compiled = {name for name, value in re.findall(r"(\w+) = (\d)", text) if value == "1"}
    able = [name for name in _WANTED if _FLAGS[name] in processor]
    missing = [name for name in able if name not in compiled]
    shown = ", ".join(sorted(compiled)) or "none"
    if missing:
        return Finding(
            "features",
            "warn",
            f"compiled for {shown}; this processor also has {', '.join(missing)}",
            "`perdure engine install` fetches a library with a variant for this processor",
        )
    return Finding("features", "ok", shown)
