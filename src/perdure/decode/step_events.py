"""Events of requests: what the engine loop tells whoever subscribed.

Every call here is made only where somebody looks: while nobody does, nothing is computed for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from perdure import system
from perdure.decode.request import Request
from perdure.decode.sequence import SequenceGroup, TokenSequence
from perdure.engine.context import Context
from perdure.engine.row_kernels import Measures
from perdure.errors import PerdureError
from perdure.events.event import ChunkRead, Ended, LateEvent, Masked, MemoryPressure, Placed, Queued
from perdure.events.hub import EventHub, Subscription

ALTERNATIVES = 5
"""The likeliest tokens that are told beside each."""
_TIGHT = 16
"""Memory is short where less than this part of it is available."""
_LOOK = 1.0
"""Seconds between two looks at the machine's memory."""


class Drawing(NamedTuple):
    """A sequence that draws from a row of a step, and how many tokens it had before."""

    group: SequenceGroup
    sequence: TokenSequence
    seq: int
    row: int
    before: int


class StepEvents:
    """Tells a hub what happens to requests, in the thread where it happens."""

    def __init__(self, hub: EventHub, context: Context, piece: Callable[..., bytes]) -> None:
        self.hub = hub
        self._context = context
        self._piece = piece
        self._texts: dict[int, str] = {}
        """Of the tokens that were told so far."""
        self._looked = 0.0

    def queued(self, group: SequenceGroup, request: Request) -> None:
        """A request was taken, while the hub is on or with somebody who observes it."""
        hub = self.hub
        if request.observe is not None:
            if isinstance(request.observe, Subscription):
                hub.forward(group.event_id, request.observe)
            else:
                hub.observe(group.event_id, request.observe)
        if hub.on and hub.watches(group.event_id):
            hub.emit(Queued, group.event_id, len(request.prompt), request.n, request.namespace)

    def placed(self, group: SequenceGroup) -> None:
        first = group.sequences[0]
        if first.seq is None or not self.hub.watches(group.event_id):
            return
        report, waited = first.report, (first.started or first.submitted) - first.submitted
        self.hub.emit(
            Placed, group.event_id, first.seq, dict(report.tiers), report.computed, report.why, waited
        )
        if (now := time.monotonic()) >= self._looked + _LOOK:
            self._looked = now
            available, total = system.available_memory(), system.physical_memory()
            if available is not None and total and available < total // _TIGHT:
                self.hub.emit(MemoryPressure, "", available, total)

    def read(self, group: SequenceGroup, sequence: TokenSequence, count: int, seconds: float) -> None:
        """A step has computed `count` tokens of a prompt."""
        if self.hub.watches(group.event_id):
            fields = (count, sequence.cached, sequence.prompt_length, seconds)
            self.hub.emit(ChunkRead, group.event_id, *fields)

    def drawn(self, drawings: Sequence[Drawing]) -> None:
        """Sequences have drawn from rows of the last step, which is still there to be read."""
        hub = self.hub
        places: list[tuple[int, int]] = []
        tokens: list[int] = []
        told: list[tuple[str, int, int]] = []
        for group, sequence, seq, row, before in drawings:
            drawn = sequence.tokens[before:].tolist()
            if sequence.end is not None:
                drawn.append(sequence.end)
            for at, allowed in enumerate(sequence.allowed[: len(drawn)]):
                hub.emit(Masked, group.event_id, sequence.index, before + at, allowed, self._context.n_vocab)
            sequence.allowed.clear()
            if not hub.wants("TokenDrawn", group.event_id):
                continue
            for at, token in enumerate(drawn):
                places.append((row + at, seq))
                tokens.append(token)
                told.append((group.event_id, sequence.index, before + at))
        if not told:
            return
        try:
            found = self._context.read_rows(lambda rows: Measures(rows, tokens, ALTERNATIVES), places)
        except PerdureError:
            # What cannot be told is not told; the reply goes on.
            return
        texts = self._texts
        for token in {*tokens, *found.ids}:
            if token not in texts:
                # Now, in this thread: who reads of it may do so when the model is closed.
                texts[token] = self._piece(token, special=True).decode("utf-8", "replace")
        now = time.time()
        for at, (id_, index, position) in enumerate(told):
            hub.hand_on(
                LateEvent(
                    "TokenDrawn", now, id_, partial(self._fields, found, at, index, position, tokens[at])
                )
            )

    def _fields(self, found: Measures, at: int, index: int, position: int, token: int) -> tuple[Any, ...]:
        """Those of a token that was drawn. Called by whoever reads of it, in any thread."""
        logprob, entropy, rank, ids, shares = found[at]
        texts = self._texts
        best = tuple((each, texts[each], share) for each, share in zip(ids, shares, strict=True))
        # Rounding may leave a little more than 1.
        chance = min(1.0, math.exp(logprob))
        return index, position, token, texts[token], chance, entropy, -logprob, rank, best

    def ended(self, group: SequenceGroup) -> None:
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
