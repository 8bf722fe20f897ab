"""Chats being carried on in messages, one kind a process: a session, a stateless client, and the peers.

`python -m bench.processes.talkers KIND`
(through `bench.child`). `turn` says something and tells how many
tokens the prompt had, how many of them were computed, how many the reply had, and how long it took outside
the engine's own steps.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TypedDict

from bench.child import serve

N_CTX = 8192


class Told(TypedDict):
    prompt: int
    computed: int
    reply: int
    outside: float


class _Ours:
    def open(self, path: str, threads: int) -> None:
        import perdure
        from perdure.engine.context import Context

        self._runtime = perdure.open(path, n_ctx=N_CTX, slots=1, threads=threads)
        self._inside = 0.0
        step = Context.step

        def timed(context: Any, feeds: Any) -> None:
            started = time.perf_counter()
            try:
                step(context, feeds)
            finally:
                self._inside += time.perf_counter() - started

        Context.step = timed  # type: ignore[method-assign,assignment]
        self._runtime.chat([{"role": "user", "content": "Hello"}], max_tokens=2, temperature=0)
        self.anew()

    def anew(self) -> None:
        raise NotImplementedError

    def _say(self, text: str, count: int) -> Any:
        raise NotImplementedError

    def turn(self, text: str, count: int) -> Told:
        self._inside = 0.0
        started = time.perf_counter()
        reply = self._say(text, count)
        took = time.perf_counter() - started
        return {
            "prompt": reply.usage.prompt_tokens,
            "computed": reply.usage.prompt_tokens - reply.usage.cached_tokens,
            "reply": reply.usage.completion_tokens,
            "outside": took - self._inside,
        }


class Session(_Ours):
    def anew(self) -> None:
        self._number = getattr(self, "_number", 0) + 1
        self._session = self._runtime.session(f"bench {self._number}")

    def _say(self, text: str, count: int) -> Any:
        return self._session.say(text, max_tokens=count, temperature=0)


class Stateless(_Ours):
    """A client that sends the whole history each time, as it was told it."""

    def anew(self) -> None:
        self._messages: list[dict[str, str]] = []

    def _say(self, text: str, count: int) -> Any:
        self._messages.append({"role": "user", "content": text})
        reply = self._runtime.chat(self._messages, max_tokens=count, temperature=0)
        self._messages.append({"role": "assistant", "content": reply.text})
        return reply


class LlamaCppPython:
    def open(self, path: str, threads: int) -> None:
        import llama_cpp

        self._llama = llama_cpp.Llama(
            path, n_ctx=N_CTX, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self._evaluated: list[int] = []
        evaluate = self._llama.eval

        def counted(tokens: Any) -> None:
            self._evaluated.append(len(tokens))
            evaluate(tokens)

        self._llama.eval = counted
        self.anew()

    def anew(self) -> None:
        self._messages: list[dict[str, str]] = []

    def turn(self, text: str, count: int) -> Told:
        self._messages.append({"role": "user", "content": text})
        self._evaluated = []
        answer = self._llama.create_chat_completion(self._messages, max_tokens=count, temperature=0)
        self._messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        usage = answer["usage"]
        # The first call reads what is new of the prompt; the others are of the reply, a token each.
        return {
            "prompt": usage["prompt_tokens"],
            "computed": self._evaluated[0],
            "reply": usage["completion_tokens"],
            "outside": 0.0,
        }


class LlamaServer:
    def open(self, path: str, threads: int) -> None:
        import httpx
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx, params.n_parallel = N_CTX, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self._server = xllamacpp.Server(params)
        self._client = httpx.Client(base_url=self._server.listening_address, timeout=600)
        self.anew()

    def anew(self) -> None:
        self._messages: list[dict[str, str]] = []

    def turn(self, text: str, count: int) -> Told:
        self._messages.append({"role": "user", "content": text})
        body = {"messages": self._messages, "max_tokens": count, "temperature": 0, "cache_prompt": True}
        answer = self._client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        said = answer.json()
        self._messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
        return {
            "prompt": said["usage"]["prompt_tokens"],
            "computed": said["timings"]["prompt_n"],
            "reply": said["usage"]["completion_tokens"],
            "outside": 0.0,
        }


KINDS: dict[str, Callable[[], Any]] = {
    "session": Session,
    "stateless": Stateless,
    "llama-cpp-python": LlamaCppPython,
    "llama-server": LlamaServer,
}

if __name__ == "__main__":
    side = KINDS[sys.argv[1]]()
    serve({"open": side.open, "anew": side.anew, "turn": side.turn})
