"""L1 to L7: logits are views of one step."""

from __future__ import annotations

import contextlib
import copy
import gc
import operator
import pickle
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import subjects
from inside import core_of
from perdure import (
    ClosedError,
    Context,
    DecodeCancelled,
    DecodeError,
    Feed,
    LogitsView,
    Model,
    PerdureError,
    PinnedError,
    RowError,
    StaleViewError,
    TokenError,
)
from perdure.engine.contract import Batch, Outcome, Step
from promises.kinds import FULL, Kind, prompt
from zoo import folders

ZooPath = Callable[[str], Path]


@dataclass
class World:
    """A context with two sequences, a view of its last step, and an iteration over it that has begun."""

    model: Model
    ctx: Context
    view: LogitsView
    begun: Iterator[np.float32]
    state: bytes
    lora: Path


@pytest.fixture(params=["llama", *(name for name in subjects.MLX if name == "mlx-llama")])
def llama(request: pytest.FixtureRequest, open_model: Callable[[str], Model]) -> Model:
    """The toy llama on each engine: rows lie over a library's memory, or are a copy."""
    return open_model(request.param)


@pytest.fixture
def lora(llama: Model, zoo_path: ZooPath, tmp_path: Path) -> Path:
    """An adapter for it."""
    if llama.info.file_format == "mlx":
        return folders.write_adapter(zoo_path("mlx-llama"), tmp_path / "lora")
    return zoo_path("llama-lora")


@pytest.fixture
def world(llama: Model, lora: Path) -> Iterator[World]:
    ctx = FULL.open(llama)
    ctx.decode(prompt(20), seq=1)
    state = ctx.save(1)
    ctx.decode(prompt(40))
    made = World(llama, ctx, ctx.logits(), iter(ctx.logits()), state, lora)
    next(made.begun)
    del ctx
    yield made
    if made.ctx is not None:
        made.ctx.close()


def _fail(world: World) -> None:
    native = core_of(world.ctx).decode

    def break_off(batch: Batch) -> Outcome:
        native(batch)
        return Outcome.FAILED

    core_of(world.ctx).decode = break_off  # type: ignore[method-assign]
    with pytest.raises(DecodeError):
        world.ctx.decode(prompt(20))


def _cancel(world: World) -> None:
    ctx, native = world.ctx, core_of(world.ctx).decode

    def give_up(batch: Batch) -> Outcome:
        ctx.cancel()
        return native(batch)

    core_of(ctx).decode = give_up  # type: ignore[method-assign]
    with pytest.raises(DecodeCancelled):
        ctx.decode(prompt(20))


def _drop(world: World) -> None:
    world.ctx = None  # type: ignore[assignment]
    gc.collect()


CHANGES: dict[str, Callable[[World], object]] = {
    "decode": lambda w: w.ctx.decode([1]),
    "decode of several native steps": lambda w: w.ctx.decode(prompt(40)),
    "decode of the other sequence": lambda w: w.ctx.decode([1], seq=1),
    "decode without rows": lambda w: w.ctx.decode([1], rows="none"),
    "step": lambda w: w.ctx.step([Feed(0, [1]), Feed(1, [2])]),
    "truncate": lambda w: w.ctx.truncate(10),
    "truncate to nothing": lambda w: w.ctx.truncate(0),
    "truncate to what is there": lambda w: w.ctx.truncate(40),
    "fork into it": lambda w: w.ctx.fork(1, 0),
    "fork from it": lambda w: w.ctx.fork(0, 1),
    "load": lambda w: w.ctx.load(w.state),
    "restore": lambda w: w.ctx.restore(w.ctx.checkpoint()),
    "clear one": lambda w: w.ctx.clear(0),
    "clear the other": lambda w: w.ctx.clear(1),
    "clear all": lambda w: w.ctx.clear(),
    "adapt": lambda w: w.ctx.adapt({w.model.adapter(str(w.lora)): 1.0}),
    "overwrite a row": lambda w: w.ctx.overwrite(np.zeros(w.ctx.n_vocab, np.float32)),
    "rule out tokens": lambda w: w.ctx.rule_out(np.full(48, 1, np.uint8)),
    "failed decode": _fail,
    "cancelled decode": _cancel,
    "close": lambda w: w.ctx.close(),
    "del": _drop,
}


