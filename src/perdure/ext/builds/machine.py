"""What this machine has to compute on, and which package fits it, before anything is fetched.

A CUDA package runs on a card if it has machine code for it, or PTX that the driver can translate:

    driver        must know the CUDA release of the package (its major number)
    machine code  runs on cards of the same major compute capability and the same or a higher minor one
    PTX           runs on every later card, if the driver is not older than the toolkit: the first start
                  translates it
    runtime       libcudart and libcublas of that release: here, or fetched with the package
"""

from __future__ import annotations

import functools
import json
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from perdure import LibraryFetchError, TooLargeError
from perdure.ext.builds import runtime
from perdure.ext.builds.package import PACKAGES, SYSTEMS, CudaContents, Package, check_system
from perdure.ext.builds.runtime import RUNTIMES
from perdure.spi.base import TABLE_BYTES, processes, read_stream, system
from perdure.spi.libraries import compat_drivers
from perdure.spi.runtime import BackgroundTimer

_SECONDS = 30
_ORDER = ("cuda", "cuda12", "metal", "vulkan", "cpu")
"""Backends, the fastest first."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA card as its driver names it."""

    name: str
    capability: tuple[int, int]
    memory: int = 0

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.capability[0]}{self.capability[1]}, {self.memory / 2**30:.0f} GiB)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What decides which package can run."""

    system: str
    """linux, mac or win."""
    cpu: str
    cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver knows; None where there is no driver."""
    compat: tuple[int, int] | None = None
    """The newest CUDA that a driver library for forward compatibility knows here, where one works."""
    cards: tuple[Gpu, ...] = ()
    runtimes: frozenset[int] = field(default_factory=frozenset)
    """The CUDA releases whose runtime is here."""
    vulkan: tuple[str, ...] | None = None
    """The devices of the Vulkan loader; None where there is no loader."""

    @property
    def has_gpu(self) -> bool:
        return bool(self.cards or self.vulkan) or (self.system, self.cpu) == ("mac", "aarch64")

    def __str__(self) -> str:
        parts = [str(card) for card in self.cards]
        if self.cuda is not None:
            parts.append(f"driver for CUDA {self.cuda[0]}.{self.cuda[1]}")
        if self.vulkan:
            parts.append(f"Vulkan: {', '.join(self.vulkan)}")
        if (self.system, self.cpu) == ("mac", "aarch64"):
            parts.append("Apple GPU")
        return ", ".join(parts) or "no GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryFit:
    """Whether a package can run on a machine, and why. It says what else has to be fetched."""

    package: Package
    usable: bool
    reason: str
    runtime: int | None = None
    """The CUDA release whose runtime has to be fetched too."""
    translated: bool = False
    """Whether the driver translates its code at the first start, which takes minutes."""

    @property
    def nbytes(self) -> int:
        return self.package.fetched + (RUNTIMES[self.runtime].size if self.runtime else 0)

    @property
    def megabytes(self) -> str:
        return f"{self.nbytes / 1e6:.0f} MB"


def ranked(machine: Machine) -> list[LibraryFit]:
    """The packages that can run on a machine, the best first. The last one is the CPU's, if there is one."""
    return [fit for fit in fits(machine) if fit.usable]


def fits(machine: Machine) -> list[LibraryFit]:
    """Every package for this system and CPU, the fastest backend first, with whether it can run and why."""
    here = [each for each in PACKAGES if (each.system, each.cpu) == (machine.system, machine.cpu)]
    return [_fit(each, machine) for each in sorted(here, key=lambda each: _ORDER.index(each.backend))]


def _fit(package: Package, machine: Machine) -> LibraryFit:
    if package.backend == "metal":
        return LibraryFit(package=package, usable=True, reason="it uses the Apple GPU through Metal")
    if package.backend == "cpu":
        why = _why_not(machine) if machine.has_gpu else "no GPU was found"
        return LibraryFit(package=package, usable=True, reason=f"{why}; it runs on every CPU")
    if package.backend == "vulkan":
        if machine.vulkan is None:
            return LibraryFit(package=package, usable=False, reason="there is no Vulkan loader")
        if not machine.vulkan:
            return LibraryFit(package=package, usable=False, reason="Vulkan finds no GPU")
        return LibraryFit(package=package, usable=True, reason=f"{machine.vulkan[0]} speaks Vulkan")
    assert package.cuda is not None, "every other package is CUDA's"
    return _cuda_fit(package, package.cuda, machine)


