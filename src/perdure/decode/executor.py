"""The executor: computes steps, draws tokens, shares prompts between samples, and contains errors."""

from __future__ import annotations

import functools
import logging
import operator
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from perdure import system
from perdure.decode.output_queue import notify
from perdure.decode.sampling.sampler import CompiledChain, Sampler, Shown, draw, draw_together
from perdure.decode.sampling.stage import Candidates
from perdure.decode.scheduler import TIMED, Budget, Chunk, PrefillPacer, Slots, Step
from perdure.decode.sequence import SequenceGroup, SlotAssignment, TokenSequence
from perdure.engine.context import Context, Feed
from perdure.engine.contract import Floats, Rows
from perdure.errors import DecodeCancelled, InvalidInputError, PerdureError
from perdure.events.hub import EventHub

if TYPE_CHECKING:
    from perdure.decode.drafter import Drafter
    from perdure.decode.step_events import Drawing, StepEvents
    from perdure.engine.row_kernels.measures import Measures


log = logging.getLogger("perdure.decode")

FRAME = 0.016
"""Seconds that a screen shows one picture."""

PATIENCE = 0.25
"""Seconds of a step that a newcomer waits for rather than have it computed again."""

_Draw: TypeAlias = tuple[TokenSequence, Candidates]
"""A sequence that is to draw, and what it can draw."""


_Row: TypeAlias = tuple[int, int, TokenSequence, CompiledChain, int, Chunk]
"""A slot, which of its rows to draw from, the sequence that is to draw, how, at which position, and the part
of the step."""
_COUNT = operator.attrgetter("count")
_BY_PLACE = operator.itemgetter(0, 1)
_Drawn: TypeAlias = tuple[list[int], dict[int, Shown]]
"""Tokens, and by their places what is to be shown of them."""