def _borrowed_best(view: LogitsView) -> int:
    with view.borrow() as row:
        return int(row.argmax())


MASK = np.arange(384) % 3 == 0
OUT = np.zeros(384, np.float32)

ACCESSES: dict[str, Callable[[Any], object]] = {
    "index": lambda v: v[3],
    "negative index": lambda v: v[-1],
    "NumPy index": lambda v: v[np.int64(3)],
    "float of an index": lambda v: float(v[3]),
    "slice": lambda v: v[2:9],
    "empty slice": lambda v: v[2:2],
    "whole slice": lambda v: v[:],
    "ellipsis": lambda v: v[...],
    "new axis": lambda v: v[None],
    "list index": lambda v: v[[1, 5, 7]],
    "fancy": lambda v: v[np.array([1, 5, 7])],
    "mask": lambda v: v[MASK],
    "iteration": lambda v: next(iter(v)),
    "list()": list,
    "tuple of some": lambda v: tuple(zip(v, range(3), strict=False)),
    "reversed": lambda v: next(iter(reversed(v))),
    "in": lambda v: 1.5 in v,
    "len": len,
    "bool": bool,
    "ufunc": np.exp,
    "ufunc with two inputs": lambda v: np.add(v, 1.0),
    "ufunc with the view second": lambda v: np.subtract(OUT, v),
    "ufunc with out": lambda v: np.exp(v, out=OUT),
    "ufunc with where": lambda v: np.exp(v, out=OUT, where=MASK),
    "ufunc reduce": np.add.reduce,
    "ufunc accumulate": np.add.accumulate,
    "ufunc outer": lambda v: np.multiply.outer(v, [1.0, 2.0]),
    "ufunc reduceat": lambda v: np.add.reduceat(v, [0, 9]),
    "+": lambda v: v + 1,
    "reflected -": lambda v: 1 - v,
    "*": lambda v: v * v,
    "/": lambda v: v / 2,
    "negation": operator.neg,
    "abs": abs,
    "@": lambda v: v @ OUT,
    "<": lambda v: v < 0,
    ">=": lambda v: v >= 0,
    "==": lambda v: v == 0,
    "!=": lambda v: v != 0,
    "np.sum": np.sum,
    "np.sort": np.sort,
    "np.argsort": np.argsort,
    "np.argpartition": lambda v: np.argpartition(v, 3),
    "np.where": lambda v: np.where(v > 0, v, 0),
    "np.concatenate": lambda v: np.concatenate([v, v]),
    "np.stack": lambda v: np.stack((v, v)),
    "np.dot": lambda v: np.dot(v, v),
    "np.allclose": lambda v: np.allclose(v, 0),
    "np.linalg.norm": np.linalg.norm,
    "np.vectorize": lambda v: np.vectorize(float)(v),
    "np.copyto from it": lambda v: np.copyto(OUT, v),
    "assignment into another array": lambda v: OUT.__setitem__(slice(None), v),
    "np.asarray": np.asarray,
    "np.asarray with a type": lambda v: np.asarray(v, dtype=np.float64),
    "np.array": np.array,
    "np.ascontiguousarray": np.ascontiguousarray,
    "array()": lambda v: v.__array__(),
    "tolist": lambda v: v.tolist(),
    "copy": lambda v: v.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "argmax": lambda v: v.argmax(),
    "max": lambda v: v.max(),
    "min": lambda v: v.min(),
    "top": lambda v: v.top(5),
    "logprobs": lambda v: v.logprobs([1, 2]),
    "log_norm": lambda v: v.log_norm(),
    "surprisal": lambda v: v.surprisal(7),
    "entropy": lambda v: v.entropy(),
    "borrow": lambda v: _borrowed_best(v),
}


def answers(view: LogitsView) -> list[str]:
    """The ways of access that do not raise `StaleViewError`."""
    found = []
    for name, access in ACCESSES.items():
        with contextlib.suppress(StaleViewError):
            access(view)
            found.append(name)
    return found


# L1


def test_l1_a_step_has_one_view_of_each_row(world: World) -> None:
    assert world.ctx.logits() is world.view
    assert world.ctx.logits(row=-1, seq=0) is world.view
    world.ctx.decode(prompt(5), rows="all")
    assert world.ctx.logits(0) is world.ctx.logits(-5)
    assert world.ctx.logits(0) is not world.ctx.logits(1)


