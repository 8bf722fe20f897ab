"""The repetition guard: a reply that says one phrase again and again is ended, and says so."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perdure
from perdure import Runtime
from perdure.decode.stops import TIMES, RepetitionGuard
from perdure.testing.toy import ToyModel


def saying(script: Sequence[int]) -> Any:
    """A processor that has the model say `script` again and again."""
    said = 0

    def processor(tokens: Sequence[int], logits: Any) -> Any:
        nonlocal said
        row = np.full(len(logits), -50.0, np.float32)
        row[script[said % len(script)]] = 50.0
        said += 1
        return row

    return processor


def asked(rt: Runtime, script: Sequence[int], **more: Any) -> perdure.Reply:
    return rt.generate("Say", processors=[saying(script)], temperature=0, max_tokens=600, **more)


@pytest.fixture(scope="module")
def rt() -> Any:
    with perdure.open(ToyModel(), n_ctx=1024, slots=1) as found:
        yield found


@pytest.mark.parametrize("phrase", [b"a", b"no, ", b"the cat sat on the mat. "])
def test_a_reply_that_repeats_a_phrase_ends(rt: Runtime, phrase: bytes) -> None:
    reply = asked(rt, list(phrase), loop_guard=128)
    assert reply.finish_reason == "repetition"
    assert len(reply.tokens) == 128
    assert reply.text == (phrase * 128)[:128].decode()


def test_0_lets_it_go_on_and_so_does_whoever_ignores_ends(rt: Runtime) -> None:
    assert asked(rt, b"a", loop_guard=0).finish_reason == "length"
    assert asked(rt, b"a", loop_guard=128, ignore_eos=True).finish_reason == "length"


def test_the_default_is_patient(rt: Runtime) -> None:
    assert asked(rt, b"na ").finish_reason == "length"


def test_a_phrase_longer_than_a_quarter_is_none(rt: Runtime) -> None:
    phrase = bytes(range(40, 80))
    assert asked(rt, phrase, loop_guard=128).finish_reason == "length"
    assert asked(rt, phrase, loop_guard=160).finish_reason == "repetition"


def test_text_that_counts_is_not_repetition(rt: Runtime) -> None:
    text = " ".join(str(number) for number in range(200)).encode()
    assert asked(rt, text, loop_guard=64).finish_reason == "length"


def test_a_reply_that_goes_on_in_another_request_is_one_reply() -> None:
    """Past the end of the context: the phrases before count."""
    with perdure.open(ToyModel(), n_ctx=256, slots=1) as rt:
        reply = rt.chat(
            [{"role": "user", "content": "Say"}],
            overflow="shift",
            max_tokens=900,
            temperature=0,
            loop_guard=400,
            processors=[saying(b"ab")],
        )
    assert reply.finish_reason == "repetition"
    assert 400 <= len(reply.tokens) <= 464


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(1, 40), st.lists(st.integers(0, 3), max_size=20))
def test_it_sees_what_the_definition_says(tokens: list[int], window: int, prefix: list[int]) -> None:
    guard = RepetitionGuard(window, prefix)
    whole = [*prefix[-window:], *tokens][-window:]
    right = len(whole) == window and any(
        all(whole[at] == whole[at - period] for at in range(period, window))
        for period in range(1, window // TIMES + 1)
    )
    assert guard.repeats(array("i", tokens)) == right


@pytest.mark.parametrize("value", [-1, 65537, 1.5, True])
def test_what_is_no_length_is_refused(rt: Runtime, value: Any) -> None:
    with pytest.raises(perdure.InvalidInputError, match="loop_guard"):
        rt.submit([1], loop_guard=value)
