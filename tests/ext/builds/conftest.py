"""A registry of npm packages on this machine."""

from __future__ import annotations

import base64
import hashlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.ext.builds import package as packages
from perdure.ext.builds.package import Package
from serving import Page, Site, npm_archive, put_npm, site

# Random bytes: an archive of some size, so that it can be cut in the middle.
LIBRARY = random.Random(3).randbytes(1_000_000)
FILES = {
    "LICENSE": b"MIT License",
    "package.json": b"{}",
    "dist/index.js": b"run me",
    "bins/here/libllama.v0.5.0.so": LIBRARY,
    "bins/here/libggml-base.so": b"base",
    "bins/here/llama-addon.node": b"of Node.js alone",
}
KEPT = ["LICENSE", "libggml-base.so", "libllama.v0.5.0.so"]


def package_of(data: bytes, name: str = "@test/here", backend: str = "cpu") -> Package:
    """The package whose archive this is, for the machine that runs the tests."""
    real = packages.package_for()
    return Package(
        name=name,
        version="1.2.3",
        system=real.system,
        cpu=real.cpu,
        backend=backend,
        llama="v0.5.0",
        size=len(data),
        unpacked=2_000_000,
        sha512=base64.b64encode(hashlib.sha512(data).digest()).decode(),
    )


@dataclass(frozen=True)
class Registry:
    site: Site
    package: Package
    page: Page
    engines: Path


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """One package on a registry that npm's settings name, known to perdure. No npm is on the PATH."""
    data = npm_archive(FILES)
    package = package_of(data)
    monkeypatch.setattr(packages, "PACKAGES", (package,))
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PERDURE_LLAMA", raising=False)
    with site() as up:
        path = put_npm(up, package.name, package.version, data)
        (tmp_path / "npmrc").write_text(f"registry={up.url}\n")
        monkeypatch.setenv("npm_config_userconfig", str(tmp_path / "npmrc"))
        monkeypatch.setenv("npm_config_globalconfig", os.devnull)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("PATH", "/nowhere")
        yield Registry(up, package, up.pages[path], tmp_path / "home" / "engines")


def everything(engines: Path) -> list[str]:
    """What is in the folder of libraries, locks aside."""
    return sorted(
        path.relative_to(engines).as_posix()
        for path in engines.rglob("*")
        if path.is_file() and path.parent.name not in (".locks", ".parts")
    )


def clean_environment(**more: str) -> dict[str, str]:
    return {**os.environ, **more}
