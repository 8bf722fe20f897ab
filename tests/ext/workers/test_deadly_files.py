"""Class 8: a file that kills the process which loads it is refused from then on, and nothing else is."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import perdure
from ext.workers.engines import QUICK, pid, remote
from ext.workers.unchecked import BUILD
from homes import new_home
from perdure import DeadlyFileError, EngineDiedError, Runtime
from perdure.engine import registry
from perdure.engine_config import EngineConfig
from perdure.ext.workers import deadly_files
from perdure.ext.workers.deadly_files import LoadedTogether, is_crash, remembered
from perdure.server.core.api_error import to_api_error
from perdure.server.pool import ModelPool, ModelSpec, PooledModel

ZooPath = Callable[[str], Path]
ENGINE = "ext.workers.unchecked:ENGINE"
GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home, and llama.cpp without the checks that keep files from it that it aborts over."""
    home = new_home(tmp_path / "home")
    monkeypatch.setenv("PERDURE_HOME", str(home))
    registry.register(ENGINE)
    yield home
    registry.unregister(ENGINE)


@pytest.fixture
def deadly(zoo_path: ZooPath, tmp_path: Path) -> Path:
    """A model that llama.cpp aborts over: its heads are to be rotated in part."""
    data = bytearray(zoo_path("qwen3").read_bytes())
    key = b"qwen3.rope.dimension_count"
    at = data.index(key) + len(key) + 4
    data[at : at + 4] = (16).to_bytes(4, "little")
    path = tmp_path / "deadly.gguf"
    path.write_bytes(data)
    return path


def opened(model: Path, **settings: Any) -> Runtime:
    return perdure.open(model, isolated=QUICK, **{"n_ctx": 256, "slots": 1, "threads": 1, **settings})


def check_kills(model: Path, **settings: Any) -> None:
    """It is loaded, and ends the process."""
    with pytest.raises(EngineDiedError, match="SIGABRT"):
        opened(model, **settings)


def test_a_file_that_kills_its_loader_is_refused_the_second_time(deadly: Path, tmp_path: Path) -> None:
    check_kills(deadly)
    with pytest.raises(DeadlyFileError, match=r"deadly.gguf ended .* SIGABRT .*`perdure engine retry deadly"):
        opened(deadly)
    copy = tmp_path / "copy.gguf"
    shutil.copy(deadly, copy)
    with pytest.raises(DeadlyFileError):
        opened(copy)


@pytest.mark.parametrize("change", ["file", "build", "setting", "forgotten"])
def test_what_has_changed_is_tried_anew(deadly: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    check_kills(deadly)
    settings: dict[str, Any] = {}
    if change == "file":
        data = deadly.read_bytes()
        deadly.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif change == "build":
        monkeypatch.setenv(BUILD, "another")
    elif change == "setting":
        settings["n_ctx"] = 512
    else:
        assert deadly_files.forget("other.gguf") == []
        assert [each.files for each in deadly_files.forget("deadly.gguf")] == [("deadly.gguf",)]
    check_kills(deadly, **settings)
    with pytest.raises(DeadlyFileError):
        opened(deadly, **settings)


def test_a_model_that_kills_at_its_first_step_is_refused(zoo_path: ZooPath, tmp_path: Path) -> None:
    """The request that met it ends with the same words, and the next one starts no process."""
    path = tmp_path / "dies-at-any-step.gguf"
    shutil.copy(zoo_path("llama"), path)
    with opened(path) as rt:
        for _ in range(2):
            with pytest.raises(DeadlyFileError, match="dies-at-any-step"):
                rt.generate("Hello there", **GREEDY)
        assert remote(rt).health().pid is None
    with pytest.raises(DeadlyFileError):
        opened(path)


def test_a_request_that_kills_marks_no_model(zoo_path: ZooPath, tmp_path: Path) -> None:
    """Also where it is the first one: a step of the engine's own shows that the model computes."""
    path = tmp_path / "dies-at-long-steps.gguf"
    shutil.copy(zoo_path("llama"), path)
    with opened(path) as rt:
        with pytest.raises(EngineDiedError, match="in 2 tries"):
            rt.generate([5] * 20, **GREEDY)
        assert rt.generate([5] * 2, **GREEDY).tokens
    assert not remembered()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_kill_of_a_healthy_engine_marks_no_model(zoo_path: ZooPath, name: str) -> None:
    """Memory that ran out and an operator's kill, again and again, before anything was computed; and a crash
    behind what was."""
    with opened(zoo_path("llama")) as rt:
        if name == "SIGSEGV":
            rt.generate("Hello", **GREEDY)
        for _ in range(3):
            os.kill(pid(rt), signal.Signals[name])
        assert rt.generate("Hello", **GREEDY).tokens
    assert not remembered()


def test_a_lack_of_memory_is_no_crash_of_the_file() -> None:
    assert is_crash("SIGSEGV", "")
    assert is_crash("SIGABRT", "GGML_ASSERT(n_embd_head == n_rot) failed")
    assert not is_crash("SIGKILL", "")
    assert not is_crash(None, "")
    for words in ("CUDA error: out of memory", "what():  std::bad_alloc", "failed to allocate buffer"):
        assert not is_crash("SIGABRT", words)


def test_a_model_is_not_marked_by_the_adapter_that_was_loaded_with_it(tmp_path: Path) -> None:
    model, adapter = tmp_path / "model.gguf", tmp_path / "adapter.gguf"
    model.write_bytes(b"a model")
    adapter.write_bytes(b"an adapter")
    both = LoadedTogether((model, adapter), build=str)
    both.check()
    both.remember("SIGSEGV")
    LoadedTogether((model,), build=str).check()
    with pytest.raises(DeadlyFileError, match=r"model.gguf \(with adapter.gguf\) ended"):
        LoadedTogether((model, adapter), build=str).check()


def test_no_other_model_makes_room_for_one_that_is_refused(zoo_path: ZooPath, deadly: Path) -> None:
    """Its requests are refused with what helps, and cost the other model nothing."""
    specs = [
        ModelSpec(name=name, source=str(path), config=EngineConfig(n_ctx=256, slots=1), memory=2 << 20)
        for name, path in (("good", zoo_path("llama")), ("bad", deadly))
    ]
    with closing(ModelPool.open(specs, memory=3 << 20, restart_policy=QUICK)) as pool:
        good, bad = pool.models["good"], pool.models["bad"]

        async def ask(model: PooledModel) -> None:
            await pool.acquire(model)
            pool.release(model)

        with pytest.raises(EngineDiedError):
            asyncio.run(ask(bad))
        asyncio.run(ask(good))
        for _ in range(3):
            with pytest.raises(DeadlyFileError) as refused:
                asyncio.run(ask(bad))
        assert (good.loads, good.is_ready) == (1, True)
    error = to_api_error(refused.value)
    assert (error.status, error.code) == (500, "model_unusable")
    assert "perdure engine retry deadly.gguf" in str(error)
