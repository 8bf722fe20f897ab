"""A step of one token that is built before its token is known.

To build the graph of a step takes milliseconds of Python, in which the device has nothing to do. It depends
on how many tokens there are, not on which: so it is built while the step before it is computed.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from perdure.engine.mlx.adapters import MlxAdapter
from perdure.engine.mlx.sequence_state import SequenceState
from perdure.engine.mlx.weights import Weights

Adapters = tuple[tuple[MlxAdapter, float], ...]


class NextStep:
    """The step behind the one that is being computed, on handles of the sequence's caches.

    The sequence holds nothing of it before `take`: whoever has no use for it forgets it.
    """

    def __init__(self, weights: Weights, state: SequenceState, length: int, adapters: Adapters) -> None:
        self._state = state
        self._length = length
        self._adapters = adapters
        self._written = mx.array([[0]], mx.int32)
        # Computed with the step: if it is computed before, the model's class has looked at it.
        self._token = self._written + 0
        self._caches = state.handles()
        self._logits = weights.run(self._token, self._caches, [0]).logits[0]

    def fits(self, state: SequenceState, adapters: Adapters) -> bool:
        return state is self._state and state.length == self._length and adapters == self._adapters

    def take(self, token: int) -> Any:
        """The logits behind `token`, not computed yet; the sequence has the step's caches then.

        None where the model's class decided by the token's value what to build: nothing has changed then.
        """
        np.array(self._written, copy=False)[0, 0] = token
        if self._token.item() != token:
            return None
        self._state.replace(self._caches)
        return self._logits
