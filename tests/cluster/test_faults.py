"""Shared places that restart, stop, are cut off or hang under load: no reply is lost or changed, and they are
of use again by themselves. PostgreSQL's own faults are in `test_postgres.py`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import perdure
from cluster.proxy import Proxy
from cluster.servers import PostgresServer, RedisServer, Server, free_port, redis_server
from perdure.cache.tiers.places import DirectoryPlace
from perdure.testing.toy import ToyModel

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'perdure[cluster]'")
pytestmark = pytest.mark.soak

PATIENCE = 10.0
"""Seconds after which a place is given up, as in `shared.py`."""
SETTINGS = {"max_tokens": 6, "temperature": 0}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


class MotoServer(Server):
    """S3 in a process of its own; a restart forgets everything."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("moto.server", reason="moto is not installed")
        port = free_port()
        super().__init__([sys.executable, "-m", "moto.server", "-p", str(port)], port, folder / "moto.log")

    def start(self) -> None:
        super().start()
        import boto3

        boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.port}").create_bucket(Bucket="blocks")


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MotoServer]:
    for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    server = MotoServer(tmp_path)
    try:
        yield server
    finally:
        server.kill()


class Load:
    """Two replicas that take turns on some conversations, each thread one conversation."""

    def __init__(self, store: str, place: str, held: ExitStack) -> None:
        self.runtimes = [
            held.enter_context(
                perdure.open(
                    ToyModel(),
                    n_ctx=1024,
                    slots=4,
                    store=store.replace("%2Fr0", f"%2Fr{number}"),
                    blocks=[place],
                )
            )
            for number in range(2)
        ]
        self.ending = threading.Event()
        self.replies: dict[str, list[str]] = {}
        self.longest = 0.0
        self.failed: list[BaseException] = []
        self._threads = [threading.Thread(target=self._talk, args=[number]) for number in range(6)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        for thread in self._threads:
            thread.join()

    def _talk(self, number: int) -> None:
        try:
            for conversation in range(1000):
                name = f"c{number}-{conversation}"
                said = self.replies.setdefault(name, [])
                for turn in range(6):
                    if self.ending.is_set():
                        return
                    session = self.runtimes[turn % 2].session(name)
                    began = time.monotonic()
                    reply = session.say(f"Message {turn} of {name}, with some words more.", **SETTINGS)  # type: ignore[arg-type]
                    self.longest = max(self.longest, time.monotonic() - began)
                    assert reply.kept, reply.not_kept
                    said.append(str(reply.text))
        except BaseException as error:
            self.failed.append(error)

    def check(self) -> None:
        assert not self.failed, self.failed[0]
        with perdure.open(ToyModel(), n_ctx=1024, slots=4) as plain:
            for name, replies in self.replies.items():
                session = plain.session(name)
                for turn, reply in enumerate(replies):
                    told = session.say(f"Message {turn} of {name}, with some words more.", **SETTINGS)  # type: ignore[arg-type]
                    assert told.text == reply, name

    @property
    def written(self) -> int:
        """Blocks that the place has taken. Whether one is read goes by its cost, and a toy computes fast."""
        return sum(each.backend.slot_cache.tiers.lower[-1].tier.stored for each in self.runtimes)  # type: ignore[attr-defined]

    def until_written(self) -> None:
        """Until the place takes state again."""
        before, end = self.written, time.monotonic() + 120
        while self.written <= before and not self.failed:
            assert time.monotonic() < end, "the place is of no use any more"
            time.sleep(0.1)


def faults(load: Load, server: Server, proxy: Proxy) -> None:
    seconds = float(os.environ.get("PERDURE_SOAK_SECONDS", 12))
    steps: tuple[tuple[Callable[[], None], Callable[[], None]], ...] = (
        (server.restart, lambda: None),
        (lambda: server.signal(signal.SIGSTOP), lambda: server.signal(signal.SIGCONT)),
        (proxy.partition, proxy.heal),
        (proxy.cut, lambda: None),
    )
    for begin, end in steps:
        load.until_written()
        begin()
        time.sleep(seconds)
        end()
    load.until_written()


def test_redis_fails_in_every_way_under_load(
    postgres: PostgresServer, redis: RedisServer, tmp_path: Path
) -> None:
    with closing(Proxy(redis.port)) as proxy:
        _run(postgres, tmp_path, f"redis://127.0.0.1:{proxy.port}/0?tokens=100000", redis, proxy)


def test_s3_fails_in_every_way_under_load(postgres: PostgresServer, s3: MotoServer, tmp_path: Path) -> None:
    with closing(Proxy(s3.port)) as proxy:
        _run(postgres, tmp_path, f"s3://blocks/x?endpoint=http://127.0.0.1:{proxy.port}", s3, proxy)


def _run(postgres: PostgresServer, folder: Path, place: str, server: Server, proxy: Proxy) -> None:
    with ExitStack() as held:
        load = Load(postgres.url(folder / "r0"), place, held)
        with load:
            faults(load, server, proxy)
        _report(load)


def _report(load: Load) -> None:
    turns = sum(map(len, load.replies.values()))
    print(f"{turns} turns, longest {load.longest:.1f} s, {load.written} blocks written")
    load.check()
    # A call for reading and one for writing may each be given up on the way of one turn.
    assert load.longest < 3 * PATIENCE


def test_a_directory_that_hangs_under_load(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a hard mount of NFS whose server is gone: calls neither return nor fail."""
    going = threading.Event()
    going.set()

    def hanging(call: Callable[..., object]) -> Callable[..., object]:
        def wait(*values: object) -> object:
            going.wait()
            return call(*values)

        return wait

    for name in ("get", "put", "names", "delete"):
        monkeypatch.setattr(DirectoryPlace, name, hanging(getattr(DirectoryPlace, name)))
    with ExitStack() as held:
        load = Load(postgres.url(tmp_path / "r0"), f"file://{tmp_path}/shared", held)
        held.callback(going.set)
        with load:
            load.until_written()
            going.clear()
            time.sleep(float(os.environ.get("PERDURE_SOAK_SECONDS", 12)) + PATIENCE)
            going.set()
            load.until_written()
        _report(load)