def test_l1_taking_a_view_and_reading_it_copies_no_row(zoo_path: ZooPath) -> None:
    """On 262,144 tokens a copy would be a megabyte."""
    with Model(zoo_path("llama-wide")) as wide, wide.context(n_ctx=16, threads=1) as ctx:
        ctx.decode([1, 2, 3])
        tracemalloc.start()
        try:
            view = ctx.logits()
            view.argmax(), view.max(), view[7], np.max(view), np.add.reduce(view), view[5:9]
            assert tracemalloc.get_traced_memory()[1] < 100_000
            view.copy()
            assert tracemalloc.get_traced_memory()[1] > 1_000_000
        finally:
            tracemalloc.stop()


# L2


@pytest.mark.parametrize("change", CHANGES)
def test_l2_every_access_to_a_view_raises_after_every_change(change: str, world: World) -> None:
    view = world.view
    assert answers(view) == list(ACCESSES)
    next(world.begun)
    CHANGES[change](world)
    assert answers(view) == []
    with pytest.raises(StaleViewError):
        next(world.begun)
    assert view.stale
    assert repr(view) == "<LogitsView of 384 tokens, stale>"


@pytest.mark.parametrize("row", [0, 20, -1])
def test_l2_rows_of_earlier_native_steps_end_with_the_step_too(row: int, world: World) -> None:
    world.ctx.decode(prompt(40), rows="all")
    view = world.ctx.logits(row)
    assert answers(view) == list(ACCESSES)
    world.ctx.decode([1])
    assert answers(view) == []


def test_l2_a_view_never_comes_back_to_life(world: World) -> None:
    before = world.view.copy()
    world.ctx.truncate(39)
    world.ctx.decode([prompt(40)[-1]])
    assert answers(world.view) == []
    assert world.ctx.logits() is not world.view
    np.testing.assert_allclose(world.ctx.logits(), before, atol=0.1)


