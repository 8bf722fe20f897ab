"""The server: what it adds to the library, and how it does beside llama-server and llama-cpp-python's.

Each server runs in a process of its own, and one client speaks to all of them through OpenAI's chat route.
Their builds of llama.cpp differ, so each is measured in decode steps of its own: its figures are divided by,
or multiplied with, the speed at which its build writes one reply with nothing around it.

`python -m bench.serve side KIND` is one of the processes, spoken to through `bench.child`.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx

from bench.child import Child, serve
from bench.engine import model_path
from bench.harness import Bench, Figure, Gauge, Pairs, Run, Target, at_least
from bench.machine import Machine, Watch

THREADS = 2
SLOTS = 4
N_CTX = 4096
"""Tokens that one conversation can hold."""
CHAT = "/v1/chat/completions"
PEERS = ("llama-server", "llama-cpp-python")
TOPICS = ("the tides", "bees", "old maps", "bread", "glaciers", "sailing knots", "the moon", "violins")
QUESTIONS = (
    "Hello! I have been reading about {topic}. Where would I find something for beginners?",
    "Thank you. And what is the one thing about {topic} that most people get wrong?",
    "Could I keep a book on {topic} over the summer if I come by only once a month?",
    "My daughter is nine and would like to know more about {topic} too. What would you say to her?",
    "One last question: is there anything about {topic} in the local history collection?",
)
_RULES = """Visitors write to you from their phones and from the reading room, so keep every answer short \
and plain. Books may be kept for four weeks and renewed twice. Never invent a title. """
SYSTEM = "You are the help desk of a small public library by the sea. Number {number}. " + _RULES * 6
_LONG = "The lighthouse keeper wrote down the weather, the ships and the birds of the day. "


# The sides.


def _ours(held: ExitStack, path: str) -> str:
    """`perdure serve`, as people run it."""
    process = _started(
        held,
        *("perdure.cli", "serve", path, "--port", "0", "--no-store"),
        *("--ctx", str(N_CTX), "--slots", str(SLOTS), "--threads", str(THREADS)),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("address"):
            return line.split()[1]
    raise RuntimeError("perdure serve did not start")


def _llama_server(held: ExitStack, path: str) -> str:
    """llama-server out of `xllamacpp`."""
    return str(held.enter_context(Child("bench.serve", "side", "llama-server")).ask("open", path=path))


def _llama_cpp_python(held: ExitStack, path: str) -> str:
    """Its own server, which serves one request at a time."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    _started(
        held,
        *("llama_cpp.server", "--model", path, "--port", str(port), "--n_ctx", str(N_CTX)),
        *("--n_threads", str(THREADS), "--n_threads_batch", str(THREADS)),
    )
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            httpx.get(f"{url}/v1/models", trust_env=False).raise_for_status()
            return url
        except httpx.HTTPError:
            threading.Event().wait(0.1)
    raise RuntimeError("llama_cpp.server did not start")


