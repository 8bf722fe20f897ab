"""State calls: what a sequence holds, as bytes, checkpoints, and rows by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perdure.engine import state as saved
from perdure.engine.context.guarded_core import GuardedCore, Undoing, overflow
from perdure.engine.context.ledger import EMPTY
from perdure.engine.contract import (
    Capture,
    Tokens,
)
from perdure.engine.state import Checkpoint
from perdure.errors import (
    EngineError,
    IncompatibleStateError,
    InvalidInputError,
)


class StateCalls(GuardedCore):
    """Saving and putting back what sequences hold. A state that does not fit is refused, never half taken."""

    def save(self, seq: int = 0) -> bytes:
        """The state of `seq` as bytes that describe themselves (see `state.py`)."""
        with self._turn(seq):
            tokens = self._held(seq)
            return saved.pack(self.identity, tokens, self._core.read(seq, partial=False))

    def load(self, state: bytes | bytearray | memoryview, seq: int = 0) -> None:
        """Replace `seq` by saved state. Foreign or damaged bytes are refused before the engine sees them."""
        with self._turn(seq):
            found = saved.unpack(state, self.identity)
            tokens = found.tokens
            if not 0 < len(tokens) <= self.n_ctx:
                raise overflow(len(tokens), self.n_ctx, "so the saved state says")
            self._check_tokens(tokens)
            self._rows.end()
            with Undoing(self, {seq: EMPTY}):
                # Emptied first: the engine may refuse and keep a part of what was there.
                self._core.remove(seq, 0)
                self._ledger.cut(seq, 0)
                if not self._core.write(seq, found.payload, partial=False):
                    raise EngineError(f"the engine refused a verified state; sequence {seq} is now empty")
                self._confirm(seq, len(tokens))
                self._ledger.replace(seq, tokens)

    def checkpoint(self, seq: int = 0) -> Checkpoint:
        """A point to `restore` later, small where the memory can be cut."""
        with self._turn(seq):
            tokens = self._held(seq)
            part = None
            if self.memory.needs_checkpoint:
                part = self._core.read(seq, partial=True)
            return Checkpoint(self.identity.digest, tokens, part)

    def restore(self, checkpoint: Checkpoint, seq: int = 0) -> None:
        """Take `seq` back to `checkpoint`, whose tokens it must still start with.

        A recurrent memory is whole in its checkpoint, so there the sequence may hold anything.
        """
        if not isinstance(checkpoint, Checkpoint):
            raise InvalidInputError(f"restore takes a checkpoint, got {type(checkpoint).__name__}")
        with self._turn(seq):
            if checkpoint.identity != self.identity.digest:
                raise IncompatibleStateError("this checkpoint is of another model, build or layout")
            alone = not self.memory.has_rows
            if not alone and not self._ledger.starts_with(seq, checkpoint.tokens):
                raise IncompatibleStateError(
                    f"sequence {seq} no longer starts with the {checkpoint.length} tokens of the checkpoint; "
                    "load a saved state, or decode them again",
                    field="tokens",
                )
            self._check_tokens(checkpoint.tokens)
            self._rows.end()
            with Undoing(self, {seq: EMPTY}):
                if not self._undo.return_to(seq, (checkpoint.length, checkpoint.state)):
                    raise EngineError(f"the engine refused a checkpoint; sequence {seq} is now empty")
                self._ledger.replace(seq, checkpoint.tokens)

    def capture(self, seq: int = 0) -> Capture:
        """The state of `seq` in parts; cut its rows before the context is used again."""
        with self._turn(seq):
            self._held(seq)
            return self._core.capture(seq)

    def row_bytes(self) -> int | None:
        """How wide the rows of a captured state are here; None where its states have no rows by token."""
        if self._row_bytes is None:
            with self._turn():
                lengths = [self._ledger.length(seq) for seq in range(self.n_seq)]
                if 0 in lengths:
                    # It may take a step of its own to find out.
                    self._rows.end()
                self._row_bytes = (self._core.row_bytes(lengths.index(min(lengths))),)
        return self._row_bytes[0]

    def assemble(
        self,
        tokens: Tokens,
        pieces: Sequence[NDArray[np.uint8]],
        rest: NDArray[np.uint8] | None,
        seq: int = 0,
    ) -> None:
        """Replace `seq` by `tokens`, whose state is these rows and this rest, captured here before.

        Nothing of them is verified: that is for whoever kept them.
        """
        ids = self._check_tokens(tokens)
        rows = sum(len(piece) for piece in pieces)
        if len(ids) > self.n_ctx or (pieces and rows != len(ids)):
            raise InvalidInputError(f"{rows} rows for {len(ids)} tokens, where {self.n_ctx} fit")
        width = self.row_bytes()
        for piece in pieces:
            if piece.ndim != 2 or piece.shape[1] != width:
                raise IncompatibleStateError(
                    f"rows of {piece.shape[1:]} bytes, where this context has {width or 'none'}; compute the "
                    "tokens anew",
                    field="row width",
                )
        with self._turn(seq):
            self._rows.end()
            with Undoing(self, {seq: EMPTY}):
                self._core.remove(seq, 0)
                self._ledger.cut(seq, 0)
                if not self._core.assemble(seq, pieces, rest):
                    raise EngineError(f"the engine refused rows that it gave; sequence {seq} is now empty")
                self._confirm(seq, len(ids))
                self._ledger.replace(seq, ids)

    def limit_scratch(self, nbytes: int) -> int:
        """Keep at most `nbytes` between calls for states on their way in or out; how much that may come to.

        A larger state gets memory of its own for as long as it is on its way.
        """
        with self._turn():
            return self._core.limit_scratch(nbytes)

    @property
    def scratch_bytes(self) -> int:
        """What is kept for states on their way now."""
        return self._core.scratch_bytes

    def prepare(self) -> None:
        """Find out now how state is laid out, which the first capture or assembling does otherwise."""
        with self._turn():
            if not any(map(self._ledger.length, range(self.n_seq))):
                self._core.prepare()