def test_l2_the_table_notices_views_that_outlive_their_step(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: steps that do not end."""
    monkeypatch.setattr(Step, "end", lambda self: None)
    world.ctx.decode([1])
    assert answers(world.view) == list(ACCESSES)


REFUSED: dict[str, Callable[[Any], object]] = {
    "a token that is none": lambda c: c.decode([10**6]),
    "no tokens": lambda c: c.decode([]),
    "too many tokens": lambda c: c.decode(prompt(250)),
    "another sequence": lambda c: c.decode([1], seq=9),
    "a step of nothing": lambda c: c.step([]),
    "a cut too long": lambda c: c.truncate(99),
    "a fork into itself": lambda c: c.fork(0, 0),
    "garbage": lambda c: c.load(b"garbage"),
    "no checkpoint": lambda c: c.restore(None),
    "no such row": lambda c: c.logits(77),
}


@pytest.mark.parametrize("call", REFUSED)
def test_l2_a_refused_call_changes_nothing_and_ends_no_view(call: str, world: World) -> None:
    before = world.view.copy()
    with pytest.raises(PerdureError):
        REFUSED[call](world.ctx)
    assert world.ctx.logits() is world.view
    np.testing.assert_array_equal(world.view, before)


# L3 and L4


class Keeper(np.ndarray[Any, Any]):
    """An array subclass that keeps whatever NumPy shows it."""

    seen: list[Any] = []  # noqa: RUF012

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        self.seen.extend(context[1] if context else [])
        return np.asarray(array)

    def __array_finalize__(self, obj: Any) -> None:
        self.seen.append(obj)


class Neighbour:
    """Another library's array: NumPy hands it the other inputs."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> list[Any]:
        return list(inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> list[Any]:
        return [args, kwargs]


def _kept_by(call: Callable[[LogitsView, Callable[..., Any]], object], view: LogitsView) -> list[Any]:
    kept: list[Any] = []

    def keep(array: Any, *rest: Any) -> Any:
        kept.append(array)
        return array

    call(view, keep)
    return kept


def _kept_by_subclass(view: LogitsView) -> list[Any]:
    Keeper.seen.clear()
    result = view + np.zeros(384, np.float32).view(Keeper)
    return [result, *Keeper.seen]


ARRAYS: dict[str, Callable[[Any], object]] = {
    **ACCESSES,
    "reshape": lambda v: np.reshape(v, (2, 192)),
    "ravel": np.ravel,
    "split": lambda v: np.split(v, 4),
    "array_split": lambda v: np.array_split(v, 5),
    "hsplit": lambda v: np.hsplit(v, 2),
    "broadcast_to": lambda v: np.broadcast_to(v, (3, 384)),
    "broadcast_arrays": lambda v: np.broadcast_arrays(v, OUT),
    "flip": np.flip,
    "transpose": np.transpose,
    "diagonal": lambda v: np.diagonal(np.reshape(v, (2, 192))),
    "diag": np.diag,
    "real": np.real,
    "imag": np.imag,
    "as_strided": lambda v: np.lib.stride_tricks.as_strided(v, (3,), (4,)),
    "sliding_window_view": lambda v: np.lib.stride_tricks.sliding_window_view(v, 5),
    "atleast_1d": np.atleast_1d,
    "atleast_2d": np.atleast_2d,
    "atleast_3d": lambda v: np.atleast_3d(v, v),
    "expand_dims": lambda v: np.expand_dims(v, 0),
    "squeeze": np.squeeze,
    "moveaxis": lambda v: np.moveaxis(v, 0, 0),
    "swapaxes": lambda v: np.swapaxes(v, 0, 0),
    "rollaxis": lambda v: np.rollaxis(v, 0),
    "asanyarray": np.asanyarray,
    "asarray like a view": lambda v: np.asarray(v, like=v),
    "asarray like an array": lambda v: np.asarray(v, like=OUT),
    "asfortranarray": np.asfortranarray,
    "asarray_chkfinite": np.asarray_chkfinite,
    "require": lambda v: np.require(v, np.float32, ["C"]),
    "trim_zeros": np.trim_zeros,
    "meshgrid": lambda v: np.meshgrid(v, v, copy=False),
    "einsum": lambda v: np.einsum("i->i", v),
    "einsum diagonal": lambda v: np.einsum("ii->i", np.reshape(np.concatenate([v] * 384), (384, 384))),
    "nan_to_num": np.nan_to_num,
    "real_if_close": np.real_if_close,
    "take": lambda v: np.take(v, [1, 2]),
    "compress": lambda v: np.compress(MASK, v),
    "extract": lambda v: np.extract(MASK, v),
    "select": lambda v: np.select([MASK], [v]),
    "choose": lambda v: np.choose([0, 0], [v[:2], v[:2]]),
    "unique": lambda v: np.unique(v, return_index=True),
    "unique_counts": np.unique_counts,
    "histogram": lambda v: np.histogram(v, bins=[-1.0, 0.0, 1.0]),
    "partition": lambda v: np.partition(v, 5),
    "nditer": lambda v: [np.nditer(v).operands, np.nditer(v).value],
    "ndenumerate": lambda v: [vars(np.ndenumerate(v))["iter"].base],
    "broadcast": lambda v: [each.base for each in np.broadcast(v, v).iters],
    "np.ma": lambda v: np.ma.asarray(v).data,
    "block": lambda v: np.block([v, v]),
    "masked_where": lambda v: np.ma.masked_where(MASK, v).data,
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle and back": lambda v: pickle.loads(pickle.dumps(v)),
    "fftn": np.fft.rfft,
    "apply_along_axis": lambda v: _kept_by(lambda w, keep: np.apply_along_axis(keep, 0, w), v),
    "apply_over_axes": lambda v: _kept_by(lambda w, keep: np.apply_over_axes(keep, w, [0]), v),
    "piecewise": lambda v: _kept_by(lambda w, keep: np.piecewise(w, [MASK], [keep, 0]), v),
    "array subclass": _kept_by_subclass,
    "another library's array": lambda v: v + Neighbour(),
    "another library's function": lambda v: np.concatenate([v, Neighbour()]),
}


def overlapping(result: Any, row: np.ndarray[Any, Any]) -> bool:
    """Whether an array in `result`, or one that it stands on, lies over `row`."""
    if isinstance(result, (list, tuple)):
        return any(overlapping(each, row) for each in result)
    if isinstance(result, dict):
        return any(overlapping(each, row) for each in result.values())
    while isinstance(result, np.ndarray):
        if np.may_share_memory(result, row):
            return True
        result = result.base
    return False


@pytest.mark.parametrize("name", [name for name in ARRAYS if name != "borrow"])
def test_l4_no_result_lies_over_engine_memory(name: str, world: World) -> None:
    """L3 too: what comes out can be written to without touching the row."""
    before = world.view.copy()
    result = ARRAYS[name](world.view)
    with world.view.borrow() as row:
        escaped = overlapping(result, row)
    del row, result
    assert not escaped
    np.testing.assert_array_equal(world.view, before)


def test_l4_the_check_sees_a_row_that_got_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: results handed out as they are."""
    monkeypatch.setattr(LogitsView, "_own", lambda self, result: result)
    for escape in ("slice", "empty slice", "reshape", "broadcast_arrays", "einsum"):
        result = ARRAYS[escape](world.view)
        with world.view.borrow() as row:
            assert overlapping(result, row)
        del row, result


WRITES: dict[str, Callable[[Any], object]] = {
    "item": lambda v: operator.setitem(v, 0, 1.0),
    "slice": lambda v: operator.setitem(v, slice(None), 0.0),
    "mask": lambda v: operator.setitem(v, MASK, 0.0),
    "delete": lambda v: operator.delitem(v, 0),
    "+=": lambda v: v.__iadd__(1),
    "*=": lambda v: v.__imul__(2),
    "out": lambda v: np.add(v, 1, out=v),
    "out of another input": lambda v: np.exp(OUT, out=v),
    "ufunc.at": lambda v: np.add.at(v, [0], 1),
    "ufunc.at of one input": lambda v: np.negative.at(v, [0]),
    "copyto": lambda v: np.copyto(v, 0.0),
    "put": lambda v: np.put(v, [0], [1.0]),
    "place": lambda v: np.place(v, MASK, [1.0]),
    "putmask": lambda v: np.putmask(v, MASK, 1.0),
    "put_along_axis": lambda v: np.put_along_axis(v, np.array([0]), 1.0, 0),
    "np.clip into it": lambda v: np.clip(v, 0, 1, out=v),
    "np.cumsum into it": lambda v: np.cumsum(v, out=v),
    "nan_to_num in place": lambda v: np.nan_to_num(v, copy=False),
    "shuffle": random.shuffle,
    "memoryview": lambda v: memoryview(v),
    "frombuffer": lambda v: np.frombuffer(v, np.float32),
    "bytes": lambda v: bytes(v),
    "dlpack": lambda v: np.from_dlpack(v),
    "asarray without a copy": lambda v: np.asarray(v, copy=False),
    "array without a copy": lambda v: np.array(v, copy=False),
    "attribute": lambda v: setattr(v, "flags", None),
}


@pytest.mark.parametrize("name", WRITES)
def test_l3_a_view_cannot_be_written_or_taken_as_memory(name: str, world: World) -> None:
    before = world.view.copy()
    with pytest.raises((TypeError, ValueError, AttributeError)):
        WRITES[name](world.view)
    np.testing.assert_array_equal(world.view, before)
    for door in ("__array_interface__", "__array_struct__", "__dlpack__", "__buffer__", "ctypes", "data"):
        assert not hasattr(world.view, door)


def test_l3_arithmetic_agrees_with_the_same_on_a_copy(world: World) -> None:
    view, row = world.view, world.view.copy()
    bias = np.linspace(-1, 1, len(row), dtype=np.float32)
    compute: Callable[[Any], Any]
    for compute in (
        lambda x: x + bias,
        lambda x: bias - x,
        np.exp,
        lambda x: np.add.reduce(x),
        lambda x: np.where(x > 0, x, bias),
        lambda x: np.concatenate([x, [1.0], x]),
        lambda x: np.linalg.norm(x),
        lambda x: x @ bias,
        lambda x: np.hypot(x, x),
    ):
        expected = compute(row)
        got = compute(view)
        np.testing.assert_array_equal(got, expected)
        if isinstance(got, np.ndarray):
            assert type(got) is np.ndarray
            assert got.dtype == expected.dtype
            assert got.flags.writeable


def test_l3_what_people_ask_of_logits_is_true(world: World) -> None:
    view, row = world.view, world.view.copy().astype(np.float64)
    logp = row - np.log(np.exp(row - row.max()).sum()) - row.max()
    assert view.argmax() == int(row.argmax())
    assert (float(view.max()), float(view.min())) == (row.max(), row.min())
    best = np.argsort(-row, kind="stable")
    for k in (1, 2, 5, 7, 64, 384):
        top = view.top(k)
        assert [c.token for c in top] == best[:k].tolist()
        np.testing.assert_allclose([c.logit for c in top], row[best[:k]])
        np.testing.assert_allclose([c.logprob for c in top], logp[best[:k]], atol=1e-5)
    np.testing.assert_allclose(view.logprobs([0, 5, 383]), logp[[0, 5, 383]], atol=1e-5)
    assert view.surprisal(5) == pytest.approx(-logp[5], abs=1e-5)
    assert view.entropy() == pytest.approx(-(np.exp(logp) * logp).sum(), abs=1e-5)
    assert view.logprobs([]).shape == (0,)
    for wrong in ([-1], [384], [2**63], [1.5], ["a"], [None], [True]):
        with pytest.raises(TokenError):
            view.logprobs(wrong)  # type: ignore[arg-type]
    for k in (0, -1, 385):
        with pytest.raises(ValueError):
            view.top(k)


# L5


def _pinned(ctx: Context) -> bool:
    """Whether the context refuses to change, and does not."""
    before = ctx.tokens()
    try:
        ctx.decode([1])
    except PinnedError:
        assert ctx.tokens() == before
        return True
    return False


def test_l5_a_borrowed_array_is_the_live_memory_and_holds_every_change_off(world: World) -> None:
    del world.begun
    expected = world.view.copy()
    held = world.ctx.tokens(0), world.ctx.tokens(1)
    with world.view.borrow() as row:
        assert type(row) is np.ndarray
        np.testing.assert_array_equal(row, expected)
        with pytest.raises(ValueError):
            row[0] = 1
        with pytest.raises(ValueError):
            row.flags.writeable = True
        for name, change in CHANGES.items():
            if name in ("failed decode", "cancelled decode", "del"):
                continue
            with pytest.raises(BufferError):
                change(world)
            assert (world.ctx.tokens(0), world.ctx.tokens(1)) == held
        np.testing.assert_array_equal(row, expected)
        np.testing.assert_array_equal(world.view, expected)
    assert not _pinned(world.ctx)


def test_l5_the_name_is_empty_after_the_block(world: World) -> None:
    with world.view.borrow() as row:
        assert row.size == 384
    assert row.size == 0
    assert not _pinned(world.ctx)


KEPT: dict[str, Callable[[Any], Any]] = {
    "a slice": lambda row: row[3:5],
    "an empty slice": lambda row: row[3:3],
    "a slice of a slice": lambda row: row[3:50][::2],
    "the array itself": lambda row: row,
    "a reshape": lambda row: row.reshape(2, 192),
    "a memoryview": memoryview,
    "a memoryview's slice": lambda row: memoryview(row)[3:5],
    "an iterator": iter,
    "a flat iterator": lambda row: row.flat,
    "a dlpack twin": lambda row: np.from_dlpack(row),
    "a view of another type": lambda row: row.view(np.int32),
    "an object that keeps it": lambda row: {"row": [row]},
    "a closure's default": lambda row: lambda kept=row: kept,
    "a strided window": lambda row: np.lib.stride_tricks.sliding_window_view(row, 3),
}


@pytest.mark.parametrize("shape", KEPT)
def test_l5_an_array_that_outlives_the_block_pins_until_it_is_gone(shape: str, world: World) -> None:
    kept = []
    with pytest.raises(PinnedError, match="outlives"), world.view.borrow() as row:
        kept.append(KEPT[shape](row))
    del row
    assert _pinned(world.ctx)
    with pytest.raises(PinnedError):
        world.ctx.close()
    assert world.ctx.tokens() == prompt(40)
    kept.clear()
    gc.collect()
    assert not _pinned(world.ctx)
    assert world.ctx.tokens() == [*prompt(40), 1]


def test_l5_a_scalar_or_a_copy_may_be_kept(world: World) -> None:
    with world.view.borrow() as row:
        kept = [row[0], row.copy(), row[:5] + 1, row.tolist(), row[[1, 2]]]
    assert not _pinned(world.ctx)
    assert len(kept) == 5


def test_l5_a_closure_over_the_name_sees_it_empty(world: World) -> None:
    with world.view.borrow() as row:

        def later() -> int:
            return row.size

        assert later() == 384
    assert later() == 0
    assert not _pinned(world.ctx)


def test_l5_two_borrows_at_once_pin_until_both_are_over(world: World) -> None:
    kept = []
    with world.view.borrow() as outer:
        with world.view.borrow() as inner:
            assert np.shares_memory(outer, inner)
        assert inner.size == 0
        assert outer.size == 384
        assert _pinned(world.ctx)
    assert not _pinned(world.ctx)
    view = world.ctx.logits()
    with view.borrow() as outer:
        with pytest.raises(PinnedError), view.borrow() as inner:
            kept.append(inner[:1])
        del inner
    assert _pinned(world.ctx)
    kept.clear()
    assert not _pinned(world.ctx)


def test_l5_an_exception_inside_the_block_comes_out_as_it_is(world: World) -> None:
    with pytest.raises(KeyError), world.view.borrow() as row:
        raise KeyError("mine")
    assert row.size == 0
    assert not _pinned(world.ctx)


def test_l5_an_exception_does_not_free_what_was_kept(world: World) -> None:
    kept: list[Any] = []

    def keep_and_fail(part: Any) -> None:
        kept.append(part)
        raise KeyError("mine")

    with pytest.raises(KeyError), world.view.borrow() as row:
        keep_and_fail(row[2:4])
    del row
    assert _pinned(world.ctx)
    kept.clear()
    assert not _pinned(world.ctx)


def test_l5_borrowing_works_inside_an_except_handler(world: World) -> None:
    try:
        raise KeyError("first")
    except KeyError:
        with world.view.borrow() as row:
            best = int(row.argmax())
    assert best == world.view.argmax()
    assert row.size == 0
    assert not _pinned(world.ctx)


def test_l5_a_generator_holds_its_borrow_while_it_is_suspended(world: World) -> None:
    def values() -> Iterator[float]:
        with world.view.borrow() as row:
            yield from row[:5].tolist()

    running = values()
    assert next(running) == float(world.view[0])
    assert _pinned(world.ctx)
    assert len(list(running)) == 4
    assert not _pinned(world.ctx)
    world.view = world.ctx.logits()
    abandoned = values()
    next(abandoned)
    assert _pinned(world.ctx)
    del abandoned
    gc.collect()
    assert not _pinned(world.ctx)


def test_l5_an_exit_stack_without_a_name_works(world: World) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(world.view.borrow())
        assert _pinned(world.ctx)
    assert not _pinned(world.ctx)


def test_l5_a_context_that_is_deleted_while_borrowed_leaves_the_array_readable(llama: Model) -> None:
    ctx = FULL.open(llama)
    ctx.decode(prompt(40))
    view = ctx.logits()
    expected = view.copy()
    with view.borrow() as row:
        del ctx
        gc.collect()
        others = [FULL.open(llama) for _ in range(3)]
        for other in others:
            other.decode(prompt(60, salt=1))
        np.testing.assert_array_equal(row, expected)
        with pytest.raises(StaleViewError):
            view[0]
    assert row.size == 0


def test_l5_a_kept_array_keeps_the_memory_of_a_deleted_context(llama: Model) -> None:
    ctx = FULL.open(llama)
    ctx.decode(prompt(40))
    expected = ctx.logits().copy()
    kept = []
    with pytest.raises(PinnedError), ctx.logits().borrow() as row:
        kept.append(row[5:9])
    del row, ctx
    gc.collect()
    others = [FULL.open(llama) for _ in range(3)]
    for other in others:
        other.decode(prompt(60, salt=1))
    np.testing.assert_array_equal(kept[0], expected[5:9])


def test_l5_closing_while_borrowed_is_refused_and_possible_afterwards(world: World) -> None:
    with world.view.borrow():
        with pytest.raises(PinnedError):
            world.ctx.close()
        assert not world.ctx.closed
        assert world.ctx.tokens() == prompt(40)
    world.ctx.decode([1])
    world.ctx.close()
    with pytest.raises(ClosedError):
        world.ctx.decode([1])


def test_l5_the_checks_see_memory_that_is_not_pinned(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: steps that end whatever is borrowed of them."""
    monkeypatch.setattr(Step, "retire", Step.end)
    with world.view.borrow():
        assert not _pinned(world.ctx)


# L6


def test_l6_a_view_is_refused_while_a_decode_is_in_flight(world: World) -> None:
    inside, go_on = threading.Event(), threading.Event()
    native = core_of(world.ctx).decode

    def slow(batch: Batch) -> Outcome:
        inside.set()
        assert go_on.wait(60)
        return native(batch)

    core_of(world.ctx).decode = slow  # type: ignore[method-assign]
    worker = threading.Thread(target=world.ctx.decode, args=([1],))
    worker.start()
    assert inside.wait(60)
    assert answers(world.view) == []
    found: list[LogitsView] = []
    reader = threading.Thread(target=lambda: found.append(world.ctx.logits()))
    reader.start()
    assert not found
    go_on.set()
    worker.join()
    reader.join()
    with FULL.open(world.model) as fresh:
        fresh.decode(prompt(40))
        fresh.decode([1])
        np.testing.assert_array_equal(found[0], fresh.logits())


@pytest.mark.parametrize("after", ["before the native call", "after the native call"])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_l6_a_failed_decode_leaves_no_row_to_read(step: int, after: str, world: World) -> None:
    native, calls = core_of(world.ctx).decode, iter(range(9))

    def fail(batch: Batch) -> Outcome:
        if next(calls) < step:
            return native(batch)
        if after == "after the native call":
            native(batch)
        return Outcome.FAILED

    core_of(world.ctx).decode = fail  # type: ignore[method-assign]
    with pytest.raises(DecodeError) as caught:
        world.ctx.decode(prompt(40), rows="all")
    assert caught.value.kept == {0: 40}
    assert answers(world.view) == []
    for row in (-1, 0, 20):
        with pytest.raises(RowError):
            world.ctx.logits(row)
    core_of(world.ctx).decode = native  # type: ignore[method-assign]
    world.ctx.decode([1])
    assert world.ctx.logits().argmax() >= 0


# L7


@pytest.mark.parametrize(
    "change",
    [
        *("load", "restore", "fork into it", "fork from it", "truncate", "truncate to what is there"),
        *("clear one", "clear all", "adapt", "decode without rows"),
    ],
)
def test_l7_there_is_no_row_until_a_token_is_decoded_again(change: str, world: World) -> None:
    CHANGES[change](world)
    for row, seq in ((-1, None), (0, None), (-1, 0), (-1, 1)):
        with pytest.raises(RowError):
            world.ctx.logits(row, seq)
    world.ctx.decode([3])
    assert world.ctx.logits().argmax() >= 0


def test_l7_the_row_after_a_wake_is_the_true_one(kind: Kind, model: Model) -> None:
    with kind.open(model) as ctx:
        ctx.decode(prompt(50))
        state = ctx.save()
        ctx.decode([7])
        expected = ctx.logits().copy()
    with kind.open(model) as woken:
        woken.decode(prompt(30, salt=1))
        woken.load(state)
        with pytest.raises(RowError):
            woken.logits()
        woken.decode([7])
        np.testing.assert_array_equal(woken.logits(), expected)


@pytest.mark.model
def test_l2_and_l5_on_the_default_model(real_model: Model) -> None:
    with real_model.context(n_ctx=64, n_seq=2, threads=1) as ctx:
        ctx.decode(real_model.tokenize("The capital of France is"))
        view = ctx.logits()
        with view.borrow() as row:
            best = int(row.argmax())
            assert _pinned(ctx)
        assert best == view.argmax() == view.top(1)[0].token
        assert real_model.piece(best) == b" Paris"
        ctx.decode([best])
        assert view.stale
        for access in (
            lambda: view[0],
            lambda: view + 1,
            lambda: np.asarray(view),
            view.argmax,
            view.entropy,
        ):
            with pytest.raises(StaleViewError):
                access()
