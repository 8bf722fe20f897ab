"""The model's own next-token layers (MTP): what they hold goes wherever the sequence's state goes."""

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
from perdure.errors import IncompatibleStateError, InvalidInputError, RowError
from perdure.ext.speculation.next_token import NextTokenCore

NAMES = ["deepseek2-mtp", "step35-mtp", "mimo2-mtp", "qwen35-mtp"]
"""Without a window; with one, which the next-token layers have too; with one, which they have not; a hybrid,
which cannot be cut."""
TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, 256, 80)]


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, zoo_path: Callable[[str], Path]) -> Iterator[Model]:
    with Model(zoo_path(request.param), mtp=True) as model:
        yield model


def opened(model: Model, **settings: object) -> Context:
    return model.context(**{"n_ctx": 128, "n_seq": 3, "threads": 1, "mtp": True, **settings})  # type: ignore[arg-type]


def likeliest(row: Floats, position: int) -> int:
    return int(row.argmax())


def expected(context: Context, seq: int = 0) -> Floats:
    """The row that the first guess is drawn from."""
    rows: list[Floats] = []

    def seen(row: Floats, position: int) -> int:
        rows.append(row.copy())
        return 0

    context.guess(7, seen, seq)
    return rows[0]


def guesses(context: Context, seq: int = 0, count: int = 6) -> list[int]:
    return context.guess(7, likeliest, seq, count=count)


def test_guessing_changes_neither_the_sequence_nor_its_rows(model: Model) -> None:
    with opened(model) as context:
        context.decode(TOKENS)
        row, state = context.logits().copy(), context.save()
        first = guesses(context)
        assert len(first) == 6
        assert guesses(context) == first
        assert context.tokens() == TOKENS
        np.testing.assert_array_equal(context.logits().copy(), row)
        assert context.save() == state


def test_positions_of_what_is_drawn_follow_the_token(model: Model) -> None:
    seen: list[int] = []

    def draw(row: Floats, position: int) -> int:
        seen.append(position)
        return int(row.argmax())

    with opened(model) as context:
        context.decode(TOKENS)
        context.guess(7, draw, count=3)
    assert seen == [len(TOKENS) + 1, len(TOKENS) + 2, len(TOKENS) + 3]


@pytest.mark.parametrize("shared", [False, True])
def test_a_fork_and_a_copy_by_rows_guess_alike(model: Model, shared: bool) -> None:
    with opened(model, shared=shared) as context:
        context.decode(TOKENS)
        context.fork(0, 1)
        np.testing.assert_allclose(expected(context, 1), expected(context), atol=0.05)
        capture = context.capture(0)
        assert capture.rows is not None
        rows, tail = capture.rows.cut(0, 80), capture.tail_state
        context.assemble(TOKENS, [rows[:32], rows[32:]], tail, 2)
        again = context.capture(2)
        assert again.rows is not None
        np.testing.assert_array_equal(again.rows.cut(0, 80), rows)
        assert (again.tail_state is None) == (tail is None)
        # What comes behind a state that was put back follows on it in both.
        context.step([Feed(seq, [5]) for seq in range(3)])
        for seq in (1, 2):
            context.step([Feed(seq, [6])])
        assert guesses(context, 1)
        assert guesses(context, 2)


def test_a_saved_state_has_both_parts(model: Model) -> None:
    with opened(model) as context, opened(model) as other:
        context.decode(TOKENS)
        # What was there before is forgotten.
        other.decode(TOKENS[::-1])
        other.load(context.save())
        mine, theirs = context.capture().rows, other.capture().rows
        assert mine is not None
        assert theirs is not None
        np.testing.assert_array_equal(mine.cut(0, 80), theirs.cut(0, 80))
        # There is no hidden state before the next token yet.
        assert guesses(other) == []
        other.decode([5])
        assert len(guesses(other)) == 6


def test_their_part_of_the_state_is_used(model: Model) -> None:
    """What was put back is read by the layers: with other rows they guess otherwise."""
    with opened(model) as context:
        context.decode(TOKENS)
        capture = context.capture()
        assert capture.rows is not None
        whole, tail = capture.rows.cut(0, 80), capture.tail_state
        with model.context(n_ctx=128, threads=1) as plain:
            width = plain.row_bytes()
        assert width is not None
        spoiled, window = whole.copy(), tail
        spoiled[:, width:] = spoiled[::-1, width:]
        if tail is not None:
            # Its first bytes say where the model's part of it ends. The window of other tokens comes behind.
            end = 8 + int.from_bytes(tail[:8].tobytes(), "little")
            context.decode(TOKENS[::-1], 2)
            other = context.capture(2).tail_state
            assert other is not None
            window = np.concatenate([tail[:end], other[end:]])
        found: list[Floats] = []
        for piece, rest in ((whole, tail), (whole, tail), (spoiled, window)):
            context.assemble(TOKENS, [piece], rest, 1)
            context.decode([5, 6, 8], 1)
            found.append(expected(context, 1))
        np.testing.assert_array_equal(found[0], found[1])
        assert np.abs(found[0] - found[2]).max() > 1e-3


