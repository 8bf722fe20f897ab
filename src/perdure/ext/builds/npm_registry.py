"""Archives from the registry that npm's settings name. npm and Node need not be here, and are not run.

registry=https://npm.example.com/mirror/             or npm_config_registry in the environment
@node-llama-cpp:registry=https://other.example.com/
//npm.example.com/mirror/:_authToken=${NPM_TOKEN}
proxy, https-proxy, noproxy, cafile, ca, strict-ssl  as npm has them
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from perdure import FetchError, LibraryFetchError
from perdure.ext.builds.package import WAYS, Package
from perdure.ext.fetching.download import Remote, download, read_page, trust, web
from perdure.spi.base import processes, read_text
from perdure.spi.models import Progress

if TYPE_CHECKING:
    import httpx

_PUBLIC = "https://registry.npmjs.org"
_LISTING_BYTES = 64 << 20
_ABBREVIATED = "application/vnd.npm.install-v1+json; q=1.0, application/json; q=0.8"
_NOTHING = ("", "null", "false", "undefined")


@dataclass(frozen=True, slots=True)
class NpmSettings:
    """A user's settings of npm, by their names."""

    values: Mapping[str, str]

    def registry(self, package: str) -> str:
        """The address of the registry that has a package: the one of its scope, if there is one."""
        scope = package.partition("/")[0]
        url = self._value(f"{scope}:registry") or self._value("registry") or _PUBLIC
        return url.rstrip("/")

    def login(self, url: str, registry: str) -> dict[str, str]:
        """The header for an address: the credentials of the longest path above it, or of its registry where
        that is the same host."""
        for address in (url, f"{registry}/"):
            parts = urlsplit(address)
            if parts.netloc != urlsplit(url).netloc:
                continue
            place = f"//{parts.netloc}{parts.path}"
            while len(place) > len("//"):
                if header := self._header(place):
                    return {"Authorization": header}
                place = re.sub(r"(?:[^/]+|/)$", "", place)
        return {}

    def _header(self, place: str) -> str:
        values = {
            name: self._value(f"{place}:{name}") for name in ("_authToken", "_auth", "username", "_password")
        }
        if values["_authToken"]:
            return f"Bearer {values['_authToken']}"
        if values["username"] and values["_password"]:
            word = base64.b64decode(values["_password"])
            return f"Basic {base64.b64encode(values['username'].encode() + b':' + word).decode()}"
        return f"Basic {values['_auth']}" if values["_auth"] else ""

    def client(self) -> httpx.Client:
        """A client that goes where these settings say."""
        files = [self._value("cafile"), os.environ.get("NODE_EXTRA_CA_CERTS", "")]
        verify = trust(*(Path(file).expanduser() for file in files if file), pem=self._value("ca"))
        strict = self.values.get("strict-ssl", "true") != "false"
        return web(
            verify=verify,
            proxy=self._value("https-proxy") or self._value("proxy") or None,
            direct=[host.strip() for host in self._value("noproxy").split(",") if host.strip()],
            unverified=() if strict else ("*",),
        )

    def _value(self, name: str) -> str:
        value = self.values.get(name, "")
        return "" if value in _NOTHING else value


def npm_settings() -> NpmSettings:
    """npm's settings: those of all users, those of this one, and the environment, which counts most."""
    own = dict(_of_environment())
    prefix = Path(own.get("prefix") or processes.npm_prefix())
    values: dict[str, str] = {}
    for file in (own.get("globalconfig") or prefix / "etc" / "npmrc", own.get("userconfig") or "~/.npmrc"):
        path = Path(file).expanduser()
        try:
            values |= _read(read_text(path, regular=False))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            raise LibraryFetchError(f"npm's settings at {path} cannot be read: {error}") from error
    return NpmSettings(values | own)


def _of_environment() -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        if name.lower().startswith("npm_config_") and value:
            key = name[len("npm_config_") :]
            yield key if key.startswith("//") else key[:1].lower() + key[1:].lower().replace("_", "-"), value


def _read(text: str) -> dict[str, str]:
    """The lines of an .npmrc; those of a list are one value, with a line each."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = (_expanded(part.strip()) for part in line.partition("="))
        if not equals or key[:1] in ("", ";", "#"):
            continue
        if value[:1] == value[-1:] == '"':
            value = json.loads(value, strict=False)
        else:
            value = re.split(r"(?<!\\)[;#]", value)[0].strip().strip("'")
        values[key] = f"{values.get(key.removesuffix('[]'), '')}\n{value}" if key.endswith("[]") else value
        if key.endswith("[]"):
            values[key.removesuffix("[]")] = values.pop(key)
    return values


def _expanded(text: str) -> str:
    """`${NAME}` stands for a variable of the environment, if there is such a one."""
    return re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), text)


def fetch_archive(package: Package, target: Path, progress: Progress | None = None) -> None:
    """Have the archive of a package in `target`, verified. What is there of an earlier try is kept."""
    settings = npm_settings()
    try:
        with settings.client() as client:
            download(client, _locate(package, settings, client), target, progress)
    except FetchError as error:
        raise LibraryFetchError(
            f"{package} could not be fetched: {error}. Check npm's settings (.npmrc, npm_config_*), or {WAYS}"
        ) from error


def _locate(package: Package, settings: NpmSettings, client: httpx.Client) -> Remote:
    """Where the registry says that the archive is."""
    registry = settings.registry(package.name)
    address = f"{registry}/{quote(package.name, safe='@')}"
    about = Remote(url=address, headers={"Accept": _ABBREVIATED, **settings.login(address, registry)})
    try:
        listing = json.loads(read_page(client, about, _LISTING_BYTES))
        url = str(listing["versions"][package.version]["dist"]["tarball"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise FetchError(f"{about.shown} does not list version {package.version}") from None
    if url.startswith(f"{_PUBLIC}/"):
        # A mirror may pass the public list on unchanged, though its users reach only the mirror.
        url = registry + url.removeprefix(_PUBLIC)
    return Remote(
        url=url,
        size=package.size,
        sha512=package.digest,
        headers=settings.login(url, registry),
    )
