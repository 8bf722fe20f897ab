"""The engine loop: one thread that computes for all requests, and how others reach it."""

from __future__ import annotations

import functools
import logging
import math
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from perdure.checks import is_whole
from perdure.decode.executor import Executor
from perdure.decode.output_queue import OutputQueue
from perdure.decode.request import Request
from perdure.decode.sampling.stage import Breakers
from perdure.decode.scheduler import (
    TIMED,
    BatchScheduler,
    Budget,
    PrefillPacer,
    QueueOrder,
    Scheduler,
    Slots,
    Step,
    admit,
    promote,
)
from perdure.decode.sequence import Rank, SequenceGroup, make_group
from perdure.engine.adapters import AdapterTable
from perdure.engine.context import Context
from perdure.engine.model import EngineModel
from perdure.engine_config import QUEUE
from perdure.errors import BusyError, ClosedError, EngineError, InvalidInputError
from perdure.events.background import BackgroundThread
from perdure.events.hub import EventHub
from perdure.extension import optional_part

if TYPE_CHECKING:
    from perdure.decode.drafter import Drafter
    from perdure.decode.sampling.grammar import Grammars
    from perdure.decode.sampling.repetition import BreakerTable
    from perdure.decode.step_events import StepEvents


T = TypeVar("T")

log = logging.getLogger("perdure.decode")

CHUNK = 64
"""Prompt tokens a step while others wait, until it is known how long they take; in exact mode always."""
STALL = 0.05
"""Seconds for which a running reply may be held up by others' prompts."""
_COUNT = operator.attrgetter("count")
_LONG = 0.05
"""Seconds of a step from which on a caller that only reads a state does not wait for its end."""
_LONGEST_QUIET = 1.0
"""Seconds without a request after which nothing that waits for quiet waits any longer."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A function to be called in the engine thread, and what ends it early if the loop is closed."""

    function: Callable[[], Any]
    answer: Future[Any]
    stop: Callable[[], None] | None
    is_peek: bool = False
    """Whether it only reads, so that it need not be answered between steps."""


class _LongStep(Exception):
    """A look that was to be answered between steps comes into a long one."""


