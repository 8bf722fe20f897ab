"""B6 under Ctrl-C: it stops a long decode, and wherever it strikes, the ledger stays true."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import subjects
from perdure import Context, Feed, Model, models
from perdure.engine import registry
from promises import children
from promises.kinds import FULL, MLX, WINDOW, Kind, Row, positions, prompt

ZooPath = Callable[[str], Path]


def _interrupt(path: Path, count: int, at: int) -> dict[str, Any]:
    ended = children.run("interrupted", path, count, at)
    assert ended.code == 0, str(ended)
    found = json.loads(ended.lines[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma3",
        "mamba",
        "jamba",
        *(pytest.param(name, marks=pytest.mark.soak) for name in subjects.MLX),
    ],
)
def test_b6_ctrl_c_stops_a_long_decode_and_leaves_what_was_there(name: str, zoo_path: ZooPath) -> None:
    found = _interrupt(zoo_path(name), 20_000, 3)
    # 40 steps lay ahead: the one in flight is the last, and it is asked to stop.
    assert found == {"interrupted": True, "stopped": True, "steps": 3, "kept": True, "right": True}


@pytest.mark.model
def test_b6_ctrl_c_on_the_default_model() -> None:
    found = _interrupt(models.path(), 2000, 1)
    assert found == {"interrupted": True, "stopped": True, "steps": 1, "kept": True, "right": True}


FIRST, OTHER = prompt(10), prompt(3, salt=1)
PROBE = prompt(4, salt=2)


class Saved:
    """What the calls below need, made before they are interrupted."""

    def __init__(self, ctx: Context) -> None:
        self.state = ctx.save(1)
        self.checkpoint = ctx.checkpoint(0)


CALLS: dict[str, Callable[[Context, Saved], None]] = {
    "decode": lambda ctx, saved: ctx.decode(prompt(20, salt=3)),
    "decode of one": lambda ctx, saved: ctx.decode([7]),
    "step": lambda ctx, saved: ctx.step([Feed(0, [7, 8]), Feed(1, [9])]),
    "truncate": lambda ctx, saved: ctx.truncate(6),
    "fork": lambda ctx, saved: ctx.fork(1, 0),
    "clear": lambda ctx, saved: ctx.clear(),
    "clear one": lambda ctx, saved: ctx.clear(0),
    "load": lambda ctx, saved: ctx.load(saved.state),
    "restore": lambda ctx, saved: ctx.restore(saved.checkpoint),
}

# One kind where everything can be cut, and those that need the most to be taken back.
STRUCK = [
    *((FULL, call) for call in CALLS),
    *((kind, call) for kind in (WINDOW, Kind("mamba"), Kind("jamba")) for call in ("decode", "load", "fork")),
]
STRUCK_MLX = [
    *((kind, call) for kind in MLX[:1] for call in CALLS),
    *((kind, call) for kind in MLX[3:6] for call in ("decode", "load", "fork", "step")),
]


def _strike(call: Callable[[], None], at: int) -> bool:
    """Run `call` and raise KeyboardInterrupt at the `at`-th line of the engine's own code that it runs."""
    left = at

    def lines(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return lines

    def calls(frame: FrameType, event: str, arg: Any) -> Any:
        inside = "perdure/engine" in frame.f_code.co_filename
        # The library's log calls in from native code, where no exception can get out.
        return lines if inside and "library" not in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize(
    ("kind", "name"),
    [*STRUCK, *(pytest.param(*each, marks=pytest.mark.soak) for each in STRUCK_MLX)],
    ids=str,
)
def test_b6_ctrl_c_at_every_line_of_a_call(
    kind: Kind, name: str, open_model: Callable[[str], Model], zoo_path: ZooPath
) -> None:
    model = open_model(kind.name)
    if kind in MLX:
        # Its own: struck where a `with` ends, which no signal is, a lock of the weights stays held by this
        # thread, and other tests' threads would wait for it.
        model = registry.open_model(zoo_path(kind.name), {}, cells=0)  # type: ignore[assignment]
    known: dict[tuple[int, ...], Row] = {}

    def start() -> tuple[Context, Saved]:
        ctx = kind.open(model, n_ctx=64, n_batch=8)
        ctx.decode(FIRST)
        ctx.decode(OTHER, seq=1)
        return ctx, Saved(ctx)

    def answer(ctx: Context) -> Row:
        ctx.decode(PROBE)
        return ctx.logits().copy()

    def learn(ctx: Context) -> None:
        held = tuple(ctx.tokens())
        known[held] = answer(ctx)

    # What may be left: nothing, what was there, or what the call was to make of it.
    ctx, saved = start()
    learn(ctx)
    ctx.clear()
    learn(ctx)
    ctx, saved = start()
    CALLS[name](ctx, saved)
    learn(ctx)

    at, struck = 0, True
    while struck:
        # Every line would take long for the kinds that are slow to open.
        at += 1 if kind is FULL else 3
        ctx, saved = start()
        struck = _strike(lambda ctx=ctx, saved=saved: CALLS[name](ctx, saved), at)  # type: ignore[misc]
        held = tuple(ctx.tokens())
        assert held in known, f"line {at}"
        assert positions(ctx, 0) == len(held), f"line {at}"
        assert positions(ctx, 1) == ctx.length(1), f"line {at}"
        np.testing.assert_array_equal(answer(ctx), known[held], err_msg=f"line {at}")
        ctx.close()
    assert at > 30
