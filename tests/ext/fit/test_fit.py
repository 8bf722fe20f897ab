"""How a model is best opened in what is free, proposed from the headers of its files."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import perdure
from perdure import InvalidInputError, models
from perdure.engine_config import KvType
from perdure.ext.fetching.download import Remote, RemoteBytes, web
from perdure.ext.fit.fit import Fit, propose
from perdure.models.placement import Sizes
from perdure.models.ways_to_open import FitConstraints, Room
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
    assert (found.setup.slots, found.setup.kv.k) == (slots, kind)
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
    found = proposed(DENSE, 64, 24, n_ctx=1000, slots=3, kv=KvType("q4_0"), gpu_layers=5)
    setup = found.setup
    assert (setup.n_ctx, setup.slots, setup.kv) == (1000, 3, ("q4_0", "f16"))
    assert setup.gpu_layers == 5


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
