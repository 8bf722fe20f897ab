"""A drafter that reads the model's hidden states, keys and values (Gemma 4's assistant)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import perdure
from inside import core_of
from perdure import Context, Model
from perdure.engine.context import Feed
from perdure.engine.contract import Floats
from perdure.errors import InvalidInputError, ModelFileError
from zoo import ZOO, assistant
from zoo.recipe import Recipe

TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, 256, 80)]


@pytest.fixture(scope="module")
def model(zoo_path: Callable[[str], Path]) -> Iterator[Model]:
    with Model(zoo_path("gemma4")) as model:
        yield model


@pytest.fixture(scope="module")
def drafter(zoo_path: Callable[[str], Path]) -> Iterator[Model]:
    with Model(zoo_path("gemma4-assistant")) as model:
        yield model


Opened = Callable[..., Context]


@pytest.fixture
def opened(model: Model, drafter: Model) -> Opened:
    def context(**settings: object) -> Context:
        return model.context(**{"n_ctx": 128, "n_seq": 3, "threads": 1, "assistant": drafter, **settings})  # type: ignore[arg-type]

    return context


def likeliest(row: Floats, position: int) -> int:
    return int(row.argmax())


def expected(context: Context, seq: int = 0, token: int = 7) -> list[Floats]:
    """The rows that the first three guesses are drawn from."""
    rows: list[Floats] = []

    def seen(row: Floats, position: int) -> int:
        rows.append(row.copy())
        return int(row.argmax())

    context.guess(token, seen, seq, count=3)
    return rows


def guesses(context: Context, seq: int = 0, count: int = 6) -> list[int]:
    return context.guess(7, likeliest, seq, count=count)


@pytest.mark.parametrize("swa_full", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_guessing_changes_neither_the_sequence_nor_its_rows(
    opened: Opened, shared: bool, swa_full: bool
) -> None:
    """Promise V3: a guess leaves no trace in the state, whatever the cache is like."""
    with opened(shared=shared, swa_full=swa_full) as context:
        context.decode(TOKENS)
        row, state = context.logits().copy(), context.save()
        seen: list[int] = []

        def draw(row: Floats, position: int) -> int:
            seen.append(position)
            return int(row.argmax())

        first = context.guess(7, draw, count=6)
        assert len(first) == 6
        assert seen == [81, 82, 83, 84, 85, 86]
        assert guesses(context) == first
        assert context.tokens() == TOKENS
        np.testing.assert_array_equal(context.logits().copy(), row)
        assert context.save() == state
        context.decode([5, 6])
        assert guesses(context)


def test_it_reads_the_hidden_state_the_token_and_the_whole_cache(opened: Opened, model: Model) -> None:
    with opened() as context:
        context.decode(TOKENS)
        rows = expected(context)
        assert np.abs(expected(context, token=8)[0] - rows[0]).max() > 0.1
        # The hidden state is that of the last token, however many there were in a step.
        context.decode(TOKENS[:50], 1)
        context.decode(TOKENS[50:-1], 1)
        context.decode(TOKENS[-1:], 1)
        np.testing.assert_allclose(expected(context, 1)[0], rows[0], atol=0.05)
        # The last token, the window and what only the layer without a window sees.
        for place in (79, 60, 3):
            other = [*TOKENS[:place], (TOKENS[place] + 1) % 256, *TOKENS[place + 1 :]]
            context.clear(1)
            context.decode(other, 1)
            assert np.abs(expected(context, 1)[0] - rows[0]).max() > 1e-3


def test_its_state_is_that_of_the_model_alone(opened: Opened, model: Model) -> None:
    """Promise V3: it keeps nothing, so that a session sleeps and wakes with or without it."""
    with opened() as context, model.context(n_ctx=128, n_seq=3, threads=1) as plain:
        for each in (context, plain):
            each.decode(TOKENS)
        guesses(context)
        assert context.save() == plain.save()
        # Every token goes through the last layer there, not the last one alone: it rounds otherwise.
        np.testing.assert_allclose(context.logits().copy(), plain.logits().copy(), atol=1e-3)
        rows = expected(context)
        # What was there before is forgotten.
        context.decode(TOKENS[::-1], 1)
        guesses(context, 1)
        context.load(plain.save(), 1)
        # There is no hidden state before the next token yet.
        assert guesses(context, 1) == []
        for seq in (0, 1):
            context.decode([5], seq)
        for ours, theirs in zip(expected(context, 1), expected(context), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert len(rows) == 3
        assert not plain.capabilities.guesses
        assert context.capabilities.guesses


@pytest.mark.parametrize("shared", [False, True])
def test_a_fork_and_a_copy_by_rows_guess_alike(opened: Opened, shared: bool) -> None:
    """Promise V3: forks, and what was captured and put together again, guess as the sequence itself."""
    with opened(shared=shared) as context:
        context.decode(TOKENS)
        context.fork(0, 1)
        for ours, theirs in zip(expected(context, 1), expected(context), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=0.05)
        capture = context.capture(0)
        assert capture.rows is not None
        pieces = [capture.rows.cut(0, 32), capture.rows.cut(32, 80)]
        context.assemble(TOKENS, pieces, capture.tail_state, 2)
        assert guesses(context, 2) == []
        context.step([Feed(seq, [5]) for seq in range(3)])
        for seq in (1, 2):
            for ours, theirs in zip(expected(context, seq), expected(context), strict=True):
                np.testing.assert_allclose(ours, theirs, atol=0.05)
        # What one goes on with is nothing to the others.
        context.step([Feed(1, [9, 9])])
        before = expected(context)
        context.step([Feed(2, [8, 8, 8])])
        np.testing.assert_array_equal(expected(context)[0], before[0])


def test_a_cut_takes_it_back(opened: Opened) -> None:
    with opened() as context:
        context.decode(TOKENS[:75])
        before = expected(context)
        context.decode(TOKENS[75:])
        after = expected(context)
        assert np.abs(after[0] - before[0]).max() > 0.1
        context.truncate(75)
        np.testing.assert_array_equal(expected(context)[0], before[0])
        context.decode(TOKENS[75:])
        np.testing.assert_array_equal(expected(context)[0], after[0])


def test_a_ctrl_c_while_hidden_states_are_taken_loses_none(opened: Opened) -> None:
    with opened() as context, opened() as calm:
        core = core_of(context)
        for each in (context, calm):
            each.decode(TOKENS[:70])
        take = core.hidden_states  # type: ignore[attr-defined]

        def interrupted(count: int) -> Floats:
            take(count)
            patch.undo()
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core, "hidden_states", interrupted)
            with pytest.raises(KeyboardInterrupt):
                context.decode(TOKENS[70:])
        for each in (context, calm):
            each.truncate(70)
        np.testing.assert_array_equal(expected(context)[0], expected(calm)[0])


def test_a_full_sequence_has_no_room_for_guesses(opened: Opened) -> None:
    with opened(n_ctx=256) as context:
        for _ in range(3):
            context.decode(TOKENS)
        context.decode(TOKENS[:14])
        assert len(guesses(context, count=9)) == 2
        context.decode([1, 2])
        assert guesses(context) == []


def variant(folder: Path, name: str, of: str, **keys: object) -> Path:
    """The model or its assistant with other numbers in its file."""
    recipe = {"gemma4": assistant.gemma4, "gemma4-assistant": assistant.gemma4_assistant}[of]

    class Changed:
        def __init__(self, sheet: object) -> None:
            self._sheet = sheet

        def set(self, **values: object) -> None:
            self._sheet.set(**{key: keys.get(key, value) for key, value in values.items()})  # type: ignore[attr-defined]

        def __getattr__(self, name: str) -> object:
            return getattr(self._sheet, name)

    return Recipe(
        name=name,
        architecture=of,
        memory="sliding",
        fill=lambda sheet, vocabulary: recipe(Changed(sheet), vocabulary),  # type: ignore[arg-type]
    ).write(folder)


def test_a_drafter_that_does_not_fit_is_refused_in_words(
    zoo_path: Callable[[str], Path], tmp_path: Path, model: Model, drafter: Model
) -> None:
    """Promise B3: the library would read beyond the caches, or end the process."""
    with pytest.raises(InvalidInputError, match=r"guesses for a model of gemma4.*as its draft"):
        drafter.context(n_ctx=64)
    with pytest.raises(InvalidInputError, match="as its draft"):
        perdure.open(zoo_path("gemma4-assistant"), n_ctx=64)
    with pytest.raises(InvalidInputError, match="guesses for gemma4, not for llama"):
        perdure.open(zoo_path("llama"), n_ctx=64, draft=zoo_path("gemma4-assistant"))
    with pytest.raises(InvalidInputError, match="is no assistant"):
        model.context(n_ctx=64, assistant=model)
    for name, keys, words in (
        ("window", {"attention__sliding_window": 64}, "window of 64 tokens, and the model one of 32"),
        ("heads", {"attention__head_count_kv": 1}, "keys of 1 heads of 32 values, and the model has 2 of 32"),
    ):
        with (
            Model(variant(tmp_path, name, "gemma4-assistant", **keys)) as other,
            pytest.raises(InvalidInputError, match=words),
        ):
            model.context(n_ctx=64, assistant=other)
    with pytest.raises(ModelFileError, match="not all of its 2 layers"):
        Model(variant(tmp_path, "layers", "gemma4-assistant", nextn_predict_layers=1))
    with pytest.raises(ModelFileError, match="not of their kind"):
        Model(variant(tmp_path, "shared", "gemma4", attention__shared_kv_layers=1))
    with pytest.raises(InvalidInputError, match="exact"):
        perdure.open(zoo_path("gemma4"), n_ctx=64, draft=zoo_path("gemma4-assistant"), exact=True)


def test_drafters_of_other_kinds_are_refused_in_words(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    file = Recipe(name="eagle", architecture="eagle3", memory="full", fill=ZOO["llama"].fill).write(tmp_path)
    with pytest.raises(InvalidInputError, match="drafter of the kind eagle3"):
        perdure.open(zoo_path("llama"), n_ctx=64, draft=file)


@pytest.mark.parametrize("isolated", [False, True])
def test_replies_with_guesses_wake_and_go_on(
    zoo_path: Callable[[str], Path], tmp_path: Path, isolated: bool
) -> None:
    """Promises V1, V3: with the assistant guessing, a session sleeps, wakes without it, and writes what it
    would have without."""
    told = []
    for speculate in (0, 3):
        texts = []
        for turn in range(3):
            with perdure.open(
                zoo_path("gemma4"),
                n_ctx=512,
                threads=1,
                store=tmp_path / str(speculate),
                draft=zoo_path("gemma4-assistant") if speculate and turn != 1 else None,
                isolated=isolated,
                cache=1 << 24,
            ) as runtime:
                session = runtime.session("one", max_tokens=12, temperature=0, ignore_eos=True)
                reply = session.say("Tell me more", speculate=speculate)
                texts.append(list(reply.tokens))
                if turn:
                    assert reply.reuse.reused > 0
                if speculate and turn != 1:
                    assert reply.timings.drafted_tokens > 0
        told.append(texts)
    assert told[0] == told[1]
