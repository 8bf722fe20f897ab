"""Layers on a GPU: how many fit, what is said where they do not, and what no machine without one may do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import InvalidInputError, Model, OutOfMemoryError, models
from perdure.backend import LocalBackend
from perdure.config import settings
from perdure.engine.llama.native import library
from perdure.engine.llama.native.devices import Device, list_devices
from perdure.engine.llama.offload import (
    ModelBytes,
    Offload,
    check_split,
    choose_devices,
    plan_offload,
    spare_sequences,
)

GIB = 1 << 30
NEEDS = ModelBytes(layers=(GIB,) * 32, output=GIB, compute=GIB // 2)


def device(name: str = "CUDA0", kind: str = "gpu", free: float = 24) -> Device:
    return Device(name=name, description="A card", kind=kind, free=int(free * GIB), total=48 * GIB)


# How many.


def test_m5_all_layers_go_to_a_device_that_holds_them() -> None:
    """M5: what does not fit is said before loading, with what would."""
    plan = plan_offload("auto", [device(free=40)], NEEDS, "m.gguf")
    assert (plan.layers, plan.note) == (33, None)


@pytest.mark.parametrize("free", [0.1, 1.4, 1.6, 5, 20, 33.4])
def test_m5_auto_takes_as_many_as_fit_and_says_so_in_one_line(free: float) -> None:
    plan = plan_offload("auto", [device(free=free)], NEEDS, "m.gguf")
    assert NEEDS.taken(plan.layers) <= free * GIB < NEEDS.taken(plan.layers + 1)
    assert plan.note is not None
    assert f"{plan.layers} of 33 layers" in plan.note
    assert "\n" not in plan.note


def test_m5_more_than_fit_is_an_error_that_says_how_many_would() -> None:
    with pytest.raises(OutOfMemoryError, match=r"gpu_layers=19") as caught:
        plan_offload(30, [device(free=20)], NEEDS, "m.gguf")
    assert "CUDA0 (20.0 of 48.0 GiB free)" in str(caught.value)
    assert plan_offload(19, [device(free=20)], NEEDS, "m.gguf").layers == 19


def test_several_devices_share_the_layers() -> None:
    assert plan_offload("auto", [device(free=20), device("CUDA1", free=20)], NEEDS, "m").layers == 33


def test_more_layers_than_there_are_means_all() -> None:
    assert plan_offload(999, [device(free=40)], NEEDS, "m.gguf").layers == 33


def test_a_models_bytes_come_from_its_file(zoo_path: Callable[[str], Path]) -> None:
    headers = models.read_parts(zoo_path("llama"))
    bare = ModelBytes.of(headers, cells=0)
    assert len(bare.layers) == models.read_card(zoo_path("llama")).layers
    assert 0 < sum(bare.layers) + bare.output <= sum(each.size for each in headers[0].tensors)
    full = ModelBytes.of(headers, cells=1000)
    kv = models.read_card(zoo_path("llama")).kv_bytes_per_token
    assert kv is not None
    assert sum(full.layers) - sum(bare.layers) == pytest.approx(1000 * kv, rel=0.01)
    assert ModelBytes.of(headers, cells=1000, kv=False).layers == bare.layers


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
    with Model(zoo_path("llama"), gpu_layers=0) as model:
        plans = [Offload(layers=0), Offload(layers=2, devices=(device(),))]
        plans += [Offload(layers=3, devices=(device(),)), Offload(layers=3, devices=(device("CUDA1"),))]
        seen = []
        for plan in plans:
            model._offload = plan
            for model._kv_offload in (True, False):
                for model._split in (None, (1.0,)):
                    seen.append(model._kernels())
    # Nothing on a device is one thing, however it was to be split.
    assert len(set(seen)) == 1 + 3 * 4


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
