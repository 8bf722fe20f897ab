"""A store in one file, taken while it is in use, and a store made of such a file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from perdure import (
    CorruptStateError,
    IncompatibleStateError,
    InvalidInputError,
    StoreError,
    StoreLockedError,
    StoreReadOnlyError,
    StoreVersionError,
)
from perdure.ext.upkeep.archive_file import end_archive, read_archive, write_member
from perdure.ext.upkeep.repair import Progress, Verification, verify
from perdure.spi.base import (
    PRIVATE,
    make_folder,
    open_private,
    processes,
    sync_folder,
    system,
    translate_os_errors,
)
from perdure.spi.cache import MARK as ENCRYPTED
from perdure.spi.cache import block_folders
from perdure.spi.sqlite import (
    FILE,
    KEY,
    MARK,
    SessionFolder,
    SqliteStore,
    UseLock,
    opening_lock,
)

_FAMILY = "perdure-backup/"
FORMAT = f"{_FAMILY}1"
_MANIFEST = "manifest.json"
_BLOCK = re.compile(r"blocks/([0-9a-f]{2})/\1[0-9a-f]{62}")
_UNFINISHED = re.compile(r".+\.\d+\.backup\.tmp")
"""What a backup is called before it is whole."""
_PIECE = 1 << 20
_MANIFEST_BYTES = 256 << 20


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
    file = file.absolute()
    _sweep(file.parent, _UNFINISHED)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.backup.tmp")
    try:
        with translate_os_errors(file), _snapshot(folder, file) as snapshot:
            sessions, turns = _counts(snapshot)
            members = {FILE: snapshot}
            members |= {name: folder / name for name in (MARK, KEY) if (folder / name).is_file()}
            if state:
                members |= _encryption(folder)
                members |= {f"blocks/{path.parent.name}/{path.name}": path for path in _blocks(folder)}
            created, blocks = time.time(), 0
            digests: dict[str, str] = {}
            with open_private(temporary) as raw:
                processes.lock_file(raw.fileno())
                for number, (name, path) in enumerate(members.items()):
                    # State that had to go meanwhile is no loss; sessions are.
                    with suppress(*((FileNotFoundError,) if name.startswith("blocks/") else ())):
                        digests[name] = _add(raw, name, path)
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
                write_member(raw, _MANIFEST, len(data), [data])
                end_archive(raw)
                raw.flush()
                system.sync(raw.fileno())
            _name(temporary, file)
        sync_folder(file.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
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
    _sweep(folder.parent, re.compile(rf"{re.escape(folder.name)}\.\d+\.restoring"))
    new = folder.with_name(f"{folder.name}.{os.getpid()}.restoring")
    try:
        make_folder(new, ours=True)
        with _locked(new):
            about = _unpacked(file, new, progress)
            try:
                verification = verify(new, lambda done, total: None)
            except StoreVersionError as error:
                raise StoreVersionError(
                    f"{file} is of version {error.found}, this perdure knows up to {error.known}: update "
                    "perdure",
                    found=error.found,
                    known=error.known,
                ) from None
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


@contextmanager
def _snapshot(folder: Path, file: Path) -> Iterator[Path]:
    """The database as it is between two changes, by SQLite's own means, until this is closed. It lies where
    what a killed process has left is cleared; beside the backup where the store cannot be written."""
    files = SessionFolder(folder)
    with ExitStack() as stack:
        try:
            with opening_lock(folder):
                use = UseLock(folder)
                stack.callback(use.release)
                if use.first:
                    files.clear_leftovers()
            place = files.transfers()
        except (StoreReadOnlyError, StoreLockedError):
            place = file.parent
        snapshot = place / f"{file.name}.{os.getpid()}.sqlite.tmp"
        # A folder that is no store of ours, or a damaged one, raises here.
        with closing(SqliteStore(folder, readonly=True)) as store:
            store.index.copy_to(snapshot)
        try:
            yield snapshot
        finally:
            with suppress(OSError):
                snapshot.unlink(missing_ok=True)


def _counts(snapshot: Path) -> tuple[int, int]:
    """Sessions and turns of a database of any version."""
    try:
        with closing(sqlite3.connect(snapshot)) as db:
            tables = db.execute("SELECT name FROM sqlite_master WHERE name IN ('session', 'record')")
            sessions = sum(db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for (name,) in [*tables])
            [(turns,)] = db.execute("SELECT count(*) FROM turn WHERE kind != 'start'")
            return int(sessions), int(turns)
    except sqlite3.Error as error:
        raise StoreError(f"the sessions could not be copied: {error}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """While this is open, a folder is not taken for one that a killed process has left. Windows opens no
    folders, and has a folder locked while files in it are open."""
    if not system.POSIX:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        processes.lock_file(handle)
        yield
    finally:
        os.close(handle)


def _sweep(place: Path, names: re.Pattern[str]) -> None:
    """Remove what killed processes have left there: a living one has it locked."""
    for path in place.iterdir() if place.is_dir() else ():
        if not names.fullmatch(path.name):
            continue
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY)
            try:
                if not processes.lock_file(handle):
                    continue
            finally:
                os.close(handle)
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _blocks(folder: Path) -> Iterator[Path]:
    """Those of all models. Their names are digests of what is in them, so in a backup they lie together."""
    for place in block_folders(folder):
        for path in sorted((place / "blocks").glob("*/*")):
            if _BLOCK.fullmatch(f"blocks/{path.parent.name}/{path.name}"):
                yield path


def _encryption(folder: Path) -> dict[str, Path]:
    """What says with which key the blocks are encrypted, where they are: they stay so in a backup."""
    marks = [mark for place in block_folders(folder) if (mark := place / ENCRYPTED).is_file()]
    return {ENCRYPTED: marks[0]} if marks else {}


def _add(archive: IO[bytes], name: str, path: Path) -> str:
    with path.open("rb") as source:
        content = iter(lambda: source.read(_PIECE), b"")
        return write_member(archive, name, os.fstat(source.fileno()).st_size, content)


def _unpacked(file: Path, new: Path, progress: Progress | None) -> dict[str, Any]:
    """Files that are ours by their names, and what the manifest says of them; all of it must be there."""
    about: Any = None
    digests: dict[str, str] = {}
    done, size = 0, 0
    with translate_os_errors(file):
        size = file.stat().st_size
    with translate_os_errors(new), read_archive(file, "backup of a store") as archive:
        while (member := archive.member()) is not None:
            name, nbytes = member
            if name == _MANIFEST and nbytes <= _MANIFEST_BYTES:
                about = json.loads(archive.take(nbytes))
            elif name in (FILE, MARK, KEY, ENCRYPTED) or _BLOCK.fullmatch(name):
                digests[name] = _written(archive.pieces(nbytes), new / name)
            else:
                raise CorruptStateError(f"{file} holds {name[:100]!r}, which is no file of a store")
            done += nbytes
            if progress is not None:
                progress(done, size)
    kind = str(about.get("format")) if isinstance(about, dict) else ""
    if kind != FORMAT and kind.startswith(_FAMILY):
        raise IncompatibleStateError(
            f"{file} is a backup of format {kind[len(_FAMILY) :][:20]!r}, this perdure reads "
            f"{FORMAT[len(_FAMILY) :]}: update perdure",
            field="format",
        )
    if not isinstance(about, dict) or kind != FORMAT:
        raise CorruptStateError(f"{file} is no whole backup of a store: it has no manifest of {FORMAT}")
    if about.get("files") != digests or FILE not in digests:
        raise CorruptStateError(f"{file} is damaged: its files are not those of its manifest")
    return about


def _written(pieces: Iterator[bytes], path: Path) -> str:
    make_folder(path.parent)
    digest = hashlib.sha256()
    with open_private(path) as out:
        for data in pieces:
            digest.update(data)
            out.write(data)
        out.flush()
        system.sync(out.fileno())
    return digest.hexdigest()
