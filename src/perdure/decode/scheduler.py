"""One engine thread for all requests: plan → decode → draw → deliver."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from perdure.decode.grammar import Grammars
from perdure.decode.group import Group
from perdure.decode.job import Job, Outbox, rouse
from perdure.decode.placement import FreshPlaces, Place, Placement
from perdure.decode.request import Request
from perdure.decode.run import Run
from perdure.engine.context import Context, Feed
from perdure.engine.contract import Model, Rows
from perdure.errors import (
    BusyError,
    ClosedError,
    ContextOverflow,
    DecodeCancelled,
    EngineError,
    InvalidInputError,
    PerdureError,
    TokenError,
)

T = TypeVar("T")

_TIMED = 16
"""Steps of so many tokens tell how fast prompts are computed; shorter ones are mostly overhead."""
CHUNK = 64
"""Prompt tokens a step while others wait: what a running reply can be held up by."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a step: the `count` tokens of a run that follow its first `start`."""

    group: Group
    run: Run
    start: int
    count: int


class Scheduler:
    """Serves requests on one context, from any thread.

    Always holds: a running request has a sequence of its own, with room for all that it may write; an
    error ends only the request that it belongs to; no reader is ever waited for. In `exact` mode every
    native step is of one request and cut at fixed places, so a reply never depends on who else is served.
    """

    def __init__(
        self,
        model: Model,
        context: Context,
        *,
        exact: bool = False,
        queue: int = 256,
        chunk: int = CHUNK,
        placement: Placement | None = None,
    ) -> None:
        for name, value, low in (("queue", queue, 0), ("chunk", chunk, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise InvalidInputError(f"{name} is a whole number from {low}, got {value!r}")
        self._model = model
        self._context = context
        self._exact = exact
        self._limit = queue
        self._chunk = min(chunk, context.n_batch)
        self._places = placement or FreshPlaces(context)
        self._grammars = Grammars(model)
        self._changed = threading.Condition()
        self._waiting: deque[Group] = deque()
        self._active: list[Group] = []
        self._readers: list[Outbox] = []
        self._errands: list[tuple[Callable[[], Any], Future[Any], Callable[[], None] | None]] = []
        self._stop_errand: Callable[[], None] | None = None
        self._flying: frozenset[int] = frozenset()
        self._turn = 0
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="perdure-engine", daemon=True)
        self._thread.start()

    # For callers, from any thread.

    def submit(self, request: Request) -> Job:
        """Queue a request. Whatever is wrong with it is raised here, before any work."""
        self.check_thread()
        runs = self._prepare(request, outbox := Outbox())
        group = Group(outbox, runs, request.ends_at(time.monotonic()))
        with self._changed:
            if self._closing:
                raise ClosedError("this runtime is closed")
            # Those who came a moment ago and will find a free sequence do not count as waiting.
            free = self._context.n_seq - sum(each.placed for each in self._active)
            waiting = len(self._waiting) - free
            if waiting >= self._limit:
                raise BusyError(
                    f"{waiting} requests are waiting, {self._limit} may; try again later",
                    waiting=waiting,
                    limit=self._limit,
                )
            self._waiting.append(group)
            self._changed.notify_all()
        return Job(outbox, lambda: self._cancel(group))

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the engine thread, between two steps, and return what it returns."""
        self.check_thread()
        return self.post(function).result()

    def post(self, function: Callable[[], T], *, stop: Callable[[], None] | None = None) -> Future[T]:
        """The same without waiting. `stop` is called if the runtime is closed while `function` runs."""
        errand: Future[T] = Future()
        with self._changed:
            if self._closing:
                raise ClosedError("this runtime is closed")
            self._errands.append((function, errand, stop))
            self._changed.notify_all()
        return errand

    @property
    def load(self) -> tuple[int, int]:
        """Requests waiting, and being served."""
        with self._changed:
            return len(self._waiting), len(self._active)

    def close(self) -> None:
        """End every request as cancelled and stop the engine thread."""
        self.check_thread()
        with self._changed:
            self._closing = True
            self._context.cancel()
            if self._stop_errand is not None:
                self._stop_errand()
            self._changed.notify_all()
        self._thread.join()

    def check_thread(self) -> None:
        """Refuse a caller for whom the engine thread itself would have to wait."""
        if threading.current_thread() is self._thread:
            raise InvalidInputError("a processor cannot wait for the runtime that waits for it")

    def _prepare(self, request: Request, outbox: Outbox) -> list[Run]:
        context, model = self._context, self._model
        ids = _token_ids(request.prompt, context.n_vocab)
        # The last token that is written is never fed, so it needs no room.
        room = context.n_ctx - len(ids) + 1
        wanted = request.max_tokens or 1
        if wanted > room:
            raise ContextOverflow(
                f"the prompt has {len(ids)} tokens and {wanted} more are wanted; {context.n_ctx} fit in all",
                needed=len(ids) + wanted,
                fits=context.n_ctx,
            )
        settled = request.sampling.seeded()
        if request.ignore_eos:
            settled = settled.without(self._ends)
        runs = []
        for index in range(request.n):
            sampling = settled.seeded(index)
            runs.append(
                Run(
                    request,
                    index=index,
                    model=model,
                    sampling=sampling,
                    sampler=context.sampler(sampling.stages(n_vocab=context.n_vocab, n_ctx=context.n_ctx)),
                    matcher=self._grammars.matcher(request.grammar) if request.grammar else None,
                    limit=request.max_tokens or room,
                    put=outbox.put,
                )
            )
        return runs

    @functools.cached_property
    def _ends(self) -> list[int]:
        return sorted(self._model.ends)

    def _cancel(self, group: Group) -> None:
        with self._changed:
            group.cancelled = True
            # A step that serves nobody else need not be waited for.
            if self._flying == {id(group)}:
                self._context.cancel()
            self._changed.notify_all()

    # The engine thread.

    def _loop(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._waiting or self._active or self._errands or self._closing):
                        self._changed.wait()
                    if self._closing:
                        break
                self._round()
        except BaseException as error:
            # A defect of our own: nobody may be left waiting for a thread that is gone.
            self._fail_all(error)
            raise
        self._fail_all(None)

    def _round(self) -> None:
        """One turn of the loop. Nothing of a request is left in its frame while the loop sleeps."""
        if self._errands:
            self._run_errands()
        self._end_overdue()
        if self._waiting:
            self._admit()
        for step in self._plan():
            self._serve(step)
        self._collect()
        if not self._active:
            self._wake_readers()

    def _run_errands(self) -> None:
        with self._changed:
            errands, self._errands = self._errands, []
        for function, errand, stop in errands:
            with self._changed:
                self._stop_errand = stop
                closing = self._closing and stop is not None
            try:
                if closing:
                    raise ClosedError("this runtime is closed")
                result = function()
            except BaseException as error:
                errand.set_exception(error)
            else:
                errand.set_result(result)
            self._stop_errand = None

    def _end_overdue(self) -> None:
        with self._changed:
            groups = [group for group in (*self._waiting, *self._active) if group.cancelled or group.deadline]
        if not groups:
            return
        now = time.monotonic()
        for group in groups:
            if group.cancelled or (group.deadline is not None and now >= group.deadline):
                group.cancel()
        self._collect()

    def _admit(self) -> None:
        """Give free sequences to those who wait, first come first served."""
        with self._changed:
            waiting = list(self._waiting)
        for group in waiting:
            run = group.runs[0]
            # At least one token is fed, so that there is a row to draw from; a scored prompt needs all rows.
            known = np.array(run.script[:-1], np.int32)
            reuse = not self._exact and not run.scoring
            try:
                place = self._places.acquire(known, namespace=run.request.namespace, reuse=reuse)
            except PerdureError as error:
                group.fail(run, error)
                self._collect()
                continue
            if place is None:
                return
            if not isinstance(place, Place):
                continue
            run.seq, run.cached, run.report = place.seq, place.cached, place.report
            for each in group.runs:
                each.started = time.monotonic()
            with self._changed:
                self._waiting.remove(group)
                self._active.append(group)

    def _plan(self) -> list[list[_Piece]]:
        """The native steps of this round. Prompts take turns, a chunk each."""
        ready = [(group, run) for group in self._active for run in group.runs if run.seq is not None]
        ready = [(group, run) for group, run in ready if not run.done]
        doubted = [(group, run) for group, run in ready if run.cached < run.doubted]
        ready = [(group, run) for group, run in ready if run.cached >= run.doubted]
        writers = [_Piece(group, run, run.cached, 1) for group, run in ready if not run.reading]
        readers = [(group, run) for group, run in ready if run.reading]
        self._turn += 1
        if readers:
            first = self._turn % len(readers)
            readers = readers[first:] + readers[:first]
        if self._exact:
            chunks = [_Piece(group, run, run.cached, self._exact_count(run)) for group, run in readers[:1]]
            return [[piece] for piece in writers + chunks]
        context = self._context
        alone = not writers and len(readers) == 1
        budget = min(context.n_batch - len(writers), context.n_batch if alone else self._chunk)
        rows = context.capabilities.max_outputs - len(writers)
        step = writers
        for group, run in readers:
            if budget <= 0 or rows <= 0:
                break
            piece = self._next(group, run, budget, rows)
            step.append(piece)
            budget -= piece.count
            rows -= piece.count if run.scoring else 1
        steps = [
            [self._next(group, run, self._chunk, context.capabilities.max_outputs)] for group, run in doubted
        ]
        return [*steps, step] if step else steps

    def _next(self, group: Group, run: Run, budget: int, rows: int) -> _Piece:
        """The next tokens of a prompt, as many as fit a step that has room for `budget` and for `rows`."""
        assert run.seq is not None
        count = min(run.remaining, budget, rows if run.scoring else budget)
        count = self._places.chunk(run.seq, run.cached, count, run.returns)
        return _Piece(group, run, run.cached, count)

    def _exact_count(self, run: Run) -> int:
        """Prompts are cut at multiples of the chunk, replies at every token, whoever else is there."""
        if run.cached >= run.prompt_length:
            return 1
        chunk = min(self._chunk, self._context.capabilities.max_outputs) if run.scoring else self._chunk
        end = min((run.cached // chunk + 1) * chunk, run.prompt_length)
        return end - run.cached

    def _serve(self, step: Sequence[_Piece]) -> None:
        # Who lost state since the step was planned is planned for anew in the next round.
        step = [piece for piece in step if not piece.run.done and piece.run.cached == piece.start]
        if not step:
            return
        try:
            self._decode(step)
        except DecodeCancelled:
            self._recount()
        except PerdureError as error:
            self._recount()
            if len(step) > 1:
                # Somebody's tokens, or bad luck: each gets past this point alone, or ends.
                for piece in step:
                    piece.run.doubted = piece.start + piece.count
            else:
                step[0].group.fail(step[0].run, error)
        else:
            self._draw(step)

    def _decode(self, step: Sequence[_Piece]) -> None:
        feeds = []
        for piece in step:
            run = piece.run
            assert run.seq is not None
            ends = piece.count == run.remaining
            rows: Rows = "all" if run.scoring else "last" if ends else "none"
            feeds.append(Feed(run.seq, run.next_tokens(piece.count), rows))
        with self._changed:
            self._flying = frozenset(id(piece.group) for piece in step)
            gone = self._closing or all(piece.group.cancelled for piece in step)
        try:
            if not gone:
                # Readers wake while the engine computes, not while the next ones draw.
                self._wake_readers()
                start = time.monotonic()
                self._context.step(feeds)
                if (count := sum(piece.count for piece in step)) >= _TIMED:
                    self._places.timed(count, time.monotonic() - start)
        finally:
            with self._changed:
                self._flying = frozenset()
        if gone:
            raise DecodeCancelled("nobody waits for this step", kept={})

    def _wake_readers(self) -> None:
        readers, self._readers = self._readers, []
        rouse([sleeper for outbox in readers for sleeper in outbox.wake()])

    def _recount(self) -> None:
        """After a failure: what a sequence lost is fed again from the script.

        A failed step can cost a sequence its state that was not even in it: a recurrent memory moves the
        states of others about.
        """
        for run in (run for group in self._active for run in group.runs):
            if run.seq is not None:
                run.cached = min(run.cached, self._context.length(run.seq))

    def _draw(self, step: Sequence[_Piece]) -> None:
        """Draw for every run whose script is wholly fed, then start the further samples."""
        read: list[Group] = []
        for piece in step:
            run = piece.run
            if run.scoring:
                run.score(self._context, piece.count)
            run.cached += piece.count
            if run.remaining or run.done:
                continue
            self._readers.append(piece.group.outbox)
            if run.written:
                self._draw_next(run, run, piece.count - 1)
            else:
                read.append(piece.group)
                self._draw_first(piece)
        for piece in step:
            run = piece.run
            if run.seq is not None and run.cached <= run.prompt_length:
                with suppress(PerdureError):
                    self._places.reached(run.seq, run.cached, run.returns)
        for group in read:
            self._spread(group)

    def _draw_next(self, run: Run, reader: Run, row: int) -> None:
        assert reader.seq is not None
        try:
            run.draw(self._context, row, reader.seq)
        except BaseException as error:
            _end_by(error, run)

    def _draw_first(self, piece: _Piece) -> None:
        """All samples of a prompt draw their first token from its one row."""
        context, reader, row = self._context, piece.run, piece.count - 1
        runs = [run for run in piece.group.runs if not run.done]
        raw = context.logits(row, reader.seq).copy() if len(runs) > 1 else None
        for run in runs:
            run.cached, run.report = reader.cached, reader.report
            if raw is not None:
                context.overwrite(raw, row, reader.seq)
            self._draw_next(run, reader, row)

    def _spread(self, group: Group) -> None:
        """Give the further samples sequences of their own, as far as some are free."""
        first = group.runs[0]
        assert first.seq is not None
        for run in group.waiting:
            with _own_errors(run):
                place = self._places.acquire(
                    np.empty(0, np.int32), namespace=run.request.namespace, reuse=False
                )
                if not isinstance(place, Place):
                    break
                run.seq, run.cached = place.seq, place.cached
                with suppress(PerdureError):
                    self._context.fork(first.seq, run.seq)
                    run.cached = first.cached
        if group.waiting:
            with suppress(PerdureError):
                group.checkpoint = self._context.checkpoint(first.seq)

    def _inherit(self, group: Group, heir: Run, seq: int) -> None:
        """Give `heir` the sequence of a finished sample, back at the end of their prompt."""
        heir.seq = seq
        with _own_errors(heir):
            if group.checkpoint is not None:
                with suppress(PerdureError):
                    self._context.restore(group.checkpoint, seq)
                    return
            # The long way: the prompt is read again.
            self._context.clear(seq)
            heir.cached = 0

    def _collect(self) -> None:
        """Hand the sequences of finished runs on, and finished requests back."""
        with self._changed:
            groups = [*self._active, *(group for group in self._waiting if group.done)]
        for group in groups:
            for run in group.runs:
                while run.done and run.seq is not None:
                    seq, run.seq = run.seq, None
                    if heirs := group.waiting:
                        run = heirs[0]
                        self._inherit(group, run, seq)
                    else:
                        self._places.release(seq)
            if group.done:
                with self._changed:
                    (self._active if group in self._active else self._waiting).remove(group)
                group.deliver()

    def _fail_all(self, error: BaseException | None) -> None:
        with self._changed:
            self._closing = True
            groups = [*self._waiting, *self._active]
            self._waiting.clear()
            self._active.clear()
            errands, self._errands = self._errands, []
        for _, errand, _ in errands:
            errand.set_exception(ClosedError("this runtime is closed"))
        cause = None if error is None else EngineError(f"the engine thread ended: {error!r}")
        for group in groups:
            for run in group.runs:
                if not run.done:
                    run.finish("cancelled" if cause is None else "error", error=cause)
            group.deliver()


def _token_ids(prompt: Sequence[int], n_vocab: int) -> NDArray[np.integer]:
    with suppress(ValueError):
        ids = np.asarray(prompt)
        if ids.ndim == 1 and ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() < n_vocab:
            return ids
    raise TokenError(f"a prompt is a flat list of token ids from 0 to {n_vocab - 1}")


@contextmanager
def _own_errors(*runs: Run) -> Iterator[None]:
    """Whatever is raised here, also by a caller's own processor, ends these runs and no others."""
    try:
        yield
    except BaseException as error:
        _end_by(error, *runs)


def _end_by(error: BaseException, *runs: Run) -> None:
    # A processor that calls sys.exit() ends its request, not the engine thread; and what would mean
    # something else where it is raised again is named instead.
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        cause = error
    else:
        cause = InvalidInputError(f"a processor raised {error!r}")
    for run in runs:
        if not run.done:
            run.finish("error", error=cause)
