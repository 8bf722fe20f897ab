"""llama-server with guesses of its own: n-grams of the prompt and the reply (`--spec-type ngram-simple`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import httpx

from bench.child import Child, serve
from bench.processes.servers import built_llama_server, built_url

KIND = "ngram-simple"
_MATCH, _LONGEST = 3, 16
"""Tokens that must have come before, and those that are guessed: as ours. As shipped they are 12 and 48."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a reply of it was like."""

    speed: float
    guessed: int
    right: int


class SpeculatingServer:
    """Two servers of one model, one of which guesses."""

    name = f"llama-server ({KIND})"

    def __init__(self, path: str, *, threads: int, n_ctx: int) -> None:
        self._held = ExitStack()
        self._urls = {
            guessing: self._open(path, threads, n_ctx, guessing=guessing) for guessing in (True, False)
        }

    def _open(self, path: str, threads: int, n_ctx: int, *, guessing: bool) -> str:
        if built := built_llama_server():
            options = ["-t", str(threads)]
            if guessing:
                options += ["--spec-type", KIND, "--spec-ngram-simple-size-n", str(_MATCH)]
                options += ["--spec-ngram-simple-size-m", str(_LONGEST)]
            return built_url(self._held, built, path, 1, *options, n_ctx=n_ctx)
        child = self._held.enter_context(Child("bench.speculation.peer"))
        return str(child.ask("open", path=path, threads=threads, n_ctx=n_ctx, guessing=guessing))

    def speed(self, tokens: Sequence[int], count: int, *, guessing: bool) -> Served:
        """Of one greedy reply."""
        body = {"prompt": list(tokens), "n_predict": count, "temperature": 0, "ignore_eos": True, "seed": 1}
        answer = httpx.post(f"{self._urls[guessing]}/completion", json=body, timeout=600, trust_env=False)
        answer.raise_for_status()
        timings = answer.json()["timings"]
        right = timings.get("draft_n_accepted", 0)
        return Served(timings["predicted_per_second"], timings.get("draft_n", 0), right)

    def __enter__(self) -> SpeculatingServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()


class _Packaged:
    """The process that llama-server out of `xllamacpp` lives in."""

    def open(self, path: str, threads: int, n_ctx: int, guessing: bool) -> str:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx, params.n_parallel = n_ctx, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        if guessing:
            kinds = xllamacpp.common_speculative_type
            params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
            params.speculative.ngram_simple.size_n = _MATCH
            params.speculative.ngram_simple.size_m = _LONGEST
        self._server = xllamacpp.Server(params)
        return str(self._server.listening_address)


if __name__ == "__main__":
    serve({"open": _Packaged().open})
    sys.exit()
