"""The runtime: a model, a context and a scheduler, opened and closed as one."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.cache.book import Book
from perdure.cache.working_set import WorkingSet
from perdure.decode.grammar import Grammar
from perdure.decode.job import Job
from perdure.decode.request import Delta, Processor, Reply, Request
from perdure.decode.sampling import Sampling
from perdure.decode.scheduler import Scheduler
from perdure.engine.contract import Model as ModelContract
from perdure.engine.llama.model import Model
from perdure.errors import InvalidInputError
from perdure.store.disk import DiskTier
from perdure.store.records import Records
from perdure.store.writer import WriteBehind


class Runtime:
    """Many requests on one model. Safe from any thread and from asyncio; close it, or use `with`."""

    def __init__(
        self,
        model: ModelContract,
        *,
        n_ctx: int = 4096,
        slots: int = 4,
        exact: bool = False,
        queue: int = 256,
        cache: int | None = None,
        store: str | os.PathLike[str] | None = None,
        store_bytes: int = 16 << 30,
        own_model: bool = False,
        **context: Any,
    ) -> None:
        self.model = model
        self._own_model = own_model
        self._disk: WriteBehind | None = None
        budget = _bytes("cache", _default_budget() if cache is None else cache)
        if store is not None and not budget:
            raise InvalidInputError("a store needs a cache: leave cache out, or give it some bytes")
        _bytes("store_bytes", store_bytes)
        with ExitStack() as undo:
            self._context = model.context(n_ctx=n_ctx, n_seq=slots, **context)
            undo.callback(self._context.close)
            if store is not None:
                self._disk = WriteBehind(DiskTier(Path(store), budget=store_bytes))
                undo.callback(self._disk.close)
            self._places = places = WorkingSet(self._context, budget=budget, lower=self._disk)
            self._scheduler = Scheduler(
                model, self._context, exact=exact, queue=queue, placement=places if budget else None
            )
            undo.callback(self._scheduler.close)
            self.cache = Book(
                places,
                tokenize=model.tokenize,
                read=self._read_only,
                call=self._scheduler.call,
                keeper=Records(self._disk.disk, behind=self._disk) if self._disk else None,
            )
            undo.pop_all()

    @property
    def n_ctx(self) -> int:
        """What one request can hold."""
        return self._context.n_ctx

    @property
    def slots(self) -> int:
        """How many requests are served at once."""
        return self._context.n_seq

    @property
    def load(self) -> tuple[int, int]:
        """Requests waiting, and being served."""
        return self._scheduler.load

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
        return self._scheduler.submit(
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

    def _read_only(self, tokens: NDArray[np.int32], namespace: str) -> None:
        """Have a prompt computed, for its state alone. The token after it is drawn and dropped."""
        self.generate([*tokens.tolist(), int(tokens[-1])], max_tokens=1, temperature=0, namespace=namespace)

    def close(self) -> None:
        """End what is running as cancelled, and give everything back."""
        # First, for it may refuse: a processor cannot close the runtime that waits for it.
        self._scheduler.close()
        with ExitStack() as ending:
            if self._own_model:
                ending.callback(self.model.close)
            if self._disk is not None:
                ending.callback(self._disk.close)
            ending.callback(self._context.close)
            if self._disk is not None and not self._context.closed:
                self._places.store_all()

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


def _bytes(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidInputError(f"{name} is a number of bytes, 0 for none, got {value!r}")
    return value


def _default_budget() -> int:
    """An eighth of this machine's memory, 2 GiB at most."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(2 << 30, physical // 8)


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
            return Runtime(loaded, own_model=True, **settings)
        except BaseException:
            loaded.close()
            raise
    return Runtime(model, **settings)
