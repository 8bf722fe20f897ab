"""B1 to B6: native memory has one owner, and nothing bad reaches it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inside import core_of
from perdure import (
    ClosedError,
    Context,
    DecodeCancelled,
    DecodeError,
    Feed,
    Model,
    ModelFileError,
    StaleViewError,
    TokenError,
)
from perdure.engine.context.ledger import Undo
from perdure.engine.contract import Batch, Outcome
from promises import bad_inputs, children
from promises.kinds import FULL, KINDS, MLX, Kind, positions, prompt, row_after

ZooPath = Callable[[str], Path]


@pytest.fixture(scope="session")
def zoo_folder(zoo_path: ZooPath) -> Path:
    """The folder with the toy models that a child needs."""
    for name in ("qwen3", "mamba", "llama-lora"):
        zoo_path(name)
    return zoo_path("llama").parent


# B1


@pytest.mark.parametrize("what", ["orders", "fuzz"])
def test_b1_every_native_object_is_freed_once_whatever_the_order(what: str, zoo_folder: Path) -> None:
    """B4 too: 120 orders of deletion, a model before its contexts among them."""
    ended = children.run("lifetimes", what, zoo_folder)
    assert ended.code == 0, str(ended)
    assert ended.lines[-1].startswith("settled")


def test_b1_memory_stays_flat_over_2000_contexts(zoo_folder: Path) -> None:
    ended = children.run("lifetimes", "cycles", zoo_folder)
    assert ended.code == 0, str(ended)
    assert int(ended.lines[-1].split()[1]) < 4 << 20


def test_b1_no_batch_of_the_librarys_is_in_the_code() -> None:
    source = Path(__file__).parents[2] / "src" / "perdure"
    calls = ("llama_batch_init", "llama_batch_free", "llama_batch_get_one")
    for file in source.rglob("*.py"):
        assert not [call for call in calls if call in file.read_text()], file


# B2


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 31, 32, 33, 160])
def test_b2_a_prompt_of_any_length_is_cut_and_placed(count: int, kind: Kind, model: Model) -> None:
    tokens = prompt(count)
    with kind.open(model) as ctx:
        ctx.decode(tokens)
        assert ctx.tokens() == tokens
        assert positions(ctx, 0) == count
        pieces = [tokens[at : at + 16] for at in range(0, count, 16)]
        np.testing.assert_array_equal(ctx.logits(), row_after(kind, model, pieces))
        # Uncut, the same up to rounding; in a mixture of experts that can be 0.15.
        assert np.abs(ctx.logits() - row_after(kind, model, [tokens], n_batch=256)).max() < 0.3


@pytest.mark.parametrize("rows", [[0], [0, 70, 159], [15, 16], list(range(160))])
def test_b2_rows_of_a_cut_prompt_are_those_of_its_tokens(rows: list[int], llama: Model) -> None:
    tokens = prompt(160)
    with FULL.open(llama) as ctx, FULL.open(llama) as pieces:
        ctx.decode(tokens, rows=rows)
        for at in range(0, 160, 16):
            here = [row - at for row in rows if at <= row < at + 16]
            pieces.decode(tokens[at : at + 16], rows=here)
            for row in here:
                np.testing.assert_array_equal(ctx.logits(at + row), pieces.logits(row))


def test_b2_no_tokens_is_a_typed_error_and_changes_nothing(kind: Kind, model: Model) -> None:
    with kind.open(model) as ctx:
        ctx.decode(prompt(5))
        view = ctx.logits()
        with pytest.raises(TokenError):
            ctx.decode([])
        with pytest.raises(TokenError):
            ctx.decode(np.array([], np.int32))
        assert ctx.logits() is view
        assert ctx.tokens() == prompt(5)


@pytest.mark.model
def test_b2_on_the_default_model(real_model: Model) -> None:
    tokens = real_model.tokenize("It was the best of times, it was the worst of times. " * 4)[:50]
    with real_model.context(n_ctx=64, n_batch=5, threads=1) as ctx:
        ctx.decode(tokens)
        assert ctx.tokens() == tokens
        whole = ctx.logits().copy()
        ctx.clear()
        for at in range(0, 50, 5):
            ctx.decode(tokens[at : at + 5])
        np.testing.assert_array_equal(ctx.logits(), whole)


# B3


@pytest.mark.parametrize("group", [*bad_inputs.GROUPS, "flips", "forgeries"])
def test_b3_bad_inputs_raise_and_change_nothing(group: str, zoo_folder: Path, tmp_path: Path) -> None:
    ended = children.run("bad_inputs", group, zoo_folder, tmp_path)
    assert ended.code == 0, str(ended)
    assert [line for line in ended.lines if line.startswith("bad")] == []
    assert ended.lines[-1] == "done"


def test_b3_the_table_is_long() -> None:
    assert sum(map(len, bad_inputs.GROUPS.values())) > 350


def test_b3_the_table_notices_what_it_is_for(zoo_folder: Path, tmp_path: Path) -> None:
    """Planted: cases that answer, raise something else, change the context, end the process."""
    ended = children.run("bad_inputs", "planted", zoo_folder, tmp_path)
    assert ended.code < 0
    bad = [line for line in ended.lines if line.startswith("bad")]
    assert [any(name in line for line in bad) for name in bad_inputs.PLANTED] == [True, True, True, False]
    assert ended.lines[-1] == "case ends by a signal"


def test_b3_odd_text_is_still_text(llama: Model) -> None:
    for text in (
        "",
        "\0",
        "a\0b",
        "\0" * 50_000,
        "a" * 100_000,
        " " * 100_000,
        "👩‍👩‍👧‍👦" * 2_000,
        "\U0010ffff",
        "\ufeff",
    ):
        tokens = llama.tokenize(text)
        assert b"".join(map(llama.piece, tokens)).decode() == text
        assert llama.detokenize(tokens) == text


def test_b3_a_model_with_a_name_that_is_not_utf8_can_be_used(zoo_path: ZooPath, tmp_path: Path) -> None:
    place = Path(str(tmp_path / "m\udcff.gguf"))
    place.write_bytes(zoo_path("llama").read_bytes())
    with Model(place) as model, model.context(n_ctx=8, threads=1) as ctx:
        ctx.decode([1])
        assert len(ctx.save()) > 100


def test_b3_state_is_never_labelled_with_a_file_that_was_changed_after_loading(
    zoo_path: ZooPath, tmp_path: Path
) -> None:
    place, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    place.write_bytes(zoo_path("llama").read_bytes())
    other.write_bytes(zoo_path("qwen3").read_bytes())
    with Model(place) as model, model.context(n_ctx=8, threads=1) as ctx:
        ctx.decode([1])
        other.replace(place)
        with pytest.raises(ModelFileError):
            ctx.save()
    with Model(place) as model, model.context(n_ctx=8, threads=1) as ctx:
        ctx.decode([1])
        digest = model.digest
        place.unlink()
        assert model.digest == digest
        assert len(ctx.save()) > 100


# B4


def test_b4_closing_ends_a_decode_in_flight_1000_times(zoo_folder: Path) -> None:
    ended = children.run("lifetimes", "closing", zoo_folder)
    assert ended.code == 0, str(ended)
    assert ended.lines[-1].startswith("settled")


def test_b4_close_waits_until_native_code_has_returned(llama: Model) -> None:
    ctx = FULL.open(llama)
    inside, go_on = threading.Event(), threading.Event()
    native, order, errors = core_of(ctx).decode, [], []
    free = core_of(ctx).close

    def slow(batch: Batch) -> Outcome:
        inside.set()
        assert go_on.wait(60)
        outcome = native(batch)
        order.append("decoded")
        return outcome

    def note_free() -> None:
        order.append("freed")
        free()

    def work() -> None:
        try:
            ctx.decode(prompt(40))
        except ClosedError as error:
            errors.append(error)

    core_of(ctx).decode = slow  # type: ignore[method-assign]
    core_of(ctx).close = note_free  # type: ignore[method-assign]
    worker = threading.Thread(target=work)
    closer = threading.Thread(target=ctx.close)
    worker.start()
    assert inside.wait(60)
    closer.start()
    go_on.set()
    worker.join()
    closer.join()
    assert order == ["decoded", "freed"]
    assert len(errors) == 1
    with pytest.raises(ClosedError):
        ctx.tokens()


def test_b4_the_model_may_go_first(zoo_path: ZooPath) -> None:
    model = Model(zoo_path("llama"))
    ctx = FULL.open(model)
    model.close()
    with pytest.raises(ClosedError):
        model.tokenize("a")
    with pytest.raises(ClosedError):
        model.context()
    del model
    ctx.decode(prompt(20))
    assert ctx.logits().argmax() >= 0
    state = ctx.save()
    ctx.load(state, 1)
    ctx.close()
    ctx.close()


# B5


def _greedy(ctx: Context, seq: int, count: int) -> list[int]:
    """`count` tokens after a prompt of the sequence's own, read while other threads decode."""
    chosen: list[int] = []
    feed = prompt(20, salt=seq)
    while len(chosen) < count:
        ctx.decode(feed, seq)
        # Another thread may decode between the two calls: then the row is refused, never another's.
        try:
            best = ctx.logits(seq=seq).argmax()
        except (StaleViewError, ValueError):
            ctx.truncate(ctx.length(seq) - len(feed), seq)
            continue
        feed = [best]
        chosen.append(best)
    return chosen


