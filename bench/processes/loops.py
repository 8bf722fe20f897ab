"""Decoding loops, one kind a process: ours, the engine's bare calls, llama-cpp-python; and a busy one.

`python -m bench.processes.loops KIND`, spoken to through `bench.child`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypedDict

import numpy as np
import psutil

from bench.child import serve

BATCH = 512


class Timing(TypedDict):
    """Seconds that a loop took, and the tokens it chose, by which two loops can be told to agree."""

    seconds: float
    tokens: list[int]


class Loop(Protocol):
    """One sequence: tokens in, the likeliest next token out."""

    def open(self, path: str, n_ctx: int, threads: int | None) -> None: ...
    def feed(self, tokens: Sequence[int]) -> None: ...
    def best(self) -> int: ...
    def rewind(self, length: int) -> None: ...


class Ours:
    def __init__(self) -> None:
        import perdure
        from perdure.engine.llama.native import library

        library.load()
        # Named here, for names are imported when they are first used: llama-cpp-python's all are by now.
        self._open = perdure.Model

    def open(self, path: str, n_ctx: int, threads: int | None) -> None:
        self._model = self._open(path)
        self._context = self._model.context(n_ctx=n_ctx, n_batch=BATCH, threads=threads)

    def feed(self, tokens: Sequence[int]) -> None:
        self._context.decode(tokens)

    def best(self) -> int:
        return self._context.logits().argmax()

    def rewind(self, length: int) -> None:
        self._context.truncate(length)


class Bare:
    """The same library, loaded the same way, in a context of the same settings, with nothing around it."""

    def __init__(self) -> None:
        from perdure import system
        from perdure.engine.llama.native import library

        self._lib = library.load()
        self._default_threads = system.usable_cores

    def open(self, path: str, n_ctx: int, threads: int | None) -> None:
        lib = self._lib
        self._model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = threads or self._default_threads()
        params.flash_attn_type = 1
        params.no_perf = True
        self._context = lib.llama_init_from_model(self._model, params)
        self._memory = lib.llama_get_memory(self._context)
        self._n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._length = 0
        self._tokens = (ctypes.c_int32 * BATCH)()
        self._positions = (ctypes.c_int32 * BATCH)()
        self._outputs = (ctypes.c_int8 * BATCH)()
        self._counts = (ctypes.c_int32 * BATCH)(*[1] * BATCH)
        self._seq = (ctypes.c_int32 * 1)(0)
        self._seqs = (ctypes.POINTER(ctypes.c_int32) * BATCH)(
            *[ctypes.cast(self._seq, ctypes.POINTER(ctypes.c_int32))] * BATCH
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

    def feed(self, tokens: Sequence[int]) -> None:
        count = len(tokens)
        self._tokens[:count] = list(tokens)
        self._positions[:count] = list(range(self._length, self._length + count))
        self._outputs[: count - 1] = [0] * (count - 1)
        self._outputs[count - 1] = 1
        self._batch.n_tokens = count
        if self._lib.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode failed")
        self._length += count

    def best(self) -> int:
        row = self._lib.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(row, shape=(self._n_vocab,)).argmax())

    def rewind(self, length: int) -> None:
        self._lib.llama_memory_seq_rm(self._memory, 0, length, -1)
        self._length = length


class LlamaCppPython:
    """Its `Llama` as shipped, `threads` apart; the choice of a token is as bare as can be."""

    def __init__(self) -> None:
        import llama_cpp

        self._llama_cpp = llama_cpp

    def open(self, path: str, n_ctx: int, threads: int | None) -> None:
        self._llama = self._llama_cpp.Llama(
            path, n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self._n_vocab = self._llama.n_vocab()

    def feed(self, tokens: Sequence[int]) -> None:
        self._llama.eval(tokens)

    def best(self) -> int:
        row = self._llama_cpp.llama_get_logits_ith(self._llama.ctx, -1)
        return int(np.ctypeslib.as_array(row, shape=(self._n_vocab,)).argmax())

    def rewind(self, length: int) -> None:
        # The next eval drops what lies beyond.
        self._llama.n_tokens = length


LOOPS: dict[str, Callable[[], Loop]] = {"ours": Ours, "bare": Bare, "llama-cpp-python": LlamaCppPython}


class Timer:
    """Times one loop, always from the same prompt."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def open(self, path: str, n_ctx: int, threads: int | None, prompt: Sequence[int]) -> None:
        self._loop.open(path, n_ctx, threads)
        self._prompt = prompt
        self._loop.feed(prompt)

    def prefill(self, tokens: Sequence[int]) -> Timing:
        """Decode `tokens` after nothing."""
        self._loop.rewind(0)
        started = time.perf_counter()
        self._loop.feed(tokens)
        best = self._loop.best()
        seconds = time.perf_counter() - started
        self._loop.rewind(0)
        self._loop.feed(self._prompt)
        return {"seconds": seconds, "tokens": [best]}

    def decode(self, count: int) -> Timing:
        """Choose `count` tokens after the prompt, one by one."""
        loop = self._loop
        loop.rewind(len(self._prompt))
        token, tokens = self._prompt[-1], []
        started = time.perf_counter()
        for _ in range(count):
            loop.feed([token])
            token = loop.best()
            tokens.append(token)
        return {"seconds": time.perf_counter() - started, "tokens": tokens}

    def behind(self, earlier: int, tokens: Sequence[int], times: int) -> list[float]:
        """Seconds to decode `tokens` behind so many others, which are in the cache; each time anew."""
        self._loop.rewind(0)
        for start in range(0, earlier, BATCH):
            self._loop.feed([100 + at for at in range(start, min(start + BATCH, earlier))])
        taken = []
        for _ in range(times):
            self._loop.rewind(earlier)
            started = time.perf_counter()
            self._loop.feed(tokens)
            self._loop.best()
            taken.append(time.perf_counter() - started)
        return taken


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(psutil.Process().memory_info().rss)


def burn() -> None:
    while True:
        pass


def start(kind: str) -> None:
    calls: dict[str, Callable[..., Any]] = {"resident": resident, "environment": lambda: dict(os.environ)}
    if kind == "burn":
        calls["burn"] = burn
    else:
        timer = Timer(LOOPS[kind]())
        calls |= {"open": timer.open, "prefill": timer.prefill, "decode": timer.decode}
        calls["behind"] = timer.behind
    serve(calls)


if __name__ == "__main__":
    start(sys.argv[1])
