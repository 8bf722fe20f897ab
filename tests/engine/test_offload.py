"""Layers on a GPU: how many fit, what is said where they do not, and what no machine without one may do."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perdure
from engine.shims import cpu_variants, needs_compiler, shim
from inside import weights_of
from perdure import InvalidInputError, Model, OutOfMemoryError, models
from perdure.backend import LocalBackend
from perdure.config import settings
from perdure.engine.llama import first_steps
from perdure.engine.llama.first_steps import StepTime, _all_on_gpu, translate
from perdure.engine.llama.layer_plan import plan_again, plan_offload, spare_sequences
from perdure.engine.llama.model import _params
from perdure.engine.llama.native import library
from perdure.engine.llama.native.library import Device, list_devices
from perdure.engine.llama.offload import Offload, check_split, choose_devices
from perdure.models.placement import ModelPlacement, Sizes
from perdure.models.ways_to_open import MARGIN

GIB = 1 << 30
SIZES = Sizes(
    layers=(GIB,) * 32,
    experts=(0,) * 32,
    embedding=0,
    output=GIB,
    tied=False,
    cache=((0, 0),) * 32,
    states=(0,) * 32,
    masks=1,
    width=0,
    query=0,
    latent=0,
    recurrent=0,
    heads=1,
    inner=1 << 16,
    experts_used=2,
    expert_inner=1 << 16,
    vocabulary=0,
    trained=4096,
)
EXPERTS = dataclasses.replace(SIZES, layers=(GIB // 4,) * 32, experts=(3 * GIB // 4,) * 32)


def taken(layers: int) -> int:
    return SIZES.device(ModelPlacement(gpu_layers=layers)).total + MARGIN


def device(name: str = "CUDA0", kind: str = "gpu", free: float = 24) -> Device:
    return Device(name=name, description="A card", kind=kind, free=int(free * GIB), total=48 * GIB)


# How many.


def test_m5_all_layers_go_to_a_device_that_holds_them() -> None:
    """M5: what does not fit is said before loading, with what would."""
    plan = plan_offload("auto", [device(free=40)], SIZES, "m.gguf")
    assert (plan.layers, plan.note) == (33, None)


@pytest.mark.parametrize("free", [0.1, 1.4, 1.6, 5, 20, 33.4])
def test_m5_auto_takes_as_many_as_fit_and_says_so_in_one_line(free: float) -> None:
    plan = plan_offload("auto", [device(free=free)], SIZES, "m.gguf")
    assert not plan.layers or taken(plan.layers) <= free * GIB
    assert free * GIB < taken(plan.layers + 1)
    assert plan.note is not None
    assert f"{plan.layers} of 33 layers" in plan.note
    assert "\n" not in plan.note


def test_m5_more_than_fit_is_an_error_that_says_how_many_would() -> None:
    with pytest.raises(OutOfMemoryError, match=r"gpu_layers=19") as caught:
        plan_offload(30, [device(free=20)], SIZES, "m.gguf")
    assert "CUDA0 (20.0 of 48.0 GiB free)" in str(caught.value)
    assert plan_offload(19, [device(free=20)], SIZES, "m.gguf").layers == 19


def test_several_devices_share_the_layers() -> None:
    assert plan_offload("auto", [device(free=20), device("CUDA1", free=20)], SIZES, "m").layers == 33


def test_more_layers_than_there_are_means_all() -> None:
    assert plan_offload(999, [device(free=40)], SIZES, "m.gguf").layers == 33


# Experts.


def test_experts_are_left_out_before_layers_are() -> None:
    plan = plan_offload("auto", [device(free=20)], EXPERTS, "m.gguf")
    assert plan.layers == 33
    assert 0 < plan.cpu_experts < 32
    assert plan.note is not None
    assert f"experts of {plan.cpu_experts} of 32 layers" in plan.note
    roomier = plan_offload("auto", [device(free=21)], EXPERTS, "m.gguf")
    assert roomier.cpu_experts == plan.cpu_experts - 1 or roomier.cpu_experts == plan.cpu_experts - 2


def test_with_all_experts_out_layers_are_what_is_left_to_leave_out() -> None:
    plan = plan_offload("auto", [device(free=5)], EXPERTS, "m.gguf")
    assert plan.cpu_experts == 32
    assert 0 < plan.layers < 33


def test_a_number_of_experts_that_was_chosen_is_kept() -> None:
    assert plan_offload("auto", [device(free=48)], EXPERTS, "m.gguf", cpu_experts=7).cpu_experts == 7
    assert plan_offload("auto", [device(free=48)], EXPERTS, "m.gguf", cpu_experts="all").cpu_experts == 32
    with pytest.raises(OutOfMemoryError):
        plan_offload(33, [device(free=20)], EXPERTS, "m.gguf", cpu_experts=0)


# Which.


def test_gpus_are_chosen_before_what_shares_memory_and_by_name_in_the_order_given() -> None:
    cpu, card, other = device("CPU", "cpu"), device(), device("CUDA1")
    shared = device("Vulkan1", "igpu")
    assert choose_devices([cpu, shared, card, other], None) == (card, other)
    assert choose_devices([cpu, shared], None) == (shared,)
    assert choose_devices([cpu], None) == ()
    assert choose_devices([card, other], ["cuda1", "CUDA0"]) == (other, card)
    with pytest.raises(InvalidInputError, match="no device CUDA7; this library has CUDA0"):
        choose_devices([cpu, card], ["CUDA7"])


def test_a_split_has_a_share_for_each_device() -> None:
    two = [device(), device("CUDA1")]
    assert check_split([3, 1], two) == (3, 1)
    assert check_split(None, two) is None
    for wrong in ([1], [1, 2, 3], [-1, 2], [0, 0], [float("inf"), 1]):
        with pytest.raises(InvalidInputError, match="tensor_split"):
            check_split(wrong, two)


def test_m3_state_names_the_layers_devices_and_shares_that_computed_it(
    zoo_path: Callable[[str], Path],
) -> None:
    """M3: each change is another identity."""
    plans = [Offload(layers=0), Offload(layers=2, devices=(device(),))]
    plans += [Offload(layers=3, devices=(device(),), cpu_experts=2)]
    plans += [Offload(layers=3, devices=(device(),)), Offload(layers=3, devices=(device("CUDA1"),))]
    seen = [
        plan.describe(split, kv_offload)
        for plan in plans
        for kv_offload in (True, False)
        for split in (None, (1.0,))
    ]
    with Model(zoo_path("llama"), gpu_layers=0) as model, model.context(n_ctx=64) as ctx:
        assert ctx.identity.devices.endswith(seen[0])
    # Nothing on a device is one thing, however it was to be split.
    assert len(set(seen)) == 1 + 4 * 4


# Cards that are too small, or busy.

OPEN = """
import sys, logging, perdure
logging.basicConfig(format="%(name)s: %(message)s")
layers = "auto" if sys.argv[2] == "auto" else int(sys.argv[2])
try:
    with perdure.Model(sys.argv[1], gpu_layers=layers, cells=64) as model:
        with model.context(n_ctx=64, threads=1) as context:
            context.decode([40, 41, 42])
        print("layers", model.gpu_layers)
