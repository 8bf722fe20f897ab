"""The archive of a package: verified as a whole, then unpacked without trust."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from perdure import LibraryFetchError, TooLargeError
from perdure.ext.builds.package import Package
from perdure.ext.fetching.download import mistake
from perdure.ext.fetching.wheel import open_tar
from perdure.spi.base import system

_CHUNK = 1 << 20
_MOST_FILES = 200
_BESIDE = 64 << 20
"""Bytes of an archive beside the files that are kept: others, and what tar says of each."""
_BINARIES = "bins"
"""Where the packages keep their libraries."""
_LICENCES = ("LICENSE", "LICENCE", "NOTICE")
_SUFFIXES = (".so", ".dylib", ".dll", ".metal", ".metallib")


def verify(archive: Path, package: Package) -> None:
    """Refuse an archive that is not, byte for byte, the one whose digest stands in our source."""
    wrong = mistake(archive, package.size, sha512=package.digest)
    if wrong:
        raise LibraryFetchError(
            f"{archive} is not the pinned archive of {package}: {wrong}. Nothing of it was unpacked"
        )


def unpack(archive: Path, package: Package, folder: Path) -> dict[str, str]:
    """Put the libraries and licences of an archive into `folder`, flat and on the disk for good.

    Returns the SHA-256 of each file by its name. Only plain files are taken, none over a limit; anything
    that would lead out of `folder` is refused.
    """
    digests: dict[str, str] = {}
    left = package.unpacked
    try:
        with open_tar(archive, left + _BESIDE) as tar:
            for member in _plain(tar, package):
                name = PurePosixPath(member.name).name
                if name in digests:
                    raise _refused(package, f"{name} is in it twice")
                left -= member.size
                if left < 0:
                    raise _refused(package, f"its files take more than {package.unpacked} bytes")
                digests[name] = _write(tar, member, folder / name)
    except TooLargeError as error:
        raise _refused(package, str(error)) from error
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError) as error:
        raise _refused(package, f"it cannot be read ({error})") from error
    if not any(name.endswith(_SUFFIXES) for name in digests):
        raise _refused(package, "there is no library in it")
    return digests


def is_library(name: str) -> bool:
    """Whether a file is one that llama.cpp loads: a shared library, also with a version behind it."""
    return any(name.endswith(suffix) or f"{suffix}." in name for suffix in _SUFFIXES)


def is_licence(name: str) -> bool:
    return name.split(".")[0].upper() in _LICENCES


def _plain(tar: tarfile.TarFile, package: Package) -> Iterator[tarfile.TarInfo]:
    """The members to take. One that is not a plain file inside of the archive's folder refuses them all."""
    for count, member in enumerate(tar):
        if count >= _MOST_FILES:
            raise _refused(package, f"it has more than {_MOST_FILES} members")
        path = PurePosixPath(member.name)
        # A name like `C:x` or `a\\b` means something else on Windows.
        if path.is_absolute() or ".." in path.parts or set(member.name) & set("\\:\0"):
            raise _refused(package, f"{member.name!r} leads out of it")
        if member.isdir():
            continue
        # A sparse member says any size and has few bytes.
        if not member.isreg() or member.issparse():
            raise _refused(package, f"{member.name!r} is not a plain file")
        inside = path.parts[1:]
        if (inside[:1] == (_BINARIES,) and is_library(path.name)) or (
            len(inside) == 1 and is_licence(path.name)
        ):
            yield member


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> str:
    source = tar.extractfile(member)
    assert source is not None, "plain files have bytes"
    digest = hashlib.sha256()
    with source, target.open("xb") as file:
        left = member.size
        while left:
            chunk = source.read(min(_CHUNK, left))
            if not chunk:
                raise EOFError(f"{member.name} ends early")
            left -= len(chunk)
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        system.sync(file.fileno())
    return digest.hexdigest()


def _refused(package: Package, why: str) -> LibraryFetchError:
    return LibraryFetchError(f"the archive of {package} is refused: {why}. Nothing was installed")
