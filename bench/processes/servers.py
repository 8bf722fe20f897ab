"""Servers in processes of their own, one client for all of them, and what their builds can do bare.

`python -m bench.processes.servers KIND` is one of the processes, spoken to through `bench.child`.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any, Self
from urllib.parse import SplitResult, urlsplit

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
"""About as long as a question in the chat template."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A streamed reply: seconds to its first text and to its last, and its text. It is as long as was asked
    for: servers differ in how they cut it into pieces."""

    first: float
    last: float
    end: float
    """Seconds to the end of its connection, from when the first of those asked together was."""
    text: str


class Server:
    """A server that is asked through OpenAI's chat route, and its build without it. Those of one build are
    given one `Bare`: where its memory happens to lie then favours nobody."""

    def __init__(self, held: ExitStack, kind: str, bare: Bare) -> None:
        self.kind = kind
        self._captured_errors: IO[str] = held.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        self.bare = bare
        self._url = urlsplit(_KINDS[kind](held, model_path(), self._captured_errors))

    def together(self, bodies: Sequence[Mapping[str, Any]]) -> list[Heard]:
        """Replies to all of them, asked for at once."""
        clients = ask_together(self._url, bodies)
        return [self._read(came, end) for came, end in zip(clients.came, clients.ends, strict=True)]

    def beside(self, long: Mapping[str, Any], short: Callable[[int], Mapping[str, Any]]) -> list[float]:
        """Seconds to the first text of short prompts, one after the other, while a long one is read."""
        with Clients(self._url) as clients:
            reading = clients.ask(long)
            while reading in clients.waiting:
                if clients.waiting == {reading}:
                    clients.ask(short(len(clients.came) - 1))
                clients.listen()
            while clients.waiting:
                clients.listen()
        return [
            self._read(came, end).first for came, end in zip(clients.came[1:], clients.ends[1:], strict=True)
        ]

    def _read(self, came: Sequence[tuple[float, bytes]], end: float) -> Heard:
        stamps, texts, rest, reason = [], [], b"", None
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
                for choice in filter(None, map(self._choice, lines)):
                    reason = choice["finish_reason"] or reason
                    if text := choice["delta"].get("content"):
                        stamps.append(stamp)
                        texts.append(text)
        if status != 200 or not texts:
            raise RuntimeError(f"{self.kind} answered {status}: {rest.decode()}\n{self._complained()}")
        if reason != "length":
            raise RuntimeError(f"{self.kind} ended by {reason} before it had written all it should")
        return Heard(stamps[0], stamps[-1], end, "".join(texts))

    def _choice(self, line: bytes) -> dict[str, Any] | None:
        if not line.startswith(b"data: {"):
            return None
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise RuntimeError(f"{self.kind}: {chunk['error']}\n{self._complained()}")
        return chunk["choices"][0] if chunk["choices"] else None

    def _complained(self) -> str:
        """What the server wrote last about things that went wrong."""
        self._captured_errors.seek(0)
        lines = self._captured_errors.read().splitlines()
        return "\n".join(line for line in lines if '"level": "info"' not in line)[-4000:]


class Clients:
    """Requests on connections of their own, and what came on each when. It is read afterwards, and little
    else is done meanwhile: clients and server share the cores."""

    def __init__(self, url: SplitResult) -> None:
        self._url = url
        self._readable = select.poll()
        self._connections: dict[int, tuple[int, socket.socket]] = {}
        self._started: list[float] = []
        self.came: list[list[tuple[float, bytes]]] = []
        self.ends: list[float] = []
        self.waiting: set[int] = set()

    def ask(self, body: Mapping[str, Any]) -> int:
        """Send a request; its number."""
        content = json.dumps({**body, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {self._url.netloc}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        number = len(self.came)
        self._started.append(time.perf_counter())
        connection = socket.create_connection((self._url.hostname, self._url.port))
        connection.sendall(head.encode() + content)
        self.came.append([])
        self.ends.append(0.0)
        self.waiting.add(number)
        self._connections[connection.fileno()] = number, connection
        self._readable.register(connection.fileno(), select.POLLIN)
        return number

    def listen(self) -> None:
        """Note what comes next."""
        for descriptor, _ in self._readable.poll():
            number, connection = self._connections[descriptor]
            data = connection.recv(1 << 16)
            now = time.perf_counter()
            if data:
                self.came[number].append((now - self._started[number], data))
            else:
                self.ends[number] = now - self._started[0]
                self._readable.unregister(descriptor)
                del self._connections[descriptor]
                connection.close()
                self.waiting.remove(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for _, connection in self._connections.values():
            connection.close()


def ask_together(url: SplitResult, bodies: Sequence[Mapping[str, Any]]) -> Clients:
    """Ask for all of these at once, and wait until all are answered."""
    with Clients(url) as clients:
        for body in bodies:
            clients.ask(body)
        while clients.waiting:
            clients.listen()
    return clients


# The processes.

_OPTIONS = ("--ctx", str(N_CTX), "--slots", str(SLOTS), "--threads", str(THREADS))


def _ours(held: ExitStack, path: str, captured_errors: IO[str]) -> str:
    """`perdure serve`, as people run it."""
    return launched(held, captured_errors, path, "--no-store", *_OPTIONS)


def launched(
    held: ExitStack,
    captured_errors: IO[str],
    path: str,
    *options: str,
) -> str:
    """Where `perdure serve` listens, with these options."""
    process = _started(held, captured_errors, "perdure.cli", "serve", path, "--port", "0", *options)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("address"):
            return line.split()[1]
    raise RuntimeError("perdure serve did not start")


def _llama_server(held: ExitStack, path: str, captured_errors: IO[str]) -> str:
    """The one that was compiled with the library in use, or else the one out of `xllamacpp`."""
    built = built_llama_server()
    return built_url(held, built, path, SLOTS, "-t", str(THREADS)) if built else llama_server_url(held, path)


def llama_server_url(held: ExitStack, path: str) -> str:
    """Where llama-server out of `xllamacpp` listens."""
    return str(held.enter_context(Child("bench.processes.servers", "llama-server")).ask("open", path=path))


def built_llama_server() -> str | None:
    """llama-server out of the folder that PERDURE_LLAMA names."""
    from perdure.config import settings

    folder = settings().llama
    return shutil.which("llama-server", path=folder) if folder else None


def built_url(held: ExitStack, program: str, path: str, slots: int, *options: str, n_ctx: int = N_CTX) -> str:
    """Where a llama-server that was compiled listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [program, "-m", path, "--port", str(port), "-c", str(n_ctx * slots), "-np", str(slots), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    held.callback(process.wait)
    held.callback(process.terminate)
    return _answering(process, f"http://127.0.0.1:{port}", "/health")


def _answering(process: subprocess.Popen[Any], url: str, route: str) -> str:
    """That address, once something answers there."""
    while process.poll() is None:
        try:
            httpx.get(f"{url}{route}", trust_env=False).raise_for_status()
            return url
        except httpx.HTTPError:
            threading.Event().wait(0.1)
    raise RuntimeError(f"{process.args!r} did not start")


def _llama_cpp_python(held: ExitStack, path: str, captured_errors: IO[str]) -> str:
    """Its own server, which serves one request at a time. As shipped it cuts a reply short when the next
    request comes; here it may finish."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = _started(
        held,
        captured_errors,
        *("llama_cpp.server", "--model", path, "--host", "127.0.0.1", "--port", str(port)),
        *("--n_ctx", str(N_CTX), "--n_threads", str(THREADS), "--n_threads_batch", str(THREADS)),
        *("--interrupt_requests", "false", "--verbose", "false"),
    )
    try:
        return _answering(process, f"http://127.0.0.1:{port}", "/v1/models")
    except RuntimeError as error:
        captured_errors.seek(0)
        raise RuntimeError(f"{error}:\n{captured_errors.read()[-4000:]}") from None


def _started(held: ExitStack, captured_errors: IO[str], *arguments: str) -> subprocess.Popen[str]:
    """`python -m` of these, until the end of the measurement."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env={name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))},
        stdout=subprocess.PIPE,
        stderr=captured_errors,
        text=True,
    )
    held.callback(process.communicate)
    held.callback(process.terminate)
    return process


