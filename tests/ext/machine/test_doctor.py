"""`perdure doctor`, run as people run it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from server.test_command import run


def test_the_doctor_looks_at_everything(zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    done = run("doctor", "--json", "--model", str(zoo_path("llama")), "--store", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    # Engines that were installed besides tell of themselves.
    assert set(found) - {"device", "MLX"} == {
        "engine",
        "extensions",
        "features",
        "gpu",
        "threads",
        "memory",
        "disk",
        "store",
    }
    assert "llama.cpp" in found["engine"]["found"]
    assert re.search(r"[\d,]+ MiB/s", found["disk"]["found"])
    assert all(finding["advice"] for finding in found.values() if finding["state"] != "ok")


def test_the_doctor_finds_a_damaged_store(zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    import perdure

    with perdure.open(zoo_path("llama"), n_ctx=256, threads=1, store=tmp_path) as rt:
        rt.cache.warm("a text that is long enough to fill a block or two of state, in any case " * 2)
    for file in (tmp_path / "blocks").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-8])
    done = run("doctor", "--model", str(zoo_path("llama")), "--store", str(tmp_path))
    assert re.search(r"^warn +store .*damaged", done.stdout, re.MULTILINE), done.stdout
    assert "perdure cache verify" in done.stdout


def test_the_doctor_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    monkeypatch.delenv("PERDURE_MODEL", raising=False)
    done = run("doctor")
    assert done.returncode == 0
    assert "not here yet" in done.stdout
    assert not (tmp_path / "models").exists()
    assert not (tmp_path / "engines").exists()


def test_doctor_says_of_a_store_without_blocks_just_that(tmp_path: Path) -> None:
    """Sessions may be kept there all the same."""
    from perdure.ext.machine.doctor import _store

    (tmp_path / "sessions.sqlite").touch()
    [found] = _store(tmp_path)
    assert (found.state, found.found) == ("ok", f"no blocks are kept at {tmp_path} yet")
