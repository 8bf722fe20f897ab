"""The runtime: everything that can be asked of one model."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Any

from perdure.backend import Backend, LocalBackend
from perdure.cache.book import Book
from perdure.decode.grammar import Grammar
from perdure.decode.job import Job
from perdure.decode.request import Delta, Processor, Reply, Request
from perdure.decode.sampling import Sampling
from perdure.engine.contract import Model as ModelContract
from perdure.engine.contract import Vocabulary
from perdure.engine.llama.model import Model
from perdure.errors import InvalidInputError


class Runtime:
    """Many requests on one model. Safe from any thread and from asyncio; close it, or use `with`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @property
    def model(self) -> Vocabulary:
        return self.backend.model

    @property
    def cache(self) -> Book:
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

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        sampling: Sampling | None = None,
        grammar: Grammar | None = None,
        schema: Any = None,
        regex: str | None = None,
        n: int = 1,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        ignore_eos: bool = False,
        processors: Sequence[Processor] = (),
        namespace: str = "",
        timeout: float | None = None,
        **settings: Any,
    ) -> Job:
        """Queue a request and return at once. Further keywords are those of `Sampling`."""
        if sampling is not None and settings:
            raise InvalidInputError(f"give sampling or its fields, not both: {', '.join(settings)}")
        unknown = [name for name in settings if name not in Sampling.__dataclass_fields__]
        if unknown:
            raise InvalidInputError(f"unknown settings: {', '.join(unknown)}")
        given = [grammar] if grammar is not None else []
        given += [Grammar.json_schema(schema)] if schema is not None else []
        given += [Grammar.regex(regex)] if regex is not None else []
        if len(given) > 1:
            raise InvalidInputError("give one of grammar, schema and regex")
        tokens = self.model.tokenize(prompt) if isinstance(prompt, str) else prompt
        return self.backend.submit(
            Request(
                prompt=tokens,
                max_tokens=max_tokens,
                sampling=sampling or Sampling(**settings),
                stops=(stop,) if isinstance(stop, str) else tuple(stop or ()),
                grammar=given[0] if given else None,
                n=n,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                ignore_eos=ignore_eos,
                processors=tuple(processors),
                namespace=namespace,
                timeout=timeout,
            )
        )

    def generate(self, prompt: str | Sequence[int], **request: Any) -> Reply:
        """The reply to a prompt; the keywords are those of `submit`."""
        job = self.submit(prompt, **request)
        try:
            return job.reply()
        finally:
            job.cancel()

    def stream(self, prompt: str | Sequence[int], **request: Any) -> Iterator[Delta]:
        """The reply piece by piece. It is queued at once; leaving the loop early cancels the rest."""
        return _deltas(self.submit(prompt, **request))

    async def agenerate(self, prompt: str | Sequence[int], **request: Any) -> Reply:
        """Like `generate`, for asyncio."""
        job = self.submit(prompt, **request)
        try:
            return await job.areply()
        finally:
            job.cancel()

    def astream(self, prompt: str | Sequence[int], **request: Any) -> AsyncIterator[Delta]:
        """Like `stream`, for asyncio."""
        return _adeltas(self.submit(prompt, **request))

    def score(self, prompt: str | Sequence[int], *, top: int = 0) -> Reply:
        """The log probabilities of a prompt's own tokens, and its perplexity."""
        return self.generate(prompt, prompt_logprobs=top, max_tokens=1, temperature=0)

    def close(self) -> None:
        """End what is running as cancelled, and give everything back."""
        self.backend.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _deltas(job: Job) -> Iterator[Delta]:
    try:
        yield from job
    finally:
        job.cancel()


async def _adeltas(job: Job) -> AsyncIterator[Delta]:
    try:
        async for delta in job:
            yield delta
    finally:
        job.cancel()


def open(  # noqa: A001
    model: str | os.PathLike[str] | ModelContract | None = None,
    *,
    n_ctx: int = 4096,
    slots: int = 4,
    exact: bool = False,
    queue: int = 256,
    cache: int | None = None,
    store: str | os.PathLike[str] | None = None,
    **context: Any,
) -> Runtime:
    """A runtime on a model: a file, a name, a loaded model, or the default one.

    `n_ctx` is what one request can hold, `slots` how many are served at once; up to `queue` more wait.
    `cache` is how many bytes of state are kept between requests, 0 for none; `store` is a folder where that
    state outlives the process. With `exact`, a reply does not depend in the last bit on who else is served.
    Further keywords are those of `Model.context`.
    """
    settings: dict[str, Any] = {"n_ctx": n_ctx, "slots": slots, "exact": exact, "queue": queue}
    settings |= {"cache": cache, "store": store, **context}
    if model is None or isinstance(model, (str, os.PathLike)):
        loaded: ModelContract = Model(model)
        try:
            return Runtime(LocalBackend(loaded, own_model=True, **settings))
        except BaseException:
            loaded.close()
            raise
    return Runtime(LocalBackend(model, **settings))
