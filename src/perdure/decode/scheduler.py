"""One engine thread for all requests: plan → decode → draw → deliver."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perdure.decode.grammar import Grammars
from perdure.decode.job import Job, Outbox
from perdure.decode.request import Request
from perdure.decode.run import Run
from perdure.engine.context import Context, Feed
from perdure.engine.contract import Model, Rows
from perdure.engine.state import Checkpoint
from perdure.errors import (
    BusyError,
    ClosedError,
    ContextOverflow,
    DecodeCancelled,
    EngineError,
    PerdureError,
    TokenError,
)

CHUNK = 64
"""Prompt tokens a step while others wait: what a running reply can be held up by."""


class Placement(Protocol):
    """Which sequence a request gets, and how much of its prompt is already there."""

    def acquire(self, tokens: NDArray[np.int32]) -> tuple[int, int] | None:
        """A free sequence that starts with the returned number of `tokens`; None if none is free."""
        ...

    def release(self, seq: int) -> None: ...


class FreshPlaces:
    """Every request starts from an empty sequence."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._free = list(range(context.n_seq))

    def acquire(self, tokens: NDArray[np.int32]) -> tuple[int, int] | None:
        if not self._free:
            return None
        # The lowest: the engine batches neighbours together.
        seq = min(self._free)
        self._free.remove(seq)
        self._context.clear(seq)
        return seq, 0

    def release(self, seq: int) -> None:
        self._free.append(seq)


