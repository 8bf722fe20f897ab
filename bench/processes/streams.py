"""Replies being written, one kind a process: ours, a bare batched loop with samplers, llama-cpp-python.

`python -m bench.processes.streams KIND`
(through `bench.child`). Every kind draws with the same settings, and
none may end a reply early, so that all of them do the same work.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypedDict

from bench.child import serve

BATCH = 512
CHUNK = 64
"""Prompt tokens a step while others wait, as in our scheduler."""
SEED = 7
TOP_K, TOP_P, MIN_P, TEMPERATURE = 40, 0.95, 0.05, 0.8

_WARM = 8
"""Steps before the clock starts."""

Prompts = Sequence[Sequence[int]]


class Written(TypedDict):
    """The tokens of the first reply, and when each token of each reply arrived."""

    tokens: list[int]
    times: list[list[float]]


class Writer(Protocol):
    """Writes replies to several prompts at once."""

    def open(self, path: str, streams: int, n_ctx: int, threads: int) -> None: ...
    def write(self, prompts: Prompts, count: int) -> Written: ...


class Ours:
    """One reply is read by a thread, several by one event loop, as a server would."""

    def open(self, path: str, streams: int, n_ctx: int, threads: int, exact: bool = False) -> None:
        import perdure

        # Without a cache, so that every prompt is read as in the other loops.
        self._runtime = perdure.open(path, n_ctx=n_ctx, slots=streams, threads=threads, exact=exact, cache=0)

    def write(
        self, prompts: Prompts, count: int, bias: dict[str, float] | None = None, schema: Any = None
    ) -> Written:
        request: dict[str, Any] = {
            "max_tokens": count,
            "ignore_eos": schema is None,
            "schema": schema,
            "logit_bias": {int(token): value for token, value in (bias or {}).items()},
            "seed": SEED,
            "top_k": TOP_K,
            "top_p": TOP_P,
            "min_p": MIN_P,
            "temperature": TEMPERATURE,
        }
        tokens: list[int] = []
        times: list[list[float]] = [[] for _ in prompts]
        if len(prompts) == 1:
            for delta in self._runtime.stream(prompts[0], **request):
                times[0] += [time.perf_counter()] * len(delta.tokens)
                tokens += delta.tokens
            return {"tokens": tokens, "times": times}

        async def read(index: int) -> None:
            async for delta in self._runtime.astream(prompts[index], **request):
                times[index] += [time.perf_counter()] * len(delta.tokens)
                if index == 0:
                    tokens.extend(delta.tokens)

        async def read_all() -> None:
            await asyncio.gather(*(read(index) for index in range(len(prompts))))

        asyncio.run(read_all())
        return {"tokens": tokens, "times": times}

    def interrupt(self, prompt: Sequence[int], long: Sequence[int]) -> list[float]:
        """The gaps between tokens of a running reply from when a long prompt comes until it is read."""
        request: dict[str, Any] = {"ignore_eos": True, "seed": SEED}
        gaps: list[float] = []
        running = self._runtime.submit(prompt, **request)
        deltas = iter(running)
        for _ in range(8):
            next(deltas)
        late = self._runtime.submit(long, max_tokens=1, **request)
        last = time.perf_counter()
        while not late.done:
            next(deltas)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        running.cancel()
        running.replies()
        return gaps


class Bare:
    """`llama_decode` over one batch of all streams and a sampler chain for each, with nothing around them."""

    def open(self, path: str, streams: int, n_ctx: int, threads: int) -> None:
        self._lib = lib = self._library()
        self._model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        self._vocab = lib.llama_model_get_vocab(self._model)
        self._n_vocab = lib.llama_vocab_n_tokens(self._vocab)
        self._ends = [token for token in range(self._n_vocab) if lib.llama_vocab_is_eog(self._vocab, token)]
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = n_ctx * streams, streams
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1
        params.kv_unified = False
        params.no_perf = True
        self._context = lib.llama_init_from_model(self._model, params)
        self._memory = lib.llama_get_memory(self._context)
        self._tokens = (ctypes.c_int32 * BATCH)()
        self._positions = (ctypes.c_int32 * BATCH)()
        self._outputs = (ctypes.c_int8 * BATCH)()
        self._counts = (ctypes.c_int32 * BATCH)(*[1] * BATCH)
        self._ids = (ctypes.c_int32 * BATCH)()
        pointer, size = ctypes.POINTER(ctypes.c_int32), ctypes.sizeof(ctypes.c_int32)
        start = ctypes.addressof(self._ids)
        self._seqs = (pointer * BATCH)(
            *(ctypes.cast(start + size * index, pointer) for index in range(BATCH))
        )
        from perdure.engine.llama.native.declarations import LlamaBatch

        fields: dict[str, Any] = dict(LlamaBatch._fields_)
        self._batch = LlamaBatch()
        for name, array in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._counts),
            ("seq_id", self._seqs),
            ("logits", self._outputs),
        ):
            setattr(self._batch, name, ctypes.cast(array, fields[name]))

    def _library(self) -> Any:
        from perdure.engine.llama.native import library

        return library.load()

    def _chain(self) -> Any:
        from bench.processes.library_sampler import LibrarySampler
        from perdure import Sampling

        settings: dict[str, Any] = {
            "top_k": TOP_K,
            "top_p": TOP_P,
            "min_p": MIN_P,
            "temperature": TEMPERATURE,
            "seed": SEED,
        }
        banned = dict.fromkeys(self._ends, float("-inf"))
        sampling = Sampling(logit_bias=banned, **settings)
        return LibrarySampler(sampling, n_vocab=self._n_vocab, n_ctx=1, handles=self._handles())

    def _handles(self) -> Sequence[ctypes.CDLL]:
        from perdure.engine.llama.native import library

        return library.loaded()._handles

    def _read(
        self, seq: int, at: int, tokens: Sequence[int], also: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        """Decode a piece of a prompt, and one token each for other sequences."""
        entries = [*also, *((seq, at + index, token) for index, token in enumerate(tokens))]
        for index, (owner, position, token) in enumerate(entries):
            self._ids[index], self._positions[index], self._tokens[index] = owner, position, token
            self._outputs[index] = index < len(also) or index == len(entries) - 1
        self._decode(len(entries))

    def _decode(self, count: int) -> None:
        self._batch.n_tokens = count
        if self._lib.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode failed")

    def write(self, prompts: Prompts, count: int) -> Written:
        lib, context, streams = self._lib, self._context, range(len(prompts))
        lib.llama_memory_clear(self._memory, True)
        chains = [self._chain() for _ in prompts]
        drawn, times = [], []
        for seq, prompt in enumerate(prompts):
            for at in range(0, len(prompt), BATCH):
                self._read(seq, at, prompt[at : at + BATCH])
            drawn.append(chains[seq].sample(context, -1))
        times.append(time.perf_counter())
        tokens = [drawn[0]]
        for seq in streams:
            self._ids[seq], self._outputs[seq], self._positions[seq] = seq, 1, len(prompts[seq])
        for _ in range(count - 1):
            for seq in streams:
                self._tokens[seq] = drawn[seq]
            self._decode(len(prompts))
            for seq in streams:
                self._positions[seq] += 1
                drawn[seq] = chains[seq].sample(context, seq)
            times.append(time.perf_counter())
            tokens.append(drawn[0])
        return {"tokens": tokens, "times": [times] * len(prompts)}

    def floor(self, streams: int, count: int) -> float:
        """Tokens a second of decoding alone: nothing is drawn, and the engine is only waited for."""
        lib = self._lib
        lib.llama_memory_clear(self._memory, True)
        for seq in range(streams):
            self._ids[seq], self._outputs[seq], self._tokens[seq] = seq, 1, 1000 + seq
        for step in range(count + _WARM):
            if step == _WARM:
                started = time.perf_counter()
            for seq in range(streams):
                self._positions[seq] = step
            self._decode(streams)
            lib.llama_synchronize(self._context)
        return streams * count / (time.perf_counter() - started)

    def read(self, prompt: Sequence[int]) -> float:
        """Seconds to read a prompt."""
        self._lib.llama_memory_clear(self._memory, True)
        started = time.perf_counter()
        for at in range(0, len(prompt), BATCH):
            self._read(0, at, prompt[at : at + BATCH])
        return time.perf_counter() - started

    def interrupt(self, prompt: Sequence[int], long: Sequence[int]) -> list[float]:
        """How long each chunk of a long prompt takes beside one token of a running reply."""
        self._lib.llama_memory_clear(self._memory, True)
        self._read(0, 0, prompt)
        chunks = []
        chain = self._chain()
        for number, at in enumerate(range(0, len(long), CHUNK)):
            started = time.perf_counter()
            self._read(1, at, long[at : at + CHUNK], also=[(0, len(prompt) + number, prompt[-1])])
            chain.sample(self._context, 0)
            chunks.append(time.perf_counter() - started)
        return chunks


class BareXllamacpp(Bare):
    """The same over the build that llama-server has."""

    def _library(self) -> Any:
        from bench.processes.foreign import Foreign

        return Foreign()

    def _handles(self) -> Sequence[ctypes.CDLL]:
        return [self._lib.handle]


class LlamaCppPython:
    """Its `Llama` as shipped, `threads` apart."""

    def open(self, path: str, streams: int, n_ctx: int, threads: int) -> None:
        import llama_cpp

        self._llama = llama_cpp.Llama(
            path, n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        vocab = llama_cpp.llama_model_get_vocab(self._llama.model)
        size = self._llama.n_vocab()
        self._ends = [token for token in range(size) if llama_cpp.llama_vocab_is_eog(vocab, token)]

    def write(self, prompts: Prompts, count: int) -> Written:
        chunks = self._llama.create_completion(
            list(prompts[0]),
            max_tokens=count,
            stream=True,
            seed=SEED,
            top_k=TOP_K,
            top_p=TOP_P,
            min_p=MIN_P,
            temperature=TEMPERATURE,
            logit_bias=dict.fromkeys(self._ends, float("-inf")),
        )
        return {"tokens": [], "times": [[time.perf_counter() for _ in chunks]]}


KINDS: dict[str, Callable[[], Any]] = {
    "ours": Ours,
    "bare": Bare,
    "bare-xllamacpp": BareXllamacpp,
    "llama-cpp-python": LlamaCppPython,
}


class Writers:
    """The writers that this process has open, by number."""

    def __init__(self, kind: str) -> None:
        self._kind = KINDS[kind]
        self._open: dict[int, Any] = {}
        self._numbers = itertools.count()

    def open(self, **arguments: Any) -> int:
        writer = self._kind()
        writer.open(**arguments)
        number = next(self._numbers)
        self._open[number] = writer
        return number

    def write(self, number: int, **arguments: Any) -> Written:
        written: Written = self._open[number].write(**arguments)
        return written

    def read(self, number: int, **arguments: Any) -> float:
        return float(self._open[number].read(**arguments))

    def floor(self, number: int, **arguments: Any) -> float:
        return float(self._open[number].floor(**arguments))

    def interrupt(self, number: int, **arguments: Any) -> list[float]:
        gaps: list[float] = self._open[number].interrupt(**arguments)
        return gaps


if __name__ == "__main__":
    writers = Writers(sys.argv[1])
    names = ("open", "write", "floor", "read", "interrupt")
    serve({name: getattr(writers, name) for name in names})
