"""What pip knows: where a package is, and how this machine's user wants it fetched."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from perdure import system
from perdure.errors import FetchError
from perdure.models.download import Remote


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
        said = [line for line in lines if line.startswith("ERROR")] or lines
        raise FetchError(
            f"pip could not {doing}: {said[-1] if said else f'exit code {done.returncode}'}. "
            "Check the network and `pip config list`, or pass the path of a .gguf file"
        )
    return done.stdout
