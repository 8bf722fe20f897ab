"""A session as one file that can be moved.

    manifest.json    what is in it, with a digest for each part and one over the manifest itself
    turns.jsonl      the turns, each with the digest that proves it and all before it
    files/N          a file that turns name (an image), as it was sent: its digest is what they name
    blocks/N         its state, a block a file, if it was asked for
    seal             a signature: proves to the store that wrote it that all of this is its own

An archive (`archive_file.py`) without any path of the machine that wrote it. State in it is believed only
where the signature holds.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure import CorruptStateError, IncompatibleStateError
from perdure.ext.upkeep.archive_file import (
    ArchivePart,
    ArchiveReader,
    digest_of,
    end_archive,
    read_archive,
    write_member,
)
from perdure.spi.base import Identity, atomic_write, is_whole, sync_folder, translate_os_errors
from perdure.spi.cache import Block
from perdure.spi.sessions import FIRST, Turn

FORMAT = 1
_MANIFEST, _TURNS, _FILE, _BLOCK, _SIGNATURE = (
    "manifest.json",
    "turns.jsonl",
    "files/{}",
    "blocks/{}",
    "seal",
)
_WHAT = "export of a session"
MAX_MANIFEST, MAX_TURNS, MAX_FILE, MAX_BLOCK, MAX_BYTES = 8 << 20, 128 << 20, 64 << 20, 1 << 30, 64 << 30
"""Bytes that are taken of a manifest, of all turns, of one file, of one block, and of everything."""
MAX_TURN, MAX_VALUES, MAX_MESSAGES = 32 << 20, 2 << 20, 1 << 18
"""Bytes and JSON values of one turn, and messages of all: parsed, they take many times the memory."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What is in a file, all of it verified. State is left in the file until it is asked for."""

    path: Path
    name: str
    kind: str
    settings: Mapping[str, Any]
    turns: tuple[Turn, ...]
    identity: Identity | None
    """What its state depends on; None where there is none, or where another version of perdure said so in
    other fields."""
    parts: tuple[ArchivePart, ...]
    digest: str
    signature: bytes

    @property
    def has_state(self) -> bool:
        return any(part.name.startswith("blocks/") for part in self.parts)

    def signed_by(self, key: bytes | None) -> bool:
        """Whether the store with that key wrote it, and nobody has changed it since."""
        return key is not None and hmac.compare_digest(self.signature, _sign(key, self.digest))

    def files(self) -> Iterator[tuple[str, bytes]]:
        """The files in it, one at a time, each verified again, with its SHA-256 in hex."""
        for part, data in self._contents("files/"):
            yield part.sha256, data

    def blocks(self) -> Iterator[Block]:
        """The state in it, block by block, each verified again."""
        for _, data in self._contents("blocks/"):
            yield Block.unpack(data)

    def _contents(self, kind: str) -> Iterator[tuple[ArchivePart, bytes]]:
        with read_archive(self.path, _WHAT) as archive:
            archive.skip(archive.next(_MANIFEST, MAX_MANIFEST))
            for part in self.parts:
                archive.next(part.name, part.nbytes, exactly=True)
                if part.name.startswith(kind):
                    yield part, archive.read(part)
                else:
                    archive.skip(part.nbytes)


def write_export(
    path: Path,
    turns: Iterable[Turn],
    packed: tuple[Identity, list[Block]] | None,
    *,
    name: str,
    kind: str,
    settings: Mapping[str, Any],
    key: bytes | None = None,
    find_file: Callable[[str], bytes | None] = lambda digest: None,
    progress: Progress | None = None,
) -> Path:
    """Write a session to `path`: whole, or not at all. `key` is that of the store, which signs it.

    `turns` are gone through twice, and are not in memory together. `find_file` gives a file that they name;
    one that is gone is left out, and so is one that the caller has no key for.
    """
    identity, blocks = packed if packed is not None else (None, [])
    count, head = 0, ""
    digests: dict[str, None] = {}

    def lines() -> Iterator[bytes]:
        nonlocal count, head
        count = -1
        for turn in turns:
            count, head = count + 1, turn.digest.hex()
            digests.update(dict.fromkeys(turn.files))
            # Older versions stored settings with halves of surrogate pairs.
            line = json.dumps(turn.to_json(), ensure_ascii=False) + "\n"
            yield line.encode("utf-8", "surrogatepass")

    contents: list[Callable[[], Iterable[bytes | memoryview]]] = [lines]
    parts = [digest_of(_TURNS, lines())]
    files = [
        digest for digest in digests if (data := find_file(digest)) is not None and len(data) <= MAX_FILE
    ]
    contents += [lambda digest=digest: [find_file(digest) or b""] for digest in files]  # type: ignore[misc]
    contents += [lambda block=block: block.pack() for block in blocks]  # type: ignore[misc]
    names = [_FILE.format(number) for number in range(len(files))]
    names += [_BLOCK.format(number) for number in range(len(blocks))]
    parts += [digest_of(name, content()) for name, content in zip(names, contents[1:], strict=True)]
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
        write_member(file, _MANIFEST, len(about), [about])
        for part, content in zip(parts, contents, strict=True):
            write_member(file, part.name, part.nbytes, content())
            done += part.nbytes
            if progress is not None:
                progress(done, total)
        if key is not None:
            signature = _sign(key, manifest["digest"])
            write_member(file, _SIGNATURE, len(signature), [signature])
        end_archive(file)
    sync_folder(path.parent)
    return path


