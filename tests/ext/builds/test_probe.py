"""A library that cannot run here is found out in a child process; another way is taken or named (M1, M2)."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import perdure.ext.builds as libraries
from engine.shims import cpu_variants, empty_library, needs_compiler, shim
from perdure.engine.llama.native import choice, guard, library, probe_results, source
from perdure.engine.llama.native.backends import BUILT_IN
from perdure.engine.llama.native.declarations import (
    FUNCTIONS,
    OPTIONAL,
    ContextParams06,
    Functions,
    numbers,
)
from perdure.engine.llama.native.source import LibrarySource
from perdure.errors import EngineLibraryError
from perdure.ext.builds import fetched, probe
from perdure.ext.builds.causes import cause_of, last_words
from perdure.ext.builds.package import PACKAGES

pytestmark = needs_compiler

USE = """
import sys, perdure
try:
    with perdure.Model(sys.argv[1]) as model, model.context(n_ctx=64, threads=1) as ctx:
        ctx.decode([40, 41, 42])
        print("answered", ctx.logits().argmax())
except perdure.EngineLibraryError as error:
    print("refused:", error)
"""
"""A program of a user, who has not heard of any of this."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The library of this process is the one of the usual place, whichever test comes first.
    library.loaded()
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PERDURE_LLAMA_VARIANT", raising=False)
    return tmp_path / "home"


