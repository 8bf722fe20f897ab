"""Bytes from a URL into a file, over as many connections as it takes."""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import re
import shutil
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import certifi
from filelock import FileLock

from perdure import FetchError
from perdure.spi.base import atomic_write as write_atomically
from perdure.spi.base import read_text, system
from perdure.spi.models import Progress

if TYPE_CHECKING:
    # A tenth of a second of every command, of which few fetch anything.
    import httpx


@contextmanager
def atomic_write(target: Path) -> Iterator[BinaryIO]:
    """Write to a temporary file that becomes `target`, on disk for good, when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with write_atomically(target) as file:
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


_MOST_FAILURES = 4
_FIRST_PAUSE = 0.2
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_RANGE = re.compile(r"bytes (?:(?P<first>\d+)-\d+|\*)/(?P<total>\d+|\*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A file somewhere else. Its digest, where it is known, decides whether what came is right."""

    url: str
    sha256: str | None = None
    sha512: str | None = None
    size: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def shown(self) -> str:
        """The address without what may be secret in it."""
        import httpx

        url = httpx.URL(self.url)
        return f"{url.scheme}://{url.host}{f':{url.port}' if url.port else ''}{url.path}"


def trust(*extra: Path, pem: str = "") -> ssl.SSLContext:
    """Trust what this system trusts (`SSL_CERT_FILE` included), certifi's list, files or folders of `extra`
    certificates, and those of a text."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    for path in extra:
        try:
            context.load_verify_locations(**{"capath" if path.is_dir() else "cafile": str(path)})
        except OSError as error:
            raise FetchError(f"the certificates at {path} cannot be used: {error}") from error
    if pem:
        try:
            context.load_verify_locations(cadata=pem)
        except (ssl.SSLError, ValueError) as error:
            raise FetchError(f"the certificates in npm's `ca` cannot be used: {error}") from error
    return context


def web(
    *,
    verify: ssl.SSLContext | None = None,
    proxy: str | None = None,
    direct: Sequence[str] = (),
    unverified: Sequence[str] = (),
) -> httpx.Client:
    """A client for long downloads: through a proxy but for the hosts of `direct`, where one is named; and
    with any certificate of the `unverified` hosts, whose files are proved by their digests alone."""
    import httpx

    verified = verify or trust()
    try:
        mounts: dict[str, httpx.BaseTransport | None] = {
            _pattern(host): httpx.HTTPTransport(verify=False, proxy=proxy) for host in unverified
        }
        mounts |= {_pattern(host): httpx.HTTPTransport(verify=verified) for host in direct}
        return httpx.Client(
            verify=verified,
            proxy=proxy,
            mounts=mounts,
            follow_redirects=True,
            timeout=httpx.Timeout(60, connect=20),
        )
    except (ImportError, ValueError) as error:
        raise FetchError(f"the proxy that is set cannot be used: {error}") from error


def _pattern(host: str) -> str:
    """As settings name hosts, `.example.com` is all below it and `example.com` that one too."""
    return "all://" if host == "*" else f"all://*{host.lstrip('*')}"


def digest(path: Path, name: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, name).hexdigest()


def read_page(client: httpx.Client, remote: Remote, limit: int) -> bytes:
    """A small answer as a whole: an index, a list of versions."""
    pieces: list[bytes] = []

    def attempt() -> bool:
        pieces.clear()
        with client.stream("GET", remote.url, headers=dict(remote.headers)) as answer:
            answer.raise_for_status()
            for piece in answer.iter_bytes():
                pieces.append(piece)
                if sum(map(len, pieces)) > limit:
                    raise FetchError(f"{remote.shown} has more than the {limit} bytes that are read of it")
        return True

    _try(remote, attempt)
    return b"".join(pieces)


class RemoteBytes:
    """The first bytes of a remote file, in the order of reading. A server is asked for one stretch
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
        # The old bytes may be of an earlier file at this address; only a fresh copy shows that.
        _Part(part).discard()
        _persist(client, remote, part, progress)
        wrong = _mistake(remote, part)
    if wrong:
        _Part(part).discard()
        raise FetchError(f"what {remote.shown} sent is not the file that was asked for: {wrong}")


def _mistake(remote: Remote, part: Path) -> str | None:
    return mistake(part, remote.size, sha256=remote.sha256, sha512=remote.sha512)


