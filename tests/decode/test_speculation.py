"""V1: guessing ahead never changes a reply, whatever is asked for, on every kind of memory."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from decode.observed import check_delivery, core, open_toy, outcome, read
from perdure import InvalidInputError, LogitsView, Reply, Runtime
from perdure.backend import LocalBackend
from perdure.decode.sequence import TokenSequence
from perdure.decode.speculation.drafter import Draft
from perdure.decode.speculation.ngrams import EARLIER, INDEXED, NAMESPACES, EarlierReplies, NgramIndex
from perdure.memory import MEMORY_KINDS, FullAttention, MemorySpec
from perdure.testing.toy import ToyModel
from perdure.testing.toy.core import Trouble

every_kind = pytest.mark.parametrize("kind", MEMORY_KINDS, ids=lambda kind: kind.name)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Planted:
    """Guesses what is known to come, with mistakes here and there; and makes the engine fail with it."""

    name = "planted"

    def __init__(self, dice: random.Random, mistakes: float = 0.3) -> None:
        self.replies: Sequence[Sequence[int]] = ()
        """What will be drawn, by sample."""
        self.trouble: Trouble | None = None
        self._dice = dice
        self._mistakes = mistakes

    def draft(self, sequence: TokenSequence, count: int) -> Draft | None:
        if sequence.index >= len(self.replies):
            return None
        tokens = list(self.replies[sequence.index][sequence.written :][:count])
        # Behind the end of a reply as well.
        tokens += [self._dice.randrange(260) for _ in range(count - len(tokens))]
        if self._dice.random() < self._mistakes:
            tokens[self._dice.randrange(count)] = self._dice.randrange(260)
        if self.trouble is not None and self._dice.random() < 0.03:
            self.trouble.fail_decode(after=self._dice.randrange(3))
        return Draft(tokens, 0.9, self.name)

    def forget(self, sequence: TokenSequence) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def guessing(
    kind: type[MemorySpec], planted: Planted | None, store: Path | None = None, **settings: Any
) -> Iterator[Runtime]:
    """A runtime whose drafter is `planted`; n-grams where there is none."""
    drafters = None if planted is None else [planted]
    options: dict[str, Any] = {"n_ctx": 256, "slots": 2, "stall": 0, **settings}
    backend = LocalBackend(ToyModel(kind), drafters=drafters, store=store, own_model=True, **options)
    with Runtime(backend, store=store) as rt:
        yield rt


def favours_vowels(tokens: Sequence[int], logits: LogitsView) -> NDArray[np.float32]:
    values = logits.copy()
    values[[97, 101, 105, 111, 117]] += 2.0 + len(tokens) % 3
    return values


def some_request(dice: random.Random) -> dict[str, Any]:
    """A prompt and what is asked of its reply, of everything that acts on what is drawn."""
    asked: dict[str, Any] = {
        "prompt": [dice.randrange(32, 127) for _ in range(dice.randrange(1, 40))],
        "max_tokens": dice.randrange(1, 48),
        "seed": dice.randrange(1000),
        "temperature": dice.choice([0, 0, 0.5, 1.0, 2.0]),
        "ignore_eos": dice.random() < 0.6,
    }
    for chance, options in (
        (0.3, {"repeat_penalty": 1.4, "penalty_last_n": dice.choice([-1, 4, 64])}),
        (0.2, {"frequency_penalty": 0.7, "presence_penalty": 0.4}),
        (0.2, {"dry_multiplier": 1.5, "dry_allowed_length": 1}),
        (0.2, {"xtc_probability": 0.5, "xtc_threshold": 0.05}),
        (0.1, {"mirostat": dice.choice([1, 2])}),
        (0.1, {"typical_p": 0.7}),
        (0.1, {"top_n_sigma": 1.5}),
        (0.2, {"top_k": dice.choice([0, 3])}),
        (0.3, {"logit_bias": {97: 3.0, 98: 3.0, 120: float("-inf")}}),
        (0.3, {"stop": dice.sample([" ", "e", "th", "a b", "zz"], 2)}),
        (0.3, {"logprobs": dice.choice([0, 2])}),
        (0.3, {"n": dice.choice([2, 3])}),
        (0.1, {"processors": [favours_vowels]}),
    ):
        if dice.random() < chance:
            asked |= options
    grammar = dice.choice([None, None, None, {"schema": SCHEMA}, {"regex": "([ab]{1,3},){2,9}end"}])
    if grammar is not None:
        asked |= grammar
    return asked


def made(reply: Reply) -> tuple[Any, ...]:
    """All of a reply that somebody could see and that is no time."""
    error = None if reply.error is None else (type(reply.error), str(reply.error))
    usage = reply.usage.prompt_tokens, reply.usage.completion_tokens
    what = reply.text, reply.tokens, reply.finish_reason, reply.end, reply.stop, reply.seed, reply.index
    return *what, reply.logprobs, usage, error


def compare(kind: type[MemorySpec], seed: int, requests: int) -> tuple[int, int]:
    """Ask for random replies with and without guesses: guesses made, and right."""
    dice = random.Random(seed)
    planted = Planted(dice)
    drafted = accepted = 0
    with open_toy(kind) as plain, guessing(kind, planted) as rt:
        planted.trouble = core(rt).faults
        for _ in range(requests):
            asked = some_request(dice)
            without = outcome(plain.submit(**asked))
            planted.replies = [reply.tokens for reply in without]
            job = rt.submit(**asked, speculate=dice.randrange(1, 13))
            beside = rt.submit([65, dice.randrange(32, 127)], max_tokens=5) if dice.random() < 0.3 else None
            if dice.random() < 0.05:
                # Whoever leaves early has a beginning of the same reply.
                next(iter(job))
                job.cancel()
                for reply, whole in zip(outcome(job), without, strict=True):
                    assert whole.tokens[: len(reply.tokens)] == reply.tokens, asked
                # A fault that was planted for a step that nobody waited for would hit the next request.
                planted.trouble.forget()
            else:
                seen = read(job)
                with_guesses = outcome(job)
                assert [made(reply) for reply in with_guesses] == [made(reply) for reply in without], asked
                check_delivery(seen.deltas, with_guesses, rt.model, asked.get("stop", ()))
                drafted += sum(reply.timings.drafted_tokens for reply in with_guesses)
                accepted += sum(reply.timings.accepted_tokens for reply in with_guesses)
            if beside is not None:
                outcome(beside)
    return drafted, accepted


@every_kind
def test_guesses_change_no_reply(kind: type[MemorySpec]) -> None:
    """V1 and K5: penalties, grammars, stops, log probabilities, samples, budgets, cancelling act alike."""
    drafted, accepted = compare(kind, seed=1, requests=50)
    assert drafted > accepted > drafted / 4 > 0


@pytest.mark.soak
@every_kind
def test_guesses_change_no_reply_in_ten_thousand(kind: type[MemorySpec]) -> None:
    for seed in range(10):
        drafted, accepted = compare(kind, seed=100 + seed, requests=250)
        assert drafted > accepted > drafted / 4 > 0


@every_kind
def test_a_session_that_guesses_sleeps_wakes_forks_and_comes_back(
    kind: type[MemorySpec], tmp_path: Path
) -> None:
    """V3 and W≡C: what was guessed leaves nothing behind in a session's state, in whatever tier it is."""
    dice = random.Random(7)
    planted = Planted(dice, mistakes=0.6)
    texts = ["Hello", "And then?", "Why?", "Go on", "So?"]
    settings: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    with open_toy(kind, n_ctx=512) as plain:
        session = plain.session("a")
        right = [session.say(text, **settings) for text in texts]
    said = []
    for at, text in enumerate(texts):
        # A new process each time, as far as state goes: what it knows is on disk.
        with guessing(kind, planted, tmp_path, n_ctx=512) as rt:
            session = rt.session("a")
            planted.replies = [right[at].tokens]
            turn = session.say(text, **settings, speculate=6)
            said.append(turn.text)
            assert turn.tokens == right[at].tokens
            if at == 2:
                session.sleep()
                other = session.fork("b")
                planted.replies = [right[3].tokens]
                assert other.say(texts[3], **settings, speculate=6).text == right[3].text
    assert said == [turn.text for turn in right]