def _started(held: ExitStack, *arguments: str) -> subprocess.Popen[str]:
    """`python -m` of these, until the end of the measurement."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env={name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    held.callback(process.communicate)
    held.callback(process.terminate)
    return process


SERVERS = {"ours": _ours, "llama-server": _llama_server, "llama-cpp-python": _llama_cpp_python}


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


KINDS: dict[str, Callable[[], Any]] = {"llama-server": LlamaServer, "library": Library}


# The client.


@dataclass(frozen=True, slots=True)
class Heard:
    """A streamed reply: seconds to its first text and to its last, its pieces, and its text."""

    first: float
    last: float
    pieces: int
    text: str


class Server:
    """A server in a process of its own, and the speed of its build with nothing around it."""

    def __init__(self, held: ExitStack, kind: str) -> None:
        self.kind = kind
        self._url = SERVERS[kind](held, model_path())
        self.bare = bare_speed(kind)

    def together(self, bodies: Sequence[Mapping[str, Any]]) -> list[Heard]:
        """Replies to all of them, asked for at once."""

        async def all_of_them() -> list[Heard]:
            async with self._client() as client:
                return list(await asyncio.gather(*(_heard(client, body) for body in bodies)))

        return asyncio.run(all_of_them())

    def beside(self, long: Mapping[str, Any], short: Callable[[int], Mapping[str, Any]]) -> list[float]:
        """Seconds to the first text of short prompts, one after the other, while a long one is read."""

        async def measured() -> list[float]:
            async with self._client() as client:
                reading = asyncio.ensure_future(_heard(client, long))
                firsts: list[float] = []
                while not reading.done():
                    firsts.append((await _heard(client, short(len(firsts)))).first)
                await reading
                return firsts

        return asyncio.run(measured())

    def _client(self) -> httpx.AsyncClient:
        # Connections of their own: some servers close those that were idle for a while.
        once = httpx.Limits(max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=self._url, timeout=600, limits=once, trust_env=False)


async def _heard(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Heard:
    started = time.perf_counter()
    first = last = 0.0
    pieces = []
    async with client.stream("POST", CHAT, json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{client.base_url}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            text = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
            if text:
                last = time.perf_counter() - started
                first = first or last
                pieces.append(text)
    return Heard(first, last, len(pieces), "".join(pieces))


@functools.cache
def bare_speed(kind: str) -> float:
    """Tokens a second of one reply by a server's own build of llama.cpp."""
    if kind == "llama-server":
        with Child("bench.conversations", "llama-server") as child:
            child.ask("open", path=model_path(), threads=THREADS)
            said = [
                child.ask("reply", conversation=0, prompt=list(range(1000, 1032)), count=65) for _ in range(3)
            ]
        return float(statistics.median(64 / (each["last"] - each["first"]) for each in said))
    with Child("bench.streams", "bare") as child:
        number = child.ask("open", path=model_path(), streams=1, n_ctx=512, threads=THREADS)
        runs = [
            child.ask("write", number=number, prompts=[list(range(1000, 1032))], count=65) for _ in range(3)
        ]
    return float(statistics.median(64 / (run["times"][0][-1] - run["times"][0][0]) for run in runs))


def _body(messages: Sequence[Mapping[str, str]], count: int) -> dict[str, Any]:
    # Greedy, with no way to the end: all sides then write as much as they are asked for.
    never = dict.fromkeys(map(str, _ends()), -100)
    settings = {"model": "default", "max_tokens": count, "temperature": 0, "logit_bias": never}
    return {**settings, "messages": list(messages)}


@functools.cache
def _ends() -> list[int]:
    from perdure import Model

    model = Model(model_path())
    return [token for token in range(model.n_vocab) if model.is_end(token)]


def _peers(held: ExitStack, run: Run) -> list[Server]:
    found = []
    for kind in PEERS[:1] if run.quick else PEERS:
        if kind == "llama-cpp-python" and not importlib.util.find_spec("starlette_context"):
            _left_out("llama-cpp-python's server: pip install 'llama-cpp-python[server]'")
            continue
        found.append(Server(held, kind))
    if run.quick:
        _left_out("llama-cpp-python's server")
    return found


def _left_out(what: str) -> None:
    print(f"   left out: {what}", flush=True)


# The questions.


def aggregate(run: Run) -> Iterator[Figure]:
    """Tokens a second of all replies together, at 1, 4 and 8 clients."""
    count, repeats = run.pick((128, 5), (24, 1))
    with ExitStack() as held:
        ours, peers = Server(held, "ours"), _peers(held, run)
        for clients in (1, 4, 8):
            bodies = [
                _body([{"role": "user", "content": f"Tell me a long story about {topic}."}], count)
                for topic in TOPICS[:clients]
            ]
            sides = [ours, *peers]
            taken: dict[str, list[float]] = {side.kind: [] for side in sides}
            with Watch() as watch:
                for number in range(repeats):
                    for side in sides[:: 1 if number % 2 else -1]:
                        started = time.perf_counter()
                        heard = side.together(bodies)
                        seconds = time.perf_counter() - started
                        taken[side.kind].append(sum(each.pieces for each in heard) / seconds / side.bare)
            for peer in peers:
                name = f"tokens a second of {clients} clients together, against one bare reply"
                yield _figure(
                    name, taken, peer.kind, "of bare speed", Gauge.RATE, at_least(1.0), watch.machine
                )


def turns(run: Run) -> Iterator[Figure]:
    """The first token of the last of five turns, for as many conversations as slots and for twice as many."""
    rounds, repeats = run.pick((len(QUESTIONS), 3), (3, 1))
    with ExitStack() as held:
        ours, peers = Server(held, "ours"), _peers(held, run)
        for conversations in (SLOTS, 2 * SLOTS):
            sides = [ours, *peers]
            taken: dict[str, list[float]] = {side.kind: [] for side in sides}
            with Watch() as watch:
                for number in range(repeats):
                    for side in sides:
                        taken[side.kind] += _carried_on(side, conversations, rounds, number)
            for peer in peers:
                name = f"first token of turn {rounds}, {conversations} conversations on {SLOTS} slots"
                yield _figure(name, taken, peer.kind, "steps", Gauge.COST, at_least(1.0), watch.machine)


