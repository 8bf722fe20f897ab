"""Files that ended the process that loaded them. They are not loaded the same way again.

    PERDURE_HOME/deadly.json
    {"9f31…": {"files": ["model.gguf"], "sizes": [81234], "death": "SIGSEGV", "when": 1763520000.0}}

A key is a digest of the files' contents, of the engine's build and of the settings: a file that was changed,
another build and other settings are tried anew. A death counts if a crash in native code was its cause:
neither a kill, by a person or by a system without memory, nor what died of a lack of memory itself.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from perdure import DeadlyFileError, ModelFileError
from perdure.spi.base import content_digest, read_table, settings, write_table
from perdure.spi.models import part_names

_CRASHES = frozenset({"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"})
_NO_MEMORY = re.compile(
    rb"out of memory|bad_alloc|insufficient memory|(failed|unable|cannot|not able) (to )?(re)?alloc", re.I
)
_MOST = 256
"""Records that are kept, the latest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlyFiles:
    """Files that were loaded together, and how that ended."""

    key: str
    files: tuple[str, ...]
    """Their names, the model's first."""
    sizes: tuple[int, ...]
    death: str
    when: float

    def __str__(self) -> str:
        names = self.files[0] + (f" (with {', '.join(self.files[1:])})" if self.files[1:] else "")
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.when))
        return f"{names} ended the process that loaded it by {self.death} on {day}"


def is_crash(signal: str | None, said: str) -> bool:
    """Whether a process that ended so, with these last words, died of what it computed."""
    return signal in _CRASHES and _NO_MEMORY.search(said.encode("utf-8", "replace")) is None


def files_of(sources: Iterable[str]) -> tuple[Path, ...]:
    """The files behind what an engine opens: all parts of a model, or what is in its folder."""
    files: list[Path] = []
    for path in map(Path, sources):
        if path.is_dir():
            files += sorted(each for each in path.iterdir() if each.is_file())
        elif path.is_file():
            with suppress(ModelFileError):
                files += [path.with_name(name) for name in part_names(path.name)]
    return tuple(dict.fromkeys(files))


class LoadedTogether:
    """What one process is about to load. Nothing is read of the files until one of their size is remembered,
    or a process died of them."""

    def __init__(self, files: tuple[Path, ...], *, build: Callable[[], str], chosen: str = "") -> None:
        """`build` says which engine will load them, `chosen` with which settings."""
        self.files = files
        self._build = build
        self._chosen = chosen

    def check(self) -> None:
        """DeadlyFileError where these files, loaded so, ended a process before."""
        if not self.files or not (known := remembered()):
            return
        with suppress(OSError):
            sizes = self._sizes()
            if not any(each.sizes == sizes for each in known):
                return
            key = self._key()
            for each in known:
                if each.key == key:
                    raise DeadlyFileError(
                        f"{each}, so it is not loaded again. Fetch the file anew, or use another one: a file "
                        "that was changed, another build of the engine and other settings are tried. "
                        f"`perdure engine retry {each.files[0]}` has this one tried once more"
                    )

    def remember(self, death: str) -> None:
        """A process died of them."""
        with suppress(OSError):
            record = DeadlyFiles(
                key=self._key(),
                files=tuple(file.name for file in self.files),
                sizes=self._sizes(),
                death=death,
                when=time.time(),
            )
            _write([*(each for each in remembered() if each.key != record.key), record])

    def _sizes(self) -> tuple[int, ...]:
        return tuple(file.stat().st_size for file in self.files)

    def _key(self) -> str:
        digests = [content_digest(file) for file in self.files]
        parts = [*digests, self._build(), version("perdure"), self._chosen]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def remembered() -> list[DeadlyFiles]:
    """All that is remembered, the latest last."""
    records = []
    for key, entry in read_table(_table()).items():
        with suppress(TypeError, ValueError, KeyError):
            files, sizes = tuple(map(str, entry["files"])), tuple(map(int, entry["sizes"]))
            if files:
                records.append(
                    DeadlyFiles(
                        key=key,
                        files=files,
                        sizes=sizes,
                        death=str(entry["death"]),
                        when=float(entry["when"]),
                    )
                )
    return records


def forget(name: str | None = None) -> list[DeadlyFiles]:
    """Have files tried once more: those of a name, or all. What was forgotten."""
    known = remembered()
    gone = [each for each in known if name is None or name in each.files]
    if gone:
        _write([each for each in known if each not in gone])
    return gone


def _write(records: list[DeadlyFiles]) -> None:
    table = {each.key: asdict(each) for each in records[-_MOST:]}
    for entry in table.values():
        del entry["key"]
    write_table(_table(), table)


def _table() -> Path:
    return settings().home / "deadly.json"
