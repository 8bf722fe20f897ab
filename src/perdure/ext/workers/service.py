"""The requests and calls of one connection, served by a backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from perdure import Embeddings, EngineError, InvalidInputError, Reply, Subscription
from perdure.ext.workers.connection import Connection, pack
from perdure.ext.workers.protocol import (
    EVENTS,
    Answer,
    Call,
    Cancel,
    PlainDelta,
    Ready,
    RequestId,
    StepOutput,
    Submit,
    Tables,
    Watch,
)
from perdure.spi.engine import Tokenizer
from perdure.spi.runtime import Backend, BackgroundThread, EmbeddingFuture, OutputQueue

_SHORT = 16 << 10
"""Characters, or tokens, that are converted where messages are read: a thread would take longer to start."""
_LONG_TEXTS = 2
"""Threads for those that are longer."""
_BACKEND_CALLS = frozenset({"embed", "embedding_width", "load", "second_opening", "shares"})
"""What may be asked of the backend itself."""


class OutputSender:
    """Output listener that sends what comes of requests to the other side, from the engine thread.

    Listeners are notified once a step of all requests together: so a step is one message, however many
    requests are in it, and no thread is woken to send it.
    """

    def __init__(
        self, connection: Connection, done: Callable[[RequestId], object], events: Subscription
    ) -> None:
        self._connection = connection
        self._done = done
        self._events = events
        self._dropped = 0
        self._sending_events = threading.Lock()

    def watch(self, id_: RequestId, output: OutputQueue) -> None:
        """Send all that comes of a request, from its beginning."""
        while True:
            with output.lock:
                if not output.deltas and not output.finished:
                    output.subscribe(self, (id_, output))
                    return
                item = _new_output(id_, output)
            # Until it is subscribed, nobody else sends for it, so the order holds.
            self._send([item])
            if item[2] is not None:
                return

    def notify(self, waiters: Sequence[tuple[RequestId, OutputQueue]]) -> None:
        """Called in the engine thread, with the requests of a step that have something new."""
        items: StepOutput = []
        for id_, output in waiters:
            try:
                with output.lock:
                    items.append(_new_output(id_, output))
            except Exception as error:
                output.forget((id_, output))
                output.cancel()
                self._fail(id_, error)
        if self._events.waiting:
            self.send_events(items)
        else:
            self._send(items)

    def send_events(self, items: StepOutput | None = None) -> None:
        """Send the events that have come, in one message with what a step brought."""
        with self._sending_events:
            events, dropped = self._events.take(), self._events.dropped
            new, self._dropped = dropped - self._dropped, dropped
            message: list[Any] = [*(items or []), (EVENTS, events, new)]
            sent = False
            if events or new:
                # What cannot be sent is not worth a reply.
                with suppress(Exception):
                    self._connection.send_packed(pack(message))
                    sent = True
        if items and sent:
            self._finish(items)
        elif items:
            self._send(items)

    def _send(self, items: StepOutput) -> None:
        try:
            self._connection.send_packed(pack_step(items))
        except Exception as error:
            if len(items) == 1:
                self._fail(items[0][0], error)
            else:
                # One of them may be too large, or cannot travel: the others can.
                for item in items:
                    self._send([item])
            return
        self._finish(items)

    def _finish(self, items: StepOutput) -> None:
        for id_, _, replies in items:
            if replies is not None:
                self._done(id_)

    def _fail(self, id_: RequestId, error: Exception) -> None:
        """End a request by what kept its output from being sent. The engine thread calls this, too: nothing
        that happens here may end another request."""
        self._connection.send(Answer(id_, error=portable(error)))
        self._done(id_)


class RequestService:
    """Does what one connection asks of a backend. `failed` is called with every error before it is sent."""

    def __init__(
        self,
        connection: Connection,
        backend: Backend,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._connection = connection
        self._backend = backend
        self._failed = failed
        self._events = Subscription()
        self._events.shared = True
        self._output = OutputSender(connection, self._forget, self._events)
        self._stop_watching: Callable[[], None] | None = None
        self._requests: dict[RequestId, OutputQueue | EmbeddingFuture | None] = {}
        """What was asked here and has not ended; None while it is being queued."""
        self._cancelled: set[RequestId] = set()
        """Those of them whose end was asked for, some before they were queued."""
        self._read: dict[RequestId, int] = {}
        """Tokens of their prompts that the other side knows to be read."""
        self._long_texts = ThreadPoolExecutor(_LONG_TEXTS, thread_name_prefix="perdure-text")

    def ready(self) -> Ready:
        model = self._backend.model
        return Ready(
            n_ctx=self._backend.n_ctx,
            slots=self._backend.slots,
            exact=self._backend.exact,
            n_vocab=model.n_vocab,
            memory=model.memory,
            info=model.info,
            metadata=dict(model.metadata),
            digest=model.digest,
            path=None if model.path is None else str(model.path),
        )

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def _watch(self, enabled: bool) -> None:
        """Send the other side all events, or only those of the requests that it observes."""
        if enabled and self._stop_watching is None:
            self._stop_watching = self._backend.events.join(self._events)
        elif not enabled and self._stop_watching is not None:
            self._stop_watching()
            self._stop_watching = None

    def progress(self) -> dict[RequestId, int]:
        """How much of their prompts requests have read, of those that have read more since the last time."""
        if self._events.waiting:
            self._output.send_events()
        news = {}
        for id_, output in list(self._requests.items()):
            if output is None:
                continue
            read = output.read if isinstance(output, OutputQueue) else output.tokens_read
            if read > self._read.get(id_, 0):
                news[id_] = self._read[id_] = read
        return news

    def handle(self, message: Any) -> None:
        try:
            self._handle(message)
        except Exception as error:
            # Out of memory or threads just now: the caller gets the error, and the next message is read.
            self._forget(message.id)
            self._connection.send(Answer(message.id, error=portable(error)))

    def close(self) -> None:
        """Nobody waits for any of it any more."""
        self._watch(False)
        self._long_texts.shutdown(wait=False, cancel_futures=True)
        for id_ in list(self._requests):
            self._cancel(id_)

    def _handle(self, message: Any) -> None:
        match message:
            case Submit():
                # In the order they came; a grammar may take long to compile.
                self._requests[message.id] = None
                if message.request.grammar is None:
                    self._submit(message)
                else:
                    _in_a_thread(self._submit, message)
            case Cancel():
                self._cancel(message.id)
            case Watch():
                self._watch(message.wanted)
            case Call(target="backend", name="embed"):
                self._requests[message.id] = None
                # The first has to open a context for it.
                _in_a_thread(self._embed, message)
            case Call(target="model") if _is_short(message):
                self._answer(message)
            case Call(target="model"):
                # One after the other, and not here: everybody's messages are read here.
                self._long_texts.submit(self._answer, message)
            case Call():
                _in_a_thread(self._answer, message)

    def _submit(self, message: Submit) -> None:
        try:
            request = message.request
            if request.observe is not None:
                request = replace(request, observe=self._events)
            output = self._backend.submit(request)
        except BaseException as error:
            self._forget(message.id)
            self._send_error(message.id, error)
            return
        self._requests[message.id] = output
        self._connection.send(Answer(message.id))
        if message.id in self._cancelled:
            output.cancel()
        self._output.watch(message.id, output)

    def _cancel(self, id_: RequestId) -> None:
        if id_ in self._requests:
            self._cancelled.add(id_)
            if (output := self._requests.get(id_)) is not None:
                output.cancel()

    def _forget(self, id_: RequestId) -> None:
        self._requests.pop(id_, None)
        self._cancelled.discard(id_)
        self._read.pop(id_, None)

    def _embed(self, call: Call) -> None:
        try:
            vectors = self._backend.embed(*call.args)
        except BaseException as error:
            self._forget(call.id)
            self._send_error(call.id, error)
            return
        self._requests[call.id] = vectors
        vectors.add_done_callback(lambda vectors: self._embedded(call.id, vectors))
        if call.id in self._cancelled:
            vectors.cancel()

    def _embedded(self, id_: RequestId, vectors: Future[Embeddings]) -> None:
        self._forget(id_)
        if vectors.cancelled():
            return
        if (error := vectors.exception()) is not None:
            self._send_error(id_, error)
        else:
            self._connection.send(Answer(id_, value=vectors.result()))

    def _answer(self, call: Call) -> None:
        try:
            data = pack(Answer(call.id, value=self._result(call)))
        except BaseException as error:
            self._send_error(call.id, error)
        else:
            self._connection.send_packed(data)

    def _send_error(self, id_: RequestId, error: BaseException) -> None:
        self._failed(error)
        self._connection.send(Answer(id_, error=portable(error)))

    def _result(self, call: Call) -> Any:
        if call.target == "tables":
            return _tables(self._backend.model)
        if call.target == "backend" and call.name not in _BACKEND_CALLS:
            raise InvalidInputError(f"a backend is not asked for {call.name!r}")
        targets = {"model": self._backend.model, "cache": self._backend.cache, "backend": self._backend}
        attribute = getattr(targets[call.target], call.name)
        return attribute(*call.args, **call.keywords) if callable(attribute) else attribute


pack_step: Callable[[StepOutput], bytes] = pack
"""What a step brought, as it travels."""


def portable(error: BaseException) -> Exception:
    """The error itself where it can travel, else one that quotes it."""
    try:
        pack(error)
    except Exception:
        return EngineError(f"the engine's process raised {error!r}")
    return error if isinstance(error, Exception) else EngineError(f"the engine's process raised {error!r}")


def _new_output(
    id_: RequestId, output: OutputQueue
) -> tuple[RequestId, list[PlainDelta], list[Reply] | None]:
    """All that is new of a request, out of its output queue; called with its lock held."""
    deltas: list[PlainDelta] = []
    for delta in output.deltas:
        deltas.append((delta.text, delta.tokens, delta.logprobs, delta.index, delta.finish_reason))
    output.deltas.clear()
    replies = [_portable_reply(reply) for reply in output.replies] if output.finished else None
    return id_, deltas, replies


def _portable_reply(reply: Reply) -> Reply:
    return reply if reply.error is None else replace(reply, error=portable(reply.error))


def _tables(model: Tokenizer) -> Tables:
    pieces = [model.piece(token) for token in range(model.n_vocab)]
    return Tables(
        pieces=pieces,
        # Only what is nothing as text may be something when it is written out.
        special_pieces=[piece or model.piece(token, special=True) for token, piece in enumerate(pieces)],
        ends=model.ends,
        controls=model.controls,
    )


def _is_short(call: Call) -> bool:
    return all(len(value) <= _SHORT for value in call.args if isinstance(value, Sized))


def _in_a_thread(function: Callable[..., None], *args: object) -> None:
    BackgroundThread(function, *args, name="perdure-call").start()
