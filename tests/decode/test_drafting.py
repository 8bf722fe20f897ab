"""V1: guesses of a drafter never change a reply, whatever is asked for, on every kind of memory."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import perdure
from decode.observed import check_delivery, core, open_toy, outcome, read
from perdure import InvalidInputError, LogitsView, Reply, Runtime, engine_config
from perdure.backend import BlockStorage, LocalBackend
from perdure.decode.scheduler import Budget, Step
from perdure.decode.sequence import TokenSequence
from perdure.engine_config import EngineConfig
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

    def __init__(self, dice: random.Random, mistakes: float = 0.3) -> None:
        self.replies: Sequence[Sequence[int]] = ()
        """What will be drawn, by sample."""
        self.trouble: Trouble | None = None
        self._dice = dice
        self._mistakes = mistakes

    def propose(self, step: Step, budget: Budget) -> None:
        for chunk in step:
            if chunk.takes_guesses:
                chunk.draft = self.guesses(chunk.sequence, chunk.sequence.request.speculate)

    def guesses(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        count = min(count, sequence.room - 1)
        if count < 1 or sequence.index >= len(self.replies):
            return ()
        tokens = list(self.replies[sequence.index][sequence.written :][:count])
        # Behind the end of a reply as well.
        tokens += [self._dice.randrange(260) for _ in range(count - len(tokens))]
        if self._dice.random() < self._mistakes:
            tokens[self._dice.randrange(count)] = self._dice.randrange(260)
        if self.trouble is not None and self._dice.random() < 0.03:
            self.trouble.fail_decode(after=self._dice.randrange(3))
        return tokens

    def observe(self, step: Step, seconds: float) -> None:
        pass

    def forget(self, sequence: TokenSequence) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def guessing(
    kind: type[MemorySpec], planted: Planted, store: Path | None = None, **settings: Any
) -> Iterator[Runtime]:
    """A runtime whose drafter is `planted`."""
    options: dict[str, Any] = {"n_ctx": 256, "slots": 2, "stall": 0, **settings}
    storage = BlockStorage(folder=store)
    backend = LocalBackend(
        ToyModel(kind), EngineConfig(**options), storage=storage, drafter=planted, own_model=True
    )
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
        def propose(self, step: Step, budget: Budget) -> None:
            raise ZeroDivisionError("planted")

    with guessing(FullAttention, Failing(random.Random(1))) as rt:
        reply = rt.generate("Once", max_tokens=9, seed=1, ignore_eos=True, speculate=3)
        assert rt.generate("Once", max_tokens=9, seed=1, ignore_eos=True).tokens == reply.tokens
    assert caplog.text.count("it is not done again") == 1


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


def test_without_the_extension_an_option_of_it_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_config, "extended_options", dict)
    with pytest.raises(
        InvalidInputError, match="draft is an option of the extension speculation, which is not"
    ):
        perdure.open(ToyModel(), draft="mtp")
    with pytest.raises(InvalidInputError, match="did you mean 'draft'"):
        perdure.open(ToyModel(), drfat="mtp")  # type: ignore[call-arg]
