"""Options compared in one call."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perdure
from perdure import InvalidInputError, Runtime, TokenError
from perdure.testing.toy import ToyModel

PROMPT = "the man who was"
OPTIONS = [" reading", " a", " gone away from here"]


@pytest.fixture(scope="module")
def rt(zoo_path: Callable[[str], Path]) -> Iterator[Runtime]:
    with perdure.open(zoo_path("llama"), n_ctx=256, slots=2, exact=True, threads=1) as runtime:
        yield runtime


def expected(rt: Runtime) -> dict[str, float]:
    """The log probability of each option, token by token and by hand."""
    model = rt.model
    assert isinstance(model, perdure.Model)
    found = {}
    with model.context(n_ctx=256, threads=1) as ctx:
        for option in OPTIONS:
            ctx.clear()
            before, own = model.tokenize(PROMPT), model.tokenize(option, bos=False)
            ctx.decode([*before, *own], rows="all")
            rows = [ctx.logits(len(before) - 1 + at).log_softmax() for at in range(len(own))]
            found[option] = sum(float(row[token]) for row, token in zip(rows, own, strict=True))
    return found


def test_options_come_likeliest_first_with_their_log_probabilities_and_shares(rt: Runtime) -> None:
    found = rt.choose(PROMPT, OPTIONS)
    known = expected(rt)
    assert {choice.option: choice.logprob for choice in found} == pytest.approx(known, abs=0.05)
    assert [choice.option for choice in found] == sorted(known, key=lambda option: -known[option])
    assert sum(choice.probability for choice in found) == pytest.approx(1)
    assert [OPTIONS[choice.index] for choice in found] == [choice.option for choice in found]
    shares = np.exp([choice.logprob for choice in found])
    assert [choice.probability for choice in found] == pytest.approx(list(shares / shares.sum()))


def test_by_token_long_options_are_not_at_a_disadvantage(rt: Runtime) -> None:
    found = rt.choose(PROMPT, OPTIONS, by="token")
    means = [choice.logprob_per_token for choice in found]
    assert means == sorted(means, reverse=True)
    assert math.log(found[0].probability / found[1].probability) == pytest.approx(means[0] - means[1])


def test_no_event_loop_tokenises_or_queues_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either may wait for an engine in another process, or take long."""
    threads: list[threading.Thread] = []
    with perdure.open(ToyModel(), n_ctx=64, slots=2) as rt:

        def noting(call: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*given: Any, **settings: Any) -> Any:
                threads.append(threading.current_thread())
                return call(*given, **settings)

            return noted

        monkeypatch.setattr(rt.model, "tokenize", noting(rt.model.tokenize))
        monkeypatch.setattr(rt.backend, "submit", noting(rt.backend.submit))
        assert len(asyncio.run(rt.achoose("Hello", [" a", " b"]))) == 2
    assert len(threads) == 5
    assert threading.current_thread() not in threads


def test_options_may_be_tokens_and_asked_for_by_asyncio(rt: Runtime) -> None:
    tokens = [rt.model.tokenize(option, bos=False) for option in OPTIONS]
    texts, ids = rt.choose(PROMPT, OPTIONS), rt.choose(rt.model.tokenize(PROMPT), tokens)
    assert [(each.index, each.tokens, each.logprob) for each in texts] == [
        (each.index, each.tokens, each.logprob) for each in ids
    ]
    assert asyncio.run(rt.achoose(PROMPT, OPTIONS)) == texts


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [(PROMPT, [], InvalidInputError), (PROMPT, "text", InvalidInputError), (PROMPT, ["a", ""], TokenError)],
)
def test_what_is_no_choice_is_refused(
    rt: Runtime, prompt: str, options: list[str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        rt.choose(prompt, options)


def test_another_way_to_compare_is_refused_before_anything_is_computed(rt: Runtime) -> None:
    before = rt.cache.stats()
    with pytest.raises(InvalidInputError, match="by total or by token"):
        rt.choose("and then what", OPTIONS, by="length")  # type: ignore[arg-type]
    assert rt.cache.stats() == before
