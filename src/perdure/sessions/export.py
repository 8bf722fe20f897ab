"""A session as one file that can be moved.

    manifest.json    what is in it, with a digest for each part and one over the manifest itself
    turns.jsonl      the turns, each with the digest that proves it and all before it
    blocks/N         its state, a block a file, if it was asked for
    seal             a signature: proves to the store that wrote it that all of this is its own

A tar archive of plain files, without any path of the machine that wrote it. Nothing in it is believed before
it was checked: sizes against the file, parts against their digests, and state only where the signature holds.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from perdure.atomic import atomic_write, sync_folder, translate_os_errors
from perdure.cache.block import Block
from perdure.checks import is_whole
from perdure.errors import CorruptStateError, IncompatibleStateError
from perdure.identity import Identity
from perdure.sessions.turn import FIRST, Turn

FORMAT = 1
_MANIFEST, _TURNS, _BLOCK, _SIGNATURE = "manifest.json", "turns.jsonl", "blocks/{}", "seal"
_UNIT = 512
"""Of a tar archive: everything starts at a multiple of it."""
_READ = 1 << 20
MAX_MANIFEST, MAX_TURNS, MAX_BLOCK, MAX_BYTES = 8 << 20, 128 << 20, 1 << 30, 64 << 30
"""Bytes that are taken of a manifest, of all turns, of one block, and of everything."""
MAX_TURN, MAX_VALUES, MAX_MESSAGES = 32 << 20, 2 << 20, 1 << 18
"""Bytes and JSON values of one turn, and messages of all: parsed, they take many times the memory."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ExportFile:
    """A file in an export, as its manifest names it."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What is in a file, all of it verified. State is left in the file until it is asked for."""

    path: Path
    name: str
    kind: str
    settings: Mapping[str, Any]
    turns: tuple[Turn, ...]
    identity: Identity | None
    parts: tuple[ExportFile, ...]
    digest: str
    signature: bytes

    @property
    def has_state(self) -> bool:
        return self.identity is not None and len(self.parts) > 1

    def signed_by(self, key: bytes | None) -> bool:
        """Whether the store with that key wrote it, and nobody has changed it since."""
        return key is not None and hmac.compare_digest(self.signature, _sign(key, self.digest))

    def blocks(self) -> Iterator[Block]:
        """The state in it, block by block, each verified again."""
        with _opened(self.path) as archive:
            archive.skip(archive.next(_MANIFEST, MAX_MANIFEST))
            for part in self.parts:
                archive.next(part.name, part.nbytes, exactly=True)
                if part.name == _TURNS:
                    archive.skip(part.nbytes)
                else:
                    yield Block.unpack(archive.read(part))


