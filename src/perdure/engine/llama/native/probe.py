"""The probe: whether a library runs on this machine, found out in a child process that may die.

What came out is remembered under PERDURE_HOME by the library's content, the CPU, the GPU's driver and what is
loaded beside it. It is told once, when it is found out, and by `perdure doctor`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from perdure import system
from perdure.atomic import read_table, write_table
from perdure.config import settings
from perdure.engine.llama.native import guard
from perdure.engine.llama.native.backends import backends
from perdure.engine.llama.native.source import WAYS, LibrarySource, candidates, fetch_library
from perdure.errors import EngineLibraryError
from perdure.identity import content_digest
from perdure.libraries.machine import HIDING, is_translated
from perdure.libraries.package import PACKAGES
from perdure.libraries.runtime import compat_drivers, runtime_folders

log = logging.getLogger("perdure.engine")

_PROBE = 4
"""Raised when the probe itself changes: older results are then forgotten."""
_LOADER = ("LD_PRELOAD", "LD_LIBRARY_PATH", "DYLD_INSERT_LIBRARIES", "DYLD_LIBRARY_PATH")
_SECONDS = 120
"""For one step of a probe."""
_TRANSLATION_SECONDS = 1800
"""The same for a library whose code the driver translates first, on one core."""
_LIBRARIES = re.compile(r"(?:lib|x)?(?:llama|ggml)[^/]*\.(?:so|dylib|dll)(?:\.[0-9]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One way to use a library, and how it ended: `died` is empty where all went well."""

    variant: str | None
    """The CPU variant that was used; None is the best one for this CPU, where it died before it was known."""
    extra_buffers: bool
    gpu: bool
    died: str = ""
    words: str = ""
    """The last words of the child, where it died or found no GPU for a backend that it has."""
    devices: tuple[str, ...] = ()
    """The GPUs that it could put layers on."""
    driver: str = ""
    """A driver library that was used instead of the system's."""
    version: str = ""
    """What the library says that it is."""

    def __str__(self) -> str:
        parts = [f"CPU variant {self.variant or 'of its choice'}"]
        parts += [] if self.extra_buffers else ["no extra buffers"]
        parts += [] if self.gpu else ["no GPU backends"]
        parts += [f"with {self.driver}"] if self.driver else []
        words = f" ({self.words})" if self.words else ""
        return f"{', '.join(parts)}: {self.died or 'runs'}{words}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What the probe found out about one library on this machine.

    The last attempt is the one that counts: where it went well, the library is used that way.
    """

    folder: str
    attempts: tuple[Attempt, ...]
    backends: tuple[str, ...] = ()
    """Its GPU backends: cuda, vulkan, metal."""
    translated: bool = False
    """Whether the driver translates its code for the card: kernels that are new to it take seconds each."""

    @property
    def usable(self) -> bool:
        return not self.attempts[-1].died

    @property
    def devices(self) -> tuple[str, ...]:
        """The GPUs that it uses."""
        return self.attempts[-1].devices

    @property
    def gpu_problem(self) -> str:
        """Why its GPU backends are not used, with what to do; empty where they are, or it has none."""
        if not self.backends or self.devices:
            return ""
        words = next((each.words or each.died for each in self.attempts if each.words or each.died), "")
        cause = cause_of(words)
        if cause is not None:
            return str(cause)
        return words or f"it found no GPU that {' or '.join(self.backends)} can use"

    @property
    def variant(self) -> str | None:
        return self.attempts[-1].variant

    @property
    def extra_buffers(self) -> bool:
        return self.attempts[-1].extra_buffers

    @property
    def gpu(self) -> bool:
        return self.attempts[-1].gpu

    @property
    def deaths(self) -> tuple[Attempt, ...]:
        """The ways that did not work."""
        return tuple(attempt for attempt in self.attempts if attempt.died)

    def __str__(self) -> str:
        return f"{self.folder}: {'; '.join(map(str, self.attempts))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenLibrary:
    """The library to use, what its probe found, and the same of those before it that are not used."""

    source: LibrarySource
    result: ProbeResult
    passed: tuple[ProbeResult, ...] = ()


def choose() -> ChosenLibrary:
    """The first library that runs here; one whose GPU is ruled out gives way to one that uses a GPU.

    What did not run, and what is used instead, is said in the log when it is found out.
    """
    passed: list[tuple[LibrarySource, ProbeResult]] = []
    tried: list[str] = []
    new = False
    try:
        for source in _sources(passed):
            result = remembered(source)
            new, result = new or result is None, result or test(source)
            if result.usable and not result.gpu_problem:
                return _told(_choice(source, result, passed), new)
            passed.append((source, result))
            tried += [] if result.usable else [str(result)]
    except EngineLibraryError as error:
        # None could be fetched; where some are here, people must hear of those too.
        if not passed:
            raise
        tried.append(str(error))
    for index, (source, result) in enumerate(passed):
        if result.usable:
            return _told(_choice(source, result, [*passed[:index], *passed[index + 1 :]]), new)
    raise EngineLibraryError(
        f"no llama.cpp library runs on this machine: {'. '.join(tried)}. {WAYS}", tried=tried
    )


def _choice(
    source: LibrarySource, result: ProbeResult, passed: Sequence[tuple[LibrarySource, ProbeResult]]
) -> ChosenLibrary:
    return ChosenLibrary(source=source, result=result, passed=tuple(each for _, each in passed))


def _sources(passed: Sequence[tuple[LibrarySource, ProbeResult]]) -> Iterator[LibrarySource]:
    """What is here, then one to fetch: a user's own build is the only one, and a fetched one is here.

    Where one that was `passed` runs without its GPU, only those with GPU backends can be better.
    """
    kinds = set()
    for source in candidates():
        kinds.add(source.kind)
        if any(result.usable for _, result in passed) and not gpu_backends(source):
            continue
        yield source
    if kinds.isdisjoint({"own", "installed"}) and not any(result.usable for _, result in passed):
        yield fetch_library()


def _told(choice: ChosenLibrary, new: bool) -> ChosenLibrary:
    """Say in one line what does not run here and what is used instead, if it was found out just now."""
    parts = []
    for failed in (*choice.passed, choice.result):
        name = Path(failed.folder).name
        if failed.gpu_problem and not choice.result.devices:
            parts.append(f"{name} does not use the GPU: {failed.gpu_problem}")
        elif not failed.usable:
            parts.append(f"{name} cannot run here: {failed.attempts[0]}")
        elif failed.deaths:
            parts.append(f"{name} is used with restrictions: {'; '.join(map(str, failed.attempts))}")
    version = choice.result.attempts[-1].version
    if guard.is_newer(version):
        parts.append(f"llama.cpp {version} is newer than this perdure knows, and passed its checks")
    if parts and new:
        log.warning("%s; `perdure doctor` tells more", ". ".join(parts))
    return choice


def remembered(source: LibrarySource) -> ProbeResult | None:
    """What an earlier probe of a library found; None where nothing is remembered."""
    return read_results().get(key_of(source))


def result_of(source: LibrarySource) -> ProbeResult:
    """What the probe of a library finds: the remembered result, or that of a probe now."""
    return remembered(source) or test(source)


def gpu_backends(source: LibrarySource) -> tuple[str, ...]:
    """The GPU backends whose files a library has."""
    return tuple(sorted({backend.kind for backend in backends(source.folder)} - {"cpu"}))


def translates(source: LibrarySource) -> bool:
    """Whether the driver has to translate a library's code for the card here, as far as is known."""
    return "cuda" in gpu_backends(source) and is_translated(source.folder.name)


