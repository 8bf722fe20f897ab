"""Where a model's bytes lie: predicted from headers, held against what the engine takes, and heeded."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.fit import Comparison, compare

import perdure
import zoo
from perdure import InvalidInputError, Model, OutOfMemoryError, models, system
from perdure.engine_config import ContextConfig, EngineConfig, KvType
from perdure.models.placement import ModelPlacement, Sizes, judge, rearranged_types
from perdure.models.ways_to_open import Room, memory_needed

GIB = 1 << 30
DENSE = Sizes(
    layers=(GIB // 4,) * 16,
    experts=(0,) * 16,
    embedding=GIB // 4,
    output=GIB // 4,
    tied=False,
    cache=((1024, 1024),) * 16,
    states=(0,) * 16,
    masks=1,
    width=2048,
    query=2048,
    latent=0,
    recurrent=0,
    heads=32,
    inner=8192,
    experts_used=0,
    expert_inner=8192,
    vocabulary=32_000,
    trained=32_768,
)
"""4.5 GiB of weights, 64 KiB of K/V a token."""


def mixture() -> Sizes:
    """The same with 12 GiB of experts."""
    return dataclasses.replace(DENSE, experts=(3 * GIB // 4,) * 16, experts_used=4, expert_inner=1024)


# What it takes.


@pytest.mark.parametrize("name", zoo.names())
@pytest.mark.parametrize(
    "setup",
    [
        ModelPlacement(n_ctx=4096, slots=2),
        ModelPlacement(n_ctx=2048, slots=4, kv=KvType("q8_0", "q8_0"), n_batch=128),
        ModelPlacement(n_ctx=1000, slots=3, flash=False),
    ],
    ids=["f16", "q8_0", "plain"],
)
def test_t3_what_is_predicted_is_what_the_engine_takes(
    name: str, setup: ModelPlacement, zoo_path: Callable[[str], Path]
) -> None:
    """T3: within 5%, by the buffers that the library reports, for each kind of memory."""
    found = compare(zoo_path(name), setup)
    assert found.real[0] > 1000
    assert found.ok, str(found)


def test_t3_a_wrong_prediction_is_caught() -> None:
    wrong = Comparison(model="m", setup=ModelPlacement(), predicted=(1100, 0), real=(1000.0, 0.0))
    assert not wrong.ok


@pytest.mark.model
def test_t3_the_default_model_takes_what_is_predicted() -> None:
    assert compare(models.path(), ModelPlacement(n_ctx=4096, slots=2, kv=KvType("q8_0"))).ok


@pytest.mark.parametrize(
    ("flags", "is_twice"),
    [({"amx_int8", "avx2"}, True), ({"asimddp", "asimd"}, True), ({"avx2"}, False), (set(), False)],
)
def test_a_table_that_is_also_the_output_is_there_twice_where_the_cpu_rearranges_it(
    flags: set[str], is_twice: bool
) -> None:
    """Once to look tokens up, once to compute logits with."""
    assert ("Q8_0" in rearranged_types(frozenset(flags))) == is_twice
    sizes = dataclasses.replace(DENSE, copied=GIB // 4)
    assert sizes.machine(ModelPlacement()).weights == DENSE.machine(ModelPlacement()).weights + GIB // 4
    on_device = ModelPlacement(gpu_layers=17)
    assert sizes.machine(on_device).weights == DENSE.machine(on_device).weights


def test_weights_are_those_of_the_file(zoo_path: Callable[[str], Path]) -> None:
    for name in ("llama", "qwen3moe", "gemma3"):
        headers = models.read_parts(zoo_path(name))
        sizes = Sizes.of(headers)
        assert sizes.weights == sum(tensor.size for tensor in headers[0].tensors)
        assert bool(sum(sizes.experts)) == (name == "qwen3moe")


def test_what_goes_to_a_device_is_not_in_the_machine() -> None:
    for layers in (0, 1, 9, 17):
        setup = ModelPlacement(gpu_layers=layers)
        there, here = DENSE.device(setup), DENSE.machine(setup)
        assert there.weights + here.weights == DENSE.weights
        assert there.cache + here.cache == 4096 * 65536
    experts = mixture()
    setup = ModelPlacement(gpu_layers=17, cpu_experts=10)
    assert experts.machine(setup).weights == 10 * (3 * GIB // 4) + GIB // 4
    assert experts.device(setup).weights == experts.weights - experts.machine(setup).weights


def test_another_quantisation_has_other_weights_and_the_same_cache() -> None:
    small = DENSE.scaled(DENSE.weights // 2)
    assert small.weights == pytest.approx(DENSE.weights / 2, rel=0.001)
    assert small.layer_cache(ModelPlacement()) == DENSE.layer_cache(ModelPlacement())


def test_a_verdict_leaves_a_tenth_to_others() -> None:
    assert [judge(need, 100) for need in (0, 90, 91, 100, 101)] == ["fits", "fits", "tight", "tight", "not"]


def test_one_of_several_models_takes_what_its_options_say() -> None:
    """As the best way that fits; on the devices as far as there are some, and the engine offloads."""
    room = Room(machine=64 * GIB, device=24 * GIB)
    config = EngineConfig(n_ctx=8192, slots=2)
    machine, device = memory_needed(DENSE, room, config)
    on_device = ModelPlacement(n_ctx=8192, slots=2, gpu_layers=17)
    assert machine == DENSE.machine(on_device).total
    assert device == room.device_bytes(DENSE, on_device)
    own_memory = dataclasses.replace(DENSE, offloads=False)
    on_cpu = DENSE.machine(ModelPlacement(n_ctx=8192, slots=2)).total
    assert memory_needed(own_memory, room, config) == (on_cpu, 0)
    smaller = memory_needed(own_memory, room, EngineConfig(n_ctx=8192, slots=2, kv_type="q8_0"))
    assert on_cpu - smaller[0] == 2 * 8192 * 65536 * 7.5 / 16
    filled, _ = memory_needed(own_memory, room, EngineConfig(n_ctx="auto"))
    assert filled == DENSE.machine(ModelPlacement(n_ctx=32_768, slots=4)).total


# Opening.


@pytest.mark.parametrize("isolated", [False, True])
def test_auto_takes_what_the_model_was_trained_for_where_that_fits(
    isolated: bool, zoo_path: Callable[[str], Path]
) -> None:
    settings = {"n_ctx": "auto", "slots": "auto", "threads": 1, "isolated": isolated}
    with perdure.open(zoo_path("llama"), **settings) as rt:  # type: ignore[arg-type]
        assert (rt.n_ctx, rt.slots) == (4096, 4)
        assert rt.generate(prompt="hello", max_tokens=2).usage.completion_tokens == 2


def test_auto_takes_less_where_less_is_free(
    zoo_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "available_memory", lambda: 8 << 20)
    with perdure.open(zoo_path("llama"), n_ctx="auto", slots=1, threads=1, gpu_layers=0) as rt:
        assert 256 <= rt.n_ctx < 4096
        assert rt.n_ctx % 256 == 0
    monkeypatch.setattr(system, "available_memory", lambda: 1 << 20)
    with pytest.raises(OutOfMemoryError, match="not even 256 tokens"):
        perdure.open(zoo_path("llama"), n_ctx="auto", slots=1, threads=1, gpu_layers=0)


def test_slots_do_not_depend_on_what_is_free_at_the_moment(
    zoo_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """State is of a context with so many sequences: another number would not find it again."""
    with Model(zoo_path("llama"), gpu_layers=0) as model:
        for free in (8 << 20, 1 << 40):
            monkeypatch.setattr(system, "available_memory", lambda free=free: free)
            assert model.fit_context(1024, None, ContextConfig())[1] == 4
        monkeypatch.setattr(system, "physical_memory", lambda: 6 << 20)
        assert model.fit_context(1024, None, ContextConfig())[1] < 4


def test_t3_more_than_is_free_is_said_and_more_than_there_is_refused(
    zoo_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """T3: loading never takes more than is free without saying so."""
    with Model(zoo_path("llama"), gpu_layers=0) as model:
        with caplog.at_level(logging.WARNING, "perdure.engine"), model.context(n_ctx=4096, threads=1):
            assert not caplog.records
        monkeypatch.setattr(system, "available_memory", lambda: 1 << 20)
        with caplog.at_level(logging.WARNING, "perdure.engine"), model.context(n_ctx=4096, threads=1):
            assert "are free" in caplog.text
            assert 'n_ctx="auto"' in caplog.text
        monkeypatch.setattr(system, "physical_memory", lambda: 1 << 20)
        with pytest.raises(OutOfMemoryError):
            model.context(n_ctx=4096, threads=1)


def test_weights_that_are_larger_than_what_is_free_are_said(
    zoo_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(system, "available_memory", lambda: 1 << 16)
    with caplog.at_level(logging.WARNING, "perdure.engine"), Model(zoo_path("llama"), gpu_layers=0):
        assert "weights" in caplog.text


# Experts.


def test_experts_stay_in_the_machines_memory_where_that_is_asked_for(
    zoo_path: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.DEBUG, "perdure.llama"),
        Model(zoo_path("qwen3moe"), gpu_layers=0, cpu_experts=2) as model,
    ):
        assert model.cpu_experts == 2
    overridden = [line for line in caplog.messages if "overrid" in line and "_exps" in line]
    assert sorted({line.split("blk.")[1][0] for line in overridden}) == ["0", "1"]
    with Model(zoo_path("qwen3moe"), gpu_layers=0, cpu_experts="all") as model:
        assert model.cpu_experts == 3
    with Model(zoo_path("llama"), cpu_experts="all") as model:
        assert model.cpu_experts == 0


def test_t1_state_is_of_the_experts_place_and_warm_equals_cold(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """T1, W≡C: with experts elsewhere it is another state; with the same it is found again, bit for bit."""
    path, prompt = zoo_path("qwen3moe"), "one two three four five six seven eight nine ten"
    identities = set()
    replies = []
    for experts in (0, 2, 2):
        with perdure.open(
            path, cpu_experts=experts, store=tmp_path, n_ctx=256, slots=1, threads=1, gpu_layers=0
        ) as rt:
            identities.add(rt.cache.identity().devices)
            said = rt.session("s").say("hello " + prompt, max_tokens=8, temperature=0)
            rt.sessions.delete("s")
            replies.append((said.text, said.reuse.reused if said.reuse else 0))
            cold = rt.generate(prompt=prompt, max_tokens=8, temperature=0)
            warm = rt.generate(prompt=prompt, max_tokens=8, temperature=0)
            assert (warm.text, warm.reuse.reused > 0) == (cold.text, True)
    assert len(identities) == 2


@pytest.mark.parametrize("wrong", [-1, 1.5, "some", True])
def test_cpu_experts_is_a_number_or_a_word(wrong: object, zoo_path: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidInputError, match="cpu_experts"):
        Model(zoo_path("qwen3moe"), cpu_experts=wrong)  # type: ignore[arg-type]
