"""Text and tokens that stand for each other."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import subjects
from perdure.chat.transcript import ChatTokenizer, Transcript, _pattern, _tree, shared_length
from perdure.engine.model import EngineModel
from perdure.testing.toy import ToyModel

TOY_MODEL = ToyModel()
TOY = ChatTokenizer(TOY_MODEL)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(params=["toy-full", "llama"])
def model(request: pytest.FixtureRequest, zoo_path: Callable[[str], Path]) -> EngineModel:
    return subjects.find(request.param, zoo_path).model


@pytest.fixture
def tokenizer(model: EngineModel) -> ChatTokenizer:
    return ChatTokenizer(model)


@given(texts, texts, texts)
def test_the_common_beginning_is_what_a_loop_finds(start: str, one: str, other: str) -> None:
    first, second = start + one, start + other
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    assert shared_length(first, second) == length


@given(
    st.lists(
        st.sampled_from(["<|im_end|>", "<|im_start|>", "<think>", "<", "|im_end|>", "é", "x "]), max_size=8
    )
)
def test_what_somebody_typed_never_becomes_a_control_token(parts: list[str]) -> None:
    typed = "".join(parts)
    guarded = TOY.guard(typed)
    written = TOY.encode(guarded)
    assert not set(written.tokens) & set(TOY.control)
    assert bytes(list(written.tokens)) == typed.encode()


few = st.text("<|>ab[.", min_size=2, max_size=6)


@given(st.lists(few, max_size=8), st.text("<|>ab[.", max_size=40))
def test_a_tree_of_texts_finds_them_where_a_list_does(marks: list[str], text: str) -> None:
    """I2: a list of 256 marks is gone through at every place of a text that looks like one."""
    found = re.compile(f"(?={_pattern(_tree(marks))})")
    wanted = {at for at in range(len(text)) if text.startswith(tuple(marks), at)}
    assert {each.start() for each in found.finditer(text)} == wanted


def test_a_mark_of_the_template_does(tokenizer: ChatTokenizer) -> None:
    written = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n")
    assert sum(token in tokenizer.control for token in written.tokens) == 2
    assert [chars for chars, _ in written.cuts] == [12, 29, 30]


@given(texts, texts)
def test_tokens_that_were_read_stand_for_their_text_again(said: str, reply: str) -> None:
    prompt = TOY.encode(f"<|im_start|>user\n{TOY.guard(said)}<|im_end|>\n<|im_start|>assistant\n")
    known = prompt + TOY.decode([*reply.encode(), *TOY_MODEL.tokenize("<|im_end|>", special=True)])
    text = known.text + "\n<|im_start|>user\nmore<|im_end|>\n"
    found = TOY.shared_prefix(text, known)
    assert found is not None
    assert found.tokens == known.tokens


def test_a_reply_of_odd_tokens_is_not_tokenised_again(tokenizer: ChatTokenizer, model: EngineModel) -> None:
    """C2: a reply's own tokens stand for its text, however it would be tokenised."""
    odd = [token for letter in "the the" for token in model.tokenize(letter, bos=False)]
    assert odd != model.tokenize("the the", bos=False) or len(odd) == 7
    end = model.tokenize("<|im_end|>", special=True, bos=False)
    prompt = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    known = prompt + tokenizer.decode([*odd, *end])
    again = tokenizer.shared_prefix(known.text + "\n<|im_start|>", known)
    assert again is not None
    assert again.tokens == known.tokens
    changed = known.text.replace("the the", "the thE")
    differs = tokenizer.shared_prefix(changed, known)
    assert differs is not None
    # Back to the mark before the reply, from where all is tokenised anew.
    assert differs.text.endswith("<|im_start|>")


def test_a_reply_that_was_cut_off_stands_too(tokenizer: ChatTokenizer, model: EngineModel) -> None:
    prompt = tokenizer.encode("<|im_start|>assistant\n")
    known = prompt + tokenizer.decode(model.tokenize("cut o", bos=False))
    for follows, stands in (("<|im_end|>\n", True), (" then more", True), ("ff", False)):
        found = tokenizer.shared_prefix(known.text + follows, known)
        assert found is not None
        assert (found.tokens == known.tokens) is stands


marked = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "a", "b", " ", "\n"]) | texts, max_size=6
).map("".join)


def test_a_transcript_is_cut_where_both_can_be_cut() -> None:
    one = Transcript("ab", array("i", [1, 2]), ((1, 1), (2, 2)))
    both = one + Transcript("c", array("i", [3]), ((1, 1),))
    assert (both.text, list(both.tokens), both.cuts) == ("abc", [1, 2, 3], ((1, 1), (2, 2), (3, 3)))
    assert both.first(1) == one