def test_a_cut_takes_both_back(model: Model) -> None:
    with opened(model) as context:
        context.decode(TOKENS[:75])
        before, checkpoint = expected(context), context.checkpoint()
        context.decode(TOKENS[75:])
        assert expected(context).any()
        if context.capabilities.truncate:
            context.truncate(75)
        else:
            context.restore(checkpoint)
        with opened(model) as shorter:
            shorter.decode(TOKENS[:75])
            assert len(context.save()) == len(shorter.save())
        # Read in steps of other sizes, which round otherwise; one token more or less is far off.
        np.testing.assert_allclose(expected(context), before, atol=0.05)
        context.decode(TOKENS[75:])
        assert np.abs(expected(context) - before).max() > 0.5
        rows = context.capture().rows
        assert rows is not None
        assert len(rows) == 80


def test_a_ctrl_c_while_hidden_states_are_taken_loses_none(model: Model) -> None:
    """Wherever it strikes, both caches are in step afterwards."""
    with opened(model) as context, opened(model) as calm:
        core = core_of(context)
        assert isinstance(core, NextTokenCore)
        for each in (context, calm):
            each.decode(TOKENS[:60])
            each.decode(TOKENS[60:70])
        take = core.model.hidden_states

        def interrupted(count: int) -> Floats:
            take(count)
            patch.undo()
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core.model, "hidden_states", interrupted)
            with pytest.raises(KeyboardInterrupt):
                context.decode(TOKENS[70:])
        for each in (context, calm):
            each.truncate(70)
            each.decode(TOKENS[70:])
        mine, theirs = context.capture().rows, calm.capture().rows
        assert mine is not None
        assert theirs is not None
        np.testing.assert_array_equal(mine.cut(0, 80), theirs.cut(0, 80))


def test_state_without_the_layers_is_foreign(model: Model) -> None:
    with opened(model) as context, model.context(n_ctx=128, n_seq=3, threads=1) as plain:
        plain.decode(TOKENS)
        with pytest.raises(IncompatibleStateError):
            context.load(plain.save())
        assert not plain.capabilities.guesses
        assert context.capabilities.guesses
        with pytest.raises(InvalidInputError, match="mtp=True"):
            guesses(plain)


def test_replies_are_those_of_the_model_alone(model: Model) -> None:
    with opened(model) as context, model.context(n_ctx=128, n_seq=3, threads=1) as plain:
        for each in (context, plain):
            each.decode(TOKENS)
        guesses(context)
        # Every token goes through the last layer there, not the last one alone: it rounds otherwise.
        np.testing.assert_allclose(context.logits().copy(), plain.logits().copy(), atol=1e-4)
        with pytest.raises(RowError):
            context.logits(3)


def test_a_full_sequence_has_no_room_for_guesses(model: Model) -> None:
    with opened(model) as context:
        context.decode(TOKENS)
        context.decode(TOKENS[:46])
        assert len(guesses(context, count=9)) == 2
        context.decode([1, 2])
        assert guesses(context) == []


def test_a_model_without_such_layers_is_refused(zoo_path: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidInputError, match="no next-token layers"):
        perdure.open(zoo_path("llama"), n_ctx=64, draft="mtp")
    with (
        Model(zoo_path(NAMES[0])) as model,
        pytest.raises(InvalidInputError, match="loaded without"),
    ):
        model.context(n_ctx=64, mtp=True)
    with pytest.raises(InvalidInputError, match="exact"):
        perdure.open(zoo_path(NAMES[0]), n_ctx=64, draft="mtp", exact=True)


@pytest.mark.parametrize("swa_full", [True, False])
def test_a_checkpoint_has_the_window_of_both(zoo_path: Callable[[str], Path], swa_full: bool) -> None:
    """Promise V3: a sequence goes back to a checkpoint with what its next-token layers held there."""
    with (
        Model(zoo_path("step35-mtp"), mtp=True) as model,
        opened(model, n_ctx=768, n_batch=16, swa_full=swa_full) as context,
    ):
        context.decode(TOKENS[:60])
        checkpoint = context.checkpoint()
        context.decode([5, 6, 8])
        before = expected(context)
        # The engine keeps 256 cells at least.
        context.decode(TOKENS * 5)
        context.restore(checkpoint)
        context.decode([5, 6, 8])
        # One of these three tokens went in without a hidden state; without the window it is 6.7.
        assert np.abs(expected(context) - before).max() < 0.5


@pytest.mark.parametrize(
    ("name", "isolated"), [(NAMES[0], False), (NAMES[0], True), *((name, False) for name in NAMES[1:])]
)
def test_replies_with_guesses_wake_and_go_on(
    zoo_path: Callable[[str], Path], tmp_path: Path, name: str, isolated: bool
) -> None:
    """With the model's layers guessing, a session sleeps, wakes and writes what it would have without."""
    told = []
    for draft, speculate in ((None, 0), ("mtp", 3)):
        store = tmp_path / str(speculate)
        texts = []
        for _ in range(2):
            with perdure.open(
                zoo_path(name),
                n_ctx=512,
                threads=1,
                store=store,
                draft=draft,
                isolated=isolated,
                cache=1 << 24,
            ) as runtime:
                session = runtime.session("one", max_tokens=12, temperature=0, ignore_eos=True)
                reply = session.say("Tell me more", speculate=speculate)
                texts.append(list(reply.tokens))
                if speculate:
                    assert reply.timings.drafted_tokens > 0
        told.append(texts)
    assert told[0] == told[1]
