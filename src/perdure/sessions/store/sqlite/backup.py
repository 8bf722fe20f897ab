"""A store in one file, taken while it is in use, and a store made of such a file."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import sqlite3
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from perdure import system
from perdure.atomic import PRIVATE, make_folder, open_private, sync_folder, translate_os_errors
from perdure.errors import CorruptStateError, InvalidInputError, StoreError
from perdure.sessions.store.sqlite.repair import Verification, verify
from perdure.sessions.store.sqlite.store import FILE, KEY, MARK, SqliteStore

FORMAT = "perdure-backup/1"
_MANIFEST = "manifest.json"
_BLOCK = re.compile(r"blocks/([0-9a-f]{2})/\1[0-9a-f]{62}")
_PIECE = 1 << 20
_MANIFEST_BYTES = 256 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """What is in a backup."""

    path: Path
    created: float
    sessions: int
    turns: int
    blocks: int
    nbytes: int
    left_out: tuple[str, ...] = ()
    """What a restore could not prove, and so left out."""


def back_up(folder: Path, file: Path, *, state: bool = False, progress: Progress | None = None) -> Backup:
    """Write all sessions of a store into one file, as they are at one moment, while others use it.

    With `state`, blocks of state too: without them the first turn of a session computes it again.
    """
    if file.exists():
        raise InvalidInputError(f"{file} exists already: choose another name")
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    snapshot = file.with_name(f"{file.name}.{os.getpid()}.sqlite.tmp")
    try:
        with translate_os_errors(file):
            sessions, turns = _snapshot(folder, snapshot)
            members = {FILE: snapshot}
            members |= {name: folder / name for name in (MARK, KEY) if (folder / name).is_file()}
            if state:
                members |= _encryption(folder)
                members |= {f"blocks/{path.parent.name}/{path.name}": path for path in _blocks(folder)}
            created, blocks = time.time(), 0
            digests: dict[str, str] = {}
            with open_private(temporary) as raw, tarfile.open(fileobj=raw, mode="w") as archive:
                for number, (name, path) in enumerate(members.items()):
                    # State that had to go meanwhile is no loss; sessions are.
                    with suppress(*((FileNotFoundError,) if name.startswith("blocks/") else ())):
                        digests[name] = _add(archive, name, path)
                        blocks += name.startswith("blocks/")
                    if progress is not None:
                        progress(number + 1, len(members))
                about = {
                    "format": FORMAT,
                    "created": created,
                    "sessions": sessions,
                    "turns": turns,
                    "files": digests,
                }
                data = json.dumps(about).encode()
                entry = tarfile.TarInfo(_MANIFEST)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
                archive.close()
                raw.flush()
                system.sync(raw.fileno())
            _name(temporary, file)
        sync_folder(file.absolute().parent)
    finally:
        for path in (temporary, *_database(snapshot)):
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return Backup(
        path=file,
        created=created,
        sessions=sessions,
        turns=turns,
        blocks=blocks,
        nbytes=file.stat().st_size,
    )


def _name(temporary: Path, file: Path) -> None:
    """Give a file its name, unless another has it: whole under its name, or not there."""
    try:
        os.link(temporary, file)
    except FileExistsError:
        raise
    except OSError:
        # FAT, exFAT and most network mounts have no hard links.
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | system.BINARY, PRIVATE))
        os.replace(temporary, file)


def restore(file: Path, folder: Path, *, progress: Progress | None = None) -> Backup:
    """Make a store of a backup, all that can be proved of it. The folder must not be there, or be empty.

    The rest is named in `left_out`, and the database with it lies in the new folder beside the other.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInputError(
            f"{folder} is not empty: restore into a new folder, and move it when it is whole"
        )
    folder = folder.absolute()
    make_folder(folder.parent)
    new = folder.with_name(f"{folder.name}.{os.getpid()}.restoring")
    try:
        make_folder(new, ours=True)
        about = _unpacked(file, new, progress)
        verification = verify(new, lambda done, total: None)
        if verification.not_repaired:
            raise CorruptStateError(
                f"{file} holds no sessions that can be proved: {verification.not_repaired}"
            )
        for path in (new, *(path for path in new.rglob("*") if path.is_dir())):
            sync_folder(path)
        with translate_os_errors(folder):
            if folder.exists():
                folder.rmdir()
            os.rename(new, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    files = about["files"]
    return Backup(
        path=file,
        created=about["created"],
        sessions=verification.sessions if verification.repair is None else verification.repair.sessions,
        turns=verification.turns if verification.repair is None else verification.repair.turns,
        blocks=sum(name.startswith("blocks/") for name in files),
        nbytes=file.stat().st_size,
        left_out=_left_out(verification),
    )


def _left_out(verification: Verification) -> tuple[str, ...]:
    lost = list(verification.repair.cut) if verification.repair is not None else []
    if verification.blocks is not None and verification.blocks.quarantined:
        lost.append(
            f"{verification.blocks.quarantined} damaged blocks of state, which the next turns compute again"
        )
    return tuple(lost)


def _snapshot(folder: Path, into: Path) -> tuple[int, int]:
    """The database as it is between two changes, by SQLite's own means: its sessions and turns, counted."""
    # What is no store of ours, or damaged, is told here.
    with closing(SqliteStore(folder, readonly=True)) as store:
        os.close(os.open(into, os.O_CREAT | os.O_EXCL | os.O_WRONLY | system.BINARY, PRIVATE))
        reader = store.index.connect_reader()
        assert reader is not None
        try:
            with closing(reader) as db, closing(sqlite3.connect(into)) as copy:
                db.backup(copy)
                copy.execute("PRAGMA journal_mode = DELETE")
                [(sessions,)] = copy.execute("SELECT count(*) FROM session")
                [(turns,)] = copy.execute("SELECT count(*) FROM turn WHERE kind != 'start'")
                return int(sessions), int(turns)
        except sqlite3.Error as error:
            raise StoreError(f"the sessions in {folder} could not be copied: {error}") from error


def _blocks(folder: Path) -> Iterator[Path]:
    """Those of all models. Their names are digests of what is in them, so in a backup they lie together."""
    from perdure.cache.tiers.archive import block_folders

    for place in block_folders(folder):
        for path in sorted((place / "blocks").glob("*/*")):
            if _BLOCK.fullmatch(f"blocks/{path.parent.name}/{path.name}"):
                yield path


def _encryption(folder: Path) -> dict[str, Path]:
    """What says with which key the blocks are encrypted, where they are: they stay so in a backup."""
    from perdure.cache.tiers.archive import block_folders
    from perdure.cache.tiers.encryption import MARK as ENCRYPTED

    marks = [mark for place in block_folders(folder) if (mark := place / ENCRYPTED).is_file()]
    return {ENCRYPTED: marks[0]} if marks else {}


def _database(path: Path) -> Iterator[Path]:
    return (path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm", "-journal"))


def _add(archive: tarfile.TarFile, name: str, path: Path) -> str:
    with path.open("rb") as source:
        entry = tarfile.TarInfo(name)
        entry.size = os.fstat(source.fileno()).st_size
        entry.mode = 0o600
        reader = _Hashed(source)
        archive.addfile(entry, reader)
        return reader.digest


class _Hashed:
    """A file that is hashed as it is read."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self._hash.update(data)
        return data

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def _unpacked(file: Path, new: Path, progress: Progress | None) -> dict[str, Any]:
    """Files that are ours by their names, and what the manifest says of them; all of it must be there."""
    from perdure.cache.tiers.encryption import MARK as ENCRYPTED

    about: Any = None
    digests: dict[str, str] = {}
    done, size = 0, 0
    with translate_os_errors(file):
        size = file.stat().st_size
    try:
        with translate_os_errors(new), tarfile.open(file, "r:") as archive:
            for entry in archive:
                # A sparse file would be read as long as it says it is.
                plain = entry.isreg() and not entry.issparse()
                source = archive.extractfile(entry) if plain else None
                if source is None:
                    raise CorruptStateError(f"{file} holds {entry.name[:100]!r}, which is no file of a store")
                if entry.name == _MANIFEST:
                    if entry.size > _MANIFEST_BYTES:
                        raise CorruptStateError(f"the manifest of {file} has {entry.size} bytes")
                    about = json.loads(source.read())
                elif entry.name in (FILE, MARK, KEY, ENCRYPTED) or _BLOCK.fullmatch(entry.name):
                    digests[entry.name] = _written(source, new / entry.name)
                else:
                    raise CorruptStateError(f"{file} holds {entry.name[:100]!r}, which is no file of a store")
                done += entry.size
                if progress is not None:
                    progress(done, size)
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise CorruptStateError(f"{file} is no whole backup: {error}") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise CorruptStateError(f"{file} is no whole backup of a store: it has no manifest of {FORMAT}")
    if about.get("files") != digests or FILE not in digests:
        raise CorruptStateError(f"{file} is damaged: its files are not those of its manifest")
    return about


def _written(source: IO[bytes], path: Path) -> str:
    make_folder(path.parent)
    digest = hashlib.sha256()
    with open_private(path) as out:
        while data := source.read(_PIECE):
            digest.update(data)
            out.write(data)
        out.flush()
        system.sync(out.fileno())
    return digest.hexdigest()