def _why_not(machine: Machine) -> str:
    """Why no package uses the GPU of a machine, and how to come by a library that does."""
    here = (each for each in PACKAGES if (each.system, each.cpu) == (machine.system, machine.cpu))
    newest = next((each for each in here if each.backend == "cuda12"), None)
    if machine.cards and newest is not None:
        return f"no package can use the GPU ({newest.spec}: {_fit(newest, machine).reason})"
    flag = "-DGGML_CUDA=ON" if machine.cards else "-DGGML_VULKAN=ON"
    return (
        f"no package for a GPU is published for {machine.system} on {machine.cpu} "
        f"(`CMAKE_ARGS={flag} pip install 'perdure[compile]'` builds one)"
    )


def _cuda_fit(package: Package, contents: CudaContents, machine: Machine) -> LibraryFit:
    major, minor = contents.toolkit
    if machine.cuda is None or not machine.cards:
        return LibraryFit(package=package, usable=False, reason="no NVIDIA driver answers")
    known = max(machine.cuda, machine.compat or machine.cuda)
    driver = f"the driver knows CUDA {known[0]}.{known[1]}"
    if known[0] < major:
        return LibraryFit(
            package=package, usable=False, reason=f"it needs a driver for CUDA {major}, and {driver}"
        )
    missing = None if major in machine.runtimes else major
    card = machine.cards[0]
    translates = known >= contents.toolkit and any(ptx <= card.capability for ptx in contents.ptx)
    ready = contents.has_code(card.capability)
    if ready:
        reason = f"it has machine code for {card.name}"
    elif translates:
        reason = f"the driver translates its code for {card.name}: the first start takes some minutes longer"
    elif any(ptx <= card.capability for ptx in contents.ptx):
        reason = f"its code for {card.name} is PTX of CUDA {major}.{minor}, and {driver}"
        return LibraryFit(package=package, usable=False, reason=reason)
    else:
        return LibraryFit(package=package, usable=False, reason=f"it has no code for {card.name}")
    if missing is not None:
        reason += f"; NVIDIA's CUDA {major} runtime is fetched with it"
    return LibraryFit(package=package, usable=True, reason=reason, runtime=missing, translated=not ready)


def is_translated(folder: str) -> bool:
    """Whether the driver here has to translate the code of the package that is installed in that folder."""
    return any(fit.package.folder == folder and fit.translated for fit in fits(read_machine()))


@functools.cache
def read_machine() -> Machine:
    """This machine, as its drivers describe it. They are asked in a child process, which may die."""
    answers = _ask(*system.gpu_libraries())
    if "cuda" in answers:
        for driver in compat_drivers()[:1]:
            answers["compat"] = _ask(str(driver)).get("cuda")
    return machine_of(answers)


def _ask(*libraries: str) -> dict[str, object]:
    answers: dict[str, object] = {}
    reader = Path(__file__).with_name("gpu_reader.py")
    with suppress(OSError, TooLargeError):
        for line in _output(processes.isolated_python(str(reader), *libraries)).splitlines():
            # A driver may print lines, too.
            with suppress(ValueError):
                answers |= json.loads(line)
    return answers


def _output(command: Sequence[str]) -> bytes:
    """What a child prints, which is ended where it takes too long or prints too much."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        timer = BackgroundTimer(_SECONDS, child.kill, name="perdure-gpu-reader")
        timer.start()
        try:
            assert child.stdout is not None
            return read_stream(child.stdout, TABLE_BYTES, "what the reader of GPUs prints")
        finally:
            timer.cancel()
            child.kill()


def machine_of(answers: dict[str, object]) -> Machine:
    """The machine that `gpu_reader` described."""
    cuda, compat, cards, vulkan = (answers.get(name) for name in ("cuda", "compat", "cards", "vulkan"))
    loadable = answers.get("runtimes") or []
    assert isinstance(loadable, list)
    return Machine(
        system=SYSTEMS.get(platform.system(), platform.system()),
        cpu=system.architecture(),
        cuda=(int(cuda[0]), int(cuda[1])) if isinstance(cuda, list) else None,
        compat=(int(compat[0]), int(compat[1])) if isinstance(compat, list) else None,
        cards=tuple(
            Gpu(name, (capability[0], capability[1]), memory)
            for name, capability, memory in (cards if isinstance(cards, list) else ())
        ),
        runtimes=frozenset(loadable) | {major for major in RUNTIMES if runtime.has_runtime(major)},
        vulkan=tuple(vulkan) if isinstance(vulkan, list) else None,
    )


def installable(machine: Machine) -> list[LibraryFit]:
    """`ranked`, less what this system's C library is too old for. An error where none is left says why."""
    fits, problem = [], None
    for fit in ranked(machine):
        try:
            check_system(fit.package)
        except LibraryFetchError as error:
            problem = error
            continue
        fits.append(fit)
    if not fits and problem is not None:
        raise problem
    return fits
