"""Sessions go from one engine to the other by their tokens; state never does. Quantised caches keep too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.errors import InvalidInputError
from subjects import Subject, check

Find = Callable[[str], Subject]


@pytest.mark.parametrize("first", ["llama", "mlx-llama"])
def test_a_session_of_one_engine_goes_on_on_the_other_and_says_what_it_cost(
    first: str, zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    second = {"llama": "mlx-llama", "mlx-llama": "llama"}[first]
    store = tmp_path / "store"
    with perdure.open(str(zoo_path(first)), n_ctx=512, slots=1, store=store) as rt:
        session = rt.session("a", system="be brief")
        session.say("the reading of the station", max_tokens=8, temperature=0)
        tokens = session.tokens
    with perdure.open(str(zoo_path(second)), n_ctx=512, slots=1, store=store) as rt:
        session = rt.session("a")
        assert session.tokens == tokens
        reply = session.say("and the other things", max_tokens=8, temperature=0)
        # All of it was computed anew: no state of the other engine was taken.
        assert reply.reuse.reused == 0
        assert reply.reuse.computed >= len(tokens)
        fresh = rt.session("b")
        cold = fresh.say("the rain", max_tokens=4, temperature=0)
        assert cold.text is not None


def test_state_of_other_weights_is_never_taken(llama: Path, own: Path, tmp_path: Path) -> None:
    """P7: the same architecture, tokens and store; only numbers of one matrix differ."""
    import mlx.core as mx

    weights: dict[str, Any] = mx.load(str(own / "model.safetensors"))  # type: ignore[assignment]
    weights["model.layers.0.mlp.down_proj.weight"] = weights["model.layers.0.mlp.down_proj.weight"] * 2
    mx.eval(weights)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "model.safetensors").replace(own / "model.safetensors")
    prompt = list(range(200))
    asked: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with perdure.open(str(own), n_ctx=512, slots=1) as rt:
        cold = rt.generate(prompt, **asked).tokens
    found = []
    for folder in (llama, own, llama):
        with perdure.open(str(folder), n_ctx=512, slots=1, store=tmp_path / "store") as rt:
            found.append(rt.generate(prompt, **asked))
    assert [reply.reuse.reused > 0 for reply in found] == [False, False, True]
    assert found[1].tokens == cold != found[0].tokens


@pytest.mark.extension("speculation")
def test_a_draft_of_either_engine_guesses_what_the_model_says(
    llama: Path, zoo_path: Callable[[str], Path]
) -> None:
    """Guesses change no reply: those of the model itself are right, those of another one are cut off."""
    prompt = list(range(40))
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "loop_guard": 0}
    with perdure.open(str(llama), n_ctx=128, slots=1) as rt:
        plain = rt.generate(prompt, **asked).tokens
    accepted = []
    for draft in (llama, zoo_path("llama")):
        with perdure.open(str(llama), n_ctx=128, slots=1, draft=str(draft)) as rt:
            reply = rt.generate(prompt, speculate=4, **asked)
        assert reply.tokens == plain
        assert reply.timings.drafted_tokens > 0
        accepted.append(reply.timings.accepted_tokens / reply.timings.drafted_tokens)
    assert accepted[0] > 0.8 > accepted[1]


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_a_quantised_cache_is_cut_saved_and_stepped_like_any_other(find_subject: Find, kv_type: str) -> None:
    subject = find_subject("mlx-llama")
    types: dict[str, Any] = {"k_type": kv_type, "v_type": kv_type}
    tokens = subject.tokens(40)
    with subject.context(**types) as ctx:
        ctx.decode(tokens)
        ctx.truncate(30)
        state = ctx.save()
        assert len(state) < 30 * 1536 // 2
        ctx.load(state, 1)
        ctx.decode(tokens[:5], 2)
        ctx.step([perdure.Feed(0, [9]), perdure.Feed(1, [9]), perdure.Feed(2, [9])])
        cold = subject.cold([tokens[:30], [9]], **types)
        check(ctx.logits(seq=0).copy(), cold, 1e-6)
        check(ctx.logits(seq=1).copy(), cold, 1e-6)
        check(ctx.logits(seq=2).copy(), subject.cold([tokens[:5], [9]], **types), 1e-6)


def test_k_and_v_have_one_type_and_a_window_has_none(find_subject: Find) -> None:
    with pytest.raises(InvalidInputError, match="one type"):
        find_subject("mlx-llama").context(k_type="q8_0")
    with pytest.raises(InvalidInputError, match="window"):
        find_subject("mlx-gemma3").context(k_type="q8_0", v_type="q8_0")
    with pytest.raises(InvalidInputError, match="q5_1"):
        find_subject("mlx-llama").context(k_type="q5_1", v_type="q5_1")


def test_a_text_has_one_vector(find_subject: Find) -> None:
    subject = find_subject("mlx-llama")
    with subject.model.embedder(n_ctx=256) as embedder:
        one, other = embedder.embed(subject.tokens(100)), embedder.embed(subject.tokens(20))
        again = embedder.embed(subject.tokens(100))
        assert one.tobytes() == again.tobytes() != other.tobytes()
        assert abs(float((one**2).sum()) - 1) < 1e-5