def mistake(path: Path, size: int | None, **digests: str | None) -> str | None:
    """What is wrong with a file that should have this size and these digests."""
    have = path.stat().st_size
    if size is not None and have != size:
        return f"{have} bytes, expected {size}"
    for name, expected in digests.items():
        if expected is not None and not hmac.compare_digest(digest(path, name), expected):
            return f"{name.upper().replace('SHA', 'SHA-')} {digest(path, name)}, expected {expected}"
    return None


def _persist(client: httpx.Client, remote: Remote, path: Path, progress: Progress | None) -> None:
    try:
        _try(remote, lambda: _attempt(client, remote, _Part(path), progress), lambda: _Part(path).length)
    except OSError as error:
        raise FetchError(
            f"{path} could not be written after {_Part(path).length} bytes: {error.strerror or error}"
        ) from error


def _try(remote: Remote, attempt: Callable[[], bool], length: Callable[[], int] = lambda: 0) -> None:
    """Attempt until all bytes are there, as long as attempts get further."""
    import httpx

    failures = 0
    furthest = 0
    while True:
        try:
            if attempt():
                return
            continue
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            refusal = (
                f"answered {_status(error.response)}" if isinstance(error, httpx.HTTPStatusError) else ""
            )
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in _TRANSIENT:
                raise FetchError(f"{remote.shown} {refusal}") from error
            reached = length()
            failures = 0 if reached > furthest else failures + 1
            furthest = max(furthest, reached)
            if failures >= _MOST_FAILURES:
                reason = refusal or f"could not be reached or read ({str(error) or type(error).__name__})"
                kept = (
                    f", with {reached} bytes here. They are kept: try again to go on from there"
                    if reached
                    else ""
                )
                way = "" if refusal or reached else f". {unreachable(error)}"
                raise FetchError(f"{remote.shown} {reason} {failures} times{kept}{way}") from error
        except httpx.HTTPError as error:
            raise FetchError(f"{remote.shown} could not be fetched: {error}") from error
        if failures:
            time.sleep(_FIRST_PAUSE * 2 ** (failures - 1))


def unreachable(error: BaseException) -> str:
    """What to look at where a server was not reached."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "Behind a company's proxy, name the file of its certificates in SSL_CERT_FILE"
    return "No network? Behind a proxy, name it in HTTPS_PROXY"


def _status(response: httpx.Response) -> str:
    return f"{response.status_code} {response.reason_phrase}".strip()


def _attempt(client: httpx.Client, remote: Remote, part: _Part, progress: Progress | None) -> bool:
    """One request. True when the part is complete, False when it must be started again."""
    import httpx

    have = part.length
    headers = dict(remote.headers) | {"Accept-Encoding": "identity"}
    if have and part.source != (remote.sha512 or remote.sha256):
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
                # Counted as a failure: a server that answers so may do it every time.
                part.discard()
                raise httpx.RemoteProtocolError(f"a part came, and not the one from byte {have} on")
        else:
            have = 0
            length = response.headers.get("Content-Length")
            total = int(length) if length and length.isdecimal() else None
        part.begin(have, remote.sha512 or remote.sha256, response.headers)
        with open(part.path, "ab", buffering=0) as file:
            if progress:
                progress(have, total)
            # In the sizes they come in: collecting larger ones would lose the rest at a cut.
            for chunk in response.iter_raw():
                file.write(chunk)
                have += len(chunk)
                if remote.size is not None and have > remote.size:
                    # More than was announced: the rest could fill the disk.
                    return True
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
            note = json.loads(read_text(self._note))
        except (OSError, ValueError):
            note = {}
        if not isinstance(note, dict):
            note = {}
        self.source: object = note.get("digest")
        validator = note.get("validator")
        self.validator = validator if isinstance(validator, str) else None

    @property
    def length(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def begin(self, have: int, digest: str | None, headers: httpx.Headers) -> None:
        """Note what follows, and drop all but the first `have` bytes."""
        etag = headers.get("ETag")
        # A weak tag does not promise equal bytes, so it cannot vouch for a range.
        strong = etag if etag and not etag.startswith("W/") else None
        self.validator = strong or headers.get("Last-Modified")
        self.source = digest
        with open(self.path, "ab") as file:
            file.truncate(have)
        self._note.write_text(json.dumps({"digest": digest, "validator": self.validator}))

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)


def forget(part: Path) -> None:
    """Remove a part and its note."""
    _Part(part).discard()