class EngineLoop:
    """Serves requests on one context, from any thread: admit → next steps → execute → deliver.

    Always holds: a running request has one slot to itself, with room for all that it may write; an error ends
    only the request that it belongs to; the loop never waits for a reader.
    """

    def __init__(
        self,
        model: EngineModel,
        context: Context,
        *,
        exact: bool = False,
        queue: int = QUEUE,
        chunk: int = CHUNK,
        stall: float = STALL,
        slots: Slots | None = None,
        adapters: AdapterTable | None = None,
        events: EventHub | None = None,
        open_drafter: Callable[[], Drafter | None] = lambda: None,
    ) -> None:
        """What `open_drafter` gives guesses ahead for requests that ask for it. An exact loop has no use for
        it: steps of other sizes round otherwise."""
        for name, value, low in (("queue", queue, 0), ("chunk", chunk, 1)):
            if not is_whole(value) or value < low:
                raise InvalidInputError(f"{name} is a whole number from {low}, got {value!r}")
        self._model = model
        self._context = context
        self._limit = queue
        self._exact = exact
        # Exact replies are cut at fixed places, however long that takes.
        self.pacer = PrefillPacer(chunk=chunk, largest=context.n_batch, stall=0 if exact else stall)
        self.scheduler: Scheduler = BatchScheduler(hold=stall)
        if exact:
            from perdure.decode.exact_scheduler import ExactScheduler

            self.scheduler = ExactScheduler()
        rows = context.capabilities.max_outputs
        self._budget = Budget(
            tokens=context.n_batch, rows=rows, chunk=self.pacer.chunk, alone=self.pacer.alone
        )
        self.slots = slots or Slots(context)
        # Asked for at every token.
        self._piece = functools.cache(model.piece)
        self._hub = events or EventHub()
        self._step_events: StepEvents | None = None
        self._making_events = threading.Lock()
        drafter = (lambda: None) if exact else open_drafter
        self.executor = Executor(context, self.slots, self.pacer, self._hub, self._events, drafter)
        self._adapters = adapters or AdapterTable(model.adapter)
        self._changed = threading.Condition()
        self._waiting: deque[SequenceGroup] = deque()
        self._idle: deque[SequenceGroup] = deque()
        """Work that waits until there is no other."""
        self._active: list[SequenceGroup] = []
        self._calls: list[_Call] = []
        self._in_quiet: dict[Hashable, Callable[[], object]] = {}
        """Functions that are called once there are no requests, by their keys."""
        self._quiet_seconds = 0.0
        """How long the latest of these took."""
        self._last_end = -math.inf
        """When a request ended last."""
        self._stop_call: Callable[[], None] | None = None
        self._in_long_step = False
        self._peekers = 0
        """Threads that look at something during a long step."""
        self._turn = 0
        self._cancelled = False
        """Whether a cancelled request may not have ended yet."""
        self._next_deadline = math.inf
        self._closing = False
        self._failed = False
        self._thread = BackgroundThread(self._run, name="perdure-engine")
        self._thread.start()

    @functools.cached_property
    def _grammars(self) -> Grammars:
        """Made for the first reply that is held to one."""
        from perdure.decode.sampling.grammar import Grammars

        return Grammars(self._model)

    def _events(self) -> StepEvents:
        """Made when something is first reported to a subscriber."""
        with self._making_events:
            if self._step_events is None:
                from perdure.decode.step_events import StepEvents

                self._step_events = StepEvents(self._hub, self._context, self._piece)
            return self._step_events

    def _find_breakers(self, texts: tuple[str, ...]) -> Breakers:
        """The breakers of DRY, which few requests ask for."""
        return self._breakers.find(texts)

    @functools.cached_property
    def _breakers(self) -> BreakerTable:
        from perdure.decode.sampling.repetition import BreakerTable

        return BreakerTable(self._model)

    # For callers, from any thread.

    def submit(self, request: Request) -> OutputQueue:
        """Queue a request. Whatever is wrong with it is raised here, before any work."""
        self.check_thread()
        group = make_group(
            request,
            model=self._model,
            piece=self._piece,
            context=self._context,
            grammars=lambda: self._grammars,
            breakers=self._find_breakers,
            adapters=self._adapters,
            deadline=request.ends_at(time.monotonic()),
            canceller=self,
        )
        with self._changed:
            if self._closing:
                raise ClosedError("this runtime is closed")
            if request.namespace and type(self.scheduler.order) is QueueOrder:
                self.scheduler.order = (optional_part("order of namespaces") or QueueOrder)()
            group.event_id = request.event_id or next(self._hub.ids)
            watched = request.observe is not None or self._hub.on
            if group.deadline is not None:
                self._next_deadline = min(self._next_deadline, group.deadline)
            self._cancelled |= group.cancelled
            if request.idle:
                if watched:
                    self._events().queued(group, request)
                self._idle.append(group)
                self._changed.notify_all()
                return group
            # Requests that came a moment ago and will find a free slot do not count as waiting.
            free = self.slots.count - sum(each.slots for each in self._active if each.rank < Rank.IDLE)
            waiting = len(self._waiting) - free
            if waiting >= self._limit:
                raise BusyError(
                    f"{waiting} requests are waiting, {self._limit} may; try again later",
                    waiting=waiting,
                    limit=self._limit,
                )
            if watched:
                self._events().queued(group, request)
            self._waiting.append(group)
            self._changed.notify_all()
            has_room = free > 0 or any(each.rank > group.rank for each in self._active)
        if has_room:
            self.executor.interrupt()
        return group

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the engine thread, between two steps, and return what it returns."""
        self.check_thread()
        return self.post(function).result()

    def post(self, function: Callable[[], T], *, stop: Callable[[], None] | None = None) -> Future[T]:
        """The same without waiting. `stop` is called if the runtime is closed while `function` runs."""
        answer: Future[T] = Future()
        with self._changed:
            if self._closing:
                raise ClosedError("this runtime is closed")
            self._calls.append(_Call(function, answer, stop))
            self._changed.notify_all()
        return answer

    def post_in_quiet(self, key: Hashable, function: Callable[[], object]) -> None:
        """Run `function` in the engine thread once the loop has had no request for as long as the latest such
        function took, a second at most. A request that comes while it runs waits for it. The next function
        with the same key replaces it. Functions that are left when the loop is closed are not called."""
        with self._changed:
            self._in_quiet.pop(key, None)
            self._in_quiet[key] = function
            self._changed.notify_all()

    def peek(self, function: Callable[[], T]) -> T:
        """Like `call`, for a function that only reads: it does not wait for a step of a prompt. During such a
        step `function` is called in the caller's thread, and the step's end waits for it: it may make no call
        of the context that takes its lock, which the step holds."""
        self.check_thread()
        while True:
            call = _Call(function, Future(), None, is_peek=True)
            with self._changed:
                if self._closing:
                    raise ClosedError("this runtime is closed")
                if self._in_long_step:
                    self._peekers += 1
                    break
                self._calls.append(call)
                self._changed.notify_all()
            try:
                return call.answer.result()  # type: ignore[no-any-return]
            except _LongStep:
                continue
        try:
            return function()
        finally:
            with self._changed:
                self._peekers -= 1
                self._changed.notify_all()

    @property
    def load(self) -> tuple[int, int]:
        """Requests waiting, and being served."""
        with self._changed:
            return len(self._waiting), sum(group.rank < Rank.IDLE for group in self._active)

    @property
    def failed(self) -> bool:
        """Whether the engine thread ended before this was closed: nothing is answered any more."""
        return self._failed

    def close(self) -> None:
        """End every request as cancelled and stop the engine thread."""
        self.check_thread()
        with self._changed:
            self._closing = True
            self.executor.stop()
            if self._stop_call is not None:
                self._stop_call()
            self._changed.notify_all()
        self._thread.join()

    def check_thread(self) -> None:
        """Refuse a caller for whom the engine thread itself would have to wait."""
        if threading.current_thread() is self._thread:
            raise InvalidInputError("logits processors must not call the runtime that runs them (deadlock)")

    def cancel(self, output: SequenceGroup) -> None:
        """End a request that was submitted here. The garbage collector calls this, too, anywhere."""
        self.executor.cancel(output)
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    # The engine thread.

    def _run(self) -> None:
        try:
            while True:
                # Only this thread changes the active groups: between two steps, nothing is locked.
                if not self._active:
                    with self._changed:
                        while not (self._waiting or self._calls or self._closing or self._idle):
                            if (wait := self._until_quiet()) == 0:
                                break
                            self._changed.wait(wait)
                if self._closing:
                    break
                self._round()
        except BaseException as error:
            # A defect of our own: nobody may be left waiting for a thread that is gone.
            self._failed = True
            self._end_all(error)
            raise
        self._end_all(None)

    def _round(self) -> None:
        """One round of the loop. Nothing of a request is left in its frame while the loop sleeps."""
        if self._calls or self._waiting:
            # Either may take long: what was drawn does not wait for it.
            self.executor.notify()
        if self._calls:
            self._answer_calls()
        if self._cancelled or time.monotonic() >= self._next_deadline:
            self._end_overdue()
        if self._waiting:
            self._set_idle_aside()
            self._admit()
        elif not self._active and (self._idle or self._in_quiet):
            if self._idle:
                self._admit_idle()
            elif self._until_quiet() == 0:
                self._use_quiet()
        self._turn += 1
        pacer = self.pacer
        if self._budget.chunk != pacer.chunk or self._budget.alone != pacer.alone:
            self._budget = replace(self._budget, chunk=pacer.chunk, alone=pacer.alone)
        steps = self.scheduler.next_steps(self._active, self.slots, self._budget, turn=self._turn)
        for step in steps:
            tokens = sum(map(_COUNT, step))
            if tokens >= len(step) + TIMED or tokens * pacer.a_token >= _LONG:
                self._execute_long(step)
            else:
                self.executor.execute(step, self._active, self._budget)
        self.scheduler.order.served(steps, list(self._waiting), self._active)
        self._collect(self._active)
        if not self._active:
            self.executor.notify()

    def _execute_long(self, step: Step) -> None:
        """Execute a step of a prompt. Peeks are answered meanwhile."""
        with self._changed:
            self._in_long_step = True
            peeks = [call for call in self._calls if call.is_peek]
            self._calls = [call for call in self._calls if not call.is_peek]
        for call in peeks:
            call.answer.set_exception(_LongStep())
        try:
            self.executor.execute(step, self._active, self._budget)
        finally:
            with self._changed:
                self._in_long_step = False
                self._changed.wait_for(lambda: not self._peekers)

    def _answer_calls(self) -> None:
        with self._changed:
            calls, self._calls = self._calls, []
        for call in calls:
            with self._changed:
                self._stop_call = call.stop
            try:
                if self._closing and call.stop is not None:
                    raise ClosedError("this runtime is closed")
                result = call.function()
            except BaseException as error:
                call.answer.set_exception(error)
            else:
                call.answer.set_result(result)
            self._stop_call = None

    def _end_overdue(self) -> None:
        with self._changed:
            # Before the requests are checked: one that is cancelled from now on sets it again.
            self._cancelled = False
            groups = [*self._active, *self._waiting, *self._idle]
            deadlines = [group.deadline for group in groups if group.deadline is not None]
            self._next_deadline = min(deadlines, default=math.inf)
        now = time.monotonic()
        for group in groups:
            if group.overdue(now):
                group.end_cancelled()
        self._collect(groups)

    def _admit(self) -> None:
        while True:
            with self._changed:
                waiting = list(self._waiting)
            order = self.scheduler.order
            for group in admit(order.waiting(waiting, self._active), self.slots):
                with self._changed:
                    self._waiting.remove(group)
                    self._active.append(group)
                if self._hub.on:
                    self._events().placed(group)
            promote(self._waiting, self._active)
            # Exact replies stay: what is computed again would not be cut where it was.
            later = None if self._exact else order.to_give_way(list(self._waiting), self._active)
            if later is None:
                break
            self.executor.preempt(later)
            with self._changed:
                self._active.remove(later)
                self._waiting.appendleft(later)
        self._collect(self._active)

    def _set_idle_aside(self) -> None:
        """Idle work gives way before a request is admitted: what it has read is in its slot, and is used."""
        for group in [each for each in self._active if each.rank == Rank.IDLE]:
            self.executor.preempt(group)
            with self._changed:
                self._active.remove(group)
                self._idle.appendleft(group)

    def _admit_idle(self) -> None:
        """One at a time, the latest first: its conversation is the likeliest to go on."""
        with self._changed:
            group = self._idle.pop()
        for each in admit([group], self.slots):
            with self._changed:
                self._active.append(each)
            break
        else:
            # Nothing is computed at the moment, so nothing can be waited for: it is left.
            group.end_cancelled()
            with self._changed:
                self._active.append(group)
        self._collect(self._active)

    def _until_quiet(self) -> float | None:
        """Seconds until what waits for quiet is done, if nobody comes; None where nothing waits."""
        if not self._in_quiet:
            return None
        return max(0.0, self._last_end + self._quiet_seconds - time.monotonic())

    def _use_quiet(self) -> None:
        """One at a time: others may have come meanwhile."""
        with self._changed:
            function = self._in_quiet.pop(next(iter(self._in_quiet)))
        began = time.monotonic()
        try:
            function()
        except Exception:
            # No request waits for it, and none may fail with it.
            log.exception("a function that waited for an idle engine failed")
        self._quiet_seconds = min(time.monotonic() - began, _LONGEST_QUIET)

    def _collect(self, groups: Sequence[SequenceGroup]) -> None:
        """Hand the slots of finished sequences on, and finished requests back."""
        changed: list[SequenceGroup] = []
        for group in groups:
            # After every step, for everybody: a generator would take four times as long.
            for sequence in group.sequences:
                if sequence.finish_reason is not None:
                    changed.append(group)
                    break
        for group in changed:
            self.executor.collect(group)
            if group.done:
                with self._changed:
                    next(each for each in (self._active, self._waiting, self._idle) if group in each).remove(
                        group
                    )
                self._complete(group)

    def _complete(self, group: SequenceGroup) -> None:
        self._last_end = time.monotonic()
        if self._hub.on:
            self._events().ended(group)
        group.complete()

    def _end_all(self, error: BaseException | None) -> None:
        with self._changed:
            self._closing = True
            groups = [*self._waiting, *self._active, *self._idle]
            self._waiting.clear()
            self._idle.clear()
            self._active.clear()
            calls, self._calls = self._calls, []
        for call in calls:
            call.answer.set_exception(ClosedError("this runtime is closed"))
        cause = None if error is None else EngineError(f"the engine thread ended: {error!r}")
        for group in groups:
            group.end_cancelled() if cause is None else group.fail(cause)
            self._complete(group)
