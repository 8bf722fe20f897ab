"""Texts that wait to be made vectors, a chunk at a time between the steps of replies."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from perdure import BusyError, ClosedError, Embeddings, InvalidInputError
from perdure.spi.engine import PLAIN, AdapterSet
from perdure.spi.runtime import EmbeddingFuture, Scales, Tokens

if TYPE_CHECKING:
    from perdure import Embedder
    from perdure.spi.engine import Floats, Reading


class EngineCall(Protocol):
    """Has something done in the engine thread, between two steps; `stop` ends it early, for good."""

    def __call__(self, function: Callable[[], None], *, stop: Callable[[], None]) -> Future[None]: ...


class _Task:
    """The texts of one request."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self.answer = EmbeddingFuture()
        self._waiting = deque(readings)
        self._counts = tuple(len(reading.tokens) for reading in readings)
        self._vectors: list[Floats] = []

    @property
    def reading(self) -> Reading:
        return self._waiting[0]

    def count(self) -> None:
        """Note how far the texts were read."""
        self.answer.tokens_read = sum(self._counts[: len(self._vectors)]) + self.reading.at

    def take(self, vector: Floats) -> None:
        self._vectors.append(vector)
        self._waiting.popleft()
        if not self._waiting:
            # The caller may have cancelled just now.
            with suppress(InvalidStateError):
                self.answer.set_result(Embeddings(np.stack(self._vectors), self._counts))

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self.answer.set_exception(error)


class EmbeddingQueue:
    """Makes vectors of texts, for any thread.

    Always holds: a text is read alone and from its beginning, so its vector does not depend on what else is
    served; the engine thread is never kept for more than a chunk, and replies have at least half of its time;
    requests take turns text by text.
    """

    def __init__(
        self,
        opened: Callable[[], Embedder],
        post: EngineCall,
        *,
        choose: Callable[[Scales | None, NDArray[np.int32]], AdapterSet | None],
        replying: Callable[[], bool],
        limit: int,
    ) -> None:
        """`choose` finds the adapters for a text, of requests that name some or none."""
        self._opened = opened
        self._choose = choose
        self._post = post
        self._replying = replying
        self._limit = limit
        self._rests_until = 0.0
        self._opening = threading.Lock()
        self._changing = threading.Lock()
        self._embedder: Embedder | None = None
        self._tasks: deque[_Task] = deque()
        self._stepping = False
        self._closed = False

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self._ready().width

    def submit(self, texts: Sequence[Tokens], adapters: Scales | None = None) -> EmbeddingFuture:
        """Queue texts; cancel the future to have no more of them read. What is wrong is raised here."""
        if not len(texts):
            raise InvalidInputError("there is nothing to embed; give at least one text")
        embedder = self._ready()
        readings = [embedder.begin(text, f"text {index}") for index, text in enumerate(texts)]
        for reading in readings:
            reading.adapters = self._choose(adapters, reading.tokens) or PLAIN
        task = _Task(readings)
        with self._changing:
            if self._closed:
                raise ClosedError("this runtime is closed")
            # The first is being served.
            waiting = len(self._tasks) - 1
            if waiting >= self._limit:
                raise BusyError(
                    f"{waiting} requests for embeddings are waiting, {self._limit} may; try again later",
                    waiting=waiting,
                    limit=self._limit,
                )
            self._tasks.append(task)
            idle, self._stepping = not self._stepping, True
        if idle:
            self._go_on(embedder)
        return task.answer

    def close(self) -> None:
        """To be called once the engine thread is gone."""
        with self._opening:
            self._end_all(ClosedError("this runtime is closed"), closed=True)
            if self._embedder is not None:
                self._embedder.close()

    def _ready(self) -> Embedder:
        """The embedder, opened by the thread that needs it first: the engine thread has others to serve."""
        with self._opening:
            if self._closed:
                raise ClosedError("this runtime is closed")
            if self._embedder is None:
                self._embedder = self._opened()
            return self._embedder

    def _go_on(self, embedder: Embedder) -> None:
        try:
            step = self._post(lambda: self._step(embedder), stop=embedder.stop)
        except ClosedError as error:
            self._end_all(error)
        else:
            step.add_done_callback(lambda step: self._stepped(embedder, step))

    # In the engine thread.

    def _step(self, embedder: Embedder) -> None:
        began = time.monotonic()
        # A chunk takes as long as dozens of a reply's tokens: they get as long again before the next one.
        if began < self._rests_until and self._replying():
            return
        with self._changing:
            task = next((task for task in self._tasks if not task.answer.done()), None)
        if task is None:
            return
        try:
            vector = embedder.step(task.reading)
        except Exception as error:
            task.fail(error)
            return
        task.count()
        self._rests_until = 2 * time.monotonic() - began
        if vector is not None:
            task.take(vector)
            with self._changing:
                self._tasks.rotate(-1)

    def _stepped(self, embedder: Embedder, step: Future[Any]) -> None:
        if (error := step.exception()) is not None:
            self._end_all(error)
            return
        with self._changing:
            self._tasks = deque(task for task in self._tasks if not task.answer.done())
            more = self._stepping = bool(self._tasks)
        if more:
            self._go_on(embedder)

    def _end_all(self, error: BaseException, *, closed: bool = False) -> None:
        with self._changing:
            self._closed = self._closed or closed
            self._stepping = False
            tasks, self._tasks = self._tasks, deque()
        for task in tasks:
            task.fail(error)
