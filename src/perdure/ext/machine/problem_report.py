"""Problem report: one file about a machine, to attach to an issue, with what is private left out.

    # perdure 0.1.0 on Linux-6.8-x86_64, Python 3.12.3
    ## Findings
    ok    engine     llama.cpp 0.5.0-dev (installed cpu-3.22.1, zen4) at ~/…/engines/cpu-3.22.1
    ## GPUs
    NVIDIA H200 (sm_90, 139 GiB), driver for CUDA 13.0
    …

No message, reply, key or file of a user is read for it. Names of people are taken out of paths, and values of
variables and settings are shown only where they cannot be a secret.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import perdure
from perdure import EngineLibraryError, InvalidInputError
from perdure.spi.base import SETTINGS, choices, system
from perdure.spi.engine import Finding

_PREFIXES = (
    "PERDURE_",
    "CUDA_",
    "GGML_",
    "LLAMA_",
    "NVIDIA_",
    "VK_",
    "LD_",
    "DYLD_",
    "OMP_",
    "GOMP_",
    "HSA_",
)
"""Variables that change what an engine does."""
_SECRET = re.compile(r"key|token|secret|passw|credential|auth|cookie", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")
"""A name and a password in an address."""
_PRIVATE = frozenset({"host", "alias", "allow_host", "cors", "store", "model"})
"""Settings that name people's machines, sites or files: that they are set is enough."""
_PACKAGES = (
    *("numpy", "llguidance", "jinja2", "pydantic", "fastapi", "uvicorn", "uvloop", "huggingface-hub", "gguf"),
    *("llama-cpp-python", "xllamacpp", "torch", "nvidia-cuda-runtime", "nvidia-cublas"),
    *("nvidia-cuda-runtime-cu12", "nvidia-cublas-cu12"),
)


def problem_report(findings: Iterable[Finding]) -> str:
    """The text of a report with these findings of `perdure doctor`."""
    sections = {
        "Findings": _found(findings),
        "GPUs": _gpus(),
        "Libraries": _libraries(),
        "Machine": _machine(),
        "Python packages": _packages(),
        "Environment": _environment(),
        "Settings": _settings(),
    }
    python = f"Python {platform.python_version()} ({platform.python_implementation()})"
    lines = [f"# perdure {perdure.__version__} on {platform.platform()}, {python}"]
    for title, content in sections.items():
        lines += ["", f"## {title}", "", *(list(content) or ["none"])]
    return anonymous("\n".join(lines) + "\n")


def anonymous(text: str) -> str:
    """`text` without the names of this user and machine, and without what stands before an @ in addresses."""
    text = _IN_ADDRESS.sub("(left out)@", text)
    for home in {str(Path.home()), os.path.realpath(Path.home())} - {os.sep, ""}:
        text = text.replace(home, "~")
    names = {platform.node()}
    with suppress(OSError, KeyError, ImportError):
        names.add(getpass.getuser())
    for name in names - {"", "root", "localhost"}:
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "(name)", text)
    return text


def _found(findings: Iterable[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"{finding.state:<5} {finding.name:<10} {finding.found}"
        if finding.advice:
            yield f"{'':<16} → {finding.advice}"


def _gpus() -> Iterator[str]:
    from perdure.ext.builds.machine import fits, read_machine
    from perdure.spi.libraries import compat_drivers, runtime_folders

    machine = read_machine()
    yield str(machine)
    if driver := system.nvidia_driver():
        yield driver
    releases = ", ".join(map(str, sorted(machine.runtimes)))
    yield f"NVIDIA's runtimes: {releases or 'none'}"
    yield from (f"  in {folder}" for folder in runtime_folders())
    yield from (f"forward compatibility: {path}" for path in compat_drivers())
    for fit in fits(machine):
        yield f"{fit.package}: {'can run' if fit.usable else 'cannot run'} ({fit.reason}; {fit.megabytes})"


def _libraries() -> Iterator[str]:
    """Each library that is here with all that was tried with it, as the probe remembers it."""
    from perdure.spi.libraries import candidates, gpu_backends, remembered

    try:
        sources = list(candidates())
    except EngineLibraryError as error:
        yield str(error)
        return
    for source in sources:
        result = remembered(source)
        yield f"{source}, GPU backends: {', '.join(gpu_backends(source)) or 'none'}"
        if result is None:
            yield "  not probed yet"
            continue
        yield from (f"  {attempt}" for attempt in result.attempts)
        if result.gpu_problem:
            yield f"  GPU: {result.gpu_problem}"


def _machine() -> Iterator[str]:
    yield f"{system.architecture()}, {os.cpu_count()} cores, {system.usable_cores()} usable"
    if flags := sorted(system.cpu_flags()):
        yield f"CPU flags: {' '.join(flags)}"
    total, free = system.physical_memory(), system.available_memory()
    if total is not None and free is not None:
        yield f"memory: {total / 2**30:.1f} GiB, {free / 2**30:.1f} free"
    yield f"C library: {' '.join(platform.libc_ver()) or 'not known'}; executable: {sys.executable}"


def _packages() -> Iterator[str]:
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            yield f"{name} {importlib.metadata.version(name)}"


def _environment() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(_PREFIXES):
            setting = name.removeprefix("PERDURE_").lower()
            yield f"{name}={_shown(setting, value)}"


def _settings() -> Iterator[str]:
    try:
        chosen = choices()
    except InvalidInputError as error:
        yield str(error)
        return
    for setting in SETTINGS:
        if setting.name in chosen:
            choice = chosen[setting.name]
            yield f"{setting.name} = {_shown(setting.name, choice.value)} ({choice.origin})"


def _shown(name: str, value: object) -> str:
    return "(set)" if name in _PRIVATE or _SECRET.search(name) else str(value)