_KINDS = {
    "ours": _ours,
    "llama-server": _llama_server,
    "llama-cpp-python": _llama_cpp_python,
}


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

    def step(self, body: Mapping[str, Any]) -> float:
        """Seconds for each token after the first of the reply to a request, as the chat route reads it."""
        asked = {name: body[name] for name in ("max_tokens", "temperature")}
        asked["logit_bias"] = {int(token): bias for token, bias in body["logit_bias"].items()}
        stamps = []

        async def read() -> None:
            async for delta in self._runtime.achat_stream(body["messages"], **asked):
                if delta.tokens:
                    stamps.append(time.perf_counter())

        asyncio.run(read())
        return (stamps[-1] - stamps[0]) / (len(stamps) - 1)


# Their builds.


class Bare:
    """What a server's own build of llama.cpp does with nothing around it. It is measured again each time:
    what else the machine does changes it."""

    def __init__(self, held: ExitStack, build: str) -> None:
        self._child = held.enter_context(Child("bench.processes.streams", build))
        self._numbers: dict[int, int] = {}

    def writing(self, streams: int, count: int) -> float:
        """Tokens a second of so many replies in one batch, of `count` tokens each."""
        prompts = [_PROMPT] * streams
        run = self._child.ask("write", number=self._number(streams), prompts=prompts, count=count)
        return float((count - 1) * streams / (run["times"][0][-1] - run["times"][0][0]))

    def reading(self) -> float:
        """Tokens a second of a prompt."""
        return float(len(_PROMPT) / self._child.ask("read", number=self._number(1), prompt=_PROMPT))

    def _number(self, streams: int) -> int:
        if streams not in self._numbers:
            opened = self._child.ask("open", path=model_path(), streams=streams, n_ctx=512, threads=THREADS)
            self._numbers[streams] = opened
            # The first run warms up.
            self.writing(streams, len(_PROMPT))
        return self._numbers[streams]


def build_of(kind: str) -> str:
    """The bare loop of a server's build."""
    if kind == "llama-server" and not built_llama_server():
        return "bare-xllamacpp"
    return "bare"


if __name__ == "__main__":
    if sys.argv[1] == "llama-server":
        serve({"open": LlamaServer().open})
    else:
        library = Library()
        serve({"open": library.open, "step": library.step})
