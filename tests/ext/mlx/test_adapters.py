"""LoRAs and DoRAs as mlx-lm writes them compute what it computes with them, and leave nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perdure
from perdure.errors import EngineError, InvalidInputError, ModelFileError, ModelNotFoundError
from perdure.ext.mlx.engine import ENGINE
from subjects import Subject, check, divergence
from zoo.folders import write_adapter

Find = Callable[[str], Subject]


def theirs(model: Path, adapter: Path, tokens: list[int]) -> Any:
    """The last row that mlx-lm itself computes."""
    import mlx.core as mx
    from mlx_lm.utils import load_adapters, load_model

    loaded, _ = load_model(model)
    loaded = load_adapters(loaded, str(adapter))
    loaded.eval()
    return np.array(loaded(mx.array([tokens]))[0, -1])


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_computes_what_mlx_lm_computes_and_leaves_nothing(
    kind: str, llama: Path, find_subject: Find, tmp_path: Path
) -> None:
    subject = find_subject("mlx-llama")
    folder = write_adapter(llama, tmp_path / "one", kind=kind)
    adapter = subject.model.adapter(str(folder))
    tokens = subject.tokens(12)
    cold = subject.cold([tokens], n_batch=16)
    with subject.context(n_batch=16) as ctx:
        ctx.adapt({adapter: 1.0}, 1)
        for seq in (0, 1, 2):
            ctx.decode(tokens, seq)
            row = ctx.logits().copy()
            if seq == 1:
                assert divergence(cold, row) > 1e-3
                check(row, theirs(llama, folder, tokens), 1e-6)
            else:
                check(row, cold)
    check(subject.cold([tokens], n_batch=16), cold)


def test_scales_add_up_and_a_dora_goes_alone(llama: Path, find_subject: Find, tmp_path: Path) -> None:
    subject = find_subject("mlx-llama")
    one = subject.model.adapter(str(write_adapter(llama, tmp_path / "one", seed=1)))
    two = subject.model.adapter(str(write_adapter(llama, tmp_path / "two", seed=2)))
    dora = subject.model.adapter(str(write_adapter(llama, tmp_path / "dora", kind="dora")))
    assert len({one.digest, two.digest, dora.digest}) == 3
    tokens, rows = subject.tokens(10), []
    with subject.context() as ctx:
        for scales in ({one: 1.0}, {one: 0.5}, {one: 1.0, two: 1.0}, {one: 0.0}, {}):
            ctx.adapt(scales)
            ctx.decode(tokens)
            rows.append(ctx.logits().copy())
        with pytest.raises(EngineError, match="refused these adapters"):
            ctx.adapt({dora: 0.5})
    apart = [divergence(row, rows[-1]) for row in rows]
    assert apart[0] > apart[1] > 0
    assert apart[2] > 0 == apart[3]


def test_what_is_no_adapter_of_this_model_is_refused(llama: Path, find_subject: Find, tmp_path: Path) -> None:
    model = find_subject("mlx-llama").model
    with pytest.raises(ModelNotFoundError, match=r"adapter_config\.json"):
        model.adapter(str(tmp_path))
    folder = write_adapter(llama, tmp_path / "one")
    with pytest.raises(InvalidInputError, match="another model"):
        find_subject("mlx-mamba").model.adapter(str(folder))
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({"fine_tune_type": "full"}))
    with pytest.raises(InvalidInputError, match="full"):
        model.adapter(str(folder))
    config.write_text("[1")
    with pytest.raises(ModelFileError, match="no JSON"):
        model.adapter(str(folder))
    folder = write_adapter(llama, tmp_path / "two")
    (folder / "adapters.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelFileError, match="header claims"):
        model.adapter(str(folder))


def test_a_session_uses_an_adapter_by_its_name(llama: Path, tmp_path: Path) -> None:
    folder = write_adapter(llama, tmp_path / "one")
    with perdure.open(str(llama), n_ctx=256, slots=1, adapter_names={"terse": str(folder)}) as rt:
        plain = rt.session("a").say("the rain", max_tokens=8, temperature=0).text
        named = rt.session("b").say("the rain", max_tokens=8, temperature=0, adapters={"terse": 1.0}).text
        again = rt.session("c").say("the rain", max_tokens=8, temperature=0).text
    assert plain == again != named


def test_two_models_of_one_folder_do_not_share_adapters(
    llama: Path, find_subject: Find, tmp_path: Path
) -> None:
    other = ENGINE.open(str(llama), cells=0)
    adapter = other.adapter(str(write_adapter(llama, tmp_path / "one")))
    with find_subject("mlx-llama").context() as ctx, pytest.raises(EngineError, match="refused"):
        ctx.adapt({adapter: 1.0})
