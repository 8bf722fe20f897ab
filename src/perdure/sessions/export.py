"""A session as one file that can be moved.

    manifest.json    what is in it, with a digest for each part and one over the manifest itself
    turns.jsonl      the turns, each with the digest that proves it and all before it
    blocks/N         its state, a block a file, if it was asked for

A tar archive without any path of the machine that wrote it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure import system
from perdure.cache.block import Block
from perdure.errors import CorruptStateError, StoreVersionError
from perdure.identity import Identity
from perdure.sessions.turn import FIRST, Turn
from perdure.store import block_file
from perdure.store.durable import explained, sync_folder

if TYPE_CHECKING:
    from perdure.sessions.session import Session

FORMAT = 1
_MANIFEST, _TURNS = "manifest.json", "turns.jsonl"

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What was in a file, all of it verified."""

    name: str
    kind: str
    settings: Mapping[str, Any]
    turns: tuple[Turn, ...]
    identity: Identity | None
    blocks: tuple[Block, ...]


def write_export(
    path: Path,
    session: Session,
    turns: Sequence[Turn],
    packed: tuple[Identity, list[Block]] | None,
    *,
    kind: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a session to `path`: whole, or not at all."""
    identity, blocks = packed if packed is not None else (None, [])
    said = "".join(json.dumps(turn.to_json(), ensure_ascii=False) + "\n" for turn in turns).encode()
    parts = [(_TURNS, said)] + [
        (f"blocks/{number}", b"".join(block_file.pack(block))) for number, block in enumerate(blocks)
    ]
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "kind": kind or session.kind,
        "name": session.name,
        "settings": dict(session.settings),
        "turns": len(turns) - 1,
        "head": turns[-1].digest.hex(),
        "identity": json.loads(identity.to_json()) if identity is not None and blocks else None,
        "parts": [
            {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in parts
        ],
    }
    manifest["digest"] = _digest(manifest)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    total = sum(len(data) for _, data in parts)
    done = 0
    with explained(path, total):
        try:
            with temporary.open("wb") as file:
                with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
                    _put(archive, _MANIFEST, json.dumps(manifest, ensure_ascii=False, indent=1).encode())
                    for name, data in parts:
                        _put(archive, name, data)
                        done += len(data)
                        if progress is not None:
                            progress(done, total)
                file.flush()
                system.sync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)
    return path


def read_export(path: Path, *, progress: Progress | None = None) -> Export:
    """Read a file that `write_export` wrote. Anything in it that is not as it was is refused."""
    with _opened(path) as archive:
        return _read(archive, progress)


def manifest_of(path: Path) -> dict[str, Any]:
    """What a file says that it holds; the rest of it is not looked at."""
    with _opened(path) as archive:
        return _manifest(archive)


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    with explained(path):
        try:
            with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
                yield archive
        except (
            tarfile.TarError,
            EOFError,
            UnicodeDecodeError,
            json.JSONDecodeError,
            RecursionError,
        ) as error:
            words = f"{path.name} is not an export of a session, or is damaged: {error}"
            raise CorruptStateError(words) from error


def _read(archive: tarfile.TarFile, progress: Progress | None) -> Export:
    manifest = _manifest(archive)
    try:
        parts = [(str(part["name"]), int(part["bytes"]), str(part["sha256"])) for part in manifest["parts"]]
        name, kind, settings = str(manifest["name"]), str(manifest["kind"]), dict(manifest["settings"])
        identity = manifest["identity"]
        known = Identity.from_json(json.dumps(identity).encode()) if identity is not None else None
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStateError(f"the manifest of an export is not whole: {error!r}") from error
    total, done = sum(size for _, size, _ in parts), 0
    turns: tuple[Turn, ...] = ()
    blocks = []
    for part, size, digest in parts:
        data = _take(archive, part, size)
        if hashlib.sha256(data).hexdigest() != digest:
            raise CorruptStateError(f"{part} in this export is damaged: its digest does not match")
        if part == _TURNS:
            turns = _turns(data)
        else:
            blocks.append(block_file.unpack(data))
        done += size
        if progress is not None:
            progress(done, total)
    if not turns or turns[-1].digest.hex() != manifest.get("head"):
        raise CorruptStateError("the turns of this export are not those that its manifest names")
    return Export(name=name, kind=kind, settings=settings, turns=turns, identity=known, blocks=tuple(blocks))


def _manifest(archive: tarfile.TarFile) -> dict[str, Any]:
    first = archive.next()
    if first is None or first.name != _MANIFEST or not first.isreg() or first.size > 1 << 26:
        raise CorruptStateError("this file is not an export of a session: it does not start with a manifest")
    file = archive.extractfile(first)
    assert file is not None
    manifest = json.loads(file.read())
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise CorruptStateError("the manifest of this export is not one")
    if manifest["format"] > FORMAT:
        raise StoreVersionError(
            f"this export is of format {manifest['format']}, this perdure reads {FORMAT}: update perdure",
            found=manifest["format"],
            known=FORMAT,
        )
    if manifest.get("digest") != _digest(manifest):
        raise CorruptStateError("the manifest of this export is damaged: its digest does not match")
    return manifest


def _turns(data: bytes) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    for line in data.decode().splitlines():
        turns.append(Turn.from_json(json.loads(line), turns[-1].digest if turns else FIRST))
    if not turns or turns[0].kind != "start" or any(turn.kind == "start" for turn in turns[1:]):
        raise CorruptStateError("the turns of this export do not begin with a start")
    return tuple(turns)


def _take(archive: tarfile.TarFile, name: str, size: int) -> bytes:
    member = archive.next()
    if member is None or member.name != name or not member.isreg() or member.size != size:
        raise CorruptStateError(f"this export lacks {name}, or has something else in its place")
    file = archive.extractfile(member)
    assert file is not None
    data = file.read()
    if len(data) != size:
        raise CorruptStateError(f"{name} in this export is cut short: {len(data)} of {size} bytes")
    return data


def _put(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    member.mode = 0o644
    archive.addfile(member, io.BytesIO(data))


def _digest(manifest: Mapping[str, Any]) -> str:
    said = {name: value for name, value in manifest.items() if name != "digest"}
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
