"""The requests and calls of one connection, served by a backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from perdure.backend import Backend
from perdure.decode.embedding import Embeddings
from perdure.decode.output_queue import Job, OutputQueue
from perdure.decode.request import Reply
from perdure.engine.contract import Tokenizer
from perdure.errors import EngineError, InvalidInputError
from perdure.worker.connection import Connection, pack
from perdure.worker.protocol import (
    Answer,
    Call,
    Cancel,
    PlainDelta,
    Ready,
    RequestId,
    StepOutput,
    Submit,
    Tables,
)

_SHORT = 16 << 10
"""Characters, or tokens, that are converted where messages are read: a thread would take longer to start."""
_LONG_TEXTS = 2
"""Threads for those that are longer."""
_BACKEND_CALLS = frozenset({"embed", "embedding_width", "load"})
"""What may be asked of the backend itself."""


class ServedRequest:
    """One request here. A cancel may come before it is queued."""

    def __init__(self, id_: RequestId) -> None:
        self.id = id_
        self.cancelled = False
        self.read = 0
        """Tokens of its prompt that the other side knows to be read."""
        self.job: Job | Future[Embeddings] | None = None

    @property
    def output(self) -> OutputQueue:
        assert isinstance(self.job, Job)
        return self.job.output

    def cancel(self) -> None:
        self.cancelled = True
        if self.job is not None:
            self.job.cancel()


class OutputSender:
    """Output listener that sends what comes of requests to the other side, from the engine thread.

    Listeners are told once a step of all requests together: so a step is one message, however many requests
    are in it, and no thread is woken to send it.
    """

    def __init__(self, connection: Connection, done: Callable[[RequestId], object]) -> None:
        self._connection = connection
        self._done = done

    def watch(self, request: ServedRequest) -> None:
        """Send all that comes of a request, from its beginning."""
        output = request.output
        while True:
            with output.lock:
                if not output.deltas and not output.finished:
                    output.subscribe(self, (request, output))
                    return
                item = _taken(request.id, output)
            # Until it is subscribed, nobody else sends for it, so the order holds.
            self._send([item])
            if item[2] is not None:
                return

    def notify(self, waiters: Sequence[tuple[ServedRequest, OutputQueue]]) -> None:
        """Called in the engine thread, with the requests of a step that have something new."""
        items: StepOutput = []
        for request, output in waiters:
            try:
                with output.lock:
                    items.append(_taken(request.id, output))
            except Exception as error:
                output.forget((request, output))
                request.cancel()
                self._fail(request.id, error)
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
        for id_, _, replies in items:
            if replies is not None:
                self._done(id_)

    def _fail(self, id_: RequestId, error: Exception) -> None:
        """End a request by what kept its output from being sent. The engine thread calls this, too: nothing
        that happens here may end another request."""
        self._connection.send(Answer(id_, error=portable(error)))
        self._done(id_)


class RequestService:
    """Does what one connection asks of a backend. `failed` is told of every error before it is sent."""

    def __init__(
        self,
        connection: Connection,
        backend: Backend,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._connection = connection
        self._backend = backend
        self._failed = failed
        self._output = OutputSender(connection, self._forget)
        self._requests: dict[RequestId, ServedRequest] = {}
        self._long_texts = ThreadPoolExecutor(_LONG_TEXTS, thread_name_prefix="perdure-text")

    def ready(self) -> Ready:
        model = self._backend.model
        path = getattr(model, "path", None)
        return Ready(
            n_ctx=self._backend.n_ctx,
            slots=self._backend.slots,
            n_vocab=model.n_vocab,
            memory=model.memory,
            info=model.info,
            metadata=dict(model.metadata),
            digest=model.digest,
            path=None if path is None else str(path),
        )

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def progress(self) -> dict[RequestId, int]:
        """How much of their prompts requests have read, of those that have read more since the last time."""
        found = {}
        for request in list(self._requests.values()):
            if isinstance(request.job, Job) and request.job.prompt_read > request.read:
                found[request.id] = request.read = request.job.prompt_read
        return found

    def handle(self, message: Any) -> None:
        try:
            self._handle(message)
        except Exception as error:
            # Out of memory or threads just now: that is told to whoever asked, and the next one is read.
            self._forget(message.id)
            self._connection.send(Answer(message.id, error=portable(error)))

    def close(self) -> None:
        """Nobody waits for any of it any more."""
        self._long_texts.shutdown(wait=False, cancel_futures=True)
        for request in list(self._requests.values()):
            request.cancel()

    def _handle(self, message: Any) -> None:
        match message:
            case Submit():
                # In the order they came; a grammar may take long to compile.
                request = self._requests[message.id] = ServedRequest(message.id)
                if message.request.grammar is None:
                    self._submit(request, message)
                else:
                    _in_a_thread(self._submit, request, message)
            case Cancel():
                self._cancel(message.id)
            case Call(target="backend", name="embed"):
                request = self._requests[message.id] = ServedRequest(message.id)
                # The first has to open a context for it.
                _in_a_thread(self._embed, request, message)
            case Call(target="model") if _is_short(message):
                self._answer(message)
            case Call(target="model"):
                # One after the other, and not here: everybody's messages are read here.
                self._long_texts.submit(self._answer, message)
            case Call():
                _in_a_thread(self._answer, message)

    def _submit(self, request: ServedRequest, message: Submit) -> None:
        try:
            request.job = self._backend.submit(message.request)
        except BaseException as error:
            self._failed(error)
            self._forget(request.id)
            self._connection.send(Answer(request.id, error=portable(error)))
            return
        self._connection.send(Answer(request.id))
        if request.cancelled:
            request.job.cancel()
        self._output.watch(request)

    def _cancel(self, id_: RequestId) -> None:
        request = self._requests.get(id_)
        if request is not None:
            request.cancel()

    def _forget(self, id_: RequestId) -> None:
        self._requests.pop(id_, None)

    def _embed(self, request: ServedRequest, call: Call) -> None:
        try:
            vectors = request.job = self._backend.embed(*call.args)
        except BaseException as error:
            self._forget(request.id)
            self._send_error(request.id, error)
            return
        vectors.add_done_callback(lambda vectors: self._embedded(request, vectors))
        if request.cancelled:
            vectors.cancel()

    def _embedded(self, request: ServedRequest, vectors: Future[Embeddings]) -> None:
        self._forget(request.id)
        if vectors.cancelled():
            return
        if (error := vectors.exception()) is not None:
            self._send_error(request.id, error)
        else:
            self._connection.send(Answer(request.id, value=vectors.result()))

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
        found = getattr(targets[call.target], call.name)
        return found(*call.args, **call.keywords) if callable(found) else found


pack_step: Callable[[StepOutput], bytes] = pack
"""What a step brought, as it travels."""


def portable(error: BaseException) -> Exception:
    """The error itself where it can travel, else one that quotes it."""
    try:
        pack(error)
    except Exception:
        return EngineError(f"the engine's process raised {error!r}")
    return error if isinstance(error, Exception) else EngineError(f"the engine's process raised {error!r}")


def _taken(id_: RequestId, output: OutputQueue) -> tuple[RequestId, list[PlainDelta], list[Reply] | None]:
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
    threading.Thread(target=function, args=args, daemon=True).start()
