"""Events of requests: what the engine loop reports to subscribers.

Every call here is made only while there are subscribers: without them, nothing is computed for events.
"""

from __future__ import annotations

import math
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from perdure import system
from perdure.decode.request import Request
from perdure.decode.sequence import SequenceGroup, TokenSequence
from perdure.engine.context import Context
from perdure.engine.contract import Floats
from perdure.engine.row_kernels.measures import ALTERNATIVES, Measures
from perdure.errors import PerdureError
from perdure.events.hub import EventHub
from perdure.events.subscription import Subscription

HELD = 8
"""Steps whose tokens are emitted together, at most."""
_PATIENCE = 0.05
"""Seconds for which tokens are held back, at most."""
_TIGHT = 16
"""Memory is short where less than this part of it is available."""
_MEMORY_CHECK = 1.0
"""Seconds between two looks at the machine's memory."""
_BY_PLACE = operator.itemgetter(2, 3)


Drawing: TypeAlias = tuple[SequenceGroup, TokenSequence, int, int, int]
"""Of a sequence that is watched and draws from a row of a step: its group, itself, its slot, the row, and how
many tokens it had before. Made at every token, hence without a name."""


class StepEvents:
    """Emits to a hub what happens to requests, in the thread where it happens.

    Tokens of a few steps are emitted together: after a step the processor's caches are cold, and one call for
    several steps costs a fraction of a call for each.
    """

    def __init__(self, hub: EventHub, context: Context, piece: Callable[..., bytes]) -> None:
        self.hub = hub
        self._context = context
        self._piece = piece
        self._texts: dict[int, str] = {}
        """Of the tokens that were emitted so far."""
        self._held: deque[tuple[float, Sequence[Drawing], Measures]] = deque()
        """Tokens that were drawn and not emitted yet: when, for which sequences, and their measures."""
        self._telling = threading.Lock()
        """Held while they are emitted, or added to: a thread with a later event waits for that."""
        self._checked_at = 0.0
        hub.release = self._release

    def queued(self, group: SequenceGroup, request: Request) -> None:
        """A request was taken, while the hub is on or the request has an observer."""
        from perdure.events.event import Queued

        hub = self.hub
        if request.observe is not None:
            if isinstance(request.observe, Subscription):
                hub.forward(group.event_id, request.observe)
            else:
                hub.observe(group.event_id, request.observe)
        if hub.on and hub.watches(group.event_id):
            hub.emit(Queued, group.event_id, len(request.prompt), request.n, request.namespace)

    def placed(self, group: SequenceGroup) -> None:
        from perdure.events.event import MemoryPressure, Placed

        first = group.sequences[0]
        if first.seq is None or not self.hub.watches(group.event_id):
            return
        report, waited = first.report, (first.started or first.submitted) - first.submitted
        self.hub.emit(
            Placed, group.event_id, first.seq, dict(report.tiers), report.computed, report.why, waited
        )
        if (now := time.monotonic()) >= self._checked_at + _MEMORY_CHECK:
            self._checked_at = now
            available, total = system.available_memory(), system.physical_memory()
            if available is not None and total and available < total // _TIGHT:
                self.hub.emit(MemoryPressure, "", available, total)

    def read(self, group: SequenceGroup, sequence: TokenSequence, count: int, seconds: float) -> None:
        """A step has computed `count` tokens of a prompt."""
        from perdure.events.event import ChunkRead

        if self.hub.watches(group.event_id):
            fields = (count, sequence.cached, sequence.prompt_length, seconds)
            self.hub.emit(ChunkRead, group.event_id, *fields)

    def drawn(self, drawings: Sequence[Drawing], measures: Measures | None) -> None:
        """Sequences have drawn from rows of the last step, which is still there to be read. `measures` are of
        the one token of each, in the order of their rows, where they were made with the draw."""
        now = time.time()
        if measures is None:
            self._measure(drawings, now)
            return
        with self._telling:
            waiting = self._held
            waiting.append((now, drawings, measures))
            is_due = len(waiting) >= HELD or now - waiting[0][0] >= _PATIENCE or drawings[0][1].written <= 1
        if is_due:
            self._release()

    def _measure(self, drawings: Sequence[Drawing], now: float) -> None:
        """Tell of draws whose rows were not measured yet."""
        self._release()
        places: list[tuple[int, int]] = []
        tokens: list[int] = []
        drawn_tokens: list[tuple[str, int, int]] = []
        for group, sequence, seq, row, before in drawings:
            drawn = sequence.tokens[before:].tolist()
            if sequence.end is not None:
                drawn.append(sequence.end)
            self._masked(group, sequence, before, len(drawn))
            if self.hub.wants_tokens_of(group.event_id):
                for ahead, token in enumerate(drawn):
                    places.append((row + ahead, seq))
                    tokens.append(token)
                    drawn_tokens.append((group.event_id, sequence.index, before + ahead))
        if not drawn_tokens:
            return
        try:
            measures = self._context.read_rows(partial(measures_of, tokens), places)
        except PerdureError:
            # An event that fails is dropped; the reply goes on.
            return
        for at, (id_, index, position) in enumerate(drawn_tokens):
            self._tell(now, id_, measures, at, index, position)

    def _release(self) -> None:
        """Tell of tokens that were held back, in their order, in any thread."""
        with self._telling:
            while self._held:
                now, drawings, measures = self._held.popleft()
                if len(drawings) > 1:
                    drawings = sorted(drawings, key=_BY_PLACE)
                for at, (group, sequence, _, _, before) in enumerate(drawings):
                    # A sequence that failed has not taken the token that was drawn.
                    if len(sequence.tokens) > before or sequence.end is not None:
                        self._tell(now, group.event_id, measures, at, sequence.index, before)

    def _tell(self, now: float, request: str, measures: Measures, at: int, index: int, position: int) -> None:
        from perdure.events.event import LateEvent

        texts = self._texts
        for token in measures.tokens_of(at):
            if token not in texts:
                # Not by the reader of the event, which may come after the model was closed.
                texts[token] = self._piece(token, special=True).decode("utf-8", "replace")
        fields = partial(self._fields, measures, at, index, position)
        self.hub.hand_on(LateEvent("TokenDrawn", now, request, fields))

    def _masked(self, group: SequenceGroup, sequence: TokenSequence, before: int, drawn: int) -> None:
        from perdure.events.event import Masked

        for at, allowed in enumerate(sequence.allowed[:drawn]):
            fields = (sequence.index, before + at, allowed, self._context.n_vocab)
            self.hub.emit(Masked, group.event_id, *fields)
        sequence.allowed.clear()

    def _fields(self, measures: Measures, at: int, index: int, position: int) -> tuple[Any, ...]:
        """The fields of the event of a drawn token. Called by the thread that reads the event."""
        token, logprob, entropy, rank, ids, shares = measures[at]
        texts = self._texts
        best = tuple([(each, texts[each], share) for each, share in zip(ids, shares, strict=True)])
        # Rounding may leave a little more than 1.
        chance = min(1.0, math.exp(logprob))
        return index, position, token, texts[token], chance, entropy, -logprob, rank, best

    def ended(self, group: SequenceGroup) -> None:
        from perdure.events.event import Ended

        if not self.hub.watches(group.event_id):
            return
        count = len(group.sequences)
        for at, sequence in enumerate(group.sequences):
            finished = sequence.finished or time.monotonic()
            started = sequence.started or finished
            first = sequence.first_token or finished
            self.hub.emit(
                Ended,
                group.event_id,
                sequence.index,
                sequence.finish_reason or "cancelled",
                sequence.prompt_length,
                sequence.report.reused,
                sequence.written,
                started - sequence.submitted,
                first - started,
                finished - first,
                None if sequence.error is None else f"{type(sequence.error).__name__}: {sequence.error}",
                at == count - 1,
            )


def measures_of(tokens: Sequence[int], rows: Floats) -> Measures:
    """The measures of the tokens that were drawn from rows."""
    measures = Measures(rows, ALTERNATIVES)
    measures.drawn(rows, tokens)
    return measures
