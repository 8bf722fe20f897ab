"""Texts as vectors: the hidden states of a text's tokens, pooled into one.

The rules are written once, here, over any `Core` that gives hidden states. A text is read from its first
token in chunks of one size, so that the engine thread can do other work between two of them.
"""

from __future__ import annotations

import enum
import threading
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perdure.closing import Closing
from perdure.engine.adapters import PLAIN, AdapterSet
from perdure.engine.contract import Batch, BatchPart, Floats, Outcome, Tokens, token_array
from perdure.errors import (
    ClosedError,
    ContextOverflow,
    DecodeCancelled,
    DecodeError,
    EngineError,
    InvalidInputError,
)

if TYPE_CHECKING:
    from perdure.engine.core import Core

CHUNK = 64
"""Tokens a step, always: a vector's last bits depend on it."""


class Pooling(enum.Enum):
    """Which hidden states of a text make its vector."""

    MEAN = "the mean of all"
    FIRST = "that of the first token"
    LAST = "that of the last token"
    SCORE = "none: the engine gives a score of two texts that were read as one"


class Reading:
    """One text on its way to a vector: how far it was read, and what of it is needed."""

    def __init__(self, tokens: NDArray[np.int32], adapters: AdapterSet = PLAIN) -> None:
        self.tokens = tokens
        self.adapters = adapters
        self.at = 0
        self.pooled: NDArray[np.float64] | None = None


class Embedder(Closing):
    """A native context for texts that are read once.

    Always holds: a vector depends on its text and its adapters alone, to the last bit; it has length 1 and
    finite numbers (one that scores pairs gives a single number, as it is); nothing of a text is left in the
    memory when the next begins. Calls from several threads queue.
    """

    def __init__(self, core: Core, *, pooling: Pooling, n_ctx: int, chunk: int) -> None:
        self.pooling = pooling
        self.n_ctx = n_ctx
        """Tokens that a text can have."""
        self.width = 1 if pooling is Pooling.SCORE else core.width
        """Numbers of a vector."""
        self._core = core
        self._batch = Batch(chunk)
        self._lock = threading.RLock()
        self._current: Reading | None = None
        self._applied = PLAIN
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def embed(self, tokens: Tokens, adapters: AdapterSet = PLAIN) -> Floats:
        """The vector of a text."""
        reading = self.begin(tokens, adapters=adapters)
        with self._lock:
            while (vector := self.step(reading)) is None:
                pass
            return vector

    def begin(self, tokens: Tokens, what: str = "a text", *, adapters: AdapterSet = PLAIN) -> Reading:
        """Check a text. Nothing is computed yet; `what` is what errors call it."""
        ids = self._check_tokens(tokens, what)
        if len(ids) > self.n_ctx:
            raise ContextOverflow(
                f"{what} has {len(ids)} tokens, {self.n_ctx} fit: cut it, or take a larger n_ctx if the "
                "model was trained for it",
                needed=len(ids),
                fits=self.n_ctx,
            )
        return Reading(ids, adapters)

    def step(self, reading: Reading) -> Floats | None:
        """Read the next chunk of a text: its vector, once that was the last. One text at a time."""
        with self._lock:
            if self._closed:
                raise ClosedError("this embedder is closed")
            if reading.at == 0:
                self._empty()
                self._current = reading
            elif reading is not self._current:
                raise InvalidInputError("another text was begun meanwhile; begin this one again")
            self._pool(reading, self._read(reading))
            if reading.at < len(reading.tokens):
                return None
            self._current = None
            self._empty()
            return _score(reading) if self.pooling is Pooling.SCORE else _normal(reading)

    def stop(self) -> None:
        """End the step in flight, for good: to be called before `close`, from any thread."""
        self._core.stop()

    def close(self) -> None:
        with self._lock:
            self._core.rearm()
            if not self._closed:
                self._closed = True
                self._core.close()

    def _read(self, reading: Reading) -> Floats:
        end = reading.at + self._batch.capacity
        if reading.at < reading.adapters.start < end:
            # Behind this token other adapters compute.
            end = int(reading.adapters.start)
        chunk = reading.tokens[reading.at : end]
        self._batch.fill([BatchPart(0, reading.at, chunk, np.ones(len(chunk), np.int8))])
        # Whatever goes wrong from here on, this text cannot go on.
        self._current = None
        self._use(reading.adapters.at(reading.at))
        outcome = self._core.decode(self._batch)
        if outcome is Outcome.ABORTED:
            raise DecodeCancelled("the reading of a text was stopped", kept={})
        if outcome is not Outcome.DONE:
            raise DecodeError(f"the engine failed to read a text ({outcome.value})", kept={})
        self._current = reading
        reading.at += len(chunk)
        return self._core.hidden(len(chunk))

    def _use(self, adapters: AdapterSet) -> None:
        if adapters != self._applied:
            if not self._core.adapt(dict(adapters.scales)):
                raise EngineError("the engine refused these adapters for embeddings")
            self._applied = adapters

    def _pool(self, reading: Reading, rows: Floats) -> None:
        """Take what is needed out of engine memory."""
        if self.pooling is Pooling.MEAN:
            total = rows.sum(axis=0, dtype=np.float64)
            reading.pooled = total if reading.pooled is None else reading.pooled + total
        elif self.pooling in (Pooling.LAST, Pooling.SCORE):
            reading.pooled = rows[-1].astype(np.float64)
        elif reading.pooled is None:
            reading.pooled = rows[0].astype(np.float64)

    def _empty(self) -> None:
        self._core.remove(0, 0)
        if self._core.newest(0) != -1:
            self._core.clear()
            if self._core.newest(0) != -1:
                raise EngineError("the engine did not release an earlier text")

    def _check_tokens(self, tokens: Tokens, what: str) -> NDArray[np.int32]:
        return token_array(tokens, self._core.n_vocab, what=what)


def _score(reading: Reading) -> Floats:
    pooled = reading.pooled
    assert pooled is not None
    if not np.isfinite(pooled[0]):
        raise EngineError("the engine gave a score that is no number")
    return pooled[:1].astype(np.float32)


def _normal(reading: Reading) -> Floats:
    pooled = reading.pooled
    assert pooled is not None
    # The mean has the direction of the sum, and only that is kept. No BLAS: its sums may differ by address.
    length = np.sqrt(np.square(pooled).sum())
    if not np.isfinite(length):
        raise EngineError("the engine gave hidden states that are no numbers for a text")
    return (pooled / length if length else pooled).astype(np.float32)
