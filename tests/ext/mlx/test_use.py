"""A folder is opened, served, shown and kept like any other model."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner

import perdure
from ext.workers.engines import QUICK
from perdure import CannotRewindError, InvalidInputError
from perdure.cli.app import app
from perdure.engine import registry
from perdure.ext.mlx.engine import ENGINE
from perdure.ext.mlx.model import MlxModel
from perdure.server.pool.spec import read_selection
from server.live_server import live_server
from subjects import MLX, Subject, check

Find = Callable[[str], Subject]


@pytest.mark.parametrize("isolated", [False, QUICK], ids=["in process", "in a worker"])
def test_a_folder_is_served_and_its_sessions_last(llama: Path, tmp_path: Path, isolated: bool) -> None:
    store = tmp_path / "store"
    with perdure.open(str(llama), n_ctx=256, slots=1, store=store, isolated=isolated) as rt:
        session = rt.session("a", system="be brief")
        session.say("the reading of the station", max_tokens=8, temperature=0)
        first = session.say("and the other things", max_tokens=8, temperature=0)
        if not isolated:
            with live_server(rt) as server, httpx.Client(base_url=server.url, timeout=60) as client:
                asked = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
                reply = client.post("/v1/chat/completions", json=asked).raise_for_status().json()
                assert reply["usage"]["completion_tokens"] > 0
    with perdure.open(str(llama), n_ctx=256, slots=1, store=store, isolated=isolated) as rt:
        session = rt.session("a")
        session.rewind(1)
        again = session.say("and the other things", max_tokens=8, temperature=0)
        assert again.text == first.text
        # What was computed before the restart was read from the disk.
        assert again.reuse.reused > 0
        assert sum(again.reuse.tiers.values()) == again.reuse.reused


def test_a_server_takes_a_folder_that_is_a_model_and_one_that_holds_models(
    llama: Path, zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    (one,) = read_selection([str(llama)]).models
    assert (one.name, one.source) == ("llama", str(llama))
    (named,) = read_selection([f"mine={llama}"]).models
    assert (named.name, named.source) == ("mine", str(llama))
    shutil.copy(zoo_path("llama"), tmp_path / "toy.gguf")
    (other,) = read_selection([str(tmp_path)]).models
    assert other.source == str(tmp_path / "toy.gguf")


def test_the_command_shows_a_folder(llama: Path) -> None:
    shown = CliRunner().invoke(app, ["show", str(llama)])
    assert shown.exit_code == 0
    assert "llama" in shown.output


@pytest.mark.extension("machine")
def test_doctor_tells_of_this_engine() -> None:
    assert "MLX" in CliRunner().invoke(app, ["doctor"]).output


def test_a_folder_belongs_to_this_engine_also_by_its_name(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(llama.parent)
    assert registry.engine_for("llama") is ENGINE
    assert registry.engine_for(llama) is ENGINE
    assert registry.engine_for("owner/repo:Q4_K_M") is not ENGINE


def test_mlx_is_imported_only_for_a_folder_and_leaves_the_limit_of_files_alone(llama: Path) -> None:
    script = f"""
import resource, sys
import perdure, perdure.cli.app
from perdure.engine import registry
before = resource.getrlimit(resource.RLIMIT_NOFILE)
assert registry.engine_for("owner/repo:Q4_K_M").name == "llama.cpp"
assert registry.engine_for({str(llama)!r}).name == "MLX"
assert not any(name.split(".")[0] in ("mlx", "mlx_lm", "transformers") for name in sys.modules)
registry.open_model({str(llama)!r}, {{}}, cells=0).close()
assert "mlx_lm" in sys.modules
assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_text_becomes_the_tokens_that_llama_cpp_makes_of_it(find_subject: Find) -> None:
    """Both have the zoo's vocabulary: a session can go from one engine to the other by its tokens."""
    ours, theirs = find_subject("mlx-llama").model, find_subject("llama").model
    for text in ("hello world, the end", "ä ö 日本 \n\t x", "<|im_start|>user\nhi<|im_end|>", ""):
        for special in (False, True):
            tokens = theirs.tokenize(text, special=special)
            assert ours.tokenize(text, special=special) == tokens
            assert ours.detokenize(tokens, special=True) == theirs.detokenize(tokens, special=True)
    assert ours.ends == theirs.ends
    assert ours.controls == theirs.controls


@pytest.mark.parametrize("swa_full", [True, False])
def test_a_window_that_has_slid_on_is_cut_only_where_its_rows_are_there(
    find_subject: Find, swa_full: bool
) -> None:
    """mlx-lm's own ring would cut, and answer from rows of other tokens (mlx-lm 1494, 1776)."""
    subject = find_subject("mlx-gemma3")
    tokens = subject.tokens(700)
    with subject.context(n_ctx=800, n_seq=1, n_batch=64, swa_full=swa_full) as ctx:
        ctx.decode(tokens)
        ctx.decode(tokens[:3])
        if swa_full:
            ctx.truncate(400)
        else:
            with pytest.raises(CannotRewindError):
                ctx.truncate(100)
            ctx.truncate(702)
        kept = ctx.tokens()
        ctx.decode([9])
        check(ctx.logits().copy(), subject.cold([kept, [9]], n_ctx=800, n_batch=64), 1e-9)


