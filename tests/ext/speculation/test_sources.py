"""V1: what guesses: a draft model, n-grams, earlier replies."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from decode.observed import open_toy
from perdure import InvalidInputError
from perdure.ext.speculation.ngrams import EARLIER, INDEXED, NAMESPACES, EarlierReplies, NgramIndex
from perdure.memory import MEMORY_KINDS, FullAttention, MemorySpec
from perdure.testing.toy import ToyModel

every_kind = pytest.mark.parametrize("kind", MEMORY_KINDS, ids=lambda kind: kind.name)

# A draft model.


@every_kind
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_draft_model_that_agrees_is_always_right(kind: type[MemorySpec], temperature: float) -> None:
    """It draws with the same numbers; here it has the same weights."""
    asked: dict[str, Any] = {"max_tokens": 30, "temperature": temperature, "seed": 3, "ignore_eos": True}
    with open_toy(draft=ToyModel()) as rt:
        for text in ("Once", "Once upon", "Twice", "Once upon a time"):
            plain = rt.generate(text, **asked)
            reply = rt.generate(text, **asked, speculate=5)
            assert reply.tokens == plain.tokens
            assert reply.timings.drafted_tokens == reply.timings.accepted_tokens > 20
    # Another one agrees now and then, whatever kind of memory it has.
    with open_toy(kind, draft=ToyModel(kind, seed=9)) as rt:
        asked |= {"logit_bias": {97: 9.0, 98: 9.0}}
        plain = rt.generate("Once", **asked)
        reply = rt.generate("Once", **asked, speculate=5)
        assert reply.tokens == plain.tokens
        assert reply.timings.drafted_tokens > reply.timings.accepted_tokens > 0


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"has 262 tokens and the model 261; .* same family"):
        open_toy(draft=ToyModel(marks=["<other>"]))
    with pytest.raises(InvalidInputError, match="leave draft or exact out"):
        open_toy(draft=ToyModel(), exact=True)


def test_a_draft_model_catches_up_with_a_long_prompt_by_and_by() -> None:
    with open_toy(draft=ToyModel(), n_ctx=1024, slots=3) as rt:
        prompt = [40 + at % 50 for at in range(700)]
        asked: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "seed": 3, "ignore_eos": True}
        plain = rt.generate(prompt, **asked)
        jobs = [rt.submit(prompt, **asked, speculate=4) for _ in range(5)]
        for job in jobs:
            reply = job.reply()
            assert reply.tokens == plain.tokens
            assert reply.timings.accepted_tokens > 0


# N-grams.


def test_what_followed_the_last_tokens_before_is_the_guess() -> None:
    index = NgramIndex(tokens := array("i", [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]))
    assert index.find(4) == ([4, 5, 6, 7], 3)
    tokens.append(4)
    assert index.find(2) == ([5, 6], 4)
    tokens.append(9)
    # In place of the 5.
    assert index.find(2) == ([6, 7], 0)
    tokens.extend([9, 9, 9])
    # It repeats itself up to its end, and is guessed to go on like that.
    assert index.find(5) == ([9] * 5, 3)


def test_a_text_that_was_left_is_taken_up_again() -> None:
    text = list(range(100, 160))
    index = NgramIndex(tokens := array("i", [*text, 7, *text[:10]]))
    assert index.find(3) == ([110, 111, 112], 8)
    # A token is replaced, one is left out, and one is put in: then the text goes on.
    for written, expected in ([55], 111), ([56, 113], 114), ([57, 58, 114], 115):
        tokens.extend(written)
        assert index.find(2) == ([expected, expected + 1], 0)
        tokens.extend(range(expected, expected + 3))
        assert index.find(1)[0] == [expected + 3]
        del tokens[-3:]
        tokens.extend(range(expected, expected + 1))
    # Whoever has written much else has left it for good.
    tokens.extend(range(1000, 1040))
    assert index.find(2) == ([], 0)


def test_an_index_equals_a_search_and_is_bounded() -> None:
    dice = random.Random(3)
    tokens = array("i", [dice.randrange(6) for _ in range(300)])
    index = NgramIndex(tokens)
    for _ in range(400):
        text = tokens.tolist()
        places = [at for at in range(3, len(text)) if text[at - 3 : at] == text[-3:]]
        found, same = index.find(5)
        if places:
            assert same >= 3
            # The text that is followed is preferred to the latest place, if it has them.
            assert any(found[: len(text) - place] == text[place : place + 5] for place in places)
        else:
            assert same == 0
        tokens.append(dice.randrange(6))
    long = array("i", range(3 * INDEXED))
    index = NgramIndex(long)
    for token in range(3 * INDEXED + 10):
        long.append(token)
        if token % 7 == 0:
            index.find(1)
    assert len(index) <= 2 * INDEXED + 1


def test_earlier_replies_are_gone_on_with_and_bounded() -> None:
    earlier = EarlierReplies()
    earlier.add(array("i", range(10, 30)))
    earlier.add(array("i", range(50, 60)))
    last = array("i", [7, 7, *range(12, 20)])
    assert earlier.find(last, 4) == [20, 21, 22, 23]
    # No further than the reply went, and not with fewer tokens that are the same.
    assert earlier.find(array("i", range(20, 28)), 5) == [28, 29]
    assert earlier.find(array("i", [7, 7, 7, 7, 7, 17, 18, 19]), 5) == []
    assert earlier.find(array("i", range(52, 60)), 5) == []
    dice = random.Random(5)
    for size in (20, EARLIER, 3 * EARLIER, 700, EARLIER - 1, 3, 40):
        reply = array("i", [dice.randrange(1 << 20) for _ in range(size)])
        earlier.add(reply)
        assert len(earlier) <= 2 * EARLIER
        if size > 8:
            assert earlier.find(reply[:8], 3) == reply[8:11].tolist()


def test_a_reply_that_was_given_before_is_guessed_within_its_namespace_alone() -> None:
    """V1: a guess comes from the prompt, the reply, or earlier replies of the same namespace."""
    prompt = [40 + at * 7 % 50 for at in range(30)]
    asked: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    with open_toy(n_ctx=1024, slots=1) as rt:

        def said(namespace: str) -> tuple[tuple[int, ...], int]:
            reply = rt.generate(prompt, **asked, speculate=8, namespace=namespace)
            return tuple(reply.tokens), reply.timings.accepted_tokens

        plain = tuple(rt.generate(prompt, **asked).tokens)
        (first, cold), (again, warm), (other, elsewhere) = said("a"), said("a"), said("b")
        assert first == again == other == plain
        assert warm > cold + 20
        assert elsewhere == cold
        for number in range(NAMESPACES):
            said(f"n{number}")
        assert said("a")[1] == cold


def test_n_grams_guess_right_where_text_repeats() -> None:
    with open_toy(FullAttention) as rt:
        asked: dict[str, Any] = {
            "max_tokens": 60,
            "temperature": 0,
            "regex": "(the same words again and again\n){2}",
            "prompt": "the same words again and again\n",
            # So that each is drawn.
            "logprobs": 0,
        }
        plain = rt.generate(**asked)
        reply = rt.generate(**asked, speculate=8)
    assert reply.tokens == plain.tokens
    assert reply.timings.accepted_tokens > 40
