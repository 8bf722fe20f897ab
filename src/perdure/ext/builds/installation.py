"""Installing llama.cpp libraries: fetched or copied into a folder of PERDURE_HOME, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from perdure import FetchError, LibraryFetchError
from perdure.ext.builds import package as packages
from perdure.ext.builds.archive import is_library, is_licence, unpack, verify
from perdure.ext.builds.npm_registry import fetch_archive
from perdure.ext.builds.package import Package, package_for
from perdure.ext.builds.runtime import RUNTIMES, remove_runtime
from perdure.ext.fetching.download import check_free_space, fetch_lock, forget
from perdure.spi.base import atomic_write, settings, system
from perdure.spi.libraries import MANIFEST, Installed, damaged, find, installed, read_entry
from perdure.spi.models import Progress

_UNFINISHED = ".new-"
_CHUNK = 1 << 20


def install(backend: str | None = None, progress: Progress | None = None) -> Installed:
    """Fetch the package for this machine and install it. What is here already is not fetched again."""
    package = package_for(backend)
    with _locked() as engines:
        there = read_entry(engines / package.folder)
        if there is not None and there.origin == package.spec and not damaged(there):
            return _preferred(there)
        archives = {
            part: engines / ".parts" / f"{part.backend}-{part.version}.tgz" for part in _parts(package)
        }
        _check_free_space(engines, sum(part.size + part.unpacked for part in archives))
        for part, archive in archives.items():
            fetch_archive(part, archive, progress)
        entry = _install_archives(archives, package, engines)
        for archive in archives.values():
            forget(archive)
        return entry


def install_file(archive: Path) -> Installed:
    """Install a package out of a file that was fetched elsewhere, for machines without a network."""
    size = archive.stat().st_size
    for package in packages.PACKAGES:
        if package.size == size:
            package_for(package.backend)
            verify(archive, package)
            with _locked() as engines:
                return _install_archives({package: archive}, package, engines)
    known = ", ".join(sorted({f"{package} ({package.size} bytes)" for package in packages.PACKAGES}))
    raise LibraryFetchError(f"{archive} has {size} bytes and is none of the packages known here: {known}")


def install_folder(source: Path) -> Installed:
    """Install a copy of the libraries in a folder, such as `build/bin` of a llama.cpp build."""
    files = sorted(entry for entry in _entries(source) if is_library(entry.name) or is_licence(entry.name))
    if not any(is_library(entry.name) and "llama" in entry.name for entry in files):
        raise LibraryFetchError(
            f"{source} has no libllama in it: name the folder with libllama and libggml, such as build/bin"
        )
    with _locked() as engines:
        _check_free_space(engines, sum(entry.stat().st_size for entry in files))
        with _new_folder(engines) as folder:
            digests = {entry.name: _copy(entry, folder / entry.name) for entry in files}
            name = f"own-{hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:12]}"
            entry = Installed(
                name=name,
                backend="own",
                origin=str(source.absolute()),
                version="",
                licence="see its LICENSE" if any(is_licence(name) for name in digests) else "",
                installed=time.time(),
                files=digests,
                folder=engines / name,
            )
            _publish(folder, entry)
        return entry


def remove(name: str) -> Installed:
    """Delete an installed library."""
    with _locked() as engines:
        entry = find(name)
        # Out of sight first: a folder that is half deleted must not be taken for a library.
        gone = engines / f"{_UNFINISHED}{entry.name}-{os.getpid()}"
        os.replace(entry.folder, gone)
        shutil.rmtree(gone, ignore_errors=True)
        for major in RUNTIMES:
            if not any(_needs(each, major) for each in installed()):
                remove_runtime(major)
        return entry


def _needs(entry: Installed, major: int) -> bool:
    """Whether a library was installed from a package that needs NVIDIA's runtime of that release."""
    package = next((each for each in packages.PACKAGES if each.spec == entry.origin), None)
    return package is not None and package.cuda is not None and package.cuda.toolkit[0] == major


