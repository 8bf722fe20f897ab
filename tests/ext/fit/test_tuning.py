"""Tuning: what is fastest is remembered by model and machine, and used where nobody chose otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import pytest
from typer.testing import CliRunner

import perdure
from perdure import InvalidInputError, Model, system
from perdure.backend import LocalBackend
from perdure.cli.app import app
from perdure.engine import advice
from perdure.engine.contract import LoadingKeywords
from perdure.engine.llama.engine import LlamaEngine
from perdure.engine_config import EngineConfig
from perdure.ext.fit import tuning
from perdure.ext.fit.tuning import Tuning, place, recall, recall_place, remember, tune, tuned

ENGINE = LlamaEngine()
CONFIG = EngineConfig(threads=1, n_batch=32, kv_type="f16")
FOUND = Tuning(config=CONFIG, prompt=100.0, reply=10.0)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuning, "remembered", lambda: tmp_path / "tuning.json")
    monkeypatch.setattr(advice, "remembered", lambda: tmp_path / "tuning.json")
    return tmp_path / "tuning.json"


def test_what_is_fastest_is_taken_and_remembered(
    zoo_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By made-up speeds: half of the cores are best for replies, and steps of 128 tokens for prompts."""

    def speeds(model: Model, context: dict[str, Any]) -> tuple[float, float]:
        assert set(context) <= {"threads", "n_batch"}
        return {8: 10.0, 4: 20.0}.get(context["threads"], 5.0), {128: 200.0}.get(
            context.get("n_batch", 0), 50.0
        )

    monkeypatch.setattr(tuning, "_speeds", speeds)
    monkeypatch.setattr(system, "usable_cores", lambda: 8)
    monkeypatch.setattr("perdure.ext.fit.kv_loss.speed", lambda model, k_type, *_, **__: 10.0)
    trials: list[str] = []
    with Model(zoo_path("llama"), gpu_layers=0) as model:
        found = tune(model, progress=lambda trial: trials.append(trial.what))
        config = EngineConfig(threads=4, n_batch=128, kv_type="f16")
        assert found == Tuning(config=config, prompt=200.0, reply=20.0)
        assert recall(model) == found
        tuning.forget(model)
        assert recall(model) is None
    assert trials[:4] == ["8 threads", "4 threads", "2 threads", "1 threads"]


def test_it_measures_for_real(zoo_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "usable_cores", lambda: 1)
    with Model(zoo_path("llama"), gpu_layers=0) as model:
        found = tune(model, seconds=0.001)
        assert found.config == EngineConfig(threads=1, n_batch=512, kv_type="f16")
        assert found.reply > 0
        assert found.prompt > 0
        for wrong in (0, -1, float("nan")):
            with pytest.raises(InvalidInputError):
                tune(model, seconds=wrong)


def test_it_is_used_unless_somebody_chose(zoo_path: Callable[[str], Path]) -> None:
    def opened(**settings: Any) -> tuple[int, int, str]:
        with perdure.open(zoo_path("llama"), n_ctx=64, slots=1, gpu_layers=0, **settings) as rt:
            backend = rt.backend
            assert isinstance(backend, LocalBackend)
            context = backend.context
            return context.capabilities.threads, context.n_batch, context.identity.k_type

    with Model(zoo_path("llama"), gpu_layers=0) as model:
        remember(model, FOUND)
        chosen = EngineConfig(k_type="f32")
        assert tuned(model, chosen) == EngineConfig(threads=1, n_batch=32, k_type="f32")
    assert opened() == (1, 32, "f16")
    assert opened(threads=2, n_batch=16) == (2, 16, "f16")


def test_it_is_of_one_model_and_one_machine(
    zoo_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Model(zoo_path("llama"), gpu_layers=0) as model, Model(zoo_path("qwen3"), gpu_layers=0) as other:
        remember(model, FOUND)
        assert recall(model) == FOUND
        assert recall(other) is None
        monkeypatch.setattr(system, "usable_cores", lambda: 99)
        assert recall(model) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}'])