except perdure.OutOfMemoryError as error:
    print("refused:", error)
"""


@pytest.fixture
def pretended(tmp_path: Path, zoo_path: Callable[[str], Path]) -> Callable[..., tuple[str, list[str]]]:
    """`pretended("auto", mib=300)` opens a model where the CPU is called a GPU with so much free memory: what
    was printed, and what was logged."""
    folder = shim(tmp_path / "gpu", PRETENDED_GPU=1)

    def run(wanted: object, **settings: int) -> tuple[str, list[str]]:
        variables = {f"PRETENDED_{name.upper()}": str(value) for name, value in settings.items()}
        ended = subprocess.run(
            [sys.executable, "-c", OPEN, str(zoo_path("llama")), str(wanted)],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ
            | {"PERDURE_LLAMA": str(folder), "PERDURE_HOME": str(tmp_path / "home")}
            | (
                {"PERDURE_LLAMA_VARIANT": library.loaded().variant}
                if cpu_variants(library.loaded().source)
                else {}
            )
            | variables,
        )
        return ended.stdout.strip(), [
            line for line in ended.stderr.splitlines() if line.startswith("perdure.engine: ")
        ]

    return run


@needs_compiler
def test_t4_a_card_that_is_too_small_or_busy_gets_fewer_layers_and_says_how_much_slower_that_is(
    pretended: Callable[..., tuple[str, list[str]]], zoo_path: Callable[[str], Path]
) -> None:
    sizes = Sizes.of(models.read_parts(zoo_path("llama")))
    every = sizes.all_layers

    def needed(layers: int) -> int:
        """MiB for so many layers, at least."""
        return (sizes.device(ModelPlacement(n_ctx=64, gpu_layers=layers)).total + MARGIN >> 20) + 1

    # Room for all of it: nothing is said.
    whole = needed(every)
    assert pretended("auto", mib=whole) == (f"layers {every}", [])
    # Room for some.
    fits = next(count for count in range(every, 0, -1) if needed(count) < whole)
    printed, lines = pretended("auto", mib=needed(fits))
    assert printed == f"layers {fits}"
    assert len(lines) == 1
    assert f"{fits} of {every} layers" in lines[0]
    assert "a token takes" in lines[0]
    # Room for all when it was asked, and then somebody took it: fewer, once, in one line.
    printed, lines = pretended("auto", mib=whole, layers=every - 1)
    assert printed == f"layers {int(every * 0.75)}"
    assert len(lines) == 1
    assert "whose memory other programs use" in lines[0]
    assert "a token takes" in lines[0]
    # Fewer were not few enough.
    printed, lines = pretended("auto", mib=whole, layers=0)
    assert printed.startswith("refused: ")
    assert "Choose fewer gpu_layers" in printed
    # Who names a number gets that, or an error.
    printed, lines = pretended(every, mib=whole, layers=every - 1)
    assert printed.startswith(f"refused: {every} layers of ")
    assert not lines


def test_a_second_try_leaves_experts_out_before_layers_and_is_the_last() -> None:
    first = plan_offload("auto", [device(free=48)], EXPERTS, "m.gguf")
    assert first.flexible
    again = plan_again(first, [device(free=20)], EXPERTS, "m.gguf", setup=ModelPlacement())
    assert (again.layers, again.cpu_experts, again.flexible) == (33, 32, False)
    assert "all of its experts" in str(again.note)
    plain = plan_again(
        plan_offload("auto", [device(free=48)], SIZES, "m.gguf"),
        [device(free=10)],
        SIZES,
        "m.gguf",
        setup=ModelPlacement(),
    )
    assert plain.layers == plan_offload("auto", [device(free=10)], SIZES, "m.gguf").layers
    assert not plain.flexible
    none = plan_again(
        plan_offload("auto", [device(free=2)], SIZES, "m.gguf"),
        [device(free=0)],
        SIZES,
        "m.gguf",
        setup=ModelPlacement(),
    )
    assert (none.layers, none.devices) == (0, ())
    assert not plan_offload(5, [device(free=48)], SIZES, "m.gguf").flexible


def test_the_time_of_a_step_is_that_of_its_layers(zoo_path: Callable[[str], Path]) -> None:
    """A step of the last one of two layers on a GPU: the other one would take as long there."""
    assert _all_on_gpu(5.0, 3.0, 4.5, 1, 2) == pytest.approx(2 * 1.5 + 0.5)
    assert _all_on_gpu(5.0, 4.5, 4.5, 2, 2) is None
    assert _all_on_gpu(5.0, None, None, 1, 2) is None
    assert str(StepTime(0.080, 0.010)) == (
        "a token takes 80 ms, about 8.0 times as long as with all of them there"
    )
    assert str(StepTime(0.080)) == "a token takes 80 ms"
    with Model(zoo_path("llama"), gpu_layers=0) as model:
        layers = models.read_card(zoo_path("llama")).layers
        assert layers is not None
        assert layers > 1
        measured = StepTime.measure(weights_of(model), layers, _params(1, True, 0.0, 0.0))
    assert measured is not None
    assert measured.on_gpu is not None
    assert 0 < measured.on_gpu < 10 * measured.seconds


def test_what_the_driver_translates_is_told_of_where_it_takes_long(
    zoo_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    patience: list[float] = []

    class Timer:
        """One whose time is over when the first step begins."""

        def __init__(self, seconds: float, call: Callable[..., None], *arguments: object, name: str) -> None:
            patience.append(seconds)
            self.start = lambda: call(*arguments)

        def cancel(self) -> None:
            pass

    with Model(zoo_path("llama"), gpu_layers=0) as model:
        translate(weights_of(model), _params(1, True, 0.0, 0.0), "m.gguf")
        assert not caplog.messages
        monkeypatch.setattr(first_steps, "BackgroundTimer", Timer)
        translate(weights_of(model), _params(1, True, 0.0, 0.0), "m.gguf")
    assert patience == [10.0]
    [line] = caplog.messages
    assert "translates the code that m.gguf needs" in line


# On a machine without a GPU.

without_gpu = pytest.mark.skipif(
    any(each.offloads for each in list_devices(library.load())), reason="this machine has a GPU"
)


@without_gpu
def test_layers_for_a_gpu_that_is_not_there_are_an_error_before_loading(
    zoo_path: Callable[[str], Path],
) -> None:
    with pytest.raises(InvalidInputError, match="library in use has none"):
        Model(zoo_path("llama"), gpu_layers=5)
    with pytest.raises(InvalidInputError, match="no device CUDA0"):
        Model(zoo_path("llama"), devices=["CUDA0"])
    with pytest.raises(InvalidInputError, match="has none"):
        perdure.open(zoo_path("llama"), gpu_layers=5)


@without_gpu
def test_auto_is_the_cpu_and_says_nothing(
    zoo_path: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "perdure"), Model(zoo_path("llama"), gpu_layers="auto") as model:
        assert model.gpu_layers == 0
        with model.context(n_ctx=64, threads=1) as context:
            assert context.capabilities.abort
            assert "0 layers on a GPU" in context.identity.devices
    assert not caplog.records


@without_gpu
def test_an_isolated_engine_gets_the_same_settings(zoo_path: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidInputError, match="has none"):
        perdure.open(zoo_path("llama"), gpu_layers=5, isolated=True, n_ctx=64, slots=1)


@pytest.mark.parametrize("wrong", [-1, 1.5, "all", True])
def test_gpu_layers_is_a_number_or_auto(wrong: object, zoo_path: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidInputError, match="gpu_layers"):
        Model(zoo_path("llama"), gpu_layers=wrong)  # type: ignore[arg-type]


def test_the_environment_says_how_many(
    monkeypatch: pytest.MonkeyPatch, zoo_path: Callable[[str], Path]
) -> None:
    assert settings().gpu_layers == "auto"
    monkeypatch.setenv("PERDURE_GPU_LAYERS", "7")
    assert settings().gpu_layers == 7
    monkeypatch.setenv("PERDURE_GPU_LAYERS", "some")
    with pytest.raises(InvalidInputError, match="PERDURE_GPU_LAYERS"):
        Model(zoo_path("llama"))


def test_a_loaded_model_is_not_loaded_again(zoo_path: Callable[[str], Path]) -> None:
    with Model(zoo_path("llama")) as model, pytest.raises(InvalidInputError, match="loaded already"):
        perdure.open(model, gpu_layers=1)


# Waiting there.


@pytest.mark.parametrize(("sequence", "fit"), [(GIB, 10), (11 * GIB, 0), (0, 0)])
def test_what_is_spare_for_waiting_conversations_does_not_depend_on_who_else_is_there(
    sequence: int, fit: int
) -> None:
    """48 GiB without 8 of weights, a quarter of that: whatever is free at the moment."""
    for free in (1, 20, 48):
        assert spare_sequences([device(free=free)], weights=8 * GIB, sequence=sequence) == fit


def test_conversations_wait_on_a_device_that_has_room_and_else_only_where_it_is_asked_for(
    zoo_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sequences(**settings: Any) -> tuple[int, int]:
        with perdure.open(zoo_path("llama"), n_ctx=64, slots=2, threads=1, **settings) as rt:
            backend = rt.backend
            assert isinstance(backend, LocalBackend)
            return rt.slots, backend.context.n_seq

    assert sequences(gpu_layers=0) == (2, 2)
    assert sequences(gpu_layers=0, swap_slots=3) == (2, 5)
    assert sequences(gpu_layers=0, swap_slots=3, cache=0) == (2, 2)
    monkeypatch.setattr(Model, "spare_sequences", lambda *_, **__: 9)
    assert sequences() == (2, 6)
    monkeypatch.setattr(Model, "spare_sequences", lambda *_, **__: 3)
    assert sequences() == (2, 2)
    for wrong in ({"swap_slots": -1}, {"swap_slots": 2, "shared": True}):
        with pytest.raises(InvalidInputError, match="swap_slots"):
            sequences(**wrong)
