"""A reply being made: the stream that its caller holds, over the output queue that the engine fills.

    request ──submit──▶ OutputQueue ◀──push── engine thread, or the reader of the worker's messages
                            │
          plan ──▶ Stream ◀─┘   iterate it, await it, ask it for the reply, cancel it

A plan is a generator that yields requests and receives their replies. Most yield one request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

from perdure.decode.output_queue import NAP, OutputQueue, until
from perdure.decode.request import Delta, Reply, Request, Usage

log = logging.getLogger("perdure.decode")
T = TypeVar("T")
D = TypeVar("D")
R = TypeVar("R")
Shown = TypeVar("Shown", covariant=True)

_MANY = 256
"""Deltas that are not read in one go while an event loop waits."""


class DeltaReader(Protocol[Shown]):
    """Makes what a stream's caller is shown out of the deltas of a request, in the caller's thread."""

    @property
    def spent(self) -> bool:
        """Whether the request is to end now, since its plan goes on in another one."""
        ...

    @property
    def may_interrupt(self) -> bool:
        """Whether `spent` may ever come true: each delta is then read as it comes."""
        ...

    @property
    def is_last(self) -> bool:
        """Whether no other request follows, as far as is known."""
        ...

    @property
    def waits(self) -> bool:
        """Whether its plan takes its time with the reply: no event loop waits for that."""
        ...

    def read(self, delta: Delta) -> Sequence[Shown]: ...


StreamPlan: TypeAlias = Generator[tuple[Request, DeltaReader[D] | None], list[Reply], list[R]]
"""Yields requests with their readers, receives their replies or is thrown their error, and returns what the
caller gets. A reader of None passes deltas unchanged."""


def one_request(request: Request, schema: Any = None) -> StreamPlan[Delta, Reply]:
    """The plan of a request by itself."""
    replies = yield request, None
    return replies if schema is None else [replace(reply, schema=schema) for reply in replies]


LOST_TASK = "its task was cancelled"


class Stream(Generic[D, R]):
    """A reply being made: iterate it for deltas, ask it for the reply, cancel or stop it.

    Dropping it cancels what is left of it. An error is raised where the reply is asked for, or at the end of
    the iteration. It is the same in process and across a worker, for a prompt, a chat and a session's turn:
    what differs is its plan. What a plan does with a reply is done once, in the thread that asks for the
    reply or reads the stream to its end; never in an event loop if it may wait.
    """

    def __init__(
        self, plan: StreamPlan[D, R], submit: Callable[[Request], OutputQueue], *, waits: bool = False
    ) -> None:
        self._plan = plan
        self._submit = submit
        self._waits = waits
        self._advancing = threading.Lock()
        self._changing = threading.Lock()
        self._result: list[R] | None = None
        self._error: BaseException | None = None
        self._prompt_before = 0
        self._written_before = 0
        """Tokens of the requests before the one at hand."""
        self._written_at_prompt = 0
        """Tokens that were written when the prompt at hand was asked for."""
        self.prompt_tokens = 0
        """Of the prompt that is answered, or of the summary that is written first."""
        self.first_prompt: Sequence[int] = ()
        """The tokens of its first request: with its settings and a seed, all that comes follows from them."""
        self.cancelled = False
        self.interrupted = ""
        """Why it was cancelled, where its caller did not ask for that."""
        self.stopped = False
        """Whether its reader had it end, and wants what there is."""
        self.output = OutputQueue()
        """What comes of the request at hand."""
        self._reader: DeltaReader[D] | None = None
        self._begin(*next(plan))

    @property
    def done(self) -> bool:
        """Whether nothing more is computed for it."""
        if self._result is not None or self._error is not None:
            return True
        return self.output.finished and (self._reader is None or self._reader.is_last)

    @property
    def prompt_read(self) -> int:
        """Tokens of the prompt whose state is there."""
        return self.output.read

    @property
    def written(self) -> int:
        """Tokens that have come so far, of all samples and requests."""
        return self._written_before + self.output.written

    @property
    def usage(self) -> Usage:
        """What was read and written for it so far, in all its requests."""
        # The progress of a prompt comes from time to time; once a token is written, the prompt was read.
        written = self.written
        answering = written > self._written_at_prompt
        read = self.prompt_tokens if answering else min(self.prompt_read, self.prompt_tokens)
        return Usage(prompt_tokens=self._prompt_before + read, completion_tokens=written)

    def cancel(self) -> None:
        """End it within one step; its reply says `cancelled`."""
        with self._changing:
            self.cancelled = True
            output = self.output
        output.cancel()

    def interrupt(self, why: str = "interrupted") -> None:
        """Cancel it though its caller did not ask for that: a turn of a session can be resumed then."""
        with self._changing:
            if self.interrupted or not self.cancelled:
                self.interrupted = self.output.interrupted = why
        self.cancel()

    def stop(self) -> None:
        """Cancel it because no more is wanted: its readers see an ordinary end."""
        self.stopped = True
        self.cancel()

    # For threads.

    def replies(self, timeout: float | None = None) -> list[R]:
        """All samples, once all are finished."""
        end = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                output, reader = self.output, self._reader
                if reader is not None and reader.may_interrupt:
                    for _ in self._read(output, reader, end):
                        pass
                elif not output.wait(finish=True, timeout=until(end)):
                    raise TimeoutError
                if not self._advance(output):
                    return self._replies()
        except TimeoutError:
            if timeout is None:
                raise
            raise TimeoutError(f"no reply within {timeout} seconds") from None

    def reply(self, timeout: float | None = None) -> R:
        """The only, or first, sample."""
        return self.replies(timeout)[0]

    def __iter__(self) -> Iterator[D]:
        while True:
            output, reader = self.output, self._reader
            if reader is None:
                yield from cast(Iterator[D], output.each())
            else:
                yield from self._read(output, reader, None)
            if not self._advance(output):
                return

    def _read(self, output: OutputQueue, reader: DeltaReader[D], end: float | None) -> Iterator[D]:
        for delta in () if reader.spent else output.each(end):
            yield from reader.read(delta)
            if reader.spent:
                break
        if reader.spent:
            output.cancel()
            output.wait(finish=True)

    # For asyncio.

    async def areplies(self) -> list[R]:
        """Like `replies`, for asyncio."""
        from perdure.decode.asyncio_reader import wait_end

        with self._cancelled_with_task():
            while True:
                output, reader = self.output, self._reader
                if reader is not None and reader.may_interrupt:
                    await self._aread(output, reader, lambda deltas: True)
                else:
                    await wait_end(output)
                if not await self._aadvance(output):
                    return self._replies()

    async def areply(self) -> R:
        """Like `reply`, for asyncio."""
        return (await self.areplies())[0]

    async def consume(self, push: Callable[[Sequence[D]], bool]) -> bool:
        """Have `push` called in the event loop with what is new, whenever there is something, until it gives
        False or all deltas were pushed: whether they were. No task is woken for a token."""
        with self._cancelled_with_task():
            while True:
                output, reader = self.output, self._reader
                if not await self._aread(output, reader, push):
                    return False
                if not await self._aadvance(output):
                    return True

    async def __aiter__(self) -> AsyncIterator[D]:
        from perdure.decode.asyncio_reader import AsyncioListener, resolve

        listener = AsyncioListener.of(loop := asyncio.get_running_loop())
        with self._cancelled_with_task():
            while True:
                output, reader = self.output, self._reader
                # At every token: nothing is called that need not be.
                waiter = None
                with output.lock:
                    delta = None
                    if output.deltas and (reader is None or not reader.spent):
                        delta = output.deltas.popleft()
                    elif not output.finished:
                        waiter = loop.create_future()
                        output.listen(
                            listener,
                            functools.partial(resolve, waiter),
                            finish=reader is not None and reader.spent,
                        )
                if delta is not None:
                    if reader is None:
                        yield cast(D, delta)
                        continue
                    for shown in reader.read(delta):
                        yield shown
                    if reader.spent:
                        output.cancel()
                elif waiter is not None:
                    # Another reader of the same stream may be faster.
                    await waiter
                elif not await self._aadvance(output):
                    return

    async def _aread(
        self, output: OutputQueue, reader: DeltaReader[D] | None, push: Callable[[Sequence[D]], bool]
    ) -> bool:
        """Push what comes of one request: whether all of it was pushed."""
        from perdure.decode.asyncio_reader import pushed, wait_end

        if reader is None:
            return await pushed(output, cast(Callable[[Sequence[Delta]], bool], push))
        goes_on = True

        def show(deltas: Sequence[Delta]) -> bool:
            nonlocal goes_on
            # At every token, which mostly comes alone: nothing is called that need not be.
            if len(deltas) == 1:
                shown = reader.read(deltas[0])
            else:
                shown = []
                for delta in deltas:
                    shown += reader.read(delta)
                    if reader.spent:
                        break
            goes_on = not shown or push(shown)
            return goes_on and not reader.spent

        if not reader.spent:
            await pushed(output, show)
        if goes_on and reader.spent:
            output.cancel()
            await wait_end(output)
        return goes_on

    @contextlib.contextmanager
    def _cancelled_with_task(self) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            self.interrupt(LOST_TASK)
            raise

    # From one request to the next, and to the end.

    def _begin(self, request: Request, reader: DeltaReader[D] | None) -> None:
        while True:
            try:
                output = self._submit(request)
                break
            except Exception as error:
                request, reader = self._plan.throw(error)
        self.first_prompt = self.first_prompt or request.prompt
        with self._changing:
            self._written_before += self.output.written
            if self._reader is None or reader is not self._reader:
                # A request with the same reader continues the prompt before it.
                self._prompt_before += self.prompt_tokens
                self.prompt_tokens = len(request.prompt)
                self._written_at_prompt = self._written_before
            self.output, self._reader = output, reader
            output.interrupted, cancelled = self.interrupted, self.cancelled
        if cancelled:
            # It came between the two requests and was meant for both.
            output.cancel()

    def _advance(self, output: OutputQueue) -> bool:
        """Have the plan go on behind a request that has ended: whether another one follows."""
        with self._advancing:
            if self._error is not None:
                raise self._error
            if self._result is not None:
                return False
            if self.output is not output:
                # Another reader was faster.
                return True
            self._read_rest(output)
            error = next((reply.error for reply in output.replies if reply.error is not None), None)
            plan = self._plan
            try:
                self._begin(*(plan.send(output.replies) if error is None else plan.throw(error)))
            except StopIteration as end:
                self._result = end.value
                return False
            except BaseException as error:
                self._error = error
                raise
            return True

    def _read_rest(self, output: OutputQueue) -> None:
        """Pass what is left to the reply reader: a caller that wants only the reply has read nothing."""
        reader = self._reader
        if reader is not None and not reader.spent:
            for delta in output.pop_all():
                reader.read(delta)

    async def _aadvance(self, output: OutputQueue) -> bool:
        waits = self._waits or (self._reader is not None and self._reader.waits)
        if waits or len(output.deltas) > _MANY:
            return await asyncio.to_thread(self._advance, output)
        return self._advance(output)

    def _replies(self) -> list[R]:
        assert self._result is not None
        return self._result

    def __enter__(self) -> Stream[D, R]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what is left of it."""
        if error is None:
            self.cancel()
        else:
            self.interrupt(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    def __del__(self) -> None:
        # Takes no lock: the garbage collector may call this anywhere.
        if (output := getattr(self, "output", None)) is not None and not output.finished:
            output.cancel()


class _Cancellable(Protocol):
    def cancel(self) -> object: ...


C = TypeVar("C", bound=_Cancellable)


async def submitted(submit: Callable[[], C]) -> C:
    """What `submit` queues, from a thread: there may be much to tokenise, or an engine to wait for.

    A task that is cancelled meanwhile has it cancelled once it is there.
    """
    queued = asyncio.get_running_loop().run_in_executor(None, submit)
    try:
        return await asyncio.shield(queued)
    except asyncio.CancelledError:
        queued.add_done_callback(_cancel_result)
        raise


def _cancel_result(queued: asyncio.Future[Any]) -> None:
    if queued.exception() is None:
        result = queued.result()
        # A turn of a session can be resumed, whenever its task was lost.
        result.interrupt(LOST_TASK) if isinstance(result, Stream) else result.cancel()


def result_of(answer: Future[T]) -> T:
    """What `answer` gives or raises, waited for in short naps so that no Ctrl-C is missed."""
    while not answer.done():
        try:
            answer.exception(NAP)
        except TimeoutError:
            continue
    return answer.result()