def step_seconds(source: LibrarySource, translated: bool) -> float:
    """How long a step may take. What code is in a CUDA build that is no package of ours, nobody knows."""
    known = any(package.folder == source.folder.name for package in PACKAGES)
    unknown = "cuda" in gpu_backends(source) and not known
    return _TRANSLATION_SECONDS if translated or unknown else _SECONDS


def test(source: LibrarySource) -> ProbeResult:
    """Probe a library now, whatever is remembered, and remember what came out."""
    translated = translates(source)
    if translated:
        log.warning(
            "NVIDIA's driver translates %s for this card: the first start takes some minutes longer",
            source.folder.name,
        )
    with tempfile.TemporaryDirectory(prefix="perdure-probe-") as folder:
        from perdure.engine.llama.native import toy_gguf

        for kind in toy_gguf.TYPES:
            toy_gguf.write(Path(folder) / f"{kind}.gguf", kind)
        attempts: list[Attempt] = []
        for attempt in _ways(source, Path(folder), step_seconds(source, translated)):
            attempts.append(attempt)
            if not attempt.died:
                break
    result = ProbeResult(
        folder=str(source.folder),
        attempts=tuple(attempts),
        backends=gpu_backends(source),
        translated=translated,
    )
    results = read_results()
    results[key_of(source)] = result
    _write_results(results)
    return result


