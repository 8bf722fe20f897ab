"""Bytes from a URL into a file, over as many connections as it takes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

import certifi
from filelock import FileLock

from perdure import atomic, system
from perdure.errors import FetchError

if TYPE_CHECKING:
    # A tenth of a second of every command, of which few fetch anything.
    import httpx


@contextmanager
def atomic_write(target: Path) -> Iterator[BinaryIO]:
    """Write to a temporary file that becomes `target`, on disk for good, when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic.atomic_write(target) as file:
            yield file
        system.sync_folder(target.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FetchError(f"the disk is full at {target.parent}; make room and try again") from error
        raise


def publish(temporary: Path, target: Path) -> None:
    """Rename a file that was synced, and make the new name last."""
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(temporary, target)
    system.sync_folder(target.parent)


@contextmanager
def fetch_lock(models: Path, name: str) -> Iterator[None]:
    """Be the only process that fetches `name`; others wait here."""
    locks = models / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{name.replace('/', '--')}.lock"):
        yield


def check_free_space(folder: Path, needed: int) -> None:
    """Refuse before the work rather than after it."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise FetchError(f"{folder} needs {needed} bytes of free disk, it has {free}")


Progress: TypeAlias = Callable[[int, int | None], None]
"""Called with the bytes that are here and, once it is known, how many there will be."""

_MOST_FAILURES = 4
_FIRST_PAUSE = 0.2
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_RANGE = re.compile(r"bytes (?:(?P<first>\d+)-\d+|\*)/(?P<total>\d+|\*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A file somewhere else. Its digest, where it is known, decides whether what came is right."""

    url: str
    sha256: str | None = None
    size: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def shown(self) -> str:
        """The address without what may be secret in it."""
        import httpx

        url = httpx.URL(self.url)
        return f"{url.scheme}://{url.host}{f':{url.port}' if url.port else ''}{url.path}"


def trust(extra: Path | None = None) -> ssl.SSLContext:
    """Trust what this system trusts (`SSL_CERT_FILE` included), certifi's list, and `extra`."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    if extra is not None:
        try:
            context.load_verify_locations(**{"capath" if extra.is_dir() else "cafile": str(extra)})
        except OSError as error:
            raise FetchError(f"the certificates at {extra} cannot be used: {error}") from error
    return context


def web(*, certificates: Path | None = None, proxy: str | None = None) -> httpx.Client:
    """A client for long downloads."""
    import httpx

    return httpx.Client(
        verify=trust(certificates), proxy=proxy, follow_redirects=True, timeout=httpx.Timeout(60, connect=20)
    )


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class RemoteBytes:
    """The first bytes of a remote file, in order, as somebody reads them. A server is asked for one stretch
    after the other and never for the rest of the file."""

    def __init__(self, client: httpx.Client, remote: Remote) -> None:
        self._client = client
        self._remote = remote
        self._at = 0

    def read(self, size: int, /) -> bytes:
        import httpx

        headers = {**self._remote.headers, "Range": f"bytes={self._at}-{self._at + size - 1}"}
        pieces: list[bytes] = []
        have = 0
        try:
            with self._client.stream("GET", self._remote.url, headers=headers) as answer:
                answer.raise_for_status()
                # A server without ranges starts over.
                skip = self._at if answer.status_code == 200 else 0
                for piece in answer.iter_bytes():
                    rest = piece[skip:]
                    skip = max(0, skip - len(piece))
                    pieces.append(rest[: size - have])
                    have += len(pieces[-1])
                    if have >= size:
                        # It may have more to send: the connection is closed with it.
                        break
        except httpx.HTTPError as error:
            raise FetchError(f"{self._remote.shown} could not be read: {error}") from error
        self._at += have
        return b"".join(pieces)


def download(client: httpx.Client, remote: Remote, part: Path, progress: Progress | None = None) -> None:
    """Have the whole of `remote` in `part`, verified. What `part` holds already is not fetched again.

    Whatever ends this early (a lost connection, Ctrl-C, a kill), `part` stays for the next try.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    resumed = _Part(part).length > 0
    _persist(client, remote, part, progress)
    wrong = _mistake(remote, part)
    if wrong and resumed:
        # The old bytes may be of an earlier file at this address; only a fresh copy can tell.
        _Part(part).discard()
        _persist(client, remote, part, progress)
        wrong = _mistake(remote, part)
    if wrong:
        _Part(part).discard()
        raise FetchError(f"what {remote.shown} sent is not the file that was asked for: {wrong}")


def _mistake(remote: Remote, part: Path) -> str | None:
    size = part.stat().st_size
    if remote.size is not None and size != remote.size:
        return f"{size} bytes, expected {remote.size}"
    if remote.sha256 is not None and (sha256 := digest(part)) != remote.sha256:
        return f"SHA-256 {sha256}, expected {remote.sha256}"
    return None


def _persist(client: httpx.Client, remote: Remote, path: Path, progress: Progress | None) -> None:
    """Try until all bytes are there, as long as tries get further."""
    import httpx

    failures = 0
    furthest = 0
    while True:
        part = _Part(path)
        try:
            if _attempt(client, remote, part, progress):
                return
            continue
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in _TRANSIENT:
                raise FetchError(f"{remote.shown} answered {_status(error.response)}") from error
            reached = part.length
            failures = 0 if reached > furthest else failures + 1
            furthest = max(furthest, reached)
            if failures >= _MOST_FAILURES:
                reason = (
                    f"answered {_status(error.response)}"
                    if isinstance(error, httpx.HTTPStatusError)
                    else f"could not be reached ({str(error) or type(error).__name__})"
                )
                raise FetchError(
                    f"{remote.shown} {reason} {failures} times, with {reached} bytes here. "
                    "They are kept: try again to go on from there"
                ) from error
        except httpx.HTTPError as error:
            raise FetchError(f"{remote.shown} could not be fetched: {error}") from error
        except OSError as error:
            raise FetchError(
                f"{path} could not be written after {part.length} bytes: {error.strerror or error}"
            ) from error
        if failures:
            time.sleep(_FIRST_PAUSE * 2 ** (failures - 1))


def _status(response: httpx.Response) -> str:
    return f"{response.status_code} {response.reason_phrase}".strip()


def _attempt(client: httpx.Client, remote: Remote, part: _Part, progress: Progress | None) -> bool:
    """One request. True when the part is complete, False when it must be started again."""
    import httpx

    have = part.length
    headers = dict(remote.headers) | {"Accept-Encoding": "identity"}
    if have and part.source != remote.sha256:
        part.discard()
        have = 0
    if have:
        headers["Range"] = f"bytes={have}-"
        if part.validator:
            headers["If-Range"] = part.validator
    with client.stream("GET", remote.url, headers=headers) as response:
        match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        total = int(match["total"]) if match and match["total"] != "*" else None
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            # A part that is complete asks for a range after the end; any other answer means a new file.
            if total == have:
                return True
            part.discard()
            return False
        response.raise_for_status()
        if response.status_code == httpx.codes.PARTIAL_CONTENT:
            if match is None or not match["first"] or int(match["first"]) != have:
                part.discard()
                return False
        else:
            have = 0
            length = response.headers.get("Content-Length")
            total = int(length) if length and length.isdecimal() else None
        part.begin(have, remote.sha256, response.headers)
        with open(part.path, "ab", buffering=0) as file:
            if progress:
                progress(have, total)
            # In the sizes they come in: collecting larger ones would lose the rest at a cut.
            for chunk in response.iter_raw():
                file.write(chunk)
                have += len(chunk)
                if progress:
                    progress(have, total)
            system.sync(file.fileno())
    if total is not None and have != total:
        raise httpx.RemoteProtocolError(f"{have} of {total} bytes came")
    return True


class _Part:
    """A file that is being fetched, with a note beside it of what it is a part of."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._note = path.with_name(path.name + ".json")
        try:
            note = json.loads(self._note.read_text())
        except (OSError, ValueError):
            note = {}
        if not isinstance(note, dict):
            note = {}
        self.source: object = note.get("sha256")
        validator = note.get("validator")
        self.validator = validator if isinstance(validator, str) else None

    @property
    def length(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def begin(self, have: int, sha256: str | None, headers: httpx.Headers) -> None:
        """Note what follows, and drop all but the first `have` bytes."""
        etag = headers.get("ETag")
        # A weak tag does not promise equal bytes, so it cannot vouch for a range.
        strong = etag if etag and not etag.startswith("W/") else None
        self.validator = strong or headers.get("Last-Modified")
        self.source = sha256
        with open(self.path, "ab") as file:
            file.truncate(have)
        self._note.write_text(json.dumps({"sha256": sha256, "validator": self.validator}))

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)


def forget(part: Path) -> None:
    """Remove a part and its note."""
    _Part(part).discard()
