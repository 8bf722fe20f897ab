"""The probe: whether a library runs on this machine, found out in a child process that may die."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perdure.ext.builds.causes import cause_of, last_words
from perdure.ext.builds.machine import is_translated
from perdure.ext.builds.package import PACKAGES
from perdure.spi.base import processes, settings
from perdure.spi.libraries import (
    Attempt,
    LibrarySource,
    ProbeResult,
    compat_drivers,
    gpu_backends,
    remember,
    remembered,
)
from perdure.spi.runtime import BackgroundTimer

log = logging.getLogger("perdure.engine")

_SECONDS = 120
"""For one step of a probe."""
_TRANSLATION_SECONDS = 1800
"""The same for a library whose code the driver translates first, on one core."""


def result_of(source: LibrarySource) -> ProbeResult:
    """What the probe of a library finds: the remembered result, or that of a probe now."""
    return remembered(source) or test(source)


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
        from perdure.ext.builds import toy_gguf

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
    remember(source, result)
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
        ended = run_child(processes.isolated_python(str(child), job, str(self._models)), self._seconds)
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


_SAID = 1 << 20
"""Bytes that are read of one line of a child, and of what it wrote as errors."""


_PRINTED = 64 << 20
"""Bytes that a child may print in all."""


def run_child(command: Sequence[str], seconds: float) -> _Ended:
    """Run a child to its end. Each line of its output gives it so many seconds for the next."""
    overdue = threading.Event()

    def kill(child: subprocess.Popen[bytes]) -> None:
        overdue.set()
        child.kill()

    lines, left = [], _PRINTED
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
                timer = BackgroundTimer(seconds, kill, child, name="perdure-probe")
                timer.start()
                line = child.stdout.readline(_SAID)
                timer.cancel()
                if not line:
                    break
                lines.append(line)
                left -= len(line)
                if left < 0:
                    kill(child)
            timer = BackgroundTimer(seconds, kill, child, name="perdure-probe")
            timer.start()
            code = child.wait()
            timer.cancel()
        except BaseException:
            child.kill()
            raise
        # The last of it says why.
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - _SAID))
        return _Ended(None if overdue.is_set() else code, b"".join(lines), errors.read(_SAID))


def last_report(output: bytes) -> dict[str, Any]:
    """What the child said, the last of each kind."""
    report: dict[str, Any] = {"doing": "its start", "devices": [], "unusable": []}
    for line in output.decode("utf-8", "replace").splitlines():
        # A library may print lines, too.
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            report |= message if isinstance(message, dict) else {}
    return report


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