def _ways(source: LibrarySource, models: Path, seconds: float) -> Iterator[Attempt]:
    """The ways to use `source`, the best first, each tried when it is asked for."""
    forced = settings().llama_variant
    run = _Runs(source, models, seconds)
    has_gpu = bool(gpu_backends(source))
    # A newer driver library over an older kernel module, where the machine has one.
    drivers = compat_drivers() if "cuda" in gpu_backends(source) else []
    first = run(variant=forced)
    if drivers and not first.died and not first.devices:
        with_driver = (run(variant=forced, driver=str(driver)) for driver in drivers)
        yield next((each for each in with_driver if not each.died and each.devices), first)
    yield first
    yield run(variant=forced, extra_buffers=False)
    yield from (run(variant=forced, driver=str(driver)) for driver in drivers)
    if has_gpu:
        yield run(variant=forced, gpu=False)
    if forced is None:
        for lower in run.variants[1:]:
            yield run(variant=lower, gpu=not has_gpu)
            yield run(variant=lower, gpu=not has_gpu, extra_buffers=False)


class _Runs:
    """Child processes that use one library in some way. `variants` are the CPU variants that they found."""

    def __init__(self, source: LibrarySource, models: Path, seconds: float) -> None:
        self._source = source
        self._models = models
        self._seconds = seconds
        self.variants: list[str] = []

    def __call__(
        self, *, variant: str | None, extra_buffers: bool = True, gpu: bool = True, driver: str = ""
    ) -> Attempt:
        job = {
            "folder": str(self._source.folder),
            "kind": self._source.kind,
            "version": self._source.version,
            "variant": variant,
            "extra_buffers": extra_buffers,
            "gpu": gpu,
            "driver": driver,
        }
        attempt = Attempt(variant=variant, extra_buffers=extra_buffers, gpu=gpu, driver=driver)
        return self._ended(attempt, json.dumps(job))

    def _ended(self, attempt: Attempt, job: str) -> Attempt:
        """`attempt` with how a child that was given `job` ended."""
        child = Path(__file__).with_name("probe_child.py")
        # Nothing of the current folder is run.
        ended = run_child(system.isolated_python(str(child), job, str(self._models)), self._seconds)
        report = last_report(ended.stdout)
        if ended.returncode is None:
            return replace(attempt, died=f"no end after {self._seconds} s at {report['doing']}")
        self.variants = report.get("variants", self.variants)
        words = last_words("\n".join([*report["unusable"], ended.stderr.decode("utf-8", "replace")]))
        if ended.returncode < 0:
            died = f"{_signal_name(-ended.returncode)} at {report['doing']}"
            return replace(attempt, died=died, words=words)
        if "done" in report:
            devices = tuple(report["devices"])
            return replace(
                attempt,
                variant=report["done"],
                version=report["version"],
                devices=devices,
                words="" if devices else self._why(words),
            )
        died = report.get("refused") or words or f"exit code {ended.returncode} at {report['doing']}"
        return replace(attempt, died=str(died))

    def _why(self, words: str) -> str:
        """What was said, if it says why a GPU backend found no GPU."""
        return words if gpu_backends(self._source) and cause_of(words) else ""