def test_guessed_tokens_save_steps() -> None:
    planted = Planted(random.Random(1), mistakes=0.0)
    with guessing(FullAttention, planted) as rt:
        asked: dict[str, Any] = {"max_tokens": 41, "temperature": 1.0, "seed": 3, "ignore_eos": True}
        plain = rt.generate("Once", **asked)
        assert plain.timings.drafted_tokens == plain.timings.accepted_tokens == 0
        before = core(rt).faults.n_decodes
        planted.replies = [plain.tokens]
        reply = rt.generate("Once", **asked, speculate=7)
        # The first token is the prompt's; of the other 40 a step writes 8.
        assert core(rt).faults.n_decodes - before == 1 + 5
        assert reply.tokens == plain.tokens
        assert (reply.timings.drafted_tokens, reply.timings.accepted_tokens) == (35, 35)


@pytest.mark.parametrize("value", [-2, 33, 1.5, True, "a"])
def test_a_wrong_number_of_guesses_is_refused(value: Any) -> None:
    with open_toy() as rt, pytest.raises(InvalidInputError, match="speculate"):
        rt.generate("Once", speculate=value)


def test_an_exact_runtime_does_without() -> None:
    planted = Planted(random.Random(1))
    with guessing(FullAttention, planted, exact=True) as rt:
        planted.replies = [[97] * 20]
        assert rt.generate("Once", max_tokens=20, speculate=8).timings.drafted_tokens == 0


