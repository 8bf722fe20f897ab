"""Embeddings from an engine in another process."""

from __future__ import annotations

from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from decode.observed import open_toy
from ext.workers.engines import ABORT, ABORT_ONCE, HANG, HOLD, QUICK, Hold, isolated, remote
from ext.workers.test_deaths import kill
from perdure import ContextOverflow, EngineDiedError, Runtime, TokenError

TEXTS = ["one", "word " * 40, "three"]


def here(texts: Any) -> Any:
    with open_toy() as rt:
        return rt.embed(texts).vectors


def test_vectors_are_those_of_this_process(shared: Runtime) -> None:
    found = shared.embed(TEXTS)
    np.testing.assert_array_equal(found.vectors, here(TEXTS))
    assert found.tokens == (3, 200, 5)
    assert shared.embedding_width == found.vectors.shape[1]
    np.testing.assert_array_equal(shared.embed([np.array([65, 66])]).vectors, here("AB"))


def test_errors_are_those_of_this_process(shared: Runtime) -> None:
    with pytest.raises(ContextOverflow, match="text 0 has 300 tokens, 256 fit") as refused:
        shared.embed("x" * 300)
    assert (refused.value.needed, refused.value.fits) == (300, 256)
    bad: Any
    for bad in ("", [[]], [[999]]):
        with pytest.raises(TokenError):
            shared.embed(bad)


def test_a_death_meanwhile_is_not_seen(rt: Runtime) -> None:
    found = rt.embed([[65, 66], [65, ABORT_ONCE]])
    assert found.vectors[0].tobytes() == here("AB").tobytes()
    assert remote(rt).health().restarts == 1


def test_what_kills_the_engine_is_asked_twice(rt: Runtime) -> None:
    with pytest.raises(EngineDiedError, match=r"twice during backend\.embed") as died:
        rt.embed([65, ABORT])
    assert died.value.signal == "SIGABRT"


def test_a_kill_from_outside_in_the_middle_of_a_text_is_not_seen(rt: Runtime, hold: Hold) -> None:
    answer = rt.submit_embed([65, HOLD])
    hold.reached()
    kill(rt)
    hold.reached()
    hold.go()
    assert len(answer.result(60)) == 1


def test_an_engine_that_hangs_over_a_text_is_replaced(hold: Hold) -> None:
    restart_policy = replace(QUICK, hang_timeout=0.2)
    with isolated(restart_policy=restart_policy) as rt, pytest.raises(EngineDiedError, match="twice"):
        rt.embed([65, HANG])


def test_a_cancelled_request_is_withdrawn_there(rt: Runtime, hold: Hold) -> None:
    answer = rt.submit_embed([[65, HOLD]] + [[65, HANG]] * 5)
    hold.reached()
    assert answer.cancel()
    rt.model.tokenize("the cancel has arrived before this was answered")
    hold.go()
    # It would hang over the other texts.
    assert len(rt.embed("AB")) == 1
    with pytest.raises(CancelledError):
        answer.result()
    assert remote(rt).health().restarts == 0