@pytest.mark.parametrize("name", ["mlx-mamba", "mlx-jamba"])
def test_a_recurrent_state_is_never_cut_and_comes_back_from_a_checkpoint(
    find_subject: Find, name: str
) -> None:
    subject = find_subject(name)
    tokens = subject.tokens(30)
    with subject.context() as ctx:
        ctx.decode(tokens[:20])
        point = ctx.checkpoint()
        ctx.decode(tokens[20:])
        with pytest.raises(CannotRewindError):
            ctx.truncate(20)
        ctx.restore(point)
        ctx.decode([9])
        check(ctx.logits().copy(), subject.cold([[*tokens[:20]], [9]]), 1e-9)


@pytest.mark.parametrize("name", ["mlx-llama", "mlx-gemma3", "mlx-mamba", "mlx-jamba", "mlx-qwen3moe"])
def test_a_step_of_several_sequences_is_one_computation_and_the_same_numbers(
    find_subject: Find, name: str
) -> None:
    from inside import core_of

    subject = find_subject(name)
    texts = [subject.tokens(length, length) for length in (40, 7, 23)]
    with subject.context() as ctx:
        for seq, text in enumerate(texts):
            ctx.decode(text, seq)
        for token in (3, 4):
            ctx.step([perdure.Feed(seq, [token]) for seq in range(3)])
        assert core_of(ctx)._joins is True  # type: ignore[attr-defined]
        for seq, text in enumerate(texts):
            check(ctx.logits(seq=seq).copy(), subject.cold([text, [3], [4]]), 1e-9)


def test_the_architecture_says_its_memory(find_subject: Find) -> None:
    said = {"mlx-gemma3": "sliding", "mlx-mamba": "recurrent", "mlx-jamba": "hybrid", "mlx-llama4": "full"}
    assert {name: find_subject(name).kind.name for name in said} == said


@pytest.mark.parametrize("name", MLX)
def test_our_caches_give_what_mlx_lms_own_give(
    name: str, find_subject: Find, zoo_path: Callable[[str], Path]
) -> None:
    """Past a window and a chunk of 16 tokens."""
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    subject = find_subject(name)
    tokens = subject.tokens(40)
    theirs, _ = load_model(zoo_path(name))
    kept = make_prompt_cache(theirs)
    with subject.context(n_batch=40) as ctx:
        at = 0
        for count in (9, *[1] * 10, 7, *[1] * 14):
            ctx.decode(tokens[at : at + count])
            row = theirs(mx.array([tokens[at : at + count]]), cache=kept)[0, -1, : ctx.n_vocab]
            at += count
            check(ctx.logits().copy(), np.array(row), 1e-8)


@pytest.mark.parametrize("name", ["mlx-llama", "mlx-gemma3", "mlx-mamba", "mlx-jamba"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_x1_a_step_that_fails_in_its_last_layer_is_as_if_it_had_not_been(
    find_subject: Find, monkeypatch: pytest.MonkeyPatch, name: str, error: type[BaseException]
) -> None:
    """By then the layers before it have rows and states of the step."""
    from inside import core_of

    subject = find_subject(name)
    text, other = subject.tokens(20), subject.tokens(12, 5)
    with subject.context() as ctx:
        ctx.decode(text, 0)
        ctx.decode(other, 1)
        layer = type(core_of(ctx)._weights.model.layers[-1])  # type: ignore[attr-defined]
        called = layer.__call__

        def fail(*given: Any, **named: Any) -> Any:
            called(*given, **named)
            raise error("planted")

        for feeds in ([perdure.Feed(0, [3, 4, 5])], [perdure.Feed(0, [3]), perdure.Feed(1, [4])]):
            with monkeypatch.context() as patch:
                patch.setattr(layer, "__call__", fail)
                with pytest.raises((perdure.DecodeError, KeyboardInterrupt)):
                    ctx.step(feeds)
        for seq, kept in ((0, text), (1, other)):
            assert ctx.tokens(seq) in (kept, [])
            read = ctx.tokens(seq)
            ctx.decode([9], seq)
            check(ctx.logits(seq=seq).copy(), subject.cold([part for part in (read, [9]) if part]), 1e-9)


def open_models() -> set[int]:
    """Models of this process that are open, those of other tests too."""
    return {id(each) for each in gc.get_objects() if isinstance(each, MlxModel) and not each.closed}


@pytest.mark.parametrize("command", ["analyse", "vectors"])
def test_y16_a_model_that_a_command_refuses_is_closed(llama: Path, tmp_path: Path, command: str) -> None:
    """Y16: Python's end met its threads, and the process was aborted in half of all tries."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"positive": "I am glad", "negative": "I am sad"}\n')
    arguments = ["the man"] if command == "analyse" else [str(pairs), str(tmp_path / "out.gguf")]
    before = open_models()
    done = CliRunner().invoke(app, [command, *arguments, "--model", str(llama)])
    assert isinstance(done.exception, InvalidInputError)
    assert "llama.cpp" in str(done.exception)
    assert open_models() == before
