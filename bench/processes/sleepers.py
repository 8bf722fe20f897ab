"""Conversations that sleep on the disk, one kind a process: ours, llama-cpp-python, llama-server.

`python -m bench.processes.sleepers KIND`
(through `bench.child`). `sleep` reads a prompt and puts its state
onto the disk; `wake`, in another process that has loaded the model, times the first token that follows.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.child import serve

N_CTX = 2304
REPLY = 4


class Ours:
    def open(self, path: str, threads: int, folder: str | None, n_ctx: int = N_CTX) -> None:
        import perdure

        self._runtime = perdure.open(path, n_ctx=n_ctx, slots=2, threads=threads, store=folder)
        # Like one that is running, not like its first step.
        self._runtime.generate("Once", max_tokens=2, temperature=0)

    def sleep(self, text: str) -> int:
        session = self._runtime.session("sleeper")
        session.say(text, max_tokens=REPLY, temperature=0, ignore_eos=True)
        session.sleep()
        return len(session.tokens)

    def wake(self, text: str) -> float:
        """From the call of `wake` to the first token that goes on from it."""
        started = time.perf_counter()
        session = self._runtime.session("sleeper", create=False)
        session.wake()
        job = self._runtime.submit(session.tokens, max_tokens=REPLY, temperature=0)
        next(iter(job))
        took = time.perf_counter() - started
        job.cancel()
        return took

    def compute(self, text: str) -> float:
        """The same without anything kept."""
        started = time.perf_counter()
        deltas = self._runtime.chat_stream(
            [{"role": "user", "content": text}], max_tokens=REPLY, temperature=0, ignore_eos=True
        )
        next(deltas)
        return time.perf_counter() - started

    def many(self, prefix: str, count: int) -> dict[str, int]:
        """Sessions that begin alike, all put to sleep; how many tokens they have together."""
        first = self._runtime.session("0", system=prefix)
        sessions = [first, *(first.fork(str(number)) for number in range(1, count))]
        tokens = 0
        for number, session in enumerate(sessions):
            # As little as makes it another conversation: what counts is what is kept.
            session.say(str(number), max_tokens=1, temperature=0, ignore_eos=True)
            session.sleep()
            tokens += len(session.tokens)
        return {"tokens": tokens}

    def turn(self, number: int) -> float:
        """A turn that somebody waits for, in a session of its own."""
        session = self._runtime.session(f"turn {number}")
        started = time.perf_counter()
        session.say("What is the sea?", max_tokens=32, temperature=0, ignore_eos=True)
        return time.perf_counter() - started

    def close(self) -> None:
        self._runtime.close()


class LlamaCppPython:
    """Its `Llama` with `LlamaDiskCache`."""

    def open(self, path: str, threads: int, folder: str | None) -> None:
        import llama_cpp

        self._llama = llama_cpp.Llama(
            path, n_ctx=N_CTX, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self._llama.set_cache(llama_cpp.LlamaDiskCache(str(folder), capacity_bytes=8 << 30))

    def sleep(self, text: str) -> int:
        # The state is put into its cache when a completion ends.
        self._llama.create_completion(_chatml(text), max_tokens=REPLY, temperature=0)
        return int(self._llama.n_tokens)

    def wake(self, text: str) -> float:
        started = time.perf_counter()
        chunks = self._llama.create_completion(_chatml(text), max_tokens=REPLY, temperature=0, stream=True)
        next(chunks)
        return time.perf_counter() - started

    def close(self) -> None:
        pass


class LlamaServer:
    """llama-server out of `xllamacpp`, with its slot save and restore, over HTTP."""

    def open(self, path: str, threads: int, folder: str | None) -> None:
        import httpx
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx, params.n_parallel = N_CTX, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.slot_save_path = f"{folder}/"
        params.endpoint_slots = True
        self._server = xllamacpp.Server(params)
        # It closes a connection after a stream, or when it was idle for seconds: each request has its own.
        once = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=self._server.listening_address, timeout=600, limits=once)

    def _complete(self, text: str) -> float:
        body = {
            "prompt": _chatml(text),
            "n_predict": REPLY,
            "temperature": 0,
            "stream": True,
            "cache_prompt": True,
            "id_slot": 0,
        }
        first = 0.0
        started = time.perf_counter()
        with self._client.stream("POST", "/completion", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {") and not first and json.loads(line[6:])["content"]:
                    first = time.perf_counter() - started
        return first

    def sleep(self, text: str) -> int:
        self._complete(text)
        answer = self._client.post("/slots/0?action=save", json={"filename": "sleeper.bin"})
        answer.raise_for_status()
        return int(answer.json()["n_saved"])

    def wake(self, text: str) -> float:
        started = time.perf_counter()
        self._client.post("/slots/0?action=restore", json={"filename": "sleeper.bin"}).raise_for_status()
        restored = time.perf_counter() - started
        return restored + self._complete(text)

    def close(self) -> None:
        pass


def _chatml(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def forget_pages(folder: Path) -> None:
    """Have the system read the files of a folder from the disk again."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Folders:
    """Folders for one run, beside each other on the disk that stores are on."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._numbers = itertools.count()

    def __enter__(self) -> Folders:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._base, ignore_errors=True)

    def new(self) -> Path:
        folder = self._base / str(next(self._numbers))
        folder.mkdir(parents=True)
        return folder

    def copy(self, store: Path) -> Path:
        """As it is now: whoever wakes a session goes on from it, and keeps that too."""
        folder = self._base / str(next(self._numbers))
        shutil.copytree(store, folder)
        return folder


KINDS: dict[str, Callable[[], Any]] = {
    "ours": Ours,
    "llama-cpp-python": LlamaCppPython,
    "llama-server": LlamaServer,
}

if __name__ == "__main__":
    side = KINDS[sys.argv[1]]()
    calls = ("open", "sleep", "wake", "compute", "many", "turn", "close")
    serve({name: getattr(side, name) for name in calls if hasattr(side, name)})