def _parts(package: Package) -> list[Package]:
    """The packages whose files make one library."""
    return [package] if package.base is None else [package.base, package]


def _install_archives(archives: Mapping[Package, Path], package: Package, engines: Path) -> Installed:
    """Unpack the archives of a package, and of the one that it is added to, into one folder.

    Where the other one's archive is not given, its files are copied from where it is installed.
    """
    with _new_folder(engines) as folder:
        digests: dict[str, str] = {}
        for part in _parts(package):
            if part in archives:
                digests = _unpack_into(folder, archives[part], part, digests)
            else:
                digests |= _copy_base(engines / part.folder, part, folder)
        entry = Installed(
            name=package.folder,
            backend=package.backend,
            origin=package.spec,
            version=package.llama,
            licence=package.licence,
            installed=time.time(),
            files=digests,
            folder=engines / package.folder,
        )
        _publish(folder, entry)
    return entry


def _unpack_into(folder: Path, archive: Path, part: Package, there: Mapping[str, str]) -> dict[str, str]:
    """`there` and the files of an archive; what both have is the archive's."""
    place = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_UNFINISHED))
    try:
        digests = unpack(archive, part, place)
        for name in digests:
            os.replace(place / name, folder / name)
        return {**there, **digests}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _copy_base(installed: Path, base: Package, folder: Path) -> dict[str, str]:
    entry = read_entry(installed)
    if entry is None or entry.origin != base.spec or damaged(entry):
        raise LibraryFetchError(f"it is an addition to {base}: install that first, from its .tgz")
    return {name: _copy(entry.folder / name, folder / name) for name in entry.files}


def _preferred(entry: Installed) -> Installed:
    """The same, as the last one that was installed."""
    entry = replace(entry, installed=time.time())
    _write_manifest(entry.folder, entry)
    return entry


@contextmanager
def _locked() -> Iterator[Path]:
    """The folder of libraries, for this process alone. What killed processes left in it is gone."""
    engines = settings().engines
    try:
        engines.mkdir(parents=True, exist_ok=True)
        with fetch_lock(engines, "install"):
            for entry in engines.iterdir():
                if entry.name.startswith(_UNFINISHED):
                    shutil.rmtree(entry, ignore_errors=True)
            yield engines
    except OSError as error:
        raise LibraryFetchError(f"{engines} could not be written: {error.strerror or error}") from error


@contextmanager
def _new_folder(engines: Path) -> Iterator[Path]:
    """A folder to fill; unless `_publish` gives it a name, it is gone."""
    folder = Path(tempfile.mkdtemp(dir=engines, prefix=_UNFINISHED))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, entry: Installed) -> None:
    """Give a folder that is complete its name, in the place of what had it."""
    _write_manifest(folder, entry)
    folder.chmod(0o755)
    system.sync_folder(folder)
    if entry.folder.exists():
        old = entry.folder.with_name(f"{_UNFINISHED}{entry.name}-{os.getpid()}")
        os.replace(entry.folder, old)
        os.replace(folder, entry.folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(folder, entry.folder)
    system.sync_folder(entry.folder.parent)


def _write_manifest(folder: Path, entry: Installed) -> None:
    values = asdict(entry)
    del values["folder"]
    with atomic_write(folder / MANIFEST) as file:
        file.write(json.dumps(values, indent=1).encode())


def _copy(source: Path, target: Path) -> str:
    digest = hashlib.sha256()
    with source.open("rb") as file, target.open("xb") as copy:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            copy.write(chunk)
        copy.flush()
        system.sync(copy.fileno())
    return digest.hexdigest()


def _entries(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if entry.is_file()]
    except OSError as error:
        raise LibraryFetchError(f"{folder} cannot be read: {error.strerror or error}") from error


def _check_free_space(engines: Path, needed: int) -> None:
    try:
        check_free_space(engines, needed)
    except FetchError as error:
        raise LibraryFetchError(str(error)) from error