def test_b5_eight_threads_on_one_context_say_what_one_would(llama: Model) -> None:
    settings: dict[str, Any] = {"n_ctx": 64, "n_seq": 8, "n_batch": 32}
    with FULL.open(llama, **settings) as ctx:
        serial = [_greedy(ctx, seq, 12) for seq in range(8)]
        held = [ctx.tokens(seq) for seq in range(8)]
    with FULL.open(llama, **settings) as ctx:
        threaded: dict[int, list[int]] = {}
        threads = [
            threading.Thread(target=lambda seq=seq: threaded.update({seq: _greedy(ctx, seq, 12)}))
            for seq in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [threaded[seq] for seq in range(8)] == serial
        assert [ctx.tokens(seq) for seq in range(8)] == held
        assert [positions(ctx, seq) for seq in range(8)] == list(map(len, held))


def test_b5_calls_on_one_sequence_queue_and_never_interleave(llama: Model) -> None:
    """Each thread appends runs of its own; the runs stay whole, and the answer is that of a serial run."""
    with FULL.open(llama, n_ctx=512) as ctx:

        def append(salt: int) -> None:
            for _ in range(3):
                ctx.decode(prompt(20, salt))

        threads = [threading.Thread(target=append, args=(salt,)) for salt in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        held = ctx.tokens()
        runs = [held[at : at + 20] for at in range(0, 480, 20)]
        assert sorted(runs) == sorted(prompt(20, salt) for salt in range(8) for _ in range(3))
        ctx.decode([1])
        np.testing.assert_array_equal(ctx.logits(), row_after(FULL, llama, [*runs, [1]], n_ctx=512))


# B6

FAILURES = ("stopped", "refused", "failed after the work", "raised", "interrupted", "cancelled")


def plant(ctx: Context, k: int, failure: str) -> Callable[[], None]:
    """Make the `k`-th native decode from now on fail; gives a call that takes the fault out again."""
    native, calls = core_of(ctx).decode, iter(range(1000))

    def decode(batch: Batch) -> Outcome:
        if next(calls) != k:
            return native(batch)
        if failure == "refused":
            return Outcome.REJECTED
        if failure == "raised":
            raise MemoryError("planted")
        if failure == "interrupted":
            native(batch)
            raise KeyboardInterrupt
        if failure == "failed after the work":
            native(batch)
            return Outcome.FAILED
        if failure == "cancelled":
            ctx.cancel()
        else:
            core_of(ctx).stop()
        return native(batch)

    core_of(ctx).decode = decode  # type: ignore[method-assign]
    return lambda: setattr(core_of(ctx), "decode", native)


@pytest.mark.parametrize("failure", FAILURES)
def test_b6_a_failure_at_any_chunk_leaves_the_ledger_true(failure: str, kind: Kind, model: Model) -> None:
    """The next answer is W≡C."""
    first, second, neighbour = prompt(40), prompt(70, salt=1), prompt(20, salt=2)
    expected = row_after(kind, model, [first, second])
    expected_neighbour = row_after(kind, model, [neighbour, [5]])
    for k in range(5):
        with kind.open(model) as ctx:
            if not ctx.capabilities.shared:
                ctx.decode(neighbour, seq=1)
            ctx.decode(first)
            mend = plant(ctx, k, failure)
            with pytest.raises((DecodeError, MemoryError, KeyboardInterrupt)) as caught:
                ctx.decode(second)
            mend()
            held = ctx.tokens()
            assert held in (first, [])
            assert positions(ctx, 0) == len(held)
            if isinstance(caught.value, DecodeError):
                assert caught.value.kept == {0: len(held)}
                assert isinstance(caught.value, DecodeCancelled) == (failure in ("stopped", "cancelled"))
            # Only a kind that cannot be taken back may lose what it had, and these marks can be.
            assert held == first
            ctx.decode(second)
            np.testing.assert_array_equal(ctx.logits(), expected)
            if not ctx.capabilities.shared:
                ctx.decode([5], seq=1)
                np.testing.assert_array_equal(ctx.logits(), expected_neighbour)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("count", [1, 5])
def test_b6_a_failure_of_one_step_leaves_the_ledger_true(
    failure: str, count: int, kind: Kind, model: Model
) -> None:
    first, second = prompt(40), prompt(count, salt=1)
    expected = row_after(kind, model, [first, second])
    with kind.open(model) as ctx:
        ctx.decode(first)
        mend = plant(ctx, 0, failure)
        with pytest.raises((DecodeError, MemoryError, KeyboardInterrupt)) as caught:
            ctx.decode(second)
        mend()
        held = ctx.tokens()
        assert held in (first, [])
        assert positions(ctx, 0) == len(held)
        if isinstance(caught.value, DecodeError):
            assert caught.value.kept == {0: len(held)}
        if ctx.memory.cuts:
            assert held == first
        if not held:
            ctx.decode(first)
        ctx.decode(second)
        np.testing.assert_array_equal(ctx.logits(), expected)


@pytest.mark.parametrize("failure", FAILURES)
def test_b6_a_failed_step_of_several_sequences_leaves_all_ledgers_true(
    failure: str, kind: Kind, model: Model
) -> None:
    feeds = [Feed(0, prompt(5, salt=3)), Feed(1, prompt(8, salt=4))]
    rows = []
    for fail in (False, True):
        with kind.open(model) as ctx:
            ctx.decode(prompt(40))
            ctx.decode(prompt(20, salt=1), seq=1)
            before = [ctx.tokens(0), ctx.tokens(1)]
            # A step that moves the states of several sequences is never stopped halfway: it goes through.
            if fail and (failure != "cancelled" or ctx.memory.cuts):
                mend = plant(ctx, 0, failure)
                with pytest.raises((DecodeError, MemoryError, KeyboardInterrupt)):
                    ctx.step(feeds)
                mend()
                for seq in (0, 1):
                    assert ctx.tokens(seq) == before[seq]
                    assert positions(ctx, seq) == len(before[seq])
            elif fail:
                plant(ctx, 0, failure)
            ctx.step(feeds)
            rows.append([ctx.logits(seq=seq).copy() for seq in (0, 1)])
    np.testing.assert_array_equal(rows[0], rows[1])


@pytest.mark.parametrize("kind", [FULL, *MLX[:1]], ids=str)
def test_b6_the_check_sees_tokens_that_were_not_taken_back(
    kind: Kind, open_model: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a context that does not undo."""
    monkeypatch.setattr(Undo, "carry_out", lambda self: {0: 40})
    with kind.open(open_model(kind.name)) as ctx:
        ctx.decode(prompt(40))
        plant(ctx, 3, "stopped")
        with pytest.raises(DecodeCancelled):
            ctx.decode(prompt(70, salt=1))
        assert positions(ctx, 0) > 40


def test_b6_a_cancel_without_a_decode_in_flight_means_nothing(llama: Model) -> None:
    with FULL.open(llama) as ctx:
        ctx.cancel()
        ctx.decode(prompt(40))
        # As if the other thread had been stopped between seeing the decode and asking it to end.
        ctx._stopping = True
        core_of(ctx).stop()
        ctx.decode(prompt(40))
        assert ctx.length() == 80


def test_the_library_is_heard_again_once_a_cancelled_decode_has_ended(
    llama: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with FULL.open(llama) as ctx:
        decode = core_of(ctx).decode

        def cancelled(batch: Batch) -> Outcome:
            ctx.cancel()
            return decode(batch)

        monkeypatch.setattr(core_of(ctx), "decode", cancelled)
        with pytest.raises(DecodeCancelled):
            ctx.decode(prompt(40))
        with caplog.at_level(logging.DEBUG, "perdure.llama"), FULL.open(llama):
            assert caplog.records


@pytest.mark.model
def test_b6_on_the_default_model(real_model: Model) -> None:
    first, second = (
        real_model.tokenize("The capital of France is"),
        real_model.tokenize(" Paris, and of Spain"),
    )
    settings: dict[str, Any] = {"n_ctx": 64, "n_batch": 3, "threads": 1}
    with real_model.context(**settings) as ctx:
        ctx.decode(first)
        ctx.decode(second)
        expected = ctx.logits().copy()
    with real_model.context(**settings) as ctx:
        ctx.decode(first)
        mend = plant(ctx, 1, "stopped")
        with pytest.raises(DecodeCancelled):
            ctx.decode(second)
        mend()
        assert ctx.tokens() == first
        ctx.decode(second)
        np.testing.assert_array_equal(ctx.logits(), expected)


def test_the_kinds_of_memory_are_all_there(open_model: Callable[[str], Model]) -> None:
    assert {open_model(kind.name).memory.kind.name for kind in KINDS} == {
        "full",
        "sliding",
        "recurrent",
        "hybrid",
    }