def write_export(
    path: Path,
    turns: Iterable[Turn],
    packed: tuple[Identity, list[Block]] | None,
    *,
    name: str,
    kind: str,
    settings: Mapping[str, Any],
    key: bytes | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a session to `path`: whole, or not at all. `key` is that of the store, which signs it.

    `turns` are gone through twice, and are not in memory together.
    """
    identity, blocks = packed if packed is not None else (None, [])
    count, head = 0, ""

    def lines() -> Iterator[bytes]:
        nonlocal count, head
        count = -1
        for turn in turns:
            count, head = count + 1, turn.digest.hex()
            # Older versions stored settings with halves of surrogate pairs.
            line = json.dumps(turn.to_json(), ensure_ascii=False) + "\n"
            yield line.encode("utf-8", "surrogatepass")

    contents: list[Callable[[], Iterable[bytes | memoryview]]] = [lines]
    contents += [lambda block=block: block.pack() for block in blocks]  # type: ignore[misc]
    names = [_TURNS, *(_BLOCK.format(number) for number in range(len(blocks)))]
    parts = [_part(name, content()) for name, content in zip(names, contents, strict=True)]
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "kind": kind,
        "name": name,
        "settings": dict(settings),
        "turns": count,
        "head": head,
        "identity": json.loads(identity.to_json()) if identity is not None and blocks else None,
        "sealed": key is not None,
        "parts": [{"name": part.name, "bytes": part.nbytes, "sha256": part.sha256} for part in parts],
    }
    manifest["digest"] = _digest(manifest)
    total, done = sum(part.nbytes for part in parts), 0
    with translate_os_errors(path, total), atomic_write(path, private=True) as file:
        about = json.dumps(manifest, ensure_ascii=False, indent=1).encode()
        _put(file, _MANIFEST, len(about), [about])
        for part, content in zip(parts, contents, strict=True):
            _put(file, part.name, part.nbytes, content())
            done += part.nbytes
            if progress is not None:
                progress(done, total)
        if key is not None:
            signature = _sign(key, manifest["digest"])
            _put(file, _SIGNATURE, len(signature), [signature])
        file.write(bytes(2 * _UNIT))
    sync_folder(path.parent)
    return path


def read_export(path: Path, *, progress: Progress | None = None) -> Export:
    """Read a file that `write_export` wrote. Anything in it that is not as it was is refused."""
    with _opened(path) as archive:
        manifest = _manifest(archive)
        try:
            parts = _parts(manifest["parts"])
            name, kind, settings = manifest["name"], manifest["kind"], manifest["settings"]
            if not (isinstance(name, str) and name and isinstance(kind, str) and kind):
                raise TypeError("a name and a kind are texts that are not empty")
            f"{name}{kind}".encode()
            if not isinstance(settings, dict):
                raise TypeError("settings are a mapping")
            identity = manifest["identity"]
            known = Identity.from_json(json.dumps(identity).encode()) if identity is not None else None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptStateError(f"the manifest of an export is not whole: {error!r}") from error
        total, done = sum(part.nbytes for part in parts), 0
        turns: tuple[Turn, ...] = ()
        for part in parts:
            archive.next(part.name, part.nbytes, exactly=True)
            if part.name == _TURNS:
                turns = _turns(archive.lines(part))
            else:
                archive.check(part)
            done += part.nbytes
            if progress is not None:
                progress(done, total)
        if not turns or turns[-1].digest.hex() != manifest.get("head"):
            raise CorruptStateError("the turns of this export are not those that its manifest names")
        return Export(
            path=path,
            name=name,
            kind=kind,
            settings=settings,
            turns=turns,
            identity=known,
            parts=parts,
            digest=manifest["digest"],
            signature=archive.signature() if manifest.get("sealed") else b"",
        )


def manifest_of(path: Path) -> dict[str, Any]:
    """What a file says that it holds; the rest of it is not looked at."""
    with _opened(path) as archive:
        return _manifest(archive)


class _Archive:
    """A tar archive of plain files, read from its beginning to its end. Sparse files, links, long names
    and whatever else an archive can hold are refused."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._left = os.fstat(file.fileno()).st_size

    def next(self, name: str, size: int, *, exactly: bool = False) -> int:
        """Go to the next file, which must have that name and at most, or exactly, that size. Its size."""
        member = self._header()
        fits = member is not None and (member.size == size if exactly else member.size <= size)
        if member is None or member.name != name or not fits:
            raise CorruptStateError(f"this export lacks {name}, or has something else in its place")
        if member.size > self._left:
            raise CorruptStateError(
                f"{name} in this export is cut short: {self._left} of {member.size} bytes"
            )
        return member.size

    def take(self, size: int) -> bytes:
        """The next `size` bytes, and what fills them up."""
        data = self._file.read(size)
        self._fill(size)
        if len(data) != size:
            raise CorruptStateError(f"this export is cut short: {len(data)} of {size} bytes")
        return data

    def skip(self, size: int) -> None:
        self._file.seek(size, os.SEEK_CUR)
        self._fill(size)

    def read(self, part: ExportFile) -> bytes:
        data = self.take(part.nbytes)
        _compare(part, hashlib.sha256(data).hexdigest())
        return data

    def lines(self, part: ExportFile) -> Iterator[bytes]:
        """The lines of a part, one at a time; behind the last one it is compared with its digest."""
        digest, left = hashlib.sha256(), part.nbytes
        while left:
            # By line feeds alone: texts may hold what Unicode calls the end of a line.
            line = self._file.readline(min(left, MAX_TURN))
            digest.update(line)
            left -= len(line)
            if not line or (left and not line.endswith(b"\n")):
                raise CorruptStateError(
                    f"{part.name} in this export is cut short, or has a turn of more than {MAX_TURN} bytes"
                )
            yield line
        self._fill(part.nbytes)
        _compare(part, digest.hexdigest())

    def check(self, part: ExportFile) -> None:
        """Compare a part with its digest, without holding it in memory."""
        digest, left = hashlib.sha256(), part.nbytes
        while left:
            data = self._file.read(min(left, _READ))
            if not data:
                raise CorruptStateError(f"{part.name} in this export is cut short by {left} bytes")
            digest.update(data)
            left -= len(data)
        self._fill(part.nbytes)
        _compare(part, digest.hexdigest())

    def signature(self) -> bytes:
        """What stands behind everything else."""
        return self.take(self.next(_SIGNATURE, hashlib.sha256().digest_size, exactly=True))

    def _header(self) -> tarfile.TarInfo | None:
        head = self._file.read(_UNIT)
        self._left -= len(head)
        if not head.strip(b"\0"):
            return None
        member = tarfile.TarInfo.frombuf(head, "utf-8", "strict")
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.size < 0:
            raise CorruptStateError(f"{member.name!r} in this export is no plain file")
        return member

    def _fill(self, size: int) -> None:
        rest = -size % _UNIT
        self._file.seek(rest, os.SEEK_CUR)
        self._left -= size + rest


@contextmanager
def _opened(path: Path) -> Iterator[_Archive]:
    with translate_os_errors(path):
        try:
            with path.open("rb") as file:
                yield _Archive(file)
        except (tarfile.TarError, EOFError, ValueError, RecursionError) as error:
            words = f"{path.name} is not an export of a session, or is damaged: {error}"
            raise CorruptStateError(words) from error


def _manifest(archive: _Archive) -> dict[str, Any]:
    try:
        size = archive.next(_MANIFEST, MAX_MANIFEST)
    except CorruptStateError as error:
        raise CorruptStateError(f"this is not an export of a session, or it is damaged: {error}") from error
    manifest = json.loads(archive.take(size))
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise CorruptStateError("the manifest of this export is not one")
    if manifest["format"] > FORMAT:
        raise IncompatibleStateError(
            f"this export is of format {manifest['format']}, this perdure reads {FORMAT}: update perdure",
            field="format",
        )
    if manifest.get("digest") != _digest(manifest):
        raise CorruptStateError("the manifest of this export is damaged: its digest does not match")
    return manifest


def _parts(listed: Any) -> tuple[ExportFile, ...]:
    """The turns first, then the blocks in their order."""
    parts = tuple(ExportFile(part["name"], part["bytes"], part["sha256"]) for part in listed)
    for number, part in enumerate(parts):
        name, most = (_BLOCK.format(number - 1), MAX_BLOCK) if number else (_TURNS, MAX_TURNS)
        size = part.nbytes
        if part.name != name or not is_whole(size) or not 0 <= size <= most:
            raise ValueError(f"part {number} must be {name}, of at most {most} bytes")
    if not parts or sum(part.nbytes for part in parts) > MAX_BYTES:
        raise ValueError(f"an export has turns, and at most {MAX_BYTES} bytes")
    return parts


def _turns(lines: Iterator[bytes]) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    messages = 0
    for line in lines:
        # Some of these may be in texts: no fewer than there are values.
        if sum(map(line.count, (b",", b"[", b"{"))) > MAX_VALUES:
            raise CorruptStateError(f"a turn of this export has more than {MAX_VALUES} values")
        turns.append(Turn.from_json(json.loads(line), turns[-1].digest if turns else FIRST))
        messages += len(turns[-1].messages)
        if messages > MAX_MESSAGES:
            raise CorruptStateError(f"this export has more than {MAX_MESSAGES} messages")
    if not turns or turns[0].kind != "start" or any(turn.kind == "start" for turn in turns[1:]):
        raise CorruptStateError("the turns of this export do not begin with a start")
    return tuple(turns)


def _compare(part: ExportFile, digest: str) -> None:
    if digest != part.sha256:
        raise CorruptStateError(f"{part.name} in this export is damaged: its digest does not match")


def _part(name: str, content: Iterable[bytes | memoryview]) -> ExportFile:
    digest, size = hashlib.sha256(), 0
    for each in content:
        digest.update(each)
        size += len(each)
    return ExportFile(name, size, digest.hexdigest())


def _put(file: IO[bytes], name: str, size: int, content: Iterable[bytes | memoryview]) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    member.mode = 0o600
    file.write(member.tobuf(tarfile.USTAR_FORMAT))
    for each in content:
        size -= len(each)
        file.write(each)
    if size:
        raise CorruptStateError(f"{name} changed while it was written: export it again")
    file.write(bytes(-member.size % _UNIT))


def _digest(manifest: Mapping[str, Any]) -> str:
    content = {name: value for name, value in manifest.items() if name != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _sign(key: bytes, digest: str) -> bytes:
    return hmac.new(key, b"perdure/export/1\0" + digest.encode(), hashlib.sha256).digest()
