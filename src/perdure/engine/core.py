"""What an engine is: the calls that its core must offer, in terms of memory, tokens and rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Batch, Capture, Floats, Outcome


class Adapter(Protocol):
    """A change of what a model computes, of a LoRA or a control vector. It fits the model that loaded it."""

    @property
    def digest(self) -> str:
        """Its identity: a digest of its content, and of all else that changes its effect."""
        ...

    @property
    def invocation(self) -> tuple[int, ...]:
        """The tokens that switch an activated LoRA on; none for what is always on."""
        ...


class Core(Protocol):
    """One native context. It checks nothing and remembers nothing: `Context` does both.

    Positions are what the engine itself reports. `partial` reads and writes only the part of a
    sequence's state that cannot be cut (a window, a recurrent state).
    """

    n_vocab: int
    width: int
    """Numbers of a hidden state."""

    def decode(self, batch: Batch) -> Outcome: ...
    def row(self, index: int) -> Floats:
        """The logits of batch entry `index`, over engine memory."""
        ...

    def rows(self, indices: Sequence[int]) -> Floats:
        """The logits of several batch entries as one table, over engine memory where it is one there."""
        ...

    def synchronize(self) -> None:
        """Wait until what was decoded is computed."""
        ...

    def hidden(self, count: int) -> Floats:
        """The hidden states of all `count` tokens of the last batch, over engine memory.

        Only of a core that was opened for an embedder.
        """
        ...

    def newest(self, seq: int) -> int:
        """The last position held for `seq`, or -1."""
        ...

    def oldest(self, seq: int) -> int:
        """The first position from which on all are held for `seq`, or -1."""
        ...

    def remove(self, seq: int, start: int) -> None:
        """Drop the positions of `seq` from `start` on. Read back what that did."""
        ...

    def copy(self, src: int, dst: int) -> None:
        """Make the empty `dst` a copy of the whole of `src`."""
        ...

    def clear(self) -> None:
        """Drop everything and zero the memory."""
        ...

    def read(self, seq: int, *, partial: bool) -> NDArray[np.uint8]:
        """The state of `seq`. A partial one is the caller's own; a whole one is good until the next call."""
        ...

    def write(self, seq: int, state: NDArray[np.uint8], *, partial: bool) -> bool:
        """Replace the state of `seq`. False: refused, and `seq` is then empty or as it was."""
        ...

    def capture(self, seq: int) -> Capture:
        """The state of `seq` in its parts."""
        ...

    def assemble(
        self, seq: int, pieces: Sequence[NDArray[np.uint8]], tail_state: NDArray[np.uint8] | None
    ) -> bool:
        """Replace the state of `seq` by rows and a tail state that were captured. False as for `write`."""
        ...

    def row_bytes(self, seq: int) -> int | None:
        """How wide the rows of a captured state are; None where it has none. `seq` is empty if any is."""
        ...

    def adapt(self, adapters: Mapping[Adapter, float]) -> bool:
        """Compute with these adapters at these scales from now on, for all sequences. False: refused, as
        before."""
        ...

    def limit_scratch(self, nbytes: int) -> int:
        """Keep at most `nbytes` of memory between calls for states in passing; how much may be kept."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """What is kept for that now."""
        ...

    def prepare(self) -> None:
        """Do now what the first capture or assembling would do first. All sequences are empty."""
        ...

    def stop(self) -> None:
        """Ask the decode in flight, if there is one, to end. Any thread may call this."""
        ...

    def rearm(self) -> None:
        """Forget an earlier `stop`."""
        ...

    def close(self) -> None: ...
