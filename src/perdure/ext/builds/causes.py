"""Why a library or its GPU does not run: the usual causes, by what the library or the system says."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LONGEST = 300


@dataclass(frozen=True, slots=True)
class Cause:
    """One sentence that says what is wrong, and one command or step that helps."""

    sentence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.sentence} ({self.advice})"


_RUNTIME = "`perdure engine install` fetches NVIDIA's runtime too, or `pip install {packages}`"

_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"PTX was compiled with an unsupported toolchain|unsupported PTX version",
        "the library was compiled with a newer CUDA than the driver knows, "
        "and has no machine code for this card",
        "`perdure engine install cuda12`, or update the driver",
    ),
    (
        r"no kernel image is available",
        "the library has no code for this card",
        "`perdure engine install cuda12`, or `perdure engine install vulkan`",
    ),
    (
        r"driver version is insufficient",
        "the driver is older than the CUDA that the library needs",
        "`perdure engine install cuda12`, or update the driver",
    ),
    (
        r"unsupported display driver|forward compatibility was attempted",
        "the driver library and the kernel module do not fit each other",
        "restart after a driver update, or take `cuda-compat` off the loader's path",
    ),
    (
        r"(?P<name>lib(?:cudart|cublas|cublasLt|nvrtc)\.so\.(?P<major>\d+)): cannot open",
        "{name} is not on this machine: the library needs NVIDIA's CUDA {major} runtime",
        _RUNTIME,
    ),
    (
        r"libcuda\.so\.1: cannot open|no CUDA-capable device|CUDA_ERROR_NO_DEVICE",
        "no NVIDIA driver answers here",
        "install the driver, or give a container its GPU (`docker run --gpus all`); "
        "CUDA_VISIBLE_DEVICES may hide it",
    ),
    (
        r"libvulkan\.so\.1: cannot open",
        "there is no Vulkan loader on this machine",
        "`apt install libvulkan1 mesa-vulkan-drivers`, or what your system calls them",
    ),
    (
        r"ggml_vulkan: No devices found|ERROR_INCOMPATIBLE_DRIVER|ERROR_INITIALIZATION_FAILED",
        "no Vulkan driver answers here",
        "`apt install mesa-vulkan-drivers`, or the driver of your card; GGML_VK_VISIBLE_DEVICES may hide it",
    ),
    (
        r"out of memory|OutOfDeviceMemory|cudaMalloc failed",
        "the card's memory is in use by other programs",
        "`nvidia-smi` shows which; end them, or choose another card with CUDA_VISIBLE_DEVICES",
    ),
    (
        r"version `(?P<name>GLIBC(?:XX)?_[\d.]+)' not found",
        "the library needs {name}, which this system does not have",
        "a newer system, or a build of your own: `pip install 'perdure[compile]'`",
    ),
    (
        r"illegal memory access|misaligned address|an illegal instruction was encountered",
        "the library's code fails on this card",
        "`perdure engine install vulkan`, or a build of your own with PERDURE_LLAMA=DIR",
    ),
    (
        r"invalid ELF header|file too short|wrong ELF class",
        "a file of the library is damaged, or for another machine",
        "`perdure engine test` names it; install the library again",
    ),
)
_MAJORS = {"13": "nvidia-cuda-runtime nvidia-cublas", "12": "nvidia-cuda-runtime-cu12 nvidia-cublas-cu12"}


def cause_of(words: str) -> Cause | None:
    """The usual cause behind what was said last; None where it is none of them."""
    for pattern, sentence, advice in _CAUSES:
        if match := re.search(pattern, words):
            names = match.groupdict()
            packages = _MAJORS.get(names.get("major") or "", _MAJORS["13"])
            return Cause(sentence.format(**names), advice.format(packages=packages))
    return None


def last_words(text: str) -> str:
    """The most informative line of a child's output: one with a known cause, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = next((line for line in lines if cause_of(line)), lines[-1] if lines else "")
    return telling[:_LONGEST]
