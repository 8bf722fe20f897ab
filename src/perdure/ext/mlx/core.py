"""The native calls of MLX, as the contract has them.

A step builds one graph for all of its sequences, and computes it at its end: logits that were asked for, and
what the caches then hold. Nothing of a sequence is left that waits, so graphs do not grow. While a token of
one sequence alone is computed, the step behind it is built.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from perdure import EngineError
from perdure.ext.mlx.adapters import MlxAdapter
from perdure.ext.mlx.caches import batched, give_back
from perdure.ext.mlx.sequence_state import SequenceLayout, SequenceState
from perdure.ext.mlx.weights import MlxWeights
from perdure.spi.engine import Adapter, Batch, Capture, Floats, Outcome

log = logging.getLogger("perdure.engine")

_CLOSE = 0.05
"""How far logits of a step of several sequences may be from those of each alone, of the largest one."""


Adapters = tuple[tuple[MlxAdapter, float], ...]


class NextStep:
    """A step of one token that is built before its token is known, on handles of the sequence's caches.

    To build the graph of a step takes milliseconds of Python, in which the device has nothing to do. It
    depends on how many tokens there are, not on which: so it is built while the step before it is computed.
    The sequence holds nothing of it before `take`: a caller that does not need it drops it.
    """

    def __init__(self, weights: MlxWeights, state: SequenceState, length: int, adapters: Adapters) -> None:
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


class MlxCore:
    """Sequences of caches over shared weights."""

    def __init__(
        self,
        weights: MlxWeights,
        *,
        make: Callable[[], list[Any]],
        keeps_window: bool,
        n_seq: int,
        n_ctx: int,
        embeds: bool = False,
    ) -> None:
        self.n_vocab = weights.n_vocab
        self._weights = weights
        self._make = make
        self._n_ctx = n_ctx
        self._embeds = embeds
        self._adapters: Adapters = ()
        with weights.lock:
            weights.use(())
            self.layout, self.width = self._probe(keeps_window)
        self._states = [SequenceState(make(), self.layout) for _ in range(n_seq)]
        self._table: Floats = np.zeros((0, self.n_vocab), np.float32)
        self._places: dict[int, int] = {}
        self._hidden: Floats = np.zeros((0, self.width), np.float32)
        self._stop = threading.Event()
        self._joins: bool | None = None
        """Whether a step may take several sequences at once; None until one was tried."""
        self._next: NextStep | None = None
        self._builds_ahead = True
        """Whether the model's class builds the same graph for every token."""

    def _probe(self, keeps_window: bool) -> tuple[SequenceLayout, int]:
        """How state is laid out, from a step of one token."""
        caches = self._make()
        output = self._weights.run(mx.array([[0]]), caches, None)
        state = SequenceState(caches)
        mx.eval(output.logits, state.arrays())
        width = int(output.hidden.shape[-1]) if output.hidden is not None else 0
        return SequenceLayout.of(caches, keeps_window), width

    # Decoding.

    def decode(self, batch: Batch) -> Outcome:
        if self._stop.is_set():
            return Outcome.ABORTED
        size = batch.size
        seqs = batch.seqs[:size]
        bounds = [0, *(np.flatnonzero(np.diff(seqs)) + 1).tolist(), size]
        parts = list(itertools.pairwise(bounds))
        for start, stop in parts:
            state = self._states[int(seqs[start])]
            if int(batch.positions[start]) != state.newest() + 1:
                return Outcome.REJECTED
            if state.length + stop - start > self._n_ctx:
                return Outcome.FULL
        touched = [self._states[int(seqs[start])] for start, _ in parts]
        with self._weights.lock:
            try:
                self._weights.use(self._adapters)
                if size == 1 and batch.outputs[0] and not self._embeds:
                    self._compute_one(int(batch.tokens[0]), touched[0])
                else:
                    self._compute(batch, parts, touched)
            except (RuntimeError, ValueError, MemoryError) as error:
                for state in touched:
                    state.recover()
                log.error("a step of %d tokens failed: %s", size, error)
                return Outcome.FAILED
            for state, (start, stop) in zip(touched, parts, strict=True):
                state.length = int(batch.positions[start]) + stop - start
        return Outcome.DONE

    def _compute_one(self, token: int, state: SequenceState) -> None:
        """One token of one sequence, and meanwhile the graph of the next one."""
        logits = None
        if self._next is not None and self._next.fits(state, self._adapters):
            logits = self._next.take(token)
            self._builds_ahead = logits is not None
        # While a step that was built is there, the rows that it builds on cannot be written in place.
        self._next = None
        if logits is None:
            logits = self._weights.run(mx.array([[token]], mx.int32), state.caches, [0]).logits[0]
        logits = logits.astype(mx.float32)
        arrays = state.arrays()
        mx.async_eval(logits, *arrays)  # type: ignore[no-untyped-call]
        waiting = None
        length = state.length + 1
        if self._builds_ahead and length < self._n_ctx:
            waiting = NextStep(self._weights, state, length, self._adapters)
        mx.eval(logits, *arrays)
        self._places = {0: 0}
        # The array owns its memory: a row that a caller still has keeps it alive.
        self._table = np.array(logits, copy=False)[:, : self.n_vocab]
        self._next = waiting

    def _compute(
        self, batch: Batch, parts: Sequence[tuple[int, int]], touched: Sequence[SequenceState]
    ) -> None:
        self._next = None
        outputs: list[tuple[list[int], Any]] = []
        """Entries of the batch, and their logits, in tables."""
        hidden: list[tuple[int, Any]] = []
        together = self._together(parts, touched)
        if together:
            entries = [parts[place][0] for place in together]
            logits = self._run_together([touched[place] for place in together], batch.tokens[entries])
            marked = [place for place, entry in enumerate(entries) if batch.outputs[entry]]
            if marked:
                outputs.append(([entries[place] for place in marked], logits[mx.array(marked)]))
        for place, (start, stop) in enumerate(parts):
            if place in together:
                continue
            rows = np.flatnonzero(batch.outputs[start:stop]).tolist()
            tokens = mx.array(batch.tokens[start:stop][None])
            output = self._weights.run(tokens, touched[place].caches, rows or [stop - start - 1])
            if rows:
                outputs.append(([start + row for row in rows], output.logits[0]))
            if self._embeds:
                hidden.append((start, output.hidden[0]))
        tables = [(entries, logits.astype(mx.float32)) for entries, logits in outputs]
        arrays = [array for state in touched for array in state.arrays()]
        shown = [(start, each.astype(mx.float32)) for start, each in hidden]
        mx.eval(*[logits for _, logits in tables], *[each for _, each in shown], *arrays)
        self._places = {}
        for entries, _ in tables:
            for entry in entries:
                self._places[entry] = len(self._places)
        # A new array: a row of the last step that a caller still has stays valid.
        self._table = np.empty((len(self._places), self.n_vocab), np.float32)
        at = 0
        for entries, logits in tables:
            self._table[at : at + len(entries)] = np.array(logits, copy=False)[:, : self.n_vocab]
            at += len(entries)
        if self._embeds:
            self._hidden = np.concatenate([np.array(each) for _, each in shown])

    def _together(self, parts: Sequence[tuple[int, int]], touched: Sequence[SequenceState]) -> list[int]:
        """The parts that are one token behind something, where there are several: they share a step."""
        if self._embeds or self._joins is False:
            return []
        places = [
            place for place, (start, stop) in enumerate(parts) if stop - start == 1 and touched[place].length
        ]
        if len(places) < 2:
            return []
        if self._joins is None:
            self._joins = self._can_join()
            if not self._joins:
                log.info("this model's class takes one sequence a step: several are computed one by one")
        return places if self._joins else []

    def _run_together(self, touched: Sequence[SequenceState], tokens: NDArray[np.int32]) -> Any:
        caches = [state.caches for state in touched]
        joined = batched(caches)
        logits = self._weights.run(mx.array(tokens[:, None]), joined, None).logits[:, 0]
        give_back(joined, caches)
        return logits

    def _can_join(self) -> bool:
        """Whether the model's class computes several sequences in one step as it does each alone: tried on
        two of other lengths, since not every class expects that."""
        texts = ([1, 2, 3, 4, 5], [6, 7])
        alone: list[Any] = []
        states = [SequenceState(self._make()) for _ in texts]
        for each, text in zip(states, texts, strict=True):
            self._weights.run(mx.array([text]), each.caches, [len(text) - 1])
            each.length = len(text)
            twin = each.copy()
            alone.append(self._weights.run(mx.array([[8]]), twin.caches, [0]).logits[0, 0])
        try:
            joined = self._run_together(states, np.array([8, 8], np.int32))
            truth = mx.stack(alone).astype(mx.float32)
            apart = np.abs(np.array(joined.astype(mx.float32)) - np.array(truth)).max()
            return bool(apart <= _CLOSE * np.abs(np.array(truth)).max())
        except Exception as error:  # Whatever a class makes of what it does not expect.
            log.debug("no step of several sequences: %s", error)
            return False

    def row(self, index: int) -> Floats:
        if index not in self._places:
            raise EngineError(f"the engine has no logits for batch entry {index}")
        row: Floats = self._table[self._places[index]]
        return row

    def rows(self, indices: Sequence[int]) -> Floats:
        places = [self._places[index] for index in indices]
        if places == list(range(len(self._table))):
            return self._table
        table: Floats = self._table[places]
        return table

    def synchronize(self) -> None:
        """Every step is computed when it returns."""

    def hidden(self, count: int) -> Floats:
        return self._hidden[:count]

    # Sequences.

    def newest(self, seq: int) -> int:
        return self._states[seq].newest()

    def oldest(self, seq: int) -> int:
        return self._states[seq].oldest()

    def remove(self, seq: int, start: int) -> None:
        self._next = None
        self._states[seq].remove(start)

    def copy(self, src: int, dst: int) -> None:
        self._next = None
        with self._weights.lock:
            self._states[dst] = self._states[src].copy()

    def clear(self) -> None:
        self._next = None
        for state in self._states:
            state.empty()

    # State.

    def read(self, seq: int, *, partial: bool) -> NDArray[np.uint8]:
        state = self._states[seq]
        with self._weights.lock:
            tail = state.tail()
            if partial and tail is not None:
                return tail
            rows = state.rows()
            table = np.zeros(0, np.uint8) if rows is None else rows.cut(0, len(rows)).reshape(-1)
            return table if tail is None else np.concatenate([tail, table])

    def write(self, seq: int, state: NDArray[np.uint8], *, partial: bool) -> bool:
        self._next = None
        sequence, layout = self._states[seq], self.layout
        ends = bool(layout.window or layout.states)
        with self._weights.lock:
            if partial and ends:
                good = sequence.put_tail(state)
                if not good:
                    sequence.empty()
                return good
            tail_bytes = sequence.tail_bytes(state) if ends else 0
            if tail_bytes is None:
                sequence.empty()
                return False
            table, width = state[tail_bytes:], layout.row_bytes
            if (table.nbytes % width) if width else table.nbytes:
                sequence.empty()
                return False
            pieces = [table.reshape(-1, width)] if width else []
            return sequence.put(pieces, state[:tail_bytes] if ends else None)

    def capture(self, seq: int) -> Capture:
        with self._weights.lock:
            return self._states[seq].capture()

    def assemble(
        self, seq: int, pieces: Sequence[NDArray[np.uint8]], tail_state: NDArray[np.uint8] | None
    ) -> bool:
        self._next = None
        with self._weights.lock:
            return self._states[seq].put(pieces, tail_state)

    def row_bytes(self, seq: int) -> int | None:
        return self.layout.row_bytes or None

    def adapt(self, adapters: Mapping[Adapter, float]) -> bool:
        chosen: list[tuple[MlxAdapter, float]] = []
        for adapter, scale in sorted(adapters.items(), key=lambda item: item[0].digest):
            if not isinstance(adapter, MlxAdapter) or adapter.owner is not self._weights:
                return False
            # A DoRA gives the length of the whole weight: it goes with no other one, and at no other scale.
            if adapter.is_dora and (len(adapters) > 1 or scale != 1.0):
                return False
            chosen.append((adapter, float(scale)))
        self._adapters = tuple(chosen)
        return True

    # Its own life.

    def limit_scratch(self, nbytes: int) -> int:
        return 0

    @property
    def scratch_bytes(self) -> int:
        return 0

    def prepare(self) -> None:
        """The layout is known from the start."""

    def stop(self) -> None:
        self._stop.set()

    def rearm(self) -> None:
        self._stop.clear()

    def close(self) -> None:
        self._next = None
        self._states = []
        self._table = np.zeros((0, self.n_vocab), np.float32)
        self._places = {}
