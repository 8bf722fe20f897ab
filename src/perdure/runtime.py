"""The runtime: everything that can be asked of one model."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

import numpy as np

from perdure.backend import Backend
from perdure.chat.chat_format import ChatFormat
from perdure.chat.message import Message, parse_messages
from perdure.chat.options import ChatKeywords, ChatOptions, TurnKeywords
from perdure.chat.reply import ChatDelta, ChatReply
from perdure.chat.template.template import Template
from perdure.checks import check_whole
from perdure.closing import Closing
from perdure.decode.request import Delta, Reply, Request, RequestKeywords, check_prompt_size
from perdure.decode.stream import Stream, one_request, result_of, submitted
from perdure.engine.adapters import Scales, absolute_scales
from perdure.engine.contract import Tokenizer, Tokens
from perdure.errors import InvalidInputError, TokenError
from perdure.events import LIMIT
from perdure.extension import part
from perdure.options import unknown_options
from perdure.sessions.session import Session
from perdure.sessions.sessions import Sessions
from perdure.sessions.store.registry import store_folder

if TYPE_CHECKING:
    from perdure.cache.prefix_cache import PrefixCacheCalls
    from perdure.decode.choice import Choice, Normalisation, OptionScoring
    from perdure.decode.embedding import EmbeddingFuture, Embeddings, RankedText
    from perdure.events.event import Observer
    from perdure.events.subscription import Subscription
    from perdure.sessions.listener import Listener
    from perdure.sessions.memories import Memories
    from perdure.sessions.store.base import SessionStore
    from perdure.store.owner import StoreLock

D = TypeVar("D")
R = TypeVar("R")


class Runtime(Closing):
    """Many requests on one model. Safe from any thread and from asyncio; close it, or use `with`."""

    def __init__(
        self,
        backend: Backend,
        *,
        store: str | os.PathLike[str] | None = None,
        sessions: SessionStore | None = None,
        template: str | os.PathLike[str] | Template | None = None,
        lock: StoreLock | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`lock` is the right to run an engine for `store`, taken here unless it is given; `settings` are
        those that other processes on the store get. `sessions` is a session store instead of `store`, for
        several runtimes: the caller that opened it has that right, and closes it."""
        self.backend = backend
        self._template = template
        self._chat_format_lock = threading.Lock()
        self._chat_format: ChatFormat | None = None
        folder = store_folder(store) if store is not None else None
        with ExitStack() as undo:
            if folder is not None and lock is None and not backend.is_attached:
                from perdure.store.owner import StoreLock

                lock = StoreLock(folder)
                undo.callback(lock.release)
            self.sessions = Sessions(
                folder if sessions is None else sessions,
                backend=backend,
                chat_format=lambda: self.chat_format,
                keep_open=sessions is not None,
            )
            undo.callback(self.sessions.close)
            self._listener: Listener | None = None
            if lock is not None:
                from perdure.sessions.listener import Listener

                self._listener = Listener(lock.holder, backend, settings or {})
            undo.pop_all()
        self._store_lock = lock

    @property
    def model(self) -> Tokenizer:
        return self.backend.model

    @property
    def cache(self) -> PrefixCacheCalls:
        return self.backend.cache

    @property
    def n_ctx(self) -> int:
        """What one request can hold."""
        return self.backend.n_ctx

    @property
    def slots(self) -> int:
        """How many requests are served at once."""
        return self.backend.slots

    @property
    def load(self) -> tuple[int, int]:
        """Requests waiting, and being served."""
        return self.backend.load

    @property
    def chat_format(self) -> ChatFormat:
        """How messages become tokens here. An error where the model has no template and none was chosen."""
        with self._chat_format_lock:
            if self._chat_format is None:
                self._chat_format = ChatFormat.of(self.backend, self._template)
                self._chat_format.files = self.sessions.store
            return self._chat_format

    @property
    def memories(self) -> Memories:
        return self.sessions.memories

    def events(self, kinds: Iterable[str] | None = None, *, limit: int = LIMIT) -> Subscription:
        """What happens here from now on: iterate it, in a thread of yours, and close it.

        `kinds` are names of classes in `perdure.events.event`, such as `TokenDrawn`. Of more than `limit`
        events that wait to be read, the newest are dropped and counted (`dropped`).
        """
        return self.backend.events.subscribe(kinds, limit=limit)

    def observe(
        self, observer: Observer, kinds: Iterable[str] | None = None, *, limit: int = LIMIT
    ) -> Subscription:
        """Call `observer` with each event, in a separate thread, until the subscription is closed.

        It may be slow, or raise: no reply waits for it. `perdure.ext.inspection.sinks` has some.
        """
        return self.backend.events.call(observer, kinds, limit=limit)

    def submit(self, prompt: str | Sequence[int], **request: Unpack[RequestKeywords]) -> Stream[Delta, Reply]:
        """Queue a request and return at once.

        The keywords are in `RequestKeywords`: `max_tokens`, `stop`, `schema`, `regex` or `grammar`, `n`,
        `logprobs`, `prompt_logprobs`, `ignore_eos`, `processors`, `namespace`, `timeout`, and those of
        `Sampling`, or a `sampling` as a whole.
        """
        return self._stream(Request.of(self._prompt(prompt), **request), request.get("schema"))

    def generate(self, prompt: str | Sequence[int], **request: Unpack[RequestKeywords]) -> Reply:
        """The reply to a prompt; the keywords are those of `submit`."""
        with self.submit(prompt, **request) as stream:
            return stream.reply()

    def stream(self, prompt: str | Sequence[int], **request: Unpack[RequestKeywords]) -> Iterator[Delta]:
        """The reply piece by piece. It is queued at once; leaving the loop early cancels the rest."""
        return _deltas(self.submit(prompt, **request))

    async def agenerate(self, prompt: str | Sequence[int], **request: Unpack[RequestKeywords]) -> Reply:
        """Like `generate`, for asyncio."""
        with await submitted(lambda: self.submit(prompt, **request)) as stream:
            return await stream.areply()

    def astream(
        self, prompt: str | Sequence[int], **request: Unpack[RequestKeywords]
    ) -> AsyncIterator[Delta]:
        """Like `stream`, for asyncio; it is queued when the loop begins."""
        return _adeltas(lambda: self.submit(prompt, **request))

    def submit_chat(
        self, messages: Sequence[Message | Mapping[str, Any]], **settings: Unpack[ChatKeywords]
    ) -> Stream[ChatDelta, ChatReply]:
        """Queue a reply to messages and return at once.

        The keywords are those of `submit` and: `tools`, `tool_choice`, `parallel_tool_calls`, `reasoning`
        (show, hide or capture), `reasoning_budget`, `keep_reasoning`, `overflow` (error, drop_oldest or
        shift), `continue_final_message`, `date` and `variables` for the template.
        """
        return self.chat_format.submit(messages, **settings)

    def count_chat(
        self, messages: Sequence[Message | Mapping[str, Any]], **settings: Unpack[ChatKeywords]
    ) -> int:
        """The tokens of the prompt that messages make. What surely does not fit is an error, and not
        tokenised."""
        options, others = ChatOptions.split(settings)
        namespace: str = others.get("namespace", "")
        return len(
            self.chat_format.prompt(parse_messages(messages), options, namespace=namespace, must_fit=True)
        )

    def chat(
        self, messages: Sequence[Message | Mapping[str, Any]], **settings: Unpack[ChatKeywords]
    ) -> ChatReply:
        """The reply to messages; the keywords are those of `submit_chat`."""
        with self.submit_chat(messages, **settings) as stream:
            return stream.reply()

    def chat_stream(
        self, messages: Sequence[Message | Mapping[str, Any]], **settings: Unpack[ChatKeywords]
    ) -> Iterator[ChatDelta]:
        """The reply piece by piece. It is queued at once; leaving the loop early cancels the rest."""
        return _deltas(self.submit_chat(messages, **settings))

    async def achat(
        self, messages: Sequence[Message | Mapping[str, Any]], **settings: Unpack[ChatKeywords]
    ) -> ChatReply:
        """Like `chat`, for asyncio."""
        with await submitted(lambda: self.submit_chat(messages, **settings)) as stream:
            return await stream.areply()

    def achat_stream(
        self, messages: Sequence[Message | Mapping[str, Any]], **settings: Unpack[ChatKeywords]
    ) -> AsyncIterator[ChatDelta]:
        """Like `chat_stream`, for asyncio; it is queued when the loop begins."""
        return _adeltas(lambda: self.submit_chat(messages, **settings))

    def session(
        self,
        name: str,
        *,
        system: str | None = None,
        namespace: str = "",
        create: bool = True,
        **settings: Unpack[TurnKeywords],
    ) -> Session:
        """A conversation that lasts: the one of that name, or a new one.

        Further keywords are settings for each of its turns, as for `submit_chat`.
        """
        if unknown := unknown_options(settings, {"system", "create", *TurnKeywords.__annotations__}):
            raise unknown
        chosen = dict(settings)
        if (adapters := settings.get("adapters")) is not None:
            chosen["adapters"] = absolute_scales(adapters)
        return self.sessions.open(
            name, system=system, namespace=namespace, create=create, settings=chosen or None
        )

    async def asession(
        self,
        name: str,
        *,
        system: str | None = None,
        namespace: str = "",
        create: bool = True,
        **settings: Unpack[TurnKeywords],
    ) -> Session:
        """Like `session`, for asyncio: no event loop waits for the disk."""
        return await asyncio.to_thread(
            self.session, name, system=system, namespace=namespace, create=create, **settings
        )

    def score(self, prompt: str | Sequence[int], *, top: int = 0) -> Reply:
        """The log probabilities of a prompt's own tokens, and its perplexity."""
        return self.generate(prompt, prompt_logprobs=top, max_tokens=1, temperature=0)

    async def ascore(self, prompt: str | Sequence[int], *, top: int = 0) -> Reply:
        """Like `score`, for asyncio."""
        return await self.agenerate(prompt, prompt_logprobs=top, max_tokens=1, temperature=0)

    def choose(
        self,
        prompt: str | Sequence[int],
        options: Sequence[str | Sequence[int]],
        *,
        by: Normalisation = "total",
        namespace: str = "",
    ) -> list[Choice]:
        """The options for going on from a prompt, the likeliest first, each with its probability.

        An option is a text or token ids, and is tokenised by itself; give it the space that it begins with.
        `by="token"` compares log probabilities per token, so that long options are not at a disadvantage.
        The prompt is read once for each option.
        """
        with self._submit_options(prompt, options, by, namespace) as scoring:
            return scoring.ranked([stream.reply() for stream in scoring.streams])

    async def achoose(
        self,
        prompt: str | Sequence[int],
        options: Sequence[str | Sequence[int]],
        *,
        by: Normalisation = "total",
        namespace: str = "",
    ) -> list[Choice]:
        """Like `choose`, for asyncio."""
        with await submitted(lambda: self._submit_options(prompt, options, by, namespace)) as scoring:
            return scoring.ranked([await stream.areply() for stream in scoring.streams])

    def _submit_options(
        self,
        prompt: str | Sequence[int],
        options: Sequence[str | Sequence[int]],
        by: Normalisation,
        namespace: str,
    ) -> OptionScoring:
        from perdure.decode.choice import OptionScoring

        return OptionScoring(self.model, prompt, options, self._stream, by=by, namespace=namespace)

    def embed(
        self,
        texts: str | Tokens | Sequence[str] | Sequence[Tokens],
        *,
        prefix: str = "",
        dimensions: int | None = None,
        adapters: Scales | None = None,
    ) -> Embeddings:
        """The vectors of texts, or of one: each given as text or as token ids.

        The same text has the same vector to the last bit, with any other requests. `prefix` is put before
        each text, such as the `search_query: ` that some models were trained with. `dimensions` keeps the
        first so many numbers, at length 1 again: only for models that were trained for that. `adapters` are
        as for a reply: those of the runtime unless some are named.
        """
        from perdure.decode.embedding import cut

        self.check_dimensions(dimensions)
        answer = self.submit_embed(texts, prefix=prefix, adapters=adapters)
        try:
            return cut(result_of(answer), dimensions)
        finally:
            answer.cancel()

    async def aembed(
        self,
        texts: str | Tokens | Sequence[str] | Sequence[Tokens],
        *,
        prefix: str = "",
        dimensions: int | None = None,
        adapters: Scales | None = None,
    ) -> Embeddings:
        """Like `embed`, for asyncio."""

        from perdure.decode.embedding import cut

        def submit() -> EmbeddingFuture:
            self.check_dimensions(dimensions)
            return self.submit_embed(texts, prefix=prefix, adapters=adapters)

        return cut(await asyncio.wrap_future(await submitted(submit)), dimensions)

    def submit_embed(
        self,
        texts: str | Tokens | Sequence[str] | Sequence[Tokens],
        *,
        prefix: str = "",
        adapters: Scales | None = None,
    ) -> EmbeddingFuture:
        """Queue texts to be made vectors and return at once. Cancel what it gives to end that."""
        if self.model.info.pair is not None:
            raise InvalidInputError(
                "this model scores pairs of texts and has no vector for one: use rank (POST /v1/rerank)"
            )
        tokens = [self._tokens(text, at, prefix) for at, text in enumerate(_texts(texts))]
        return self.backend.embed(tokens, _absolute(adapters))

    def check_dimensions(self, dimensions: int | None) -> None:
        """Refuse vectors of more numbers than the model's have."""
        if dimensions is not None:
            check_whole("dimensions", dimensions, 1, self.embedding_width)

    def rank(
        self, query: str, documents: Sequence[str], *, adapters: Scales | None = None
    ) -> list[RankedText]:
        """Documents, the best answer to a query first.

        By the score of each pair where the model scores pairs (a reranker); else by the cosine of vectors.
        """
        from perdure.decode.embedding import ranked

        answer = self.submit_rank(query, documents, adapters=adapters)
        try:
            return ranked(result_of(answer), scored=self.model.info.pair is not None)
        finally:
            answer.cancel()

    async def arank(
        self, query: str, documents: Sequence[str], *, adapters: Scales | None = None
    ) -> list[RankedText]:
        """Like `rank`, for asyncio."""
        from perdure.decode.embedding import ranked

        future = await submitted(lambda: self.submit_rank(query, documents, adapters=adapters))
        vectors = await asyncio.wrap_future(future)
        return ranked(vectors, scored=self.model.info.pair is not None)

    def submit_rank(
        self, query: str, documents: Sequence[str], *, adapters: Scales | None = None
    ) -> EmbeddingFuture:
        """Queue documents to be compared with a query: scores of pairs, or vectors with the query's at the
        front. `rank` reads them."""
        if isinstance(documents, str) or not len(documents):
            raise InvalidInputError("rank takes a query and a list of documents")
        pair = self.model.info.pair
        if pair is None:
            return self.submit_embed([query, *documents], adapters=adapters)
        for at, text in enumerate([query, *documents]):
            if not isinstance(text, str) or not text:
                raise TokenError(f"text {at} is empty; a query and its documents are texts")
            check_prompt_size(text, self.model, self.n_ctx)
        pairs = [pair.tokens(self.model, query, document) for document in documents]
        return self.backend.embed(pairs, _absolute(adapters))

    @property
    def embedding_width(self) -> int:
        """Numbers of a vector that `embed` gives."""
        return self.backend.embedding_width()

    def _stream(self, request: Request, schema: Any = None) -> Stream[Delta, Reply]:
        return Stream(one_request(request, schema), self.backend.submit)

    def _tokens(self, text: str | Tokens, at: int, prefix: str = "") -> Tokens:
        if not isinstance(text, str):
            if prefix:
                raise InvalidInputError("a prefix goes before texts, not before tokens")
            return text
        if not text:
            # A mark that the model puts before every text is no text.
            raise TokenError(f"text {at} is empty; give at least one token")
        text = prefix + text
        check_prompt_size(text, self.model, self.n_ctx)
        return self.model.tokenize(text)

    def infill_prompt(
        self, before: str, after: str, *, files: Sequence[tuple[str, str]] = ()
    ) -> Sequence[int]:
        """The prompt that has the model fill in what stands between two texts, for `generate` and its like.

        `files` are shown to it first, each by name and text. An error where the model has no tokens for it.
        """
        check_prompt_size(before + after + "".join(text for _, text in files), self.model, self.n_ctx)
        prompt: Sequence[int] = part("rt.infill_prompt", "completions")(self.model, before, after, files)
        return prompt

    def _prompt(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        check_prompt_size(prompt, self.model, self.n_ctx)
        return self.model.tokenize(prompt)

    def close(self) -> None:
        """End what is running as cancelled, and give everything back. What other processes that use the
        store wait for is finished first, if it does not take long."""
        try:
            if self._listener is not None:
                self._listener.close()
        finally:
            self.backend.close()
            self.sessions.close()
            if self._chat_format is not None:
                self._chat_format.close()
            if self._store_lock is not None:
                self._store_lock.release()

    async def aclose(self) -> None:
        """Like `close`, for asyncio."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Runtime:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _absolute(adapters: Scales | None) -> dict[str, float] | None:
    return None if adapters is None else absolute_scales(adapters)


def _texts(inputs: str | Tokens | Sequence[str] | Sequence[Tokens]) -> Sequence[str | Tokens]:
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs, np.ndarray):
        return [inputs] if inputs.ndim == 1 and inputs.size else list(inputs)
    if not isinstance(inputs, Sequence):
        raise InvalidInputError(f"embed takes a text, tokens, or a list of either, got {inputs!r}")
    one = len(inputs) > 0 and all(isinstance(each, (int, np.integer)) for each in inputs)
    return [cast(Tokens, inputs)] if one else cast("Sequence[str | Tokens]", inputs)


def _deltas(stream: Stream[D, R]) -> Iterator[D]:
    with stream:
        yield from stream


async def _adeltas(submit: Callable[[], Stream[D, R]]) -> AsyncIterator[D]:
    with await submitted(submit) as stream:
        async for delta in stream:
            yield delta
