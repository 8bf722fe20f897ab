"""Which package is taken for a machine: by driver, cards, runtime and Vulkan, before anything is fetched."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from perdure import system
from perdure.ext.builds import machine as module
from perdure.ext.builds.machine import Gpu, Machine, fits, installable, machine_of, ranked
from perdure.ext.builds.package import PACKAGES, package_for
from perdure.ext.builds.runtime import RUNTIMES

H200 = Gpu("NVIDIA H200", (9, 0), 139 << 30)
RTX_4090 = Gpu("NVIDIA GeForce RTX 4090", (8, 9), 24 << 30)
RTX_5090 = Gpu("NVIDIA GeForce RTX 5090", (12, 0), 32 << 30)
A100 = Gpu("NVIDIA A100", (8, 0), 80 << 30)
T4 = Gpu("Tesla T4", (7, 5), 16 << 30)
GTX_1080 = Gpu("NVIDIA GeForce GTX 1080", (6, 1), 8 << 30)
GTX_680 = Gpu("NVIDIA GeForce GTX 680", (3, 0), 2 << 30)
BOTH = frozenset({12, 13})


def linux(
    cuda: tuple[int, int] | None = None,
    card: Gpu | None = None,
    *,
    runtimes: frozenset[int] = frozenset(),
    vulkan: tuple[str, ...] | None = None,
    compat: tuple[int, int] | None = None,
    cpu: str = "x86_64",
) -> Machine:
    cards = () if card is None else (card,)
    return Machine(
        system="linux", cpu=cpu, cuda=cuda, cards=cards, runtimes=runtimes, vulkan=vulkan, compat=compat
    )


MACHINES = {
    "H200, driver for 13.0, no runtime": (
        linux((13, 0), H200),
        "cuda12",
        "the driver translates its code for NVIDIA H200: the first start takes some minutes longer; "
        "NVIDIA's CUDA 12 runtime is fetched with it",
    ),
    "H200, driver for 13.0, PyTorch's runtime of both releases": (
        linux((13, 0), H200, runtimes=BOTH),
        "cuda12",
        "the driver translates its code for NVIDIA H200: the first start takes some minutes longer",
    ),
    "H200, driver for 13.1": (
        linux((13, 1), H200, runtimes=BOTH),
        "cuda",
        "the driver translates its code for NVIDIA H200: the first start takes some minutes longer",
    ),
    "H200, driver for 13.0 and cuda-compat for 13.2": (
        linux((13, 0), H200, runtimes=BOTH, compat=(13, 2)),
        "cuda",
        "the driver translates its code for NVIDIA H200: the first start takes some minutes longer",
    ),
    "RTX 4090, driver for 13.0": (
        linux((13, 0), RTX_4090, runtimes=BOTH, vulkan=(RTX_4090.name,)),
        "cuda",
        "it has machine code for NVIDIA GeForce RTX 4090",
    ),
    "RTX 4090, driver for 12.2, no runtime": (
        linux((12, 2), RTX_4090),
        "cuda12",
        "it has machine code for NVIDIA GeForce RTX 4090; NVIDIA's CUDA 12 runtime is fetched with it",
    ),
    "RTX 5090, driver for 13.0": (
        linux((13, 0), RTX_5090, runtimes=BOTH),
        "cuda",
        "it has machine code for NVIDIA GeForce RTX 5090",
    ),
    "A100, driver for 12.8": (
        linux((12, 8), A100, runtimes=frozenset({12})),
        "cuda12",
        "the driver translates its code for NVIDIA A100: the first start takes some minutes longer",
    ),
    "T4, driver for 12.2, with Vulkan": (
        linux((12, 2), T4, vulkan=("Tesla T4",)),
        "vulkan",
        "Tesla T4 speaks Vulkan",
    ),
    "T4, driver for 12.2, without Vulkan": (
        linux((12, 2), T4),
        "cpu",
        "no package can use the GPU (@node-llama-cpp/linux-x64-cuda-ext@3.22.1: its code for Tesla T4 is PTX "
        "of CUDA 12.4, and the driver knows CUDA 12.2); it runs on every CPU",
    ),
    "GTX 1080, driver for 11.8, with Vulkan": (
        linux((11, 8), GTX_1080, vulkan=(GTX_1080.name,)),
        "vulkan",
        "NVIDIA GeForce GTX 1080 speaks Vulkan",
    ),
    "GTX 680, driver for 12.4": (
        linux((12, 4), GTX_680),
        "cpu",
        "no package can use the GPU (@node-llama-cpp/linux-x64-cuda-ext@3.22.1: it has no code for NVIDIA "
        "GeForce GTX 680); it runs on every CPU",
    ),
    "AMD card with Mesa": (
        linux(vulkan=("AMD Radeon RX 7900 XTX (RADV NAVI31)",)),
        "vulkan",
        "AMD Radeon RX 7900 XTX (RADV NAVI31) speaks Vulkan",
    ),
    "no GPU at all": (linux(), "cpu", "no GPU was found; it runs on every CPU"),
    "arm64 with an NVIDIA card": (
        linux((13, 0), H200, cpu="aarch64"),
        "cpu",
        "no package for a GPU is published for linux on aarch64 (`CMAKE_ARGS=-DGGML_CUDA=ON pip install "
        "'perdure[compile]'` builds one); it runs on every CPU",
    ),
    "arm64 with another card": (
        linux(vulkan=("AMD Radeon RX 7600",), cpu="aarch64"),
        "cpu",
        "no package for a GPU is published for linux on aarch64 (`CMAKE_ARGS=-DGGML_VULKAN=ON pip install "
        "'perdure[compile]'` builds one); it runs on every CPU",
    ),
    "Intel card under Windows": (
        Machine(system="win", cpu="x86_64", vulkan=("Intel(R) Arc(TM) A770",)),
        "vulkan",
        "Intel(R) Arc(TM) A770 speaks Vulkan",
    ),
    "NVIDIA card under Windows": (
        Machine(system="win", cpu="x86_64", cuda=(13, 0), cards=(RTX_4090,), vulkan=(RTX_4090.name,)),
        "vulkan",
        "NVIDIA GeForce RTX 4090 speaks Vulkan",
    ),
    "Windows on arm64, with Vulkan": (
        Machine(system="win", cpu="aarch64", vulkan=("Qualcomm Adreno",)),
        "cpu",
        "no package for a GPU is published for win on aarch64 (`CMAKE_ARGS=-DGGML_VULKAN=ON pip install "
        "'perdure[compile]'` builds one); it runs on every CPU",
    ),
    "Mac with an Apple chip": (
        Machine(system="mac", cpu="aarch64"),
        "metal",
        "it uses the Apple GPU through Metal",
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_the_best_package_is_taken_and_the_reason_is_told(name: str) -> None:
    machine, backend, reason = MACHINES[name]
    best = ranked(machine)[0]
    assert (best.package.backend, best.reason) == (backend, reason)
    # What is left to try ends with the CPU's, or with Metal's, which computes on a CPU too.
    assert ranked(machine)[-1].package.backend in ("cpu", "metal")


def test_what_cannot_run_says_why() -> None:
    reasons = {fit.package.backend: fit.reason for fit in fits(linux((13, 0), H200)) if not fit.usable}
    assert reasons == {
        "cuda": "its code for NVIDIA H200 is PTX of CUDA 13.1, and the driver knows CUDA 13.0",
        "vulkan": "there is no Vulkan loader",
    }
    reasons = {fit.package.backend: fit.reason for fit in fits(linux((12, 4), GTX_680, vulkan=()))}
    assert reasons["cuda"] == "it needs a driver for CUDA 13, and the driver knows CUDA 12.4"
    assert reasons["cuda12"] == "it has no code for NVIDIA GeForce GTX 680"
    assert reasons["vulkan"] == "Vulkan finds no GPU"


def test_the_size_is_that_of_all_that_is_fetched() -> None:
    fit = ranked(linux((13, 0), H200))[0]
    assert fit.package.base is not None
    assert fit.nbytes == fit.package.size + fit.package.base.size + RUNTIMES[12].size
    assert fit.megabytes == "552 MB"
    assert ranked(linux((13, 0), H200, runtimes=BOTH))[0].megabytes == "187 MB"


def test_machine_code_for_one_architecture_alone_runs_on_no_other() -> None:
    """`sm_120a` does not run on 12.1, which has machine code of its own, nor on 12.5."""
    cuda = next(package.cuda for package in PACKAGES if package.backend == "cuda")
    assert cuda is not None
    assert cuda.has_code((12, 0))
    assert cuda.has_code((12, 1))
    assert not cuda.has_code((12, 5))
    assert not cuda.has_code((9, 0))


def test_a_machine_is_what_its_drivers_say() -> None:
    answers: dict[str, object] = {
        "cuda": [13, 0],
        "compat": [13, 1],
        "cards": [["NVIDIA H200", [9, 0], 139 << 30]],
        "runtimes": [12],
        "vulkan": None,
    }
    machine = machine_of(answers)
    assert (machine.cuda, machine.compat, machine.cards) == ((13, 0), (13, 1), (H200,))
    assert 12 in machine.runtimes
    assert str(machine) == "NVIDIA H200 (sm_90, 139 GiB), driver for CUDA 13.0"
    assert not machine_of({}).cards
    assert dataclasses.replace(machine_of({}), system="linux", cpu="x86_64").has_gpu is False


@pytest.mark.parametrize(
    ("named", "processor", "backend", "libraries"),
    [
        ("Darwin", "arm64", "metal", ("libcuda.so.1", "libvulkan.1.dylib")),
        ("Darwin", "x86_64", "cpu", ("libcuda.so.1", "libvulkan.1.dylib")),
        ("Windows", "AMD64", "cpu", ("nvcuda.dll", "vulkan-1.dll")),
        ("Windows", "ARM64", "cpu", ("nvcuda.dll", "vulkan-1.dll")),
    ],
)
def test_other_systems_have_a_package_and_their_own_names_of_drivers(
    named: str, processor: str, backend: str, libraries: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: named)
    monkeypatch.setattr(platform, "machine", lambda: processor)
    monkeypatch.setattr(sys, "platform", {"Darwin": "darwin", "Windows": "win32"}[named])
    assert system.gpu_libraries() == libraries
    assert [fit.package.backend for fit in installable(machine_of({}))][:1] == [backend]
    assert package_for().backend == backend


def test_the_reader_answers_in_lines_of_json_whatever_is_here() -> None:
    reader = Path(module.__file__).with_name("gpu_reader.py")
    done = subprocess.run(
        [sys.executable, "-P", reader, *system.gpu_libraries()], capture_output=True, text=True, check=True
    )
    answers = {name for line in done.stdout.splitlines() for name in json.loads(line)}
    assert answers >= {"runtimes", "vulkan"}