def test_a_damaged_file_is_no_tuning(text: str, zoo_path: Callable[[str], Path], file: Path) -> None:
    file.write_text(text)
    with Model(zoo_path("llama"), gpu_layers=0) as model:
        assert recall(model) is None


def test_the_command_says_what_it_found(zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "perdure.cli",
        "tune",
        str(zoo_path("llama")),
        "--seconds",
        "1",
        "--forget",
    ]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Forgotten" in done.stderr


def test_a_busy_machine_is_not_tuned_unless_that_is_said(
    zoo_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is fastest beside another program would be remembered for good."""
    monkeypatch.setattr(system, "busy_cores_now", lambda seconds: 1.25)
    asked = ["tune", str(zoo_path("llama")), "--seconds", "1"]
    refused = CliRunner().invoke(app, asked)
    assert "other programs use 1.2 of" in str(refused.exception)
    assert CliRunner().invoke(app, [*asked, "--anyway"]).exit_code == 0
    monkeypatch.setattr(system, "busy_cores_now", lambda seconds: 0.1)
    assert CliRunner().invoke(app, asked).exit_code == 0


class Placed:
    """A made-up model on a made-up GPU."""

    digest = "d" * 64

    def __init__(self, loading: LoadingKeywords, experts: int) -> None:
        self.gpu_layers = 0 if loading.get("gpu_layers") == 0 else 4
        self.experts_on_gpu = bool(experts and self.gpu_layers and loading.get("cpu_experts") != "all")
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("experts", "gpu", "spread", "cpu", "best"),
    [
        (1, 10.0, 20.0, 5.0, {"cpu_experts": "all"}),
        (1, 10.0, 10.2, 5.0, {}),
        (1, 10.0, 20.0, 30.0, {"gpu_layers": 0}),
        (0, 10.0, 20.0, 5.0, {}),
    ],
)
def test_the_fastest_placement_is_remembered_and_no_model_stays_loaded(
    monkeypatch: pytest.MonkeyPatch, experts: int, gpu: float, spread: float, cpu: float, best: dict[str, Any]
) -> None:
    loaded: list[Placed] = []

    def load(loading: LoadingKeywords) -> Any:
        assert all(model.closed for model in loaded), "two models in memory at once"
        loaded.append(Placed(loading, experts))
        return loaded[-1]

    def speeds(model: Any, context: dict[str, Any]) -> tuple[float, float]:
        return (cpu if not model.gpu_layers else gpu if model.experts_on_gpu or not experts else spread), 1.0

    monkeypatch.setattr(tuning, "_speeds", speeds)
    assert place(load) == best
    assert loaded[-1].closed
    assert recall_place(lambda: Placed.digest) == best
    assert recall_place(lambda: "another") == {}


def test_a_machine_without_a_gpu_has_one_place_and_reads_no_file_for_it(
    zoo_path: Callable[[str], Path],
) -> None:
    assert place(lambda _: Model(zoo_path("llama"), gpu_layers=0)) == {}
    assert recall_place(lambda: pytest.fail("nothing was tuned, so no digest is needed")) == {}


def test_a_model_opens_where_it_was_placed_unless_somebody_chose(
    zoo_path: Callable[[str], Path], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = zoo_path("qwen3moe")
    with Model(path, gpu_layers=0) as model:
        tuning._write(tuning._place_key(model.digest), {"cpu_experts": "all"})
        layers = len(model.sizes.layers)

    def experts_here(**chosen: Unpack[LoadingKeywords]) -> int:
        model = ENGINE.open(str(path), cells=64, **chosen)
        assert isinstance(model, Model)
        with model:
            return model.cpu_experts

    assert experts_here() == layers
    assert experts_here(cpu_experts=0) == 0
    file.write_text(file.read_text().replace('"all"', '"../../x"'))
    assert experts_here() == 0
