"""State of other kernels (M3, W4), other RoPE factors (W1) or other files (W2) is never mixed with ours."""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from engine.shims import needs_compiler, shim
from perdure import IncompatibleStateError, Model, ModelFileError, ModelLoadError
from perdure.engine.llama.native import library, log_sink, probe_results
from perdure.engine.llama.native.backends import BUILT_IN, variants
from perdure.engine.llama.native.declarations import numbers
from perdure.engine.llama.native.library import list_devices
from perdure.identity import content_digest
from zoo import Recipe, attention
from zoo.attention import HEAD
from zoo.sheet import Sheet

TESTS = Path(__file__).parents[1]
Answer = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def answer(zoo_path: Callable[[str], Path]) -> Answer:
    """`answer(store)` is what a new process says to one prompt: the tokens, and how many were reused."""

    def run(store: Path | str, gpu_layers: int = 0, **environment: str) -> dict[str, Any]:
        ended = subprocess.run(
            [sys.executable, "-m", "engine.kernels", zoo_path("llama"), str(store), str(gpu_layers)],
            cwd=TESTS,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        said: dict[str, Any] = json.loads(ended.stdout)
        return said

    return run


@pytest.fixture(scope="module")
def filled(answer: Answer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the state of our own kernels."""
    store = tmp_path_factory.mktemp("filled") / "store"
    answer(store)
    assert answer(store)["reused"] == 149
    return store


@pytest.fixture
def store(filled: Path, tmp_path: Path) -> Path:
    return shutil.copytree(filled, tmp_path / "store")


def never_mixed(answer: Answer, store: Path, **change: Any) -> None:
    """A filled store gives nothing with `change`, and the answer is that of a cold start."""
    changed, cold = answer(store, **change), answer("", **change)
    assert changed == cold
    assert cold["reused"] == 0
    # Each finds its own.
    assert answer(store, **change)["reused"] == 149
    assert answer(store)["reused"] == 149


def test_m3_w4_state_of_another_cpu_variant_is_not_used(answer: Answer, store: Path) -> None:
    ours = library.loaded()
    others = [name for name, score in variants(ours.source.folder).items() if score and name != ours.variant]
    if ours.variant == BUILT_IN or not others:
        pytest.skip("this library has one CPU variant that runs here")
    never_mixed(answer, store, PERDURE_LLAMA_VARIANT=others[-1])


@needs_compiler
def test_m3_w4_state_of_another_library_is_not_used(answer: Answer, store: Path, tmp_path: Path) -> None:
    version = "0.5.9" if numbers(library.loaded().version) < (0, 6) else "0.6.9"
    never_mixed(answer, store, PERDURE_LLAMA=str(shim(tmp_path / "other", VERSION=f'"{version}"')))


@pytest.mark.extension("builds")
def test_m3_state_without_extra_buffers_is_not_used(answer: Answer, store: Path, tmp_path: Path) -> None:
    """What the probe decides is part of the identity."""
    home = tmp_path / "home"
    home.mkdir()
    source = library.loaded().source
    from perdure.ext.builds import probe

    known = probe.result_of(source)
    without = replace(known, attempts=(replace(known.attempts[-1], extra_buffers=False),))
    (home / "probes.json").write_text(json.dumps({probe_results.key_of(source): asdict(without)}))
    change = {"PERDURE_HOME": str(home), "PERDURE_LLAMA": str(source.folder)}
    never_mixed(answer, store, **change)


@pytest.mark.skipif(
    not any(each.offloads for each in list_devices(library.load())), reason="this machine has no GPU"
)
def test_m3_state_of_other_layers_on_the_gpu_is_not_used(answer: Answer, store: Path) -> None:
    never_mixed(answer, store, gpu_layers=2)


def test_m3_the_same_library_in_another_folder_is_the_same_engine(
    answer: Answer, store: Path, tmp_path: Path
) -> None:
    shutil.copytree(library.loaded().source.folder, tmp_path / "copy")
    assert answer(store, PERDURE_LLAMA=str(tmp_path / "copy"))["reused"] == 149


def test_m3_the_identity_tells_library_kernels_and_devices(zoo_path: Callable[[str], Path]) -> None:
    ours = library.loaded()
    with Model(zoo_path("llama")) as model, model.context(n_ctx=64, threads=1) as ctx:
        assert probe_results.digest(ours.source) in ctx.identity.engine
        assert ours.version in ctx.identity.engine
        assert ctx.identity.kernels.startswith(ours.variant)
        assert "CPU" in ctx.identity.devices


# W1: models with long and short RoPE factors.


def longrope(folder: Path, original: int | None) -> Path:
    """A llama whose two sets of RoPE factors differ by far. `original` is where the long ones begin."""

    def fill(sheet: Sheet, vocabulary: int) -> None:
        attention.llama(sheet, vocabulary)
        sheet.text("llama.rope.scaling.type", "longrope")
        if original is not None:
            sheet.set(rope__scaling__original_context_length=original)
        for name, factor in (("long", 40.0), ("short", 1.0)):
            sheet.put(f"rope_factors_{name}.weight", np.full(HEAD // 2, factor, np.float32))

    return Recipe(name="longrope", architecture="llama", memory="full", fill=fill).write(folder)


@pytest.mark.parametrize("original", [512, None])
def test_w1_state_of_the_other_rope_factors_is_refused(original: int | None, tmp_path: Path) -> None:
    """W1: the library decides by the cells of a sequence, which in a shared pool are all of them."""
    path = longrope(tmp_path, original)
    # Without the key, the trained length (4,096) is where the long factors begin.
    n_ctx = 256 if original else 2048
    text = [(7 * index * index + 3 * index + 11) % 380 for index in range(100)]
    with (
        Model(path) as model,
        model.context(n_ctx=n_ctx, n_seq=4, threads=1) as streams,
        model.context(n_ctx=n_ctx, n_seq=4, threads=1, shared=True) as pool,
        model.context(n_ctx=n_ctx * 4, threads=1) as long,
    ):
        for context in (streams, pool, long):
            context.decode(text)
        rows = [np.array(context.logits()) for context in (streams, pool, long)]
        # They truly differ, and it is the pool that has the long ones.
        assert np.abs(rows[0] - rows[1]).max() > 0.1
        assert np.abs(rows[1] - rows[2]).max() < 0.1
        assert [each.identity.rope.rsplit("/", 1)[1] for each in (streams, pool, long)] == [
            "short",
            "long",
            "long",
        ]
        for source, target in ((streams, pool), (pool, streams), (streams, long)):
            with pytest.raises(IncompatibleStateError):
                target.load(source.save(0), seq=0)


def test_w1_a_model_with_one_set_of_factors_shares_state_whatever_its_size(
    zoo_path: Callable[[str], Path],
) -> None:
    with (
        Model(zoo_path("llama")) as model,
        model.context(n_ctx=256, threads=1) as small,
        model.context(n_ctx=8192, threads=1) as large,
    ):
        assert small.identity.rope == large.identity.rope


# W2: a file that was replaced in place.


def rewritten(path: Path, content: bytes) -> None:
    """Write other content of the same size into the same file, and keep its time."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        before.st_size,
        before.st_mtime_ns,
        before.st_ino,
    )


def test_w2_a_file_replaced_in_place_with_its_time_kept_has_another_digest(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 1000)
    first = content_digest(path)
    rewritten(path, b"b" * 1000)
    assert content_digest(path) != first


def test_w2_a_model_replaced_in_place_while_it_is_loaded_keeps_no_state(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(zoo_path("llama"), path)
    content = bytearray(path.read_bytes())
    with Model(path) as model:
        content[-1] ^= 1
        rewritten(path, bytes(content))
        with pytest.raises(ModelFileError, match="was changed since it was loaded"):
            _ = model.digest


# What is said.


def test_a_file_that_is_refused_is_refused_with_the_librarys_reason(
    tmp_path: Path, zoo_path: Callable[[str], Path]
) -> None:
    """Its last line only says that it failed."""
    # What was stopped and closed, and that again, must not leave the library unheard.
    with Model(zoo_path("llama")) as model, model.context(n_ctx=64, threads=1) as ctx:
        ctx.close()
        with model.embedder(n_ctx=64, threads=1) as embedder:
            embedder.close()
            embedder.stop()

    def without_output(sheet: Sheet, vocabulary: int) -> None:
        attention.sizes(sheet, 1)
        attention.ends(sheet, vocabulary)

    path = Recipe(name="broken", architecture="llama", memory="full", fill=without_output).write(tmp_path)
    reason = r"refused broken.gguf: tensor 'blk\.0\.attn_norm\.weight' not found\."
    with pytest.raises(ModelLoadError, match=reason) as refused:
        Model(path)
    assert "failed to load model" not in str(refused.value)
    path = Recipe(name="unknown", architecture="llama9", memory="full", fill=attention.llama).write(tmp_path)
    with pytest.raises(ModelLoadError, match="unknown model architecture: 'llama9'"):
        Model(path)


class Listened:
    """A library that says nothing, and knows where its lines would go."""

    def llama_log_set(self, lines: Any, _: None) -> None:
        self.lines = lines


@pytest.mark.parametrize("line", range(1, 16))
def test_b6_a_ctrl_c_leaves_the_log_so_that_it_can_be_opened_again(line: int) -> None:
    """B6: at any line of muting a call; the context that muted it opens the log when it is closed."""
    library: Any = Listened()
    sink = log_sink.LogSink(library)
    heard = library.lines
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename == log_sink.__file__:
            left -= event == "line"
            if event == "line" and left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt), sink.muted(7):
            assert library.lines is not heard
    finally:
        sys.settrace(before)
    sink.open(7)
    assert library.lines is heard
    atexit.unregister(sink.shut)


def test_a_context_longer_than_the_trained_length_is_said_once(
    zoo_path: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with Model(zoo_path("llama")) as model, caplog.at_level(logging.WARNING, "perdure.engine"):
        model.context(n_ctx=4096, threads=1).close()
        assert not caplog.records
        for _ in range(2):
            model.context(n_ctx=4097, threads=1).close()
        assert [record.getMessage() for record in caplog.records] == [
            "llama.gguf was trained on texts of up to 4096 tokens, and n_ctx is 4097: what it writes beyond "
            "that may make no sense"
        ]
