"""Conversations being carried on, one kind a process: ours, the floor, llama-cpp-python, llama-server.

`python -m bench.processes.conversations KIND`
(through `bench.child`). Every kind is given whole prompts as
tokens and is left to find out for itself what of them it has already read. None may end a reply early, so
that all of them do the same work.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypedDict

import numpy as np

from bench.child import serve
from bench.processes import loops

SLOTS = 4
N_CTX = 1024
"""Tokens that one conversation can hold."""
_WORTH_COPYING = 32


class Said(TypedDict):
    """The tokens of a reply, when the first of them came, and when the last, in seconds."""

    tokens: list[int]
    first: float
    last: float


class Side(Protocol):
    def open(self, path: str, threads: int) -> None: ...
    def reply(self, conversation: int, prompt: Sequence[int], count: int) -> Said: ...


class Ours:
    def open(self, path: str, threads: int, cache: int | None = None) -> None:
        import perdure

        self._runtime = perdure.open(path, n_ctx=N_CTX, slots=SLOTS, threads=threads, cache=cache)

    def reply(self, conversation: int, prompt: Sequence[int], count: int) -> Said:
        started = time.perf_counter()
        deltas = self._runtime.stream(prompt, max_tokens=count, temperature=0, ignore_eos=True)
        return _timed(started, (delta.tokens for delta in deltas))


class Floor:
    """The bare library, a context for each conversation: what is there never has to be moved or found."""

    def open(self, path: str, threads: int) -> None:
        self._settings = path, N_CTX, threads
        self._loops: dict[int, _Remembering] = {}

    def reply(self, conversation: int, prompt: Sequence[int], count: int) -> Said:
        loop = self._loops.get(conversation)
        if loop is None:
            loop = self._loops[conversation] = _Remembering()
            loop.open(*self._settings)
        closest = max(self._loops.values(), key=lambda other: other.shared(prompt))
        if closest.shared(prompt) - loop.shared(prompt) >= _WORTH_COPYING:
            # A shared beginning is no part of what is measured; this only gets there sooner.
            loop.become(closest, closest.shared(prompt))
        started = time.perf_counter()
        return _timed(started, ([token] for token in loop.write(prompt, count)))


class _Remembering(loops.Bare):
    """A bare loop that knows its tokens, so that it feeds only those that are new."""

    def open(self, path: str, n_ctx: int, threads: int | None) -> None:
        super().open(path, n_ctx, threads)
        self._held: list[int] = []
        vocab = self._lib.llama_model_get_vocab(self._model)
        self._ends = _ends(self._lib, vocab, self._n_vocab)

    def shared(self, prompt: Sequence[int]) -> int:
        """How many tokens of `prompt` are there, less the last: its row is wanted."""
        count = min(len(self._held), len(prompt) - 1)
        different = np.flatnonzero(np.array(self._held[:count]) != np.array(prompt[:count]))
        return int(different[0]) if len(different) else count

    def feed(self, tokens: Sequence[int]) -> None:
        for at in range(0, len(tokens), loops.BATCH):
            super().feed(tokens[at : at + loops.BATCH])
        self._held += tokens

    def rewind(self, length: int) -> None:
        super().rewind(length)
        del self._held[length:]

    def best(self) -> int:
        row = np.ctypeslib.as_array(self._lib.llama_get_logits_ith(self._context, -1), shape=(self._n_vocab,))
        row[self._ends] = -np.inf
        return int(row.argmax())

    def write(self, prompt: Sequence[int], count: int) -> Iterator[int]:
        kept = self.shared(prompt)
        if kept < len(self._held):
            self.rewind(kept)
        self.feed(prompt[kept:])
        for _ in range(count - 1):
            token = self.best()
            yield token
            self.feed([token])
        yield self.best()

    def become(self, other: _Remembering, length: int) -> None:
        """Hold the first `length` tokens of `other`, and nothing else."""
        lib = self._lib
        self.rewind(0)
        size = lib.llama_state_seq_get_size_ext(other._context, 0, 0)
        state = (ctypes.c_uint8 * size)()
        lib.llama_state_seq_get_data_ext(other._context, state, size, 0, 0)
        lib.llama_state_seq_set_data_ext(self._context, state, size, 0, 0)
        self._held = list(other._held)
        self.rewind(length)


class LlamaCppPython:
    """Its `Llama` as shipped, `threads` apart."""

    def open(self, path: str, threads: int, ram_cache: bool = False) -> None:
        import llama_cpp

        self._llama = llama_cpp.Llama(
            path, n_ctx=N_CTX, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        if ram_cache:
            self._llama.set_cache(llama_cpp.LlamaRAMCache())
        vocab = llama_cpp.llama_model_get_vocab(self._llama.model)
        ends = _ends(llama_cpp, vocab, self._llama.n_vocab())
        self._never = dict.fromkeys(ends, float("-inf"))
        self._tokens: list[int] = []
        self._generate = self._llama.generate
        self._llama.generate = self._noting

    def _noting(self, *args: Any, **kwargs: Any) -> Iterator[int]:
        """Its own loop, overheard: a completion gives only text, and the next prompt must match by token."""
        for token in self._generate(*args, **kwargs):
            self._tokens.append(int(token))
            yield token

    def reply(self, conversation: int, prompt: Sequence[int], count: int) -> Said:
        self._tokens = []
        started = time.perf_counter()
        chunks = self._llama.create_completion(
            list(prompt), max_tokens=count, temperature=0, stream=True, logit_bias=self._never
        )
        said = _timed(started, ([0] for _ in chunks))
        return {**said, "tokens": self._tokens[:count]}


class LlamaServer:
    """llama-server out of `xllamacpp`, with as many slots as ours, over HTTP."""

    def open(self, path: str, threads: int) -> None:
        import httpx
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx, params.n_parallel = N_CTX * SLOTS, SLOTS
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self._server = xllamacpp.Server(params)
        # It closes a connection that was idle for a while, as all are while the other sides have their turn.
        once = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=self._server.listening_address, timeout=600, limits=once)

    def reply(self, conversation: int, prompt: Sequence[int], count: int) -> Said:
        body = {
            "prompt": list(prompt),
            "n_predict": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_tokens": True,
        }
        started = time.perf_counter()
        with self._client.stream("POST", "/completion", json=body) as answer:
            answer.raise_for_status()
            lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: {"))
            return _timed(started, (json.loads(line)["tokens"] for line in lines))


KINDS: dict[str, Callable[[], Any]] = {
    "ours": Ours,
    "floor": Floor,
    "llama-cpp-python": LlamaCppPython,
    "llama-server": LlamaServer,
}


def _timed(started: float, pieces: Iterator[Sequence[int]]) -> Said:
    tokens: list[int] = []
    first = None
    for piece in pieces:
        if piece and first is None:
            first = time.perf_counter() - started
        tokens += piece
    if first is None:
        raise RuntimeError("there was no reply")
    return {"tokens": tokens, "first": first, "last": time.perf_counter() - started}


def _ends(lib: Any, vocab: Any, size: int) -> list[int]:
    return [token for token in range(size) if lib.llama_vocab_is_eog(vocab, token)]


if __name__ == "__main__":
    side: Side = KINDS[sys.argv[1]]()
    serve({"open": side.open, "reply": side.reply})
