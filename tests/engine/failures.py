"""Failures that a test can plant in any engine, in the midst of its own work."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from inside import core_of
from perdure import Context
from perdure.engine.contract import GuessingCore, Outcome
from perdure.engine.core import Core
from perdure.engine.llama.core import LlamaCore
from perdure.engine.llama.native import library
from perdure.engine.llama.native.declarations import AbortCallback
from perdure.engine.media import MediaCore
from perdure.testing.toy import ToyCore


@contextmanager
def failing_decode(
    ctx: Context, *, step: int, after: int, outcome: Outcome = Outcome.ABORTED
) -> Iterator[None]:
    """Let the `step`-th native decode within the block end with `outcome`.

    It ends in its midst: in the toy engine after so many tokens, in llama.cpp (always as if it had been
    stopped) after so many nodes of its graph, in MLX (always as a failure) after so many layers have taken
    their part. A decode that is over sooner succeeds.
    """
    core: Core = core_of(ctx)
    if isinstance(core, GuessingCore):
        # One with layers that guess beside the model.
        core = getattr(core, "model", core)
    if isinstance(core, ToyCore):
        core.faults.fail_decode(outcome, after=after, ahead=step)
        yield
        core.faults.forget()
        return
    calls = iter(range(1, 1 << 30))
    fuse = _fuse(core, after) if isinstance(core, LlamaCore) else _failing_layers(after)

    def fused(usual: Callable[..., Outcome]) -> Callable[..., Outcome]:
        def call(*given: Any, **named: Any) -> Outcome:
            if next(calls) != step:
                return usual(*given, **named)
            with fuse:
                return usual(*given, **named)

        return call

    with ExitStack() as replaced:
        replaced.enter_context(_replaced(core, "decode", fused(core.decode)))
        if isinstance(core, MediaCore):
            replaced.enter_context(_replaced(core, "decode_rows", fused(core.decode_rows)))
        yield


@contextmanager
def refused_write(ctx: Context) -> Iterator[None]:
    """Let the engine refuse every state within the block."""
    with _replaced(core_of(ctx), "write", lambda seq, state, *, partial: False):
        yield


@contextmanager
def _replaced(core: object, name: str, call: Callable[..., object]) -> Iterator[None]:
    setattr(core, name, call)
    try:
        yield
    finally:
        delattr(core, name)


@contextmanager
def _fuse(core: LlamaCore, after: int) -> Iterator[None]:
    """Stop the computation at the node after `after` others."""
    lib: Any = library.load()
    nodes = iter(range(1 << 30))
    fuse = AbortCallback(lambda _: next(nodes) >= after)
    flag, context = ctypes.cast(core._flag, ctypes.c_void_p), core._context
    usual = ctypes.cast(ctypes.CDLL(None).strlen, AbortCallback)
    lib.llama_set_abort_callback(context, fuse, None)
    try:
        yield
    finally:
        lib.llama_set_abort_callback(context, usual, flag)


@contextmanager
def _failing_layers(after: int) -> Iterator[None]:
    """Let the layer after `after` others fail when it is about to keep something."""
    from perdure.ext.mlx.caches import RowCache, StateCache

    left = iter(range(1 << 30))

    def failing(usual: Callable[..., object]) -> Callable[..., object]:
        def call(*given: Any) -> object:
            if next(left) >= after:
                raise RuntimeError("a planned failure")
            return usual(*given)

        return call

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RowCache, "append", failing(RowCache.append))
        patched.setattr(StateCache, "__setitem__", failing(StateCache.__setitem__))
        yield
