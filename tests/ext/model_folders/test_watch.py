"""A server whose folder of models changes while it runs."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from perdure.backend import BlockStorage
from perdure.engine_config import EngineConfig
from perdure.events.background import FAILURES
from perdure.ext.model_folders.watch import FolderWatch
from perdure.server.pool import ModelPool, read_selection
from server.live_server import PATIENCE, LiveServer, hello, live_server
from server.test_command import serving
from server.test_pool import SWIFT

CHAT = "/v1/chat/completions"
ZooPath = Callable[[str], Path]


@pytest.fixture
def folder(zoo_path: ZooPath, tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(zoo_path("llama"), folder / "a.gguf")
    return folder


@contextmanager
def watched(folder: Path, store: Path) -> Iterator[tuple[LiveServer, FolderWatch, httpx.Client]]:
    """A server of the folder, and its watch, which looks when the test says so."""
    config = EngineConfig(n_ctx=512, slots=2, threads=1)
    selection = read_selection([str(folder)])
    storage = BlockStorage(folder=store)
    with closing(ModelPool.open(selection.models, config, storage=storage, restart_policy=SWIFT)) as pool:
        first = pool.default
        with (
            live_server(first.runtime, name=first.name, pool=pool) as server,
            server.client() as client,
        ):
            yield server, FolderWatch(server.state, selection.folders), client


def names(client: httpx.Client) -> list[str]:
    return [each["id"] for each in client.get("/v1/models").json()["data"]]


def test_files_that_come_and_go_are_models_that_come_and_go(
    folder: Path, zoo_path: ZooPath, tmp_path: Path
) -> None:
    with watched(folder, tmp_path / "store") as (_, watch, client):
        assert names(client) == ["a"]
        whole = zoo_path("gemma3").read_bytes()
        (folder / "deep").mkdir()
        new = folder / "deep" / "b.gguf"
        for part in (whole[:5000], whole[:9000]):
            new.write_bytes(part)
            watch.look()
            assert names(client) == ["a"], "it grows: somebody still writes it"
        new.write_bytes(whole)
        watch.look()
        watch.look()
        assert names(client) == ["a", "b"]
        said = {"message": "hello", "max_tokens": 4, "temperature": 0}
        client.post("/v1/sessions", json={"name": "s"})
        first = client.post("/v1/sessions/s/turns?model=b", json=said).json()
        assert first["perdure"]["kept"] is True
        new.unlink()
        while "b" in names(client):
            watch.look()
        gone = client.post(CHAT, json=hello(model="b"))
        assert gone.status_code == 404
        assert "'b' not found" in gone.json()["error"]["message"]
        assert client.post(CHAT, json=hello(model="a")).status_code == 200
        # What was said with it is there, and its state too.
        new.write_bytes(whole)
        watch.look()
        watch.look()
        again = client.post("/v1/sessions/s/turns?model=b", json=said).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_what_is_wrong_with_a_file_is_told_once_and_costs_the_others_nothing(
    folder: Path, zoo_path: ZooPath, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "perdure.pool"),
        watched(folder, tmp_path / "store") as (_, watch, client),
    ):
        (folder / "damaged.gguf").write_bytes(zoo_path("gemma3").read_bytes()[:5000])
        shutil.copy(folder / "a.gguf", folder / "copy.gguf")
        (folder / "no model.txt").write_text("words")
        shutil.copy(zoo_path("gemma3"), folder / "b.gguf")
        for _ in range(4):
            watch.look()
        assert names(client) == ["a", "b"]
        told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert sum("damaged.gguf is left out: " in each for each in told) == 1
        assert sum("copy.gguf is left out: it is a copy of" in each for each in told) == 1
        assert len(told) == 2
        # The same file, whole.
        shutil.copy(zoo_path("mamba"), folder / "damaged.gguf")
        for _ in range(2):
            watch.look()
        assert names(client) == ["a", "b", "damaged"]
        assert client.post(CHAT, json=hello(model="damaged")).status_code == 200


def test_a_model_that_is_used_goes_when_its_last_request_is_answered(
    folder: Path, zoo_path: ZooPath, tmp_path: Path
) -> None:
    shutil.copy(zoo_path("gemma3"), folder / "b.gguf")
    with watched(folder, tmp_path / "store") as (server, watch, client):
        body = hello(model="b", max_tokens=200, ignore_eos=True, stream=True)
        with client.stream("POST", CHAT, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.replace(folder / "b.gguf", tmp_path / "elsewhere.gguf")
            watch.look()
            with server.client() as other:
                assert names(other) == ["a", "b"]
            assert "data: [DONE]" in list(lines)
        while "b" in names(client):
            watch.look()
        # The one that is meant where nobody names one stays, loaded as it is.
        assert client.post(CHAT, json=hello()).status_code == 200
        (folder / "a.gguf").unlink()
        watch.look()
        assert names(client) == ["a"]
        assert client.post(CHAT, json=hello()).status_code == 200


def test_the_command_watches_a_folder(folder: Path, zoo_path: ZooPath, tmp_path: Path) -> None:
    with (
        serving(zoo_path("jamba"), "--model", str(folder), "--store", str(tmp_path / "store")) as running,
        running.client() as client,
    ):
        assert names(client)[1:] == ["a"]
        # As `perdure pull` does it: a whole file gets its name at once.
        shutil.copy(zoo_path("gemma3"), tmp_path / "fetched")
        os.replace(tmp_path / "fetched", folder / "fetched.gguf")
        assert running.process.stderr is not None
        assert any("model fetched is served from now on" in line for line in running.process.stderr)
        assert client.post(CHAT, json=hello(model="fetched")).status_code == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_look_that_fails_is_told_and_followed_by_the_next(
    folder: Path, zoo_path: ZooPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FolderWatch, "EVERY", 0.01)
    failed = FAILURES["perdure-folders"]
    looked = threading.Event()

    def look(watch: FolderWatch) -> None:
        if FAILURES["perdure-folders"] == failed:
            raise SystemExit("planted")
        looked.set()

    monkeypatch.setattr(FolderWatch, "look", look)
    with watched(folder, tmp_path / "store") as (_, watch, _), watch:
        assert looked.wait(PATIENCE), "the thread is gone"
    assert FAILURES["perdure-folders"] == failed + 1
