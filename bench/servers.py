"""Servers in processes of their own, one client for all of them, and what their builds can do bare.

`python -m bench.servers KIND` is one of the processes, spoken to through `bench.child`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import urlsplit

import h11
import httpx

from bench.child import Child, serve
from bench.engine import model_path

THREADS = 2
SLOTS = 4
N_CTX = 4096
"""Tokens that one conversation can hold."""
CHAT = "/v1/chat/completions"
_PROMPT = list(range(1000, 1032))
_COUNT = 25


@dataclass(frozen=True, slots=True)
class Heard:
    """A streamed reply: seconds to its first text and to its last, its pieces, and its text."""

    first: float
    last: float
    pieces: int
    text: str


class Server:
    """A server that is asked through OpenAI's chat route, and its build without it."""

    def __init__(self, held: ExitStack, kind: str) -> None:
        self.kind = kind
        self._complaints: IO[str] = held.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        self.bare = Bare(held, kind)
        self._url = urlsplit(_KINDS[kind](held, model_path(), self._complaints))

    def together(self, bodies: Sequence[Mapping[str, Any]]) -> list[Heard]:
        """Replies to all of them, asked for at once."""

        async def all_of_them() -> list[Heard]:
            return list(await asyncio.gather(*map(self._heard, bodies)))

        return asyncio.run(all_of_them())

    def beside(self, long: Mapping[str, Any], short: Callable[[int], Mapping[str, Any]]) -> list[float]:
        """Seconds to the first text of short prompts, one after the other, while a long one is read."""

        async def measured() -> list[float]:
            reading = asyncio.ensure_future(self._heard(long))
            firsts: list[float] = []
            while not reading.done():
                firsts.append((await self._heard(short(len(firsts)))).first)
            await reading
            return firsts

        return asyncio.run(measured())

    async def _heard(self, body: Mapping[str, Any]) -> Heard:
        """Ask, and note when what came. It is read afterwards: client and server share the cores."""
        content = json.dumps({**body, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {self._url.netloc}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        writer.write(head.encode() + content)
        came = []
        while data := await reader.read(1 << 16):
            came.append((time.perf_counter() - started, data))
        writer.close()
        return self._read(came)

    def _read(self, came: Sequence[tuple[float, bytes]]) -> Heard:
        stamps, texts, rest = [], [], b""
        connection = h11.Connection(h11.CLIENT)
        connection.send(h11.Request(method="POST", target=CHAT, headers=[("host", "here")]))
        status = 0
        for stamp, data in [*came, (0.0, b"")]:
            connection.receive_data(data)
            while not isinstance(event := connection.next_event(), type) and not isinstance(
                event, (h11.EndOfMessage, h11.ConnectionClosed)
            ):
                if isinstance(event, h11.Response):
                    status = event.status_code
                if not isinstance(event, h11.Data):
                    continue
                *lines, rest = (rest + bytes(event.data)).split(b"\n")
                for text in filter(None, map(self._said, lines)):
                    stamps.append(stamp)
                    texts.append(text)
        if status != 200 or not texts:
            raise RuntimeError(f"{self.kind} answered {status}: {rest.decode()}\n{self._complained()}")
        return Heard(stamps[0], stamps[-1], len(texts), "".join(texts))

    def _said(self, line: bytes) -> str:
        if not line.startswith(b"data: {"):
            return ""
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise RuntimeError(f"{self.kind}: {chunk['error']}\n{self._complained()}")
        return str(chunk["choices"][0]["delta"].get("content") or "") if chunk["choices"] else ""

    def _complained(self) -> str:
        """What the server wrote last about things that went wrong."""
        self._complaints.seek(0)
        lines = self._complaints.read().splitlines()
        return "\n".join(line for line in lines if '"level": "info"' not in line)[-4000:]


# The processes.


def _ours(held: ExitStack, path: str, complaints: IO[str]) -> str:
    """`perdure serve`, as people run it."""
    process = _started(
        held,
        complaints,
        *("perdure.cli", "serve", path, "--port", "0", "--no-store"),
        *("--ctx", str(N_CTX), "--slots", str(SLOTS), "--threads", str(THREADS)),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("address"):
            return line.split()[1]
    raise RuntimeError("perdure serve did not start")


def _llama_server(held: ExitStack, path: str, complaints: IO[str]) -> str:
    """llama-server out of `xllamacpp`."""
    return str(held.enter_context(Child("bench.servers", "llama-server")).ask("open", path=path))


def _llama_cpp_python(held: ExitStack, path: str, complaints: IO[str]) -> str:
    """Its own server, which serves one request at a time. As shipped it cuts a reply short when the next
    request comes; here it may finish."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = _started(
        held,
        complaints,
        *("llama_cpp.server", "--model", path, "--host", "127.0.0.1", "--port", str(port)),
        *("--n_ctx", str(N_CTX), "--n_threads", str(THREADS), "--n_threads_batch", str(THREADS)),
        *("--interrupt_requests", "false", "--verbose", "false"),
    )
    url = f"http://127.0.0.1:{port}"
    while process.poll() is None:
        try:
            httpx.get(f"{url}/v1/models", trust_env=False).raise_for_status()
            return url
        except httpx.HTTPError:
            threading.Event().wait(0.1)
    complaints.seek(0)
    raise RuntimeError(f"llama_cpp.server did not start:\n{complaints.read()[-4000:]}")


def _started(held: ExitStack, complaints: IO[str], *arguments: str) -> subprocess.Popen[str]:
    """`python -m` of these, until the end of the measurement."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env={name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))},
        stdout=subprocess.PIPE,
        stderr=complaints,
        text=True,
    )
    held.callback(process.communicate)
    held.callback(process.terminate)
    return process


_KINDS = {"ours": _ours, "llama-server": _llama_server, "llama-cpp-python": _llama_cpp_python}


class LlamaServer:
    """The process that llama-server lives in."""

    def open(self, path: str) -> str:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx, params.n_parallel = N_CTX * SLOTS, SLOTS
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
        self._server = xllamacpp.Server(params)
        return str(self._server.listening_address)


class Library:
    """The runtime without HTTP: in this process, or with the engine in another."""

    def open(self, path: str, isolated: bool) -> str:
        import perdure

        self._runtime = perdure.open(
            path, n_ctx=N_CTX, slots=SLOTS, threads=THREADS, isolated=isolated, cache=0
        )
        return ""

    def step(self, count: int) -> float:
        """Seconds for each token of a reply after its first."""
        stamps = []

        async def read() -> None:
            async for delta in self._runtime.astream(
                "Once upon a time", max_tokens=count, temperature=0, ignore_eos=True
            ):
                if delta.tokens:
                    stamps.append(time.perf_counter())

        asyncio.run(read())
        return (stamps[-1] - stamps[0]) / (len(stamps) - 1)


# Their builds.


class Bare:
    """What a server's own build of llama.cpp does with nothing around it. It is measured again each time:
    what else the machine does changes it."""

    def __init__(self, held: ExitStack, kind: str) -> None:
        self._child = held.enter_context(Child("bench.streams", _BARE.get(kind, "bare")))
        self._numbers: dict[int, int] = {}

    def writing(self, streams: int) -> float:
        """Tokens a second of so many replies in one batch."""
        prompts = [_PROMPT[:8]] * streams
        run = self._child.ask("write", number=self._number(streams), prompts=prompts, count=_COUNT)
        return float((_COUNT - 1) * streams / (run["times"][0][-1] - run["times"][0][0]))

    def reading(self) -> float:
        """Tokens a second of a prompt."""
        return float(len(_PROMPT) / self._child.ask("read", number=self._number(1), prompt=_PROMPT))

    def _number(self, streams: int) -> int:
        if streams not in self._numbers:
            opened = self._child.ask("open", path=model_path(), streams=streams, n_ctx=512, threads=THREADS)
            self._numbers[streams] = opened
            # The first run warms up.
            self.writing(streams)
        return self._numbers[streams]


_BARE = {"llama-server": "bare-xllamacpp"}


if __name__ == "__main__":
    if sys.argv[1] == "llama-server":
        serve({"open": LlamaServer().open})
    else:
        library = Library()
        serve({"open": library.open, "step": library.step})