def _carried_on(side: Server, conversations: int, rounds: int, number: int) -> list[float]:
    """Conversations round robin: the first token of the last turn of each, in steps of that build."""
    system = {"role": "system", "content": SYSTEM.format(number=1000 * conversations + number)}
    said: list[list[dict[str, str]]] = [[system] for _ in range(conversations)]
    firsts: list[float] = []
    for turn in range(rounds):
        firsts = []
        for conversation, messages in enumerate(said):
            question = QUESTIONS[turn].format(topic=TOPICS[conversation])
            messages.append({"role": "user", "content": question})
            [heard] = side.together([_body(messages, 16)])
            firsts.append(heard.first * side.bare)
            messages.append({"role": "assistant", "content": heard.text})
    return firsts


def overhead(run: Run) -> Iterator[Figure]:
    """A step of one reply: with the engine in another process, and over HTTP, against the library."""
    count, repeats = run.pick((128, 15), (32, 5))
    with ExitStack() as held:
        library = held.enter_context(Child("bench.serve", "side", "library"))
        library.ask("open", path=model_path(), isolated=False)
        worker = held.enter_context(Child("bench.serve", "side", "library"))
        worker.ask("open", path=model_path(), isolated=True)
        server = Server(held, "ours")
        body = _body([{"role": "user", "content": "Tell me a long story about the sea."}], count)

        def over_http() -> float:
            [heard] = server.together([body])
            return (heard.last - heard.first) / (heard.pieces - 1) * 1e3

        def step(side: Child) -> float:
            return float(side.ask("step", count=count)) * 1e3

        sides: tuple[tuple[str, Callable[[], float]], ...] = (
            ("a step with the engine in another process", lambda: step(worker)),
            ("a step over HTTP", over_http),
        )
        for name, measure in sides:
            yield run.compare(
                name,
                ours=measure,
                peer=lambda: step(library),
                against="the library",
                unit="ms",
                gauge=Gauge.COST,
                target=at_least(0.97),
                repeats=repeats,
            )


def crowding(run: Run) -> Iterator[Figure]:
    """The slowest first token in a hundred of short prompts, while a prompt of 2,000 tokens is read."""
    repeats = run.pick(6, 1)
    with ExitStack() as held:
        ours, peers = Server(held, "ours"), _peers(held, run)
        sides = [ours, *(peer for peer in peers if peer.kind == "llama-server")]
        taken: dict[str, list[float]] = {side.kind: [] for side in sides}
        with Watch() as watch:
            for number in range(repeats):
                for side in sides:
                    firsts = side.beside(_long(number), lambda at: _short(at))
                    worst = statistics.quantiles(firsts, n=100)[-1] if len(firsts) > 1 else firsts[0]
                    taken[side.kind].append(worst * side.bare)
        for side in sides[1:]:
            name = "p99 of the first token of short prompts beside one of 2,000 tokens"
            yield _figure(name, taken, side.kind, "steps", Gauge.COST, at_least(1.0), watch.machine)


def _long(number: int) -> dict[str, Any]:
    return _body([{"role": "user", "content": f"Log {number}. " + _LONG * 115}], 1)


def _short(number: int) -> dict[str, Any]:
    return _body([{"role": "user", "content": f"Say {number}."}], 1)


def _figure(
    name: str,
    taken: Mapping[str, Sequence[float]],
    peer: str,
    unit: str,
    gauge: Gauge,
    target: Target,
    machine: Machine,
) -> Figure:
    return Figure(
        name=name,
        against=peer,
        unit=unit,
        gauge=gauge,
        pairs=Pairs(tuple(taken["ours"]), tuple(taken[peer])),
        target=target,
        machine=machine,
    )


main = Bench("serve", (aggregate, turns, overhead, crowding))


if __name__ == "__main__":
    if sys.argv[1:2] == ["side"]:
        side = KINDS[sys.argv[2]]()
        calls = {"open": side.open}
        if isinstance(side, Library):
            calls["step"] = side.step
        serve(calls)
    else:
        sys.exit(main())
