"""V3, S1: a session that guesses ahead, in an engine that is killed between its turns."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import perdure
from ext.workers.engines import isolated, pid
from perdure.memory import FullAttention, Hybrid, MemorySpec
from perdure.testing.toy import ToyModel

ASKED: dict[str, Any] = {
    "max_tokens": 40,
    "temperature": 1.0,
    "seed": 4,
    "ignore_eos": True,
    # Few tokens, so that n-grams come again.
    "logit_bias": {97: 12.0, 98: 12.0},
}


@pytest.mark.parametrize("kind", [FullAttention, Hybrid])
def test_an_engine_that_dies_loses_no_turn_that_guessed(kind: type[MemorySpec], tmp_path: Path) -> None:
    texts = ["aaaa bbbb", "and then?", "why?"]
    with perdure.open(ToyModel(kind), n_ctx=512) as rt:
        session = rt.session("a")
        right = [session.say(text, **ASKED).text for text in texts]
    with isolated(kind.name, store=tmp_path, n_ctx=512) as rt:
        session = rt.session("a")
        for text, reply in zip(texts, right, strict=True):
            turn = session.say(text, **ASKED, speculate=6)
            assert turn.text == reply
            assert turn.timings.drafted_tokens > turn.timings.accepted_tokens > 0
            if text == texts[1]:
                os.kill(pid(rt), signal.SIGKILL)
    with isolated(kind.name, store=tmp_path, n_ctx=512) as rt:
        session = rt.session("a")
        assert session.turns == len(texts)
        session.rewind(1)
        assert session.say(texts[-1], **ASKED, speculate=3).text == right[-1]