def test_a_drafter_that_fails_costs_nobody_a_reply(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Planted):
        def draft(self, sequence: TokenSequence, count: int) -> Draft | None:
            raise ZeroDivisionError("planted")

    with guessing(FullAttention, Failing(random.Random(1))) as rt:
        reply = rt.generate("Once", max_tokens=9, seed=1, ignore_eos=True, speculate=3)
        assert rt.generate("Once", max_tokens=9, seed=1, ignore_eos=True).tokens == reply.tokens
    assert caplog.text.count("it is not asked again") == 1


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
    with guessing(FullAttention, None) as rt:
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


# Tokens that a grammar forces.


@every_kind
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_forced_tokens_take_one_step_and_are_those_of_draws(
    kind: type[MemorySpec], temperature: float
) -> None:
    """Log probabilities have every token drawn: the reply is the same, and has as many steps as tokens."""
    asked: dict[str, Any] = {"schema": SCHEMA, "temperature": temperature, "seed": 4, "repeat_penalty": 1.2}
    with open_toy(kind) as rt:
        drawn = rt.generate("Who?", **asked, logprobs=0)
        before = core(rt).faults.n_decodes
        reply = rt.generate("Who?", **asked, speculate=1)
        steps = core(rt).faults.n_decodes - before
    assert (reply.tokens, reply.text) == (drawn.tokens, drawn.text)
    assert drawn.timings.forced_tokens == 0
    assert reply.timings.forced_tokens >= len('name"') + len('age"')
    # The prompt's last step, and one for each token that was drawn and does not end the reply.
    assert steps <= 2 + len(reply.tokens) - reply.timings.forced_tokens


def test_forced_tokens_stop_at_a_stop_and_at_the_limit() -> None:
    asked: dict[str, Any] = {"regex": "begin one two three end", "temperature": 0, "speculate": 1}
    with open_toy() as rt:
        reply = rt.generate("Say", **asked, max_tokens=9)
        assert (reply.text, reply.finish_reason) == ("begin one", "length")
        reply = rt.generate("Say", **asked, stop=" two")
        assert (reply.text, reply.finish_reason, reply.stop) == ("begin one", "stop", " two")
        reply = rt.generate("Say", **asked)
        assert (reply.text, reply.finish_reason) == ("begin one two three end", "stop")
        assert reply.timings.forced_tokens == len("begin one two three end") - 1


@pytest.mark.parametrize(("exact", "steps"), [(False, 2), (True, 1 + len("begin "))])
def test_forced_tokens_of_an_exact_runtime_are_computed_one_by_one(exact: bool, steps: int) -> None:
    with open_toy(exact=exact) as rt:
        reply = rt.generate("Say", regex="begin [ab] end", temperature=0, speculate=1)
        assert reply.text in ("begin a end", "begin b end")
        # What is forced behind the last draw is the reply's end, and needs no step.
        assert core(rt).faults.n_decodes == steps


@pytest.mark.parametrize("replies", [1, 2])
def test_what_is_forced_beyond_a_step_is_computed_in_the_next(replies: int) -> None:
    text = "begin " + "word " * 12 + "end"
    with open_toy(n_batch=8, slots=2) as rt:
        asked: dict[str, Any] = {"regex": f"[ab]{text}[ab]", "temperature": 0, "speculate": 1}
        streams = [rt.submit("Say", **asked) for _ in range(replies)]
        assert {stream.reply().text[1:-1] for stream in streams} == {text}


def test_nothing_is_forced_unless_it_is_asked_for() -> None:
    with open_toy() as rt:
        reply = rt.generate("Say", regex="begin one end", temperature=0)
    assert (reply.text, reply.timings.forced_tokens) == ("begin one end", 0)