@dataclass(frozen=True, slots=True)
class _Ended:
    """What a child printed, and its exit code; None where it took too long and was killed."""

    returncode: int | None
    stdout: bytes
    stderr: bytes


def run_child(command: Sequence[str], seconds: float) -> _Ended:
    """Run a child to its end. Each line of its output gives it so many seconds for the next."""
    overdue = threading.Event()

    def kill(child: subprocess.Popen[bytes]) -> None:
        overdue.set()
        child.kill()

    lines = []
    with (
        tempfile.TemporaryFile() as errors,
        # An abort calls up no debugger.
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},
        ) as child,
    ):
        assert child.stdout is not None
        try:
            while True:
                timer = threading.Timer(seconds, kill, (child,))
                timer.start()
                line = child.stdout.readline()
                timer.cancel()
                if not line:
                    break
                lines.append(line)
            timer = threading.Timer(seconds, kill, (child,))
            timer.start()
            code = child.wait()
            timer.cancel()
        except BaseException:
            child.kill()
            raise
        errors.seek(0)
        return _Ended(None if overdue.is_set() else code, b"".join(lines), errors.read())


def last_report(output: bytes) -> dict[str, Any]:
    """What the child said, the last of each kind."""
    report: dict[str, Any] = {"doing": "its start", "devices": [], "unusable": []}
    for line in output.decode("utf-8", "replace").splitlines():
        # A library may print lines of its own.
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            report |= message if isinstance(message, dict) else {}
    return report


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def digest(source: LibrarySource) -> str:
    """The SHA-256 over the shared libraries of `source`, names and contents."""
    names = sorted(entry for entry in source.folder.iterdir() if _LIBRARIES.fullmatch(entry.name))
    text = "\n".join(f"{path.name} {content_digest(path)}" for path in names)
    return hashlib.sha256(text.encode()).hexdigest()


def processor() -> str:
    """The CPU, as far as it decides which instructions run."""
    return " ".join((system.architecture(), platform.processor(), *sorted(system.cpu_flags())))


def surroundings() -> str:
    """Which Python this is, and what else decides which of the system's libraries are loaded beside one: some
    die with another C++ library than they were linked with."""
    return "\0".join((sys.base_prefix, sys.version, *(os.environ.get(name, "") for name in _LOADER)))


def gpu_surroundings() -> list[str]:
    """What decides whether a GPU can be used: its driver, which cards are shown, NVIDIA's runtime."""
    shown = (os.environ.get(name, "") for name in HIDING)
    return [system.nvidia_driver(), *shown, *map(str, runtime_folders()), *map(str, compat_drivers())]


def key_of(source: LibrarySource) -> str:
    parts = [str(_PROBE), digest(source), processor(), surroundings(), settings().llama_variant or ""]
    if gpu_backends(source):
        parts += gpu_surroundings()
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _results_file() -> Path:
    return settings().home / "probes.json"


def read_results() -> dict[str, ProbeResult]:
    try:
        return {
            key: ProbeResult(
                folder=entry["folder"],
                attempts=tuple(
                    Attempt(**{**each, "devices": tuple(each["devices"])}) for each in entry["attempts"]
                ),
                backends=tuple(entry["backends"]),
                translated=entry["translated"],
            )
            for key, entry in read_table(_results_file()).items()
            if entry["attempts"]
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def _write_results(results: dict[str, ProbeResult]) -> None:
    write_table(_results_file(), {key: asdict(entry) for key, entry in results.items()})


# Why a library or its GPU does not run: the usual causes, by what the library or the system says.

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
    """The line of a child's output that tells most: one with a usual cause, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = next((line for line in lines if cause_of(line)), lines[-1] if lines else "")
    return telling[:_LONGEST]
