"""What a runtime is made of, for tests that look inside: each private part is read here, and only here."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any

from perdure import Model, Runtime
from perdure.backend import LocalBackend
from perdure.cache.block import BlockId
from perdure.cache.tiers.memory import MemoryTier
from perdure.decode.engine_loop import EngineLoop
from perdure.decode.sequence import SequenceGroup
from perdure.engine.context import Context
from perdure.engine.core import Core
from perdure.engine.embedder import Embedder
from perdure.engine.llama.weights import LlamaWeights


def inside(rt: Runtime) -> LocalBackend:
    assert isinstance(rt.backend, LocalBackend)
    return rt.backend


def core_of(context: Context | Embedder) -> Core:
    """The engine below a context: a test plants its faults there, and reads back what is truly cached."""
    return context._core


def weights_of(model: Model) -> LlamaWeights:
    """What the library has loaded, for tests that ask the library itself."""
    return model._open()


def nodes_of(tier: MemoryTier) -> Mapping[BlockId, Any]:
    """The blocks that a tier keeps: a test damages them, and sees which are in use."""
    return tier._nodes


def active_in(loop: EngineLoop) -> Collection[SequenceGroup]:
    """The requests that have slots."""
    return loop._active


def due_in_quiet(loop: EngineLoop) -> int:
    """How much waits for a moment without requests."""
    return len(loop._in_quiet)


def embedder_of(rt: Runtime) -> Embedder:
    """The context of a runtime that makes vectors. It is opened with the first text."""
    embedder: Embedder | None = inside(rt).embeddings._embedder
    assert embedder is not None
    return embedder


def thread_of(loop: EngineLoop) -> threading.Thread:
    return loop._thread
