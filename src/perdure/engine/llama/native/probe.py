"""The probe: whether a library runs on this machine, found out in a child process that may die.

A verdict is remembered under PERDURE_HOME by the library's content, the CPU and what is loaded beside it.
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perdure import system
from perdure.atomic import atomic_write
from perdure.config import settings
from perdure.engine.llama.native.backends import backends
from perdure.engine.llama.native.source import WAYS, LibrarySource, candidates, fetch_library
from perdure.errors import EngineLibraryError
from perdure.identity import content_digest

log = logging.getLogger("perdure.engine")

_PROBE = 2
"""Raised when the probe itself changes: older verdicts are then forgotten."""
_LOADER = ("LD_PRELOAD", "LD_LIBRARY_PATH", "DYLD_INSERT_LIBRARIES", "DYLD_LIBRARY_PATH")
_SECONDS = 120
_LIBRARIES = re.compile(r"(?:lib)?(?:llama|ggml)[^/]*\.(?:so|dylib|dll)(?:\.[0-9]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One way to use a library, and how it ended: `died` is empty where all went well."""

    variant: str | None
    """The CPU variant that was used; None is the best one for this CPU, where it died before it was known."""
    extra_buffers: bool
    gpu: bool
    died: str = ""

    def __str__(self) -> str:
        parts = [f"CPU variant {self.variant or 'of its choice'}"]
        parts += [] if self.extra_buffers else ["no extra buffers"]
        parts += [] if self.gpu else ["no GPU backends"]
        return f"{', '.join(parts)}: {self.died or 'runs'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What the probe found out about one library on this machine.

    The last attempt is the one that counts: where it went well, the library is used that way.
    """

    folder: str
    attempts: tuple[Attempt, ...]

    @property
    def usable(self) -> bool:
        return not self.attempts[-1].died

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
class Choice:
    """The library to use, the verdict on it, and the verdicts on those before it that cannot be used."""

    source: LibrarySource
    verdict: ProbeResult
    passed: tuple[ProbeResult, ...] = ()


def choose() -> Choice:
    """The first library that runs here. Says in the log what did not, and what is used instead."""
    passed: list[ProbeResult] = []
    tried: list[str] = []
    try:
        for source in _sources():
            found = verdict(source)
            if found.usable:
                return _said(Choice(source=source, verdict=found, passed=tuple(passed)))
            passed.append(found)
            tried.append(str(found))
    except EngineLibraryError as error:
        # None could be fetched; where some are here, people must hear of those too.
        if not passed:
            raise
        tried.append(str(error))
    raise EngineLibraryError(
        f"no llama.cpp library runs on this machine: {'. '.join(tried)}. {WAYS}", tried=tried
    )


def _sources() -> Iterator[LibrarySource]:
    """What is here, then one to fetch: a user's own build is the only one, and a fetched one is here."""
    kinds = set()
    for source in candidates():
        kinds.add(source.kind)
        yield source
    if kinds.isdisjoint({"own", "installed"}):
        yield fetch_library()


def _said(choice: Choice) -> Choice:
    for failed in choice.passed:
        log.warning("a llama.cpp library cannot run here: %s", failed)
    if choice.verdict.deaths:
        log.warning("a llama.cpp library is used with restrictions: %s", choice.verdict)
    return choice


def verdict(source: LibrarySource) -> ProbeResult:
    """The verdict on a library: the remembered one, or that of a probe now."""
    known = _read_verdicts().get(_key(source))
    if known is not None:
        return known
    return test(source)


def test(source: LibrarySource) -> ProbeResult:
    """Probe a library now, whatever is remembered, and remember what came out."""
    with tempfile.TemporaryDirectory(prefix="perdure-probe-") as folder:
        from perdure.engine.llama.native import toy_gguf

        for kind in toy_gguf.TYPES:
            toy_gguf.write(Path(folder) / f"{kind}.gguf", kind)
        attempts: list[Attempt] = []
        for attempt in _ways(source, Path(folder)):
            attempts.append(attempt)
            if not attempt.died:
                break
    found = ProbeResult(folder=str(source.folder), attempts=tuple(attempts))
    verdicts = _read_verdicts()
    verdicts[_key(source)] = found
    _write_verdicts(verdicts)
    return found