@pytest.fixture
def one_variant(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have one CPU variant tried: what is wrong with the library itself is wrong with each of them."""
    if cpu_variants(library.loaded().source):
        monkeypatch.setenv("PERDURE_LLAMA_VARIANT", library.loaded().variant)


@pytest.fixture
def use(home: Path, zoo_path: Callable[[str], Path]) -> Callable[[], str]:
    """`use()` is what a user's program prints; it must not end by a signal."""

    def run() -> str:
        ended = subprocess.run(
            [sys.executable, "-c", USE, str(zoo_path("llama"))], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return run


@pytest.mark.parametrize("death", ["SIGILL", "SIGSEGV", "SIGABRT"])
@pytest.mark.parametrize("when", ["AT_LOAD", "AT_STEP"])
@pytest.mark.usefixtures("one_variant")
def test_m1_a_library_that_dies_is_named_with_its_signal_and_its_step(
    death: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The 8th step is the second of the second model's.
    monkeypatch.setenv("PERDURE_LLAMA", str(shim(tmp_path / "dying", DEATH=death, **{when: 8})))
    with pytest.raises(EngineLibraryError, match=f"{death} at") as refused:
        choice.choose()
    assert "perdure engine install" in str(refused.value)
    where = "loading" if when == "AT_LOAD" else "a f32 model, a step of 2 tokens"
    assert f"{death} at {where}" in refused.value.tried[0]


def test_m1_a_users_program_is_told_instead_of_killed(
    use: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_LLAMA", str(shim(tmp_path / "dying", AT_STEP=1)))
    assert use().startswith("refused: no llama.cpp library runs on this machine")


def test_m1_the_next_library_is_used_where_the_first_one_dies(
    use: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sound = libraries.install_folder(shim(tmp_path / "sound"))
    dying = libraries.install_folder(shim(tmp_path / "dying", AT_STEP=1))
    monkeypatch.delenv("PERDURE_LLAMA", raising=False)
    with caplog.at_level(logging.WARNING, "perdure.engine"):
        chosen = choice.choose()
        assert chosen.source.version == sound.name
        assert [Path(failed.folder).name for failed in chosen.passed] == [dying.name]
        [line] = caplog.messages
        assert "SIGILL at a f16 model, a step of 1 tokens" in line
        # It is told once a machine.
        caplog.clear()
        assert choice.choose() == chosen
        assert not caplog.messages
    assert use().startswith("answered")


def test_m1_one_is_fetched_where_the_compiled_one_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(folder: Path) -> LibrarySource:
        return LibrarySource(kind="llama-cpp-python", folder=folder, version="1")

    def no_network(*_: object) -> LibrarySource:
        raise EngineLibraryError("there is no network")

    dying, sound = shim(tmp_path / "dying", AT_STEP=1), shim(tmp_path / "sound")
    monkeypatch.delenv("PERDURE_LLAMA", raising=False)
    monkeypatch.setattr(source, "llama_cpp_python", lambda: compiled(dying))
    monkeypatch.setattr(fetched, "fetch_library", lambda *_: replace(compiled(sound), kind="fetched"))
    chosen = choice.choose()
    assert chosen.source.kind == "fetched"
    assert [failed.folder for failed in chosen.passed] == [str(dying)]

    monkeypatch.setattr(fetched, "fetch_library", no_network)
    with pytest.raises(EngineLibraryError, match=r"SIGILL at a f16 model.*there is no network"):
        choice.choose()


def test_m1_sigill_in_the_code_of_extra_buffers_turns_those_off(
    use: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a Xeon with AMX does with a library that gcc 12 compiled."""
    folder = shim(tmp_path / "amx", WITH_EXTRA_BUFFERS=1, AT_STEP=2)
    monkeypatch.setenv("PERDURE_LLAMA", str(folder))
    found = choice.choose().result
    assert [(each.extra_buffers, each.died[:6]) for each in found.attempts] == [(True, "SIGILL"), (False, "")]
    # The same library would die in this process if the result were not heeded.
    assert use().startswith("answered")


def test_m1_a_variant_that_dies_gives_way_to_the_next_lower_one(
    use: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(cpu_variants(library.loaded().source)) < 2:
        pytest.skip("this library has no CPU variants")
    best = library.loaded().variant
    folder = shim(tmp_path / "variants", WITH_BACKEND=f'"ggml-cpu-{best}."', AT_STEP=3)
    monkeypatch.setenv("PERDURE_LLAMA", str(folder))
    found = choice.choose().result
    assert found.usable
    assert found.attempts[-1].variant not in (None, best)
    assert [each.variant for each in found.deaths] == [None, None]
    assert use().startswith("answered")


def test_m1_a_gpu_backend_whose_symbols_break_the_tokenizer_is_left_out(
    use: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a CUDA library does that brings its own libstdc++: std::regex jumps into it."""
    if library.loaded().variant == BUILT_IN:
        pytest.skip("the backends of this library are built in")
    folder = shim(tmp_path / "cuda", WITH_BACKEND='"ggml-cuda"', AT_TOKENIZE=1, DEATH="SIGSEGV")
    empty_library(folder / "libggml-cuda.so")
    monkeypatch.setenv("PERDURE_LLAMA", str(folder))
    found = choice.choose().result
    assert found.usable
    assert not found.attempts[-1].gpu
    assert "SIGSEGV at a f16 model, tokenizing" in found.deaths[0].died
    assert use().startswith("answered")


PTX = "CUDA error: the provided PTX was compiled with an unsupported toolchain"


def with_cuda(folder: Path) -> Path:
    """A library whose CUDA backend ends the process as a driver does that is too old for its PTX."""
    words = f'"{PTX}"'
    shim(folder, WITH_BACKEND='"ggml-cuda"', AT_STEP=1, DEATH="SIGABRT", WORDS=words)
    empty_library(folder / "libggml-cuda.so")
    return folder


@pytest.mark.usefixtures("one_variant")
def test_the_reason_why_a_gpu_is_not_used_is_told_once_and_by_gpu_layers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    zoo_path: Callable[[str], Path],
) -> None:
    if library.loaded().variant == BUILT_IN:
        pytest.skip("the backends of this library are built in")
    monkeypatch.setenv("PERDURE_LLAMA", str(with_cuda(tmp_path / "cuda")))
    program = """
import sys, logging, perdure
logging.basicConfig(format="logged: %(message)s")
try:
    perdure.Model(sys.argv[1], gpu_layers=5)
except perdure.InvalidInputError as error:
    print("refused:", error)
with perdure.Model(sys.argv[1]) as model:
    print("layers", model.gpu_layers)
"""
    for told in (1, 0):
        ended = subprocess.run(
            [sys.executable, "-c", program, str(zoo_path("llama"))],
            capture_output=True,
            text=True,
            check=True,
        )
        refused, layers = ended.stdout.splitlines()
        assert "newer CUDA than the driver knows" in refused
        assert "perdure engine install cuda12" in refused
        assert layers == "layers 0"
        lines = [line for line in ended.stderr.splitlines() if line.startswith("logged: ")]
        assert len(lines) == told
        assert all("newer CUDA than the driver knows" in line for line in lines)
    result = choice.choose().result
    assert PTX in result.deaths[0].words
    assert result.backends == ("cuda",)


@pytest.mark.usefixtures("one_variant")
def test_code_that_the_driver_translates_is_told_of_and_given_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packaged = next(each.folder for each in PACKAGES if each.backend == "cuda12")
    folder = shim(tmp_path / packaged, WITH_BACKEND='"ggml-cuda"')
    empty_library(folder / "libggml-cuda.so")
    monkeypatch.setenv("PERDURE_LLAMA", str(folder))
    source = LibrarySource(kind="own", folder=folder, version="")
    # Whatever card there really is.
    monkeypatch.setattr(probe, "is_translated", lambda name: False)
    assert probe.step_seconds(source, probe.translates(source)) == 120
    monkeypatch.setattr(probe, "is_translated", lambda name: name == packaged)
    assert probe.step_seconds(source, probe.translates(source)) == 1800
    with caplog.at_level(logging.WARNING, logger="perdure.engine"):
        result = choice.choose().result
    assert result.usable
    assert result.translated
    assert [line for line in caplog.messages if "the first start takes some minutes" in line]
    assert probe_results.remembered(choice.choose().source) == result


def test_a_cuda_build_that_is_no_package_of_ours_may_have_to_be_translated(tmp_path: Path) -> None:
    source = LibrarySource(kind="own", folder=tmp_path, version="")
    assert probe.step_seconds(source, translated=False) == 120
    (tmp_path / "libggml-cuda.so").touch()
    assert probe.step_seconds(source, translated=False) == 1800


def test_a_probe_has_its_time_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line begins the time anew; whoever says nothing for that long is killed."""
    begun: list[float] = []
    expired = 0

    class Timer:
        def __init__(self, seconds: float, call: Callable[..., None], *arguments: object, name: str) -> None:
            self.seconds = seconds
            self.expire = functools.partial(call, *arguments)

        def start(self) -> None:
            begun.append(self.seconds)
            if len(begun) == expired:
                self.expire()

        def cancel(self) -> None:
            pass

    monkeypatch.setattr(probe, "BackgroundTimer", Timer)
    ended = probe.run_child([sys.executable, "-c", "print('{}\\n' * 3, end='')"], 7.0)
    assert (ended.returncode, ended.stdout.split()) == (0, [b"{}"] * 3)
    # One a line, one for its end, one for its exit.
    assert begun == [7.0] * 5
    begun, expired = [], 2
    stuck = (
        'import sys; print(\'{"doing": "a step"}\', flush=True); import threading; threading.Event().wait()'
    )
    ended = probe.run_child([sys.executable, "-c", stuck], 7.0)
    assert ended.returncode is None
    assert probe.last_report(ended.stdout)["doing"] == "a step"


@pytest.mark.usefixtures("one_variant")
def test_a_library_that_needs_one_that_is_nowhere_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library.loaded().variant == BUILT_IN:
        pytest.skip("the backends of this library are built in")
    folder = shim(tmp_path / "cuda")
    runtime = tmp_path / "home" / "runtime" / "cuda13" / "nvidia" / "cu99" / "lib"
    runtime.mkdir(parents=True)
    needed = runtime / "libcudart.so.99"
    link = ["gcc", "-shared", "-Wl,--no-as-needed", "-x", "c", "/dev/null", "-x", "none"]
    subprocess.run([*link, "-Wl,-soname,libcudart.so.99", "-o", needed], check=True)
    subprocess.run([*link, "-o", folder / "libggml-cuda.so", needed], check=True)
    monkeypatch.setenv("PERDURE_LLAMA", str(folder))
    # Found under PERDURE_HOME, it is loaded; what it lacks then is another matter.
    assert "refused to start" not in choice.choose().result.gpu_problem
    assert "libcudart" not in choice.choose().result.gpu_problem
    needed.unlink()
    needed.parent.rmdir()
    problem = choice.choose().result.gpu_problem
    assert "libcudart.so.99 is not on this machine" in problem
    assert "nvidia-cuda-runtime" in problem


@pytest.mark.usefixtures("one_variant")
def test_a_library_whose_gpu_is_ruled_out_gives_way_to_another_with_a_gpu_but_not_to_a_cpu_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library.loaded().variant == BUILT_IN:
        pytest.skip("the backends of this library are built in")
    plain = libraries.install_folder(shim(tmp_path / "plain"))
    ruled_out = libraries.install_folder(with_cuda(tmp_path / "cuda"))
    monkeypatch.delenv("PERDURE_LLAMA", raising=False)
    chosen = choice.choose()
    assert (chosen.source.version, chosen.passed) == (ruled_out.name, ())
    assert not chosen.result.attempts[-1].gpu
    # The one without a GPU was not even tried.
    assert not any(plain.name in key.folder for key in probe_results.read_results().values())


@pytest.mark.parametrize(
    ("words", "sentence", "advice"),
    [
        (PTX, "newer CUDA than the driver knows", "cuda12"),
        ("CUDA error: no kernel image is available for execution", "no code for this card", "vulkan"),
        ("CUDA driver version is insufficient for CUDA runtime version", "driver is older", "cuda12"),
        ("cuda: libcublas.so.12: cannot open shared object file", "CUDA 12 runtime", "cublas-cu12"),
        ("libcuda.so.1: cannot open shared object file", "no NVIDIA driver", "--gpus all"),
        ("ggml_cuda_init: no CUDA-capable device is detected", "no NVIDIA driver", "CUDA_VISIBLE"),
        ("vulkan: libvulkan.so.1: cannot open shared object file", "no Vulkan loader", "libvulkan1"),
        ("ggml_vulkan: No devices found.", "no Vulkan driver", "mesa"),
        (
            "ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory",
            "in use",
            "nvidia-smi",
        ),
        ("/lib/libc.so.6: version `GLIBC_2.38' not found", "needs GLIBC_2.38", "perdure[compile]"),
        ("CUDA error: an illegal memory access was encountered", "fails on this card", "vulkan"),
        ("cuda: file too short", "damaged", "perdure engine test"),
    ],
)
def test_the_usual_causes_have_a_sentence_and_a_command(words: str, sentence: str, advice: str) -> None:
    told = last_words(f"first line\n{words}\nand then it aborted\n")
    assert told == words
    cause = cause_of(told)
    assert cause is not None
    assert sentence in cause.sentence
    assert advice in cause.advice


def test_a_result_is_remembered_until_the_library_or_the_cpu_or_what_is_beside_it_changes(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shim(tmp_path / "one")
    one = LibrarySource(kind="own", folder=folder, version="1")
    first = probe.result_of(one)
    known = json.loads((home / "probes.json").read_bytes())
    assert len(known) == 1

    # A remembered result is believed: this one is planted.
    (key,) = known
    known[key]["attempts"][0]["died"] = "planted"
    (home / "probes.json").write_text(json.dumps(known))
    assert not probe.result_of(one).usable
    with monkeypatch.context() as other:
        other.setattr(probe_results, "processor", lambda: "another CPU")
        assert probe.result_of(one) == first
    with monkeypatch.context() as other:
        other.setenv("LD_LIBRARY_PATH", str(tmp_path))
        assert probe.result_of(one) == first
    with monkeypatch.context() as other:
        other.setattr(sys, "base_prefix", "another Python")
        assert probe.result_of(one) == first
    # The same files with other content are another library.
    (folder / "libllama.so").unlink()
    version = "0.5.7" if OLD_LAYOUT else "0.6.7"
    (shim(tmp_path / "two", VERSION=f'"{version}"') / "libllama.so").rename(folder / "libllama.so")
    assert probe.result_of(one).usable
    assert len(json.loads((home / "probes.json").read_bytes())) == 5


@pytest.mark.parametrize("damage", [b"", b"[]", b"{", b'{"a": {}}', b'{"a": {"folder": "x", "attempts": 7}}'])
def test_a_damaged_file_of_results_costs_a_probe(damage: bytes, tmp_path: Path, home: Path) -> None:
    home.mkdir()
    (home / "probes.json").write_bytes(damage)
    one = LibrarySource(kind="own", folder=shim(tmp_path / "one"), version="1")
    assert probe.result_of(one).usable


# Another layout.


@pytest.mark.parametrize("offset", [0, 12, 40, 56, 88])
@pytest.mark.usefixtures("one_variant")
def test_m2_a_library_with_one_more_field_is_refused_in_words(
    offset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shim(tmp_path / "shifted", SHIFTED=offset)
    monkeypatch.setenv("PERDURE_LLAMA", str(folder))
    with pytest.raises(EngineLibraryError, match=r"laid out otherwise: llama_context_default_params gives"):
        choice.choose()


@pytest.mark.parametrize("version", ["0.3.9", ""])
@pytest.mark.usefixtures("one_variant")
def test_m2_a_library_of_an_older_version_is_refused_in_words(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_LLAMA", str(shim(tmp_path / "other", VERSION=f'"{version}"')))
    with pytest.raises(EngineLibraryError, match=f"it is version {version}. perdure is written for"):
        choice.choose()


OLD_LAYOUT = numbers(library.loaded().version) < (0, 6)


@pytest.mark.usefixtures("one_variant")
def test_m2_structs_of_another_version_than_it_says_are_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "0.6.0" if OLD_LAYOUT else "0.5.0"
    monkeypatch.setenv("PERDURE_LLAMA", str(shim(tmp_path / "other", VERSION=f'"{other}"')))
    with pytest.raises(EngineLibraryError, match=r"laid out otherwise: llama_context_default_params gives"):
        choice.choose()


@pytest.mark.parametrize(("version", "warned"), [("0.6.1", False), ("0.9.0", True), ("b9000", True)])
@pytest.mark.usefixtures("one_variant")
def test_a_newer_version_runs_and_an_unknown_one_is_told_of(
    version: str,
    warned: bool,
    use: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the structs of 0.6, which are made of those of the library at hand where that is older."""
    place = ContextParams06.moe_cache_size.offset
    defines = {"INSERTED": place} if OLD_LAYOUT else {}
    folder = shim(tmp_path / "newer", VERSION=f'"{version}"', **defines)
    monkeypatch.setenv("PERDURE_LLAMA", str(folder))
    with caplog.at_level(logging.WARNING, "perdure.engine"):
        assert choice.choose().result.usable
    assert ["newer than this perdure knows" in line for line in caplog.messages] == [True] * warned
    assert use().startswith("answered")


def test_m2_a_library_that_lacks_functions_is_refused_in_words(tmp_path: Path) -> None:
    functions = Functions([])
    with pytest.raises(EngineLibraryError, match=r"it lacks \d+ functions, such as ggml_backend_"):
        guard.check(functions, tmp_path)


def test_a_library_without_functions_that_no_model_needs_is_used() -> None:
    assert set(Functions([]).missing) == set(FUNCTIONS) - OPTIONAL
    assert not hasattr(Functions([]), "llama_model_quantize")


def test_m2_a_file_that_is_no_library_is_refused_in_words(
    use: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libllama.so").write_bytes(b"\x7fELF" + os.urandom(100))
    monkeypatch.setenv("PERDURE_LLAMA", str(tmp_path))
    assert "cannot be loaded" in use()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not tell what is loaded")
def test_a_process_opens_the_one_cpu_variant_that_it_uses() -> None:
    """Asking the others for their scores is the probe's: one of them could die of it, and all stay loaded."""
    if len(cpu_variants(library.loaded().source)) < 2:
        pytest.skip("this library has no CPU variants")
    program = """
import re
from perdure.engine.llama.native import library
library.loaded()
print(*sorted(set(re.findall("libggml-cpu-[^ ]*[.]so", open("/proc/self/maps").read()))))
"""
    # The home of this test is empty.
    env = os.environ | {"PERDURE_LLAMA": str(library.loaded().source.folder)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [f"libggml-cpu-{library.loaded().variant}.so"]