@dataclass(slots=True, eq=False)
class _Group:
    """The samples of one request. The first reads the prompt; the others start where it ends."""

    outbox: Outbox
    runs: list[Run]
    deadline: float | None
    cancelled: bool = False
    checkpoint: Checkpoint | None = None

    @property
    def done(self) -> bool:
        return all(run.done for run in self.runs)

    @property
    def waiting(self) -> list[Run]:
        return [run for run in self.runs if run.seq is None and not run.done]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a step: the next `count` tokens of a run."""

    group: _Group
    run: Run
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
        self._model = model
        self._context = context
        self._exact = exact
        self._limit = queue
        self._chunk = max(1, min(chunk, context.n_batch))
        self._places = placement or FreshPlaces(context)
        self._grammars = Grammars(model)
        self._changed = threading.Condition()
        self._waiting: deque[_Group] = deque()
        self._active: list[_Group] = []
        self._flying: frozenset[int] = frozenset()
        self._turn = 0
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="perdure-engine", daemon=True)
        self._thread.start()

    # For callers, from any thread.

    def submit(self, request: Request) -> Job:
        """Queue a request. Whatever is wrong with it is raised here, before any work."""
        runs = self._prepare(request, outbox := Outbox())
        deadline = None if request.timeout is None else time.monotonic() + request.timeout
        group = _Group(outbox, runs, deadline)
        with self._changed:
            if self._closing:
                raise ClosedError("this runtime is closed")
            if len(self._waiting) >= self._limit:
                raise BusyError(
                    f"{len(self._waiting)} requests are waiting, {self._limit} may; try again later",
                    waiting=len(self._waiting),
                    limit=self._limit,
                )
            self._waiting.append(group)
            self._changed.notify_all()
        return Job(outbox, lambda: self._cancel(group))

    @property
    def load(self) -> tuple[int, int]:
        """Requests waiting, and being served."""
        with self._changed:
            return len(self._waiting), len(self._active)

    def close(self) -> None:
        """End every request as cancelled and stop the engine thread."""
        with self._changed:
            self._closing = True
            self._context.cancel()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _prepare(self, request: Request, outbox: Outbox) -> list[Run]:
        context, model = self._context, self._model
        ids = np.asarray(request.prompt)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= context.n_vocab:
            raise TokenError(f"a prompt is a flat list of token ids from 0 to {context.n_vocab - 1}")
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
        return [token for token in range(self._context.n_vocab) if self._model.is_end(token)]

    def _cancel(self, group: _Group) -> None:
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
                    while not (self._waiting or self._active or self._closing):
                        self._changed.wait()
                    if self._closing:
                        break
                self._end_overdue()
                self._admit()
                for step in self._plan():
                    self._serve(step)
                self._collect()
        except BaseException as error:
            # A defect of our own: nobody may be left waiting for a thread that is gone.
            self._fail_all(error)
            raise
        self._fail_all(None)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        with self._changed:
            groups = [*self._waiting, *self._active]
        for group in groups:
            if group.cancelled or (group.deadline is not None and now >= group.deadline):
                for run in group.runs:
                    if not run.done:
                        run.finish("cancelled")
        self._collect()

    def _admit(self) -> None:
        """Give free sequences to those who wait, first come first served."""
        while True:
            with self._changed:
                group = self._waiting[0] if self._waiting else None
            if group is None:
                return
            run = group.runs[0]
            place = self._places.acquire(np.array(run.script, np.int32))
            if place is None:
                return
            run.seq, run.cached = place
            run.reused = run.cached
            for each in group.runs:
                each.started = time.monotonic()
            with self._changed:
                self._waiting.popleft()
                self._active.append(group)

    def _plan(self) -> list[list[_Piece]]:
        """The native steps of this round. Prompts take turns, a chunk each."""
        ready = [(group, run) for group in self._active for run in group.runs if run.seq is not None]
        ready = [(group, run) for group, run in ready if not run.done]
        writers = [_Piece(group, run, 1) for group, run in ready if not run.reading]
        readers = [(group, run) for group, run in ready if run.reading]
        self._turn += 1
        if readers:
            first = self._turn % len(readers)
            readers = readers[first:] + readers[:first]
        if self._exact:
            chunks = [_Piece(group, run, self._exact_count(run)) for group, run in readers[:1]]
            return [[piece] for piece in writers + chunks]
        context = self._context
        alone = not writers and len(readers) == 1
        budget = min(context.n_batch - len(writers), context.n_batch if alone else self._chunk)
        rows = context.capabilities.max_outputs - len(writers)
        step = writers
        for group, run in readers:
            count = min(run.remaining, budget, rows if run.scoring else budget)
            if count <= 0 or rows <= 0:
                break
            step.append(_Piece(group, run, count))
            budget -= count
            rows -= count if run.scoring else 1
        return [step] if step else []

    def _exact_count(self, run: Run) -> int:
        """Prompts are cut at multiples of the chunk, replies at every token, whoever else is there."""
        if run.cached >= run.prompt_length:
            return 1
        end = min((run.cached // self._chunk + 1) * self._chunk, run.prompt_length)
        return end - run.cached

    def _serve(self, step: Sequence[_Piece]) -> None:
        step = [piece for piece in step if not piece.run.done]
        if not step:
            return
        try:
            self._decode(step)
        except DecodeCancelled:
            self._recount(step)
        except EngineError as error:
            self._recount(step)
            if len(step) > 1:
                # Somebody's tokens, or bad luck: each gets another go, alone.
                for piece in step:
                    self._serve([_Piece(piece.group, piece.run, min(piece.count, piece.run.remaining))])
            else:
                step[0].run.finish("error", error=error)
        except PerdureError as error:
            for piece in step:
                piece.run.finish("error", error=error)
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
                self._context.step(feeds)
        finally:
            with self._changed:
                self._flying = frozenset()
        if gone:
            raise DecodeCancelled("nobody waits for this step", kept={})

    def _recount(self, step: Sequence[_Piece]) -> None:
        """After a failed step: what a sequence lost is fed again from the script."""
        for piece in step:
            run = piece.run
            assert run.seq is not None
            run.cached = min(run.cached, self._context.length(run.seq))

    def _draw(self, step: Sequence[_Piece]) -> None:
        """Draw for every run whose script is wholly fed, then start the further samples."""
        read = []
        for piece in step:
            run = piece.run
            with _own_errors(run):
                if run.scoring:
                    run.score(self._context, piece.count)
            run.cached += piece.count
            if run.remaining or run.done:
                continue
            if run.written:
                self._draw_next(run, run, piece.count - 1)
            else:
                read.append(piece.group)
                self._draw_first(piece)
        for group in read:
            self._spread(group)

    def _draw_next(self, run: Run, reader: Run, row: int) -> None:
        assert reader.seq is not None
        with _own_errors(run):
            run.draw(self._context, row, reader.seq)

    def _draw_first(self, piece: _Piece) -> None:
        """All samples of a prompt draw their first token from its one row."""
        context, reader, row = self._context, piece.run, piece.count - 1
        runs = [run for run in piece.group.runs if not run.done]
        raw = context.logits(row, reader.seq).copy() if len(runs) > 1 else None
        for run in runs:
            run.cached, run.reused = reader.cached, reader.reused
            if raw is not None:
                context.overwrite(raw, row, reader.seq)
            self._draw_next(run, reader, row)

    def _spread(self, group: _Group) -> None:
        """Give the further samples sequences of their own, as far as some are free."""
        first = group.runs[0]
        if not group.waiting or first.seq is None:
            return
        with _own_errors(*group.waiting):
            group.checkpoint = self._context.checkpoint(first.seq)
        for run in group.waiting:
            place = self._places.acquire(np.empty(0, np.int32))
            if place is None:
                return
            run.seq = place[0]
            with _own_errors(run):
                self._context.fork(first.seq, run.seq)

    def _collect(self) -> None:
        """Hand the sequences of finished runs on, and finished requests back."""
        with self._changed:
            groups = [*self._active, *(group for group in self._waiting if group.done)]
        for group in groups:
            for run in group.runs:
                if not run.done or run.seq is None:
                    continue
                seq, run.seq = run.seq, None
                heirs = group.waiting
                if heirs and group.checkpoint is not None:
                    heirs[0].seq = seq
                    with _own_errors(heirs[0]):
                        self._context.restore(group.checkpoint, seq)
                else:
                    self._places.release(seq)
            if group.done:
                with self._changed:
                    (self._active if group in self._active else self._waiting).remove(group)
                group.outbox.finish([run.reply() for run in group.runs])

    def _fail_all(self, error: BaseException | None) -> None:
        with self._changed:
            self._closing = True
            groups = [*self._waiting, *self._active]
            self._waiting.clear()
            self._active.clear()
        cause = None if error is None else EngineError(f"the engine thread ended: {error!r}")
        for group in groups:
            for run in group.runs:
                if not run.done:
                    run.finish("cancelled" if cause is None else "error", error=cause)
            group.outbox.finish([run.reply() for run in group.runs])


@contextmanager
def _own_errors(*runs: Run) -> Iterator[None]:
    """Whatever is raised here, also by a caller's own processor, ends these runs and no others."""
    try:
        yield
    except Exception as error:
        for run in runs:
            if not run.done:
                run.finish("error", error=error)
