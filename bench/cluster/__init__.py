"""Several machines: what is reused where, what PostgreSQL keeps a second, and what a wake costs.

`reuse` counts tokens, and no time: four replicas with a quarter of the memory each, by our policy, against
one machine with all of it, and against round robin. `turns` is the store alone, with the turns of many
sessions at once. `wake` is a real model: a session wakes out of each tier, and on another machine out of each
place that machines share, against computing it. `encryption` is the disk alone, with a key and without.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

import perdure
from bench.child import PeerMissingError
from bench.engine import model_path
from bench.harness import Bench, Figure, Gauge, Pairs, Run, at_least
from bench.machine import Watch
from perdure import Message, Turn
from perdure.cache.block import Block, BlockId
from perdure.cache.tiers.disk import DiskTier
from perdure.ext.cluster.ray.marks import ask_of
from perdure.ext.cluster.ray.policy import RoutedRequest, ranked
from perdure.ext.cluster.ray.replica import Replica, ReplicaCall
from perdure.ext.encryption.folder import DiskKey
from perdure.server.core.server_state import ServerState
from perdure.sessions.store.registry import open_store, store_folder
from perdure.testing.toy import ToyModel

_REPLICAS = 4
_TURNS = 8
Route = Callable[[RoutedRequest, Sequence[Replica]], Replica]


# Reuse.


def reuse(run: Run) -> Iterator[Figure]:
    """Tokens of prompts that were not computed: by policy, by round robin, and on one machine."""
    conversations = run.pick(64, 32)
    with Watch() as watch:
        one, needed = _reused(1, conversations, 1 << 30, lambda ask, replicas: replicas[0])
        memory = round(needed * 1.25)
        one, _ = _reused(1, conversations, memory, lambda ask, replicas: replicas[0])
        ours, _ = _reused(_REPLICAS, conversations, memory, _by_policy)
        turns = iter(range(1 << 30))
        robin, _ = _reused(
            _REPLICAS, conversations, memory, lambda ask, replicas: replicas[next(turns) % len(replicas)]
        )
    for against, peer, target in (
        ("one machine with all memory", one, at_least(0.95)),
        ("round robin", robin, at_least(2)),
    ):
        yield Figure(
            name=f"tokens reused by {_REPLICAS} replicas, {conversations} conversations of {_TURNS} turns",
            against=against,
            unit="tokens",
            gauge=Gauge.RATE,
            pairs=Pairs((float(ours),), (float(peer),)),
            target=target,
            machine=watch.machine,
        )


def _by_policy(ask: RoutedRequest, replicas: Sequence[Replica]) -> Replica:
    facts = {str(number): each.facts() for number, each in enumerate(replicas)}
    return replicas[int(ranked(ask, facts)[0])]


def _reused(count: int, conversations: int, memory: int, route: Route) -> tuple[int, int]:
    """Tokens that were reused over all replicas, which have `memory` bytes together; and the bytes that were
    held at the end."""
    dice = random.Random(1)
    order = [number for number in range(conversations) for _ in range(_TURNS)]
    dice.shuffle(order)
    histories: dict[int, list[dict[str, str]]] = {}
    with ExitStack() as held:
        replicas = []
        for _ in range(count):
            runtime = held.enter_context(
                perdure.open(ToyModel(reply_tokens=24), n_ctx=4096, slots=1, cache=memory // count)
            )
            per_token = _token_bytes(runtime)
            capacity = max(1, memory // count // per_token)
            replicas.append(Replica(ServerState(runtime=runtime, name="toy", hosts=None), capacity=capacity))

        async def talk() -> None:
            for number in order:
                messages = histories.setdefault(
                    number, [{"role": "system", "content": f"You are helper {number}. Be terse and kind."}]
                )
                messages.append({"role": "user", "content": f"Part {len(messages)} of talk {number}. " * 3})
                body = {"model": "toy", "messages": messages, "max_tokens": 24, "temperature": 0}
                messages.append({"role": "assistant", "content": await _ask(body, replicas, route)})

        asyncio.run(talk())
        found = sum(each.reused for each in replicas)
        nbytes = sum(each.state.models.first.runtime.cache.stats().nbytes for each in replicas)
        return found, nbytes


def _token_bytes(runtime: perdure.Runtime) -> int:
    """What a token of state takes in memory."""
    runtime.cache.warm([1] * 512)
    stats = runtime.cache.stats()
    runtime.cache.clear()
    return max(1, stats.nbytes // 512)


async def _ask(body: dict[str, Any], replicas: Sequence[Replica], route: Route) -> str:
    data = json.dumps(body).encode()
    headers = ((b"content-type", b"application/json"), (b"content-length", str(len(data)).encode()))
    path = "/v1/chat/completions"
    call = ReplicaCall(
        method="POST", path=path, query=b"", headers=headers, body=data, ask=ask_of(path, headers, data)
    )
    pieces = [each async for each in route(call.ask, replicas).answer(call)]
    answer = json.loads(b"".join(each for each in pieces if isinstance(each, bytes)))
    return str(answer["choices"][0]["message"]["content"])


# PostgreSQL.


def turns(run: Run) -> Iterator[Figure]:
    """Turns a second that are durable, of 8 threads with a session each, against SQLite on the same disk."""
    count = run.pick(100, 20)
    with tempfile.TemporaryDirectory() as folder, postgres() as url:
        ours, peers = [], []
        database = store_folder(url(Path(folder) / "pg"))
        with Watch() as watch:
            for number in range(run.pick(5, 3)):
                ours.append(_turns_a_second(database, f"p{number}", count))
                peers.append(_turns_a_second(Path(folder) / "sqlite", f"s{number}", count))
    yield Figure(
        name="durable turns a second in PostgreSQL, 8 sessions at once",
        against="SQLite",
        unit="turns/s",
        gauge=Gauge.RATE,
        pairs=Pairs(tuple(ours), tuple(peers)),
        target=at_least(0.1),
        machine=watch.machine,
    )


def _turns_a_second(folder: Path, name: str, count: int) -> float:
    store = open_store(folder)
    try:

        def write(number: int) -> None:
            space = f"{name}-{number}"
            store.create(space, "s", [Turn(kind="start", messages=())])
            for at in range(count):
                session = store.find(space, "s")
                message = Message(role="user", content=f"Message {at}, as long as people write them. " * 4)
                turn = Turn(kind="turn", messages=(message,), before=session.digest)
                store.add(session, [turn], parent=session.head, expected=session.head)

        began = time.perf_counter()
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(write, range(8)))
        return 8 * count / (time.perf_counter() - began)
    finally:
        store.close()


@contextmanager
def postgres() -> Iterator[Callable[..., str]]:
    """A server that is started here; what makes the URL of a store with a folder."""
    servers = _servers()
    if servers.program("initdb") is None:
        raise PeerMissingError("PostgreSQL is not installed: apt-get install postgresql")
    with servers.postgres_server(fsync=True) as server:
        yield server.url


def _servers() -> Any:
    """The module of the tests that starts servers of others."""
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    try:
        from ext.cluster import servers
    except ImportError as error:
        raise PeerMissingError(f"{error.name} is not installed: make setup") from None
    return servers


# Waking.


def wake(run: Run) -> Iterator[Figure]:
    """The first token of a session whose state is in one tier, against computing it. Memory and disk are of
    the same machine; in the other ones it slept on another machine. SmolLM2-135M, one thread."""
    words = "The harbour lies still this morning, and the ferry comes in at ten past nine. "
    text, rounds = words * run.pick(60, 25), run.pick(5, 3)
    with tempfile.TemporaryDirectory() as name, ExitStack() as held:
        folder = Path(name)
        url = held.enter_context(postgres())
        shared = {"a shared directory": f"file://{folder}/shared", **dict(_places(held, folder))}
        with Watch() as watch:
            computed = list(_computing(url(folder / "alone"), text, rounds))
            measured = {
                "memory": _own(url(folder / "memory"), text, rounds, sleep=False),
                "the disk": _own(url(folder / "disk"), text, rounds, sleep=True),
                "the disk, encrypted": _own(
                    url(folder / "sealed"), text, rounds, sleep=True, encrypt="cluster"
                ),
            }
            for number, (tier, place) in enumerate(shared.items()):
                measured[tier] = _moved(url(folder / f"{number}-m0"), place, text, rounds)
    for tier, (tokens, nbytes, seconds) in measured.items():
        size = f", {nbytes / tokens:,.0f} bytes a token" if nbytes else ""
        yield Figure(
            name=f"first token of a session in {tier}, {tokens:,} tokens{size}",
            against="computing",
            unit="ms",
            gauge=Gauge.COST,
            pairs=Pairs(tuple(each * 1e3 for each in seconds), tuple(each * 1e3 for each in computed)),
            target=at_least(1),
            machine=watch.machine,
        )


def _places(held: ExitStack, folder: Path) -> Iterator[tuple[str, str]]:
    servers = _servers()
    with suppress(ImportError):
        import moto.server  # noqa: F401

        yield "S3 (moto)", held.enter_context(servers.s3_server(folder)).url()
    if servers.program("redis-server") is not None:
        redis = held.enter_context(servers.redis_server(folder))
        yield "Redis", f"{redis.url}?tokens=100000"


def _first_token(session: perdure.Session, reused: bool) -> float:
    began = time.perf_counter()
    reply = session.say("Go on.", max_tokens=1, temperature=0)
    seconds = time.perf_counter() - began
    if (reply.reuse.reused > reply.reuse.computed) != reused:
        raise RuntimeError(f"this is not what was to be measured: {reply.reuse}")
    return seconds


def _computing(url: str, text: str, rounds: int) -> Iterator[float]:
    """Each time on a machine that has nothing."""
    with _machine(url) as runtime:
        runtime.session("one").say(text, max_tokens=1, temperature=0)
    for number in range(rounds):
        with _machine(url.replace("%2Falone", f"%2Falone{number}")) as runtime:
            yield _first_token(runtime.session("one").fork(f"fork{number}"), False)


def _own(
    url: str, text: str, rounds: int, *, sleep: bool, encrypt: str | None = None
) -> tuple[int, int, list[float]]:
    """On the machine that has it: another conversation has its slot meanwhile."""
    seconds = []
    with _machine(url, encrypt=encrypt) as runtime:
        session, other = runtime.session("one"), runtime.session("other")
        session.say(text, max_tokens=1, temperature=0)
        for _ in range(rounds):
            other.say("Something else.", max_tokens=1, temperature=0)
            if sleep:
                session.sleep()
            seconds.append(_first_token(session, True))
        return session.token_count, 0, seconds


def _moved(first: str, place: str, text: str, rounds: int) -> tuple[int, int, list[float]]:
    """On another machine each time, by way of a place that they share."""
    seconds = []
    with _machine(first, place) as runtime:
        session = runtime.session("one")
        session.say(text, max_tokens=1, temperature=0)
        tokens = session.token_count
        session.sleep()
    nbytes = 0
    for number in range(rounds):
        with _machine(first.replace("-m0", f"-m{number + 1}"), place) as runtime:
            # The lists of others are read every 2 s.
            tier = runtime.backend.slot_cache.tiers.lower[-1].tier  # type: ignore[attr-defined]
            tier.refresh()
            nbytes = tier.nbytes
            seconds.append(_first_token(runtime.session("one").fork(f"fork{number}"), True))
    return tokens, nbytes, seconds


@contextmanager
def _machine(url: str, *places: str, encrypt: str | None = None) -> Iterator[perdure.Runtime]:
    with perdure.open(
        model_path(),
        n_ctx=4096,
        slots=1,
        threads=1,
        store=url,
        encrypt=encrypt,
        blocks=list(places) or None,
    ) as runtime:
        yield runtime


# Encryption of the disk.


def encryption(run: Run) -> Iterator[Figure]:
    """MB a second of blocks that are written, synced and read again, with a key and without. A block is that
    of SmolLM2-135M: 64 tokens, 1.5 MB."""
    dice = np.random.default_rng(1)
    blocks, parent, start = [], BlockId(bytes(32)), 0
    for _ in range(run.pick(200, 60)):
        tokens = dice.integers(0, 49_152, 64, np.int32)
        rows = dice.integers(0, 256, (64, 23_040), np.uint8)
        blocks.append(Block.make(parent, start, tokens, rows, None))
        parent, start = blocks[-1].id, start + 64
    nbytes = sum(block.file_size for block in blocks)
    rates: dict[tuple[str, bool], list[float]] = {}
    with Watch() as watch, tempfile.TemporaryDirectory() as name:
        for number in range(run.pick(5, 3)):
            for sealed in (False, True):
                key = DiskKey(b"k" * 32, "bench") if sealed else None
                disk = DiskTier(Path(name) / f"{number}-{sealed}", budget=1 << 40, encryption=key)
                try:
                    for what, call in (
                        ("written", lambda disk=disk: disk.store(blocks)),
                        ("read", lambda disk=disk: [disk.load(block.id) for block in blocks]),
                    ):
                        began = time.perf_counter()
                        call()
                        rate = nbytes / 1e6 / (time.perf_counter() - began)
                        rates.setdefault((what, sealed), []).append(rate)
                    disk.clear()
                finally:
                    disk.close()
    for what in ("read", "written"):
        yield Figure(
            name=f"state {what}, encrypted, {nbytes / 1e6:,.0f} MB",
            against="plain",
            unit="MB/s",
            gauge=Gauge.RATE,
            pairs=Pairs(tuple(rates[what, True]), tuple(rates[what, False])),
            target=at_least(0.3),
            machine=watch.machine,
        )


main = Bench("cluster", (reuse, turns, wake, encryption))