class Executor:
    """Carries out steps on one context, in the engine thread.

    Always holds: an error ends only the request that it belongs to; a sequence's `cached` is never more than
    what its slot holds; no reader is waited for.
    """

    def __init__(
        self,
        context: Context,
        slots: Slots,
        pacer: PrefillPacer,
        hub: EventHub,
        events: Callable[[], StepEvents],
        open_drafter: Callable[[], Drafter | None] = lambda: None,
    ) -> None:
        """`events` is called while `hub` is on; `open_drafter` when a reply first asks for guesses."""
        self._hub = hub
        self._events = events
        self._context = context
        self._open_drafter = open_drafter
        self._slots = slots
        self._pacer = pacer
        # Reentrant: the garbage collector drops jobs, and so cancels requests, anywhere.
        self._lock = threading.RLock()
        self._in_flight: Step = ()
        self._stopped = False
        self._drawn: list[tuple[SequenceGroup, TokenSequence]] = []
        """Those whose readers have not been given what was drawn."""
        self._fills_cores = context.capabilities.threads >= system.usable_cores()
        self._seconds = 0.0
        """How long the last step took."""
        self._began = 0.0
        """When the step in flight began."""
        self.interrupted: tuple[int, int] | None = None
        """The sequence and place of the last step that a newcomer interrupted."""

    # From any thread.

    def cancel(self, group: SequenceGroup) -> None:
        """Mark a request as cancelled. A step that serves nobody else is stopped in its middle."""
        with self._lock:
            group.cancelled = True
            if self._in_flight and all(chunk.group is group for chunk in self._in_flight):
                self._context.cancel()

    def interrupt(self) -> None:
        """Stop the step in flight if it is a prompt's alone and much of it is left: a newcomer is there to be
        served. A step is interrupted once; when it comes again, it is computed to its end."""
        with self._lock:
            if len(self._in_flight) != 1 or not self._in_flight[0].is_prompt:
                return
            chunk = self._in_flight[0]
            place = (id(chunk.sequence), chunk.start)
            passed = time.monotonic() - self._began
            left = chunk.count * self._pacer.a_token - passed
            if place != self.interrupted and left > max(PATIENCE, passed):
                self.interrupted = place
                self._context.cancel()

    def stop(self) -> None:
        """Stop the step in flight, and compute nothing more."""
        with self._lock:
            self._stopped = True
            self._context.cancel()

    # In the engine thread.

    def execute(self, step: Step, active: Sequence[SequenceGroup], budget: Budget) -> None:
        """Compute a step and draw from its rows; `active` are all groups that have slots, and `budget` is
        what the step can take with guesses."""
        # A sequence that lost state since the step was made is put into a new step in the next round.
        current: list[Chunk] = []
        guessed_for = 0
        for chunk in step:
            sequence = chunk.sequence
            if sequence.finish_reason is None and sequence.cached == chunk.start:
                current.append(chunk)
                guessed_for = guessed_for or sequence.request.speculate
        step = current
        if not step:
            return
        # Where nobody asks for guesses, nothing is learned of the step either.
        drafter = self._drafter if guessed_for else None
        if drafter is not None:
            self._propose(drafter, step, budget)
        try:
            self._decode(step)
        except DecodeCancelled:
            self._recount(active)
        except (PerdureError, MemoryError) as error:
            self._recount(active)
            if len(step) > 1 or step[0].draft:
                # One sequence's tokens, or a guess, or bad luck: each gets past this point alone, or ends.
                for chunk in step:
                    sequence = chunk.sequence
                    sequence.alone_until = max(sequence.alone_until, chunk.start + chunk.count)
            else:
                step[0].group.fail(error, step[0].sequence)
        else:
            # Readers have a core to themselves until the next step begins.
            self.notify()
            self._draw(step)
            if drafter is not None:
                drafter.observe(step, time.monotonic() - self._began)
            if self._can_wait():
                return
        if not self._context.capabilities.asynchronous:
            self.notify()

    @functools.cached_property
    def _drafter(self) -> Drafter | None:
        return self._open_drafter()

    def _propose(self, drafter: Drafter, step: Step, budget: Budget) -> None:
        """Have tokens guessed, as many as there is room for."""
        try:
            drafter.propose(step, budget)
        except Exception:
            # A guess that fails costs nobody a reply.
            log.exception("guessing ahead failed; it is not done again")
            self._open_drafter = lambda: None
            del self._drafter
            for chunk in step:
                chunk.draft = ()
            return
        room = -1
        for chunk in step:
            if chunk.draft:
                if room < 0:
                    # Nothing of this where nothing is guessed.
                    room = min(budget.tokens - sum(map(_COUNT, step)), budget.rows - len(step))
                sequence = chunk.sequence
                # The last token that may be written is drawn, never guessed.
                most = min(room, sequence.room - 1, self._context.n_ctx - len(sequence.tokens))
                if sequence.media:
                    # What came behind the same words before may be an image, which no reply writes.
                    most = next(
                        (at for at, token in enumerate(chunk.draft[: max(0, most)]) if token < 0), most
                    )
                chunk.draft = chunk.draft[: max(0, most)] if chunk.takes_guesses else ()
                room -= len(chunk.draft)

    def notify(self) -> None:
        """Give readers what was drawn for them since the last time."""
        if not self._drawn:
            return
        drawn, self._drawn = self._drawn, []
        changed: dict[SequenceGroup, None] = {}
        for group, sequence in drawn:
            try:
                sequence.deliver()
            except BaseException as error:
                _end_by(error, sequence)
            # The end of a whole group is delivered with its replies, a moment later.
            if sequence.finish_reason is None or not group.done:
                changed[group] = None
        notify(changed)

    def _can_wait(self) -> bool:
        """Whether tokens are delivered after the next step, and not during it: where a step needs all cores,
        a reader that runs meanwhile holds it up. The delay is not visible: these steps are shorter than a
        frame, and first tokens and ends do not wait."""
        if not self._fills_cores or self._seconds > FRAME:
            return False
        # At every step: a generator would take four times as long.
        for _, sequence in self._drawn:  # noqa: SIM110
            if sequence.written <= 1 + sequence.forced:
                return False
        return True

    def collect(self, group: SequenceGroup) -> None:
        """Give the slots of finished samples to those that wait for one, or back."""
        for sequence in group.sequences:
            while sequence.done and sequence.seq is not None:
                if sequence.request.speculate and (drafter := self._drafter) is not None:
                    drafter.forget(sequence)
                seq, sequence.seq = sequence.seq, None
                if waiting := group.waiting:
                    sequence = waiting[0]
                    self._hand_over(group, sequence, seq)
                else:
                    self._release(seq)

    def preempt(self, group: SequenceGroup) -> None:
        """Take the slot of a request that goes on later, from what it has."""
        self._release(group.preempt())

    def _release(self, seq: int) -> None:
        try:
            self._slots.release(seq)
        except Exception:
            # The reply is whole; what was lost is state that could have been kept.
            log.exception("slot %d could not be released in order", seq)

    def _decode(self, step: Step) -> None:
        feeds: list[Feed] = []
        total = prompts = 0
        for chunk in step:
            sequence, count = chunk.sequence, chunk.count
            assert sequence.seq is not None
            if chunk.draft and self._can_go_back(chunk):
                guesses = len(chunk.draft)
                rows: Rows = range(count - 1, count + guesses)
                known = sequence.tokens[chunk.start : chunk.start + count]
                feeds.append(Feed(sequence.seq, [*known, *chunk.draft], rows))
                total += count + guesses
                continue
            ends = chunk.start + count == len(sequence.tokens)
            rows = "all" if sequence.scoring else "last" if ends else "none"
            feeds.append(Feed(sequence.seq, sequence.next_tokens(count), rows))
            total += count
            if count > 1 and chunk.is_prompt:
                prompts += count
        waited_for = False
        with self._lock:
            self._in_flight = step
            self._began = time.monotonic()
            # At every step: to make a generator takes longer than to look.
            for chunk in step:
                waited_for = waited_for or not chunk.group.cancelled
            gone = self._stopped or not waited_for
        try:
            if not gone:
                asynchronous = self._context.capabilities.asynchronous
                if prompts and not asynchronous:
                    # This takes longer than the steps before did.
                    self.notify()
                started = time.monotonic()
                self._context.step(feeds)
                if asynchronous:
                    # While the device computes.
                    self.notify()
                    if prompts >= TIMED:
                        self._context.synchronize()
                self._seconds = time.monotonic() - started
                if prompts >= TIMED:
                    self._slots.timed(total, self._seconds)
                    self._pacer.observe(total, self._seconds)
        finally:
            with self._lock:
                self._in_flight = ()
        if gone:
            raise DecodeCancelled("nobody waits for this step", kept={})

    def _can_go_back(self, chunk: Chunk) -> bool:
        """See to it that a sequence can go back from a wrong guess; else nothing is guessed."""
        if not self._context.memory.cuts:
            assert chunk.sequence.seq is not None
            try:
                chunk.checkpoint = self._context.checkpoint(chunk.sequence.seq)
            except PerdureError:
                chunk.draft = ()
        return bool(chunk.draft)

    def _go_back(self, chunk: Chunk) -> None:
        """Drop what a draft has left in the cache beyond the tokens that were drawn."""
        sequence, seq = chunk.sequence, chunk.sequence.seq
        guesses, agreed = len(chunk.draft), chunk.count_agreed()
        sequence.drafted += guesses
        sequence.accepted += agreed
        sequence.cached = chunk.start + chunk.count + agreed
        if agreed == guesses or seq is None:
            return
        with _contained(sequence):
            try:
                if chunk.checkpoint is None:
                    self._context.truncate(sequence.cached, seq)
                else:
                    self._context.restore(chunk.checkpoint, seq)
                    sequence.cached = chunk.start
            except PerdureError:
                # The long way: all of it is computed again.
                self._context.clear(seq)
                sequence.cached = 0

    def _recount(self, active: Sequence[SequenceGroup]) -> None:
        """After a failure: what a slot lost is computed again.

        A failed step can cost a slot its state that was not even in it: a recurrent memory moves the
        states of others about.
        """
        for sequence in (sequence for group in active for sequence in group.sequences):
            if sequence.seq is not None:
                sequence.cached = min(sequence.cached, self._context.length(sequence.seq))

    # Drawing.

    def _draw(self, step: Step) -> None:
        """Draw for every sequence that is computed to its end, then start the further samples."""
        prompts: list[SequenceGroup] = []
        reading: list[TokenSequence] = []
        draws: list[_Draw] = []
        plain: list[_Row] = []
        hub = self._hub
        watching = hub.on
        drawings: list[Drawing] = []
        guessed: list[Chunk] = []
        # Those of them whose draws depend on the draw before.
        one_by_one: list[Chunk] = []
        for chunk in step:
            group, sequence, count = chunk.group, chunk.sequence, chunk.count
            if sequence.scoring:
                with _contained(sequence):
                    sequence.score(self._context, count)
            cached = sequence.cached = sequence.cached + count
            if chunk.start < sequence.prompt_length:
                group.read = min(cached, sequence.prompt_length)
            if cached <= sequence.prompt_length:
                reading.append(sequence)
                if watching:
                    self._events().read(group, sequence, count, self._seconds)
            if cached < len(sequence.tokens) or sequence.finish_reason is not None:
                continue
            if cached > sequence.prompt_length:
                drawing = [sequence]
            else:
                # All samples of a prompt draw their first token from its one row.
                prompts.append(group)
                drawing = [each for each in group.sequences if not each.done]
            seq, draft = sequence.seq, chunk.draft
            assert seq is not None
            for each in drawing:
                self._drawn.append((group, each))
                each.cached, each.report = cached, sequence.report
                each.watched = watching and hub.watches(group.event_id)
                if each.watched:
                    drawings.append((group, each, seq, count - 1, len(each.tokens)))
                if (rule := each.compiled) is not None and not (draft and each.is_lazy):
                    position = len(each.tokens)
                    plain.append((seq, count - 1, each, rule, position, chunk))
                    if draft:
                        for ahead in range(1, len(draft) + 1):
                            plain.append((seq, count - 1 + ahead, each, rule, position + ahead, chunk))
                    continue
                if draft:
                    one_by_one.append(chunk)
                with _contained(each):
                    draws.append((each, each.select(self._context, count - 1, seq)))
            if draft:
                guessed.append(chunk)
        measures = None
        if plain:
            is_watched = watching and hub.wants_tokens and len(drawings) == len(plain) and not guessed
            measures = self._take_together(plain, is_watched=is_watched)
        if draws:
            self._take(draws)
        while one_by_one:
            one_by_one = self._take_next(one_by_one)
        if drawings:
            # While the rows are there.
            self._events().drawn(drawings, measures)
        for chunk in guessed:
            self._go_back(chunk)
        for sequence in reading:
            if sequence.seq is not None:
                # State that could not be kept costs time later, and nothing now.
                with _contained(sequence), suppress(PerdureError):
                    self._slots.reached(sequence.seq, sequence.cached, sequence.checkpoint_at)
        for group in prompts:
            self._fork_samples(group)

    def _take_together(self, plain: Sequence[_Row], *, is_watched: bool = False) -> Measures | None:
        """Draw a token for each sequence, out of all their rows in one pass. `is_watched`: a listener wants
        events of each of them, and gets these measures, in the order of the rows."""
        # In the order of their rows in the engine's memory, where they are then one table.
        if len(plain) > 1:
            plain = sorted(plain, key=_BY_PLACE)
        streams: list[tuple[Sampler, CompiledChain, int]] = []
        places: list[tuple[int, int]] = []
        for seq, row, sequence, rule, position, _ in plain:
            streams.append((sequence.sampler, rule, position))
            places.append((row, seq))
        draws = functools.partial(draw_together, streams)
        measures: Measures | None = None
        try:
            if is_watched:
                (tokens, shown), measures = self._context.read_rows(
                    functools.partial(_measure_and_draw, draws), places
                )
            else:
                tokens, shown = self._context.read_rows(draws, places)
        except Exception as error:
            if len(plain) == 1:
                _end_by(error, plain[0][2])
            else:
                # One of them cannot draw, and ends; the others can.
                for each in plain:
                    if _is_next(each):
                        self._take_together([each])
            return None
        for at, (each, token) in enumerate(zip(plain, tokens, strict=True)):
            sequence = each[2]
            if each[5].draft and not _is_next(each):
                continue
            try:
                sequence.take(token, shown.get(at))
            except BaseException as error:
                _end_by(error, sequence)
        return measures

    def _take(self, draws: Sequence[_Draw]) -> None:
        """Draw a token for each sequence: for all at once, or where that fails for each by itself."""
        try:
            tokens = draw(
                [(sequence.sampler, candidates, len(sequence.tokens)) for sequence, candidates in draws]
            )
        except Exception as error:
            if len(draws) == 1:
                _end_by(error, draws[0][0])
            else:
                for each in draws:
                    self._take([each])
            return
        for (sequence, _), token in zip(draws, tokens, strict=True):
            with _contained(sequence):
                sequence.take(token)

    def _take_next(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Draw one token more for each sequence whose last one was guessed right; those that did."""
        draws: list[_Draw] = []
        drawing: list[Chunk] = []
        for chunk in chunks:
            sequence = chunk.sequence
            ahead = None if sequence.finish_reason is not None else chunk.next_row()
            if ahead is None:
                continue
            assert sequence.seq is not None
            with _contained(sequence):
                candidates = sequence.select(self._context, chunk.count - 1 + ahead, sequence.seq)
                draws.append((sequence, candidates))
                drawing.append(chunk)
        if draws:
            self._take(draws)
        return drawing

    # Samples that share a prompt.

    def _fork_samples(self, group: SequenceGroup) -> None:
        """Give the further samples slots of their own, as far as some are free."""
        first = group.sequences[0]
        assert first.seq is not None
        for sequence in group.waiting:
            with _contained(sequence):
                slot = self._slots.acquire(
                    np.empty(0, np.int32),
                    namespace=sequence.request.namespace,
                    adapters=sequence.adapters,
                    reuse=False,
                    side=True,
                )
                if not isinstance(slot, SlotAssignment):
                    break
                sequence.seq, sequence.cached = slot.seq, slot.cached
                with suppress(PerdureError):
                    self._context.fork(first.seq, sequence.seq)
                    sequence.cached = first.cached
        if group.waiting:
            # Without it, whatever the reason, the prompt is computed again.
            with suppress(Exception):
                group.checkpoint = self._context.checkpoint(first.seq)

    def _hand_over(self, group: SequenceGroup, sequence: TokenSequence, seq: int) -> None:
        """Give `sequence` the slot of a finished sample, back at the end of their prompt."""
        sequence.seq = seq
        with _contained(sequence):
            if group.checkpoint is not None:
                with suppress(PerdureError):
                    self._context.restore(group.checkpoint, seq)
                    return
            # The long way: the prompt is computed again.
            self._context.clear(seq)
            sequence.cached = 0


def _measure_and_draw(draws: Callable[[Floats], _Drawn], rows: Floats) -> tuple[_Drawn, Measures | None]:
    """Both while the rows are at hand: to ask for them again takes as long as to draw."""
    try:
        from perdure.engine.row_kernels.measures import ALTERNATIVES, Measures

        measures: Measures | None = Measures(rows, ALTERNATIVES)
    except PerdureError:
        # An event that fails is dropped; the reply goes on.
        measures = None
    drawn = draws(rows)
    if measures is not None:
        measures.drawn(rows, drawn[0])
    return drawn, measures


def _is_next(row: _Row) -> bool:
    """Whether a row is the one that its sequence draws from next: it goes on, and all guesses before the row
    were right."""
    _, at, sequence, _, position, chunk = row
    if sequence.finish_reason is not None or len(sequence.tokens) != position:
        return False
    return not chunk.draft or chunk.next_row() == at - (chunk.count - 1)


@contextmanager
def _contained(*sequences: TokenSequence) -> Iterator[None]:
    """Whatever is raised here, also by a caller's own processor, ends these sequences and no others."""
    try:
        yield
    except BaseException as error:
        _end_by(error, *sequences)


def _end_by(error: BaseException, *sequences: TokenSequence) -> None:
    # A processor that calls sys.exit() ends its request, not the engine thread; and what would mean
    # something else where it is raised again is named instead.
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        cause = error
    else:
        cause = InvalidInputError(f"a processor raised {error!r}")
    for sequence in sequences:
        if not sequence.done:
            sequence.finish("error", error=cause)
