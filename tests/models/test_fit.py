"""What a model takes and how it is opened in what is free: predicted, proposed, and as it really is."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from bench.fit import Comparison, compare

import perdure
import zoo
from perdure import InvalidInputError, Model, OutOfMemoryError, models, system
from perdure.models.download import Remote, RemoteBytes, web
from perdure.models.fit import Fit, FitConstraints, Room, Setup, Sizes, judge, propose, rearranged_types
from serving import Page, put_repo, site

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
        Setup(n_ctx=4096, slots=2),
        Setup(n_ctx=2048, slots=4, k_type="q8_0", v_type="q8_0", n_batch=128),
        Setup(n_ctx=1000, slots=3, flash=False),
    ],
    ids=["f16", "q8_0", "plain"],
)
def test_t3_what_is_predicted_is_what_the_engine_takes(
    name: str, setup: Setup, zoo_path: Callable[[str], Path]
) -> None:
    """T3: within 5%, by the buffers that the library reports, for each kind of memory."""
    found = compare(zoo_path(name), setup)
    assert found.real[0] > 1000
    assert found.ok, str(found)


def test_t3_a_wrong_prediction_is_caught() -> None:
    wrong = Comparison(model="m", setup=Setup(), predicted=(1100, 0), real=(1000.0, 0.0))
    assert not wrong.ok


@pytest.mark.model
def test_t3_the_default_model_takes_what_is_predicted() -> None:
    assert compare(models.path(), Setup(n_ctx=4096, slots=2, k_type="q8_0")).ok


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
    assert sizes.machine(Setup()).weights == DENSE.machine(Setup()).weights + GIB // 4
    on_device = Setup(gpu_layers=17)
    assert sizes.machine(on_device).weights == DENSE.machine(on_device).weights


def test_weights_are_those_of_the_file(zoo_path: Callable[[str], Path]) -> None:
    for name in ("llama", "qwen3moe", "gemma3"):
        headers = models.read_parts(zoo_path(name))
        sizes = Sizes.of(headers)
        assert sizes.weights == sum(tensor.size for tensor in headers[0].tensors)
        assert bool(sum(sizes.experts)) == (name == "qwen3moe")


def test_what_goes_to_a_device_is_not_in_the_machine() -> None:
    for layers in (0, 1, 9, 17):
        setup = Setup(gpu_layers=layers)
        there, here = DENSE.device(setup), DENSE.machine(setup)
        assert there.weights + here.weights == DENSE.weights
        assert there.cache + here.cache == 4096 * 65536
    experts = mixture()
    setup = Setup(gpu_layers=17, cpu_experts=10)
    assert experts.machine(setup).weights == 10 * (3 * GIB // 4) + GIB // 4
    assert experts.device(setup).weights == experts.weights - experts.machine(setup).weights


def test_another_quantisation_has_other_weights_and_the_same_cache() -> None:
    small = DENSE.scaled(DENSE.weights // 2)
    assert small.weights == pytest.approx(DENSE.weights / 2, rel=0.001)
    assert small.layer_cache(Setup()) == DENSE.layer_cache(Setup())


# What is proposed.


def proposed(sizes: Sizes, machine: float, device: float = 0.0, **wanted: object) -> Fit:
    room = Room(machine=int(machine * GIB), device=int(device * GIB))
    found = propose("m.gguf", sizes, room, FitConstraints(**wanted))  # type: ignore[arg-type]
    if found.verdict != "not":
        assert room.holds(sizes, found.setup), "a proposal must fit"
    return found


def test_m5_a_model_that_fits_gets_the_context_that_it_was_trained_for() -> None:
    found = proposed(DENSE, 64)
    assert (found.verdict, found.setup.n_ctx, found.setup.slots) == ("fits", 32_768, 4)
    assert "trained for 32,768" in found.reasons[0]


def test_context_fills_what_is_left_and_no_more() -> None:
    found = proposed(DENSE, 8)
    assert found.verdict == "fits"
    assert 4096 <= found.setup.n_ctx < 32_768
    assert found.setup.n_ctx % 256 == 0
    assert found.machine.total < 0.9 * 8 * GIB
    assert found.machine.cache <= 4 * GIB


@pytest.mark.parametrize(
    ("free", "slots", "kind"), [(8.0, 4, "f16"), (5.2, 2, "f16"), (4.97, 1, "f16"), (4.80, 1, "q8_0")]
)
def test_fewer_requests_come_before_a_smaller_type(free: float, slots: int, kind: str) -> None:
    found = proposed(DENSE, free)
    assert (found.setup.slots, found.setup.k_type) == (slots, kind)
    assert found.verdict == ("fits" if free == 8.0 else "tight")


def test_what_does_not_fit_says_what_it_would_need() -> None:
    found = proposed(DENSE, 3)
    assert found.verdict == "not"
    assert "at least 4.7 GiB of memory, 3.0 GiB are free" in found.reasons[0]


def test_all_of_it_goes_to_a_device_that_holds_it() -> None:
    found = proposed(DENSE, 16, 24)
    assert (found.verdict, found.setup.gpu_layers) == ("fits", 17)
    assert found.machine.weights == GIB // 4


def test_layers_stay_behind_where_a_device_is_too_small() -> None:
    found = proposed(DENSE, 16, 4)
    assert found.verdict == "tight"
    assert 0 < found.setup.gpu_layers < 17
    assert "layers fit on the GPU" in " ".join(found.reasons)


def test_experts_stay_behind_before_layers_do() -> None:
    """A mixture of 1.5 times what the card has: all layers there, and some experts here."""
    found = proposed(mixture(), 32, 11)
    assert (found.verdict, found.setup.gpu_layers) == ("tight", 17)
    assert 0 < found.setup.cpu_experts < 16
    assert "experts" in found.reasons[0]
    assert found.options["cpu_experts"] == found.setup.cpu_experts
    assert proposed(mixture(), 32, 24).setup.cpu_experts == 0


def test_what_was_chosen_is_kept() -> None:
    found = proposed(DENSE, 64, 24, n_ctx=1000, slots=3, k_type="q4_0", v_type="f16", gpu_layers=5)
    setup = found.setup
    assert (setup.n_ctx, setup.slots, setup.k_type, setup.v_type) == (1000, 3, "q4_0", "f16")
    assert setup.gpu_layers == 5


def test_a_verdict_leaves_a_tenth_to_others() -> None:
    assert [judge(need, 100) for need in (0, 90, 91, 100, 101)] == ["fits", "fits", "tight", "tight", "not"]


# The call and the command.


def test_fit_reads_a_file_and_checks_what_it_is_given(zoo_path: Callable[[str], Path]) -> None:
    found = perdure.fit(zoo_path("llama"), gpu_layers=0)
    assert (found.verdict, found.setup.n_ctx, found.setup.slots) == ("fits", 4096, 4)
    with perdure.open(zoo_path("llama"), threads=1, **found.options) as rt:
        assert (rt.n_ctx, rt.slots) == (4096, 4)
    for wrong in ({"n_ctx": 0}, {"slots": -1}, {"k_type": "q9"}, {"gpu_layers": "all"}, {"cpu_experts": -1}):
        with pytest.raises(InvalidInputError):
            perdure.fit(zoo_path("llama"), **cast(Any, wrong))
    unknown: Any = {"n_cxt": 512}
    for ask in (perdure.fit, perdure.fit_all):
        with pytest.raises(InvalidInputError, match="did you mean 'n_ctx'"):
            ask(str(zoo_path("llama")), **unknown)


def run_fit(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perdure.cli", "fit", *words]
    return subprocess.run(
        command, env=given_environment(**environment), capture_output=True, text=True, check=False
    )


def given_environment(**environment: str) -> dict[str, str]:
    return {**os.environ, "NO_PROXY": "127.0.0.1", **environment}


def test_the_quantisations_of_a_repository_are_judged_without_fetching_them(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    model = zoo_path("llama").read_bytes()
    files = {"it-Q4_K_S.gguf": model, "it-Q8_0.gguf": model + bytes(1_000_000), "README.md": b"x"}
    with site() as up:
        put_repo(up, "me/it", files)
        there = {"HF_ENDPOINT": up.url, "PERDURE_HOME": str(tmp_path)}
        done = run_fit("me/it", "--json", **there)
        assert done.returncode == 0, done.stderr
        small, large = json.loads(done.stdout)
        assert (small["name"], large["name"]) == ("it-Q4_K_S.gguf", "it-Q8_0.gguf")
        assert large["weights"] - small["weights"] == pytest.approx(1_000_000, rel=0.01)
        assert small["weights"] == Sizes.of(models.read_parts(zoo_path("llama"))).weights
        assert not up.gets("/me/it/resolve/main/it-Q8_0.gguf"), "its size is enough"
        assert all(each.range for each in up.gets("/me/it/resolve/main/it-Q4_K_S.gguf"))
        table = run_fit("me/it", **there).stdout
        code = "import perdure, sys; print(perdure.fit(sys.argv[1]).weights)"
        command = [sys.executable, "-c", code, "me/it"]
        several = subprocess.run(
            command, env=given_environment(**there), capture_output=True, text=True, check=False
        )
        assert run_fit("me/nothing", **there).returncode == 1
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["fits", "fits"]
    assert "2 models: name one as me/it:Q4_K_M" in several.stderr
    assert not list(tmp_path.rglob("*.gguf"))


@pytest.mark.parametrize("ranges", [True, False])
def test_of_a_remote_file_no_more_is_read_than_its_header(
    ranges: bool, zoo_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    model = zoo_path("llama").read_bytes()
    with site() as up, web() as client:
        up.pages["/a.gguf"] = Page(body=model, ranges=ranges)
        remote = RemoteBytes(client, Remote(url=f"{up.url}/a.gguf"))
        assert remote.read(1000) == model[:1000]
        assert remote.read(50) == model[1000:1050]


def test_the_command_shows_one_model_and_how_to_serve_it(zoo_path: Callable[[str], Path]) -> None:
    path = str(zoo_path("llama"))
    done = run_fit(path, "--slots", "2", "--gpu-layers", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("llama.gguf fits.")
    assert f"perdure serve {path} --ctx 4096 --slots 2" in done.stdout
    [plain] = json.loads(run_fit(path, "--json").stdout)
    assert plain["verdict"] == "fits"
    assert plain["machine"]["weights"] > 0
    assert "--slots" in run_fit(path, "--slots", "none").stderr


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
            assert model.fit_context(1024, None)[1] == 4
        monkeypatch.setattr(system, "physical_memory", lambda: 6 << 20)
        assert model.fit_context(1024, None)[1] < 4


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
