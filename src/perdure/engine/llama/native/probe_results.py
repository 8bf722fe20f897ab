"""What probes of libraries found, remembered under PERDURE_HOME.

A result is of the library's content, the CPU, the GPU's driver and what is loaded beside it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from perdure import system
from perdure.atomic import read_table, write_table
from perdure.config import settings
from perdure.engine.llama.native.backends import backends
from perdure.engine.llama.native.source import LibrarySource
from perdure.extension import optional_part
from perdure.identity import content_digest

_PROBE = 4
"""Raised when the probe itself changes: older results are then forgotten."""
_LOADER = ("LD_PRELOAD", "LD_LIBRARY_PATH", "DYLD_INSERT_LIBRARIES", "DYLD_LIBRARY_PATH")
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
        cause_of = optional_part("cause of a library's failure")
        if cause_of is not None and (cause := cause_of(words)) is not None:
            return str(cause)
        return words or f"it found no GPU that {' or '.join(self.backends)} can use"

    @property
    def deaths(self) -> tuple[Attempt, ...]:
        """The ways that did not work."""
        return tuple(attempt for attempt in self.attempts if attempt.died)

    def __str__(self) -> str:
        return f"{self.folder}: {'; '.join(map(str, self.attempts))}"


def remembered(source: LibrarySource) -> ProbeResult | None:
    """What an earlier probe of a library found; None where nothing is remembered."""
    return read_results().get(key_of(source))


def remember(source: LibrarySource, result: ProbeResult) -> None:
    results = {**read_results(), key_of(source): result}
    write_table(_results_file(), {key: asdict(entry) for key, entry in results.items()})


def gpu_backends(source: LibrarySource) -> tuple[str, ...]:
    """The GPU backends whose files a library has."""
    return tuple(sorted({backend.kind for backend in backends(source.folder)} - {"cpu"}))


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
    from perdure.engine.llama.native.nvidia import HIDING, compat_drivers, runtime_folders

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