def read_export(path: Path, *, progress: Progress | None = None) -> Export:
    """Read a file that `write_export` wrote. Anything in it that is not as it was is refused."""
    with read_archive(path, _WHAT) as archive:
        manifest = _manifest(archive)
        try:
            parts = _parts(manifest["parts"])
            name, kind, settings = manifest["name"], manifest["kind"], manifest["settings"]
            if not (isinstance(name, str) and name and isinstance(kind, str) and kind):
                raise TypeError("a name and a kind are texts that are not empty")
            f"{name}{kind}".encode()
            if not isinstance(settings, dict):
                raise TypeError("settings are a mapping")
            known = _identity(manifest["identity"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptStateError(
                f"the manifest of this export is damaged, or of a newer perdure ({_why(error)}): update "
                "perdure"
            ) from error
        total, done = sum(part.nbytes for part in parts), 0
        turns: tuple[Turn, ...] = ()
        for part in parts:
            archive.next(part.name, part.nbytes, exactly=True)
            if part.name == _TURNS:
                turns = _turns(archive.lines(part, MAX_TURN))
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
            signature=_signature(archive) if manifest.get("sealed") else b"",
        )


def manifest_of(path: Path) -> dict[str, Any]:
    """What a file says that it holds; the rest of it is not looked at."""
    with read_archive(path, _WHAT) as archive:
        return _manifest(archive)


def _manifest(archive: ArchiveReader) -> dict[str, Any]:
    try:
        size = archive.next(_MANIFEST, MAX_MANIFEST)
    except CorruptStateError as error:
        raise CorruptStateError(f"this is no export of a session, or is damaged: {error}") from error
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


def _signature(archive: ArchiveReader) -> bytes:
    return archive.take(archive.next(_SIGNATURE, hashlib.sha256().digest_size, exactly=True))


def _identity(fields: Any) -> Identity | None:
    if fields is None:
        return None
    try:
        return Identity.from_json(json.dumps(fields).encode())
    except TypeError:
        return None


def _why(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)


def _parts(listed: Any) -> tuple[ArchivePart, ...]:
    """The turns first, then the files and the blocks in their order."""
    parts = tuple(ArchivePart(part["name"], part["bytes"], part["sha256"]) for part in listed)
    files = sum(part.name.startswith("files/") for part in parts)
    for number, part in enumerate(parts):
        name, most = _TURNS, MAX_TURNS
        if number > files:
            name, most = _BLOCK.format(number - 1 - files), MAX_BLOCK
        elif number:
            name, most = _FILE.format(number - 1), MAX_FILE
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
        try:
            turns.append(Turn.from_json(json.loads(line), turns[-1].digest if turns else FIRST))
        except CorruptStateError as error:
            raise CorruptStateError(
                f"turn {len(turns)} of this export is damaged, or of a newer perdure ({error}): update "
                "perdure"
            ) from error
        messages += len(turns[-1].messages)
        if messages > MAX_MESSAGES:
            raise CorruptStateError(f"this export has more than {MAX_MESSAGES} messages")
    if not turns or turns[0].kind != "start" or any(turn.kind == "start" for turn in turns[1:]):
        raise CorruptStateError("the turns of this export do not begin with a start")
    return tuple(turns)


def _digest(manifest: Mapping[str, Any]) -> str:
    content = {name: value for name, value in manifest.items() if name != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _sign(key: bytes, digest: str) -> bytes:
    return hmac.new(key, b"perdure/export/1\0" + digest.encode(), hashlib.sha256).digest()