def _ways(source: LibrarySource, models: Path) -> Iterator[Attempt]:
    """The ways to use `source`, the best first, each tried when it is asked for."""
    forced = settings().llama_variant
    run = _Runs(source, models)
    yield run(variant=forced)
    yield run(variant=forced, extra_buffers=False)
    has_gpu = any(backend.kind != "cpu" for backend in backends(source.folder))
    if has_gpu:
        yield run(variant=forced, gpu=False)
    if forced is None:
        for lower in run.variants[1:]:
            yield run(variant=lower, gpu=not has_gpu)
            yield run(variant=lower, gpu=not has_gpu, extra_buffers=False)


class _Runs:
    """Child processes that use one library in some way. `variants` are the CPU variants that they found."""

    def __init__(self, source: LibrarySource, models: Path) -> None:
        self._source = source
        self._models = models
        self.variants: list[str] = []

    def __call__(self, *, variant: str | None, extra_buffers: bool = True, gpu: bool = True) -> Attempt:
        job = {
            "folder": str(self._source.folder),
            "kind": self._source.kind,
            "version": self._source.version,
            "variant": variant,
            "extra_buffers": extra_buffers,
            "gpu": gpu,
        }
        died, used = self._ended(json.dumps(job))
        return Attempt(variant=used or variant, extra_buffers=extra_buffers, gpu=gpu, died=died)

    def _ended(self, job: str) -> tuple[str, str | None]:
        """How a child that was given `job` failed, or "" and the CPU variant that it used."""
        child = Path(__file__).with_name("probe_child.py")
        try:
            # Nothing of the current folder is run, and an abort calls up no debugger.
            ended = subprocess.run(
                system.isolated_python(str(child), job, str(self._models)),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=os.environ | {"GGML_NO_BACKTRACE": "1"},
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as expired:
            return f"no end after {_SECONDS} s at {_report(expired.stdout or b'')['doing']}", None
        report = _report(ended.stdout)
        self.variants = report.get("variants", self.variants)
        if ended.returncode < 0:
            return f"{_signal_name(-ended.returncode)} at {report['doing']}", None
        if "done" in report:
            return "", report["done"]
        complaint = ended.stderr.decode("utf-8", "replace").strip().rsplit("\n", 1)[-1]
        return str(
            report.get("refused") or complaint or f"exit code {ended.returncode} at {report['doing']}"
        ), None


def _report(output: bytes) -> dict[str, Any]:
    """What the child said, the last of each kind."""
    report: dict[str, Any] = {"doing": "its start"}
    for line in output.decode("utf-8", "replace").splitlines():
        # A library may print lines of its own.
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            report |= said if isinstance(said, dict) else {}
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


def _key(source: LibrarySource) -> str:
    parts = (str(_PROBE), digest(source), processor(), surroundings(), settings().llama_variant or "")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _book() -> Path:
    return settings().home / "verdicts.json"


def _read_verdicts() -> dict[str, ProbeResult]:
    try:
        entries = json.loads(_book().read_bytes())
        return {
            key: ProbeResult(
                folder=entry["folder"], attempts=tuple(Attempt(**each) for each in entry["attempts"])
            )
            for key, entry in entries.items()
            if entry["attempts"]
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _write_verdicts(verdicts: dict[str, ProbeResult]) -> None:
    # A verdict that cannot be kept costs another probe, nothing else.
    path = _book()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, durable=False) as file:
            entries = {key: asdict(entry) for key, entry in verdicts.items()}
            file.write(json.dumps(entries, indent=1).encode())
