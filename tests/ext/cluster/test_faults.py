"""PostgreSQL and shared places that restart, stop, are cut off or hang under load: no acknowledged turn is
lost or changed, nobody waits for long, and all goes on by itself. PostgreSQL's faults one by one are in
`test_postgres.py`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import perdure
from ext.cluster.proxy import Proxy
from ext.cluster.servers import (
    MotoServer,
    PostgresServer,
    RedisServer,
    Server,
    postgres_server,
    redis_server,
    s3_server,
)
from perdure.errors import PerdureError
from perdure.ext.cluster.places import DirectoryPlace
from perdure.testing.toy import ToyModel

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'perdure[cluster]'")
pytestmark = pytest.mark.soak

PATIENCE = 10.0
"""Seconds after which a place is given up, as in `shared.py`."""
TIMEOUT, DOUBT = 4.0, 20.0
"""Seconds for an answer of PostgreSQL, and for finding out how a transaction ended, as in `database.py`."""
SETTINGS = {"max_tokens": 6, "temperature": 0}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[MotoServer]:
    with s3_server(tmp_path) as server:
        yield server


def message(name: str, turn: int) -> str:
    return f"Message {turn} of {name}, with some words more."


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
        self.errors: Counter[str] = Counter()
        """Turns that were refused, or whose end was not known; by what was said."""
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
                while len(said) < 6:
                    if self.ending.is_set():
                        return
                    began = time.monotonic()
                    reply = self._say(name, len(said))
                    self.longest = max(self.longest, time.monotonic() - began)
                    if reply is not None:
                        said.append(reply)
        except BaseException as error:
            self.failed.append(error)

    def _say(self, name: str, turn: int) -> str | None:
        """The reply to the next message; None where that was refused."""
        session = self.runtimes[turn % 2].session(name)
        reply = session.say(message(name, turn), **SETTINGS)  # type: ignore[arg-type]
        assert reply.kept, reply.not_kept
        return str(reply.text)

    def check(self) -> None:
        assert not self.failed, self.failed[0]
        with perdure.open(ToyModel(), n_ctx=1024, slots=4) as plain:
            for name, replies in self.replies.items():
                session = plain.session(name)
                for turn, reply in enumerate(replies):
                    told = session.say(message(name, turn), **SETTINGS)  # type: ignore[arg-type]
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


class LoadOnPostgres(Load):
    """The same where sessions cannot be read and written at times: whoever gets an error looks what became of
    the turn, and says it again if it was not kept."""

    def _say(self, name: str, turn: int) -> str | None:
        runtime = self.runtimes[turn % 2]
        try:
            session = runtime.session(name)
            if session.turns > turn:
                # The one before was kept, although its answer was an error.
                assert session.turns == turn + 1, "a turn was kept twice"
                [last] = session.history(limit=1, after=turn)
                assert last.reply is not None
                return str(last.reply.content)
            assert session.turns == turn, "an acknowledged turn is gone"
            reply = session.say(message(name, turn), **SETTINGS)  # type: ignore[arg-type]
            if reply.kept:
                return str(reply.text)
            self.errors["not kept"] += 1
        except PerdureError as error:
            self.errors[type(error).__name__] += 1
        self.ending.wait(0.05)
        return None

    def until_answered(self) -> None:
        """Until turns are kept again."""
        before, end = self._kept(), time.monotonic() + 120
        while self._kept() <= before and not self.failed:
            assert time.monotonic() < end, f"nothing is kept any more: {self.errors}"
            time.sleep(0.1)

    def _kept(self) -> int:
        return sum(map(len, list(self.replies.values())))


def faults(going: Callable[[], None], server: Server, proxy: Proxy) -> None:
    """Every fault of a server, once each; `going` waits until all is well."""
    seconds = float(os.environ.get("PERDURE_SOAK_SECONDS", 12))
    steps: tuple[tuple[Callable[[], None], Callable[[], None]], ...] = (
        (server.restart, lambda: None),
        (lambda: server.signal(signal.SIGSTOP), lambda: server.signal(signal.SIGCONT)),
        (proxy.partition, proxy.heal),
        (proxy.cut, lambda: None),
    )
    for begin, end in steps:
        going()
        begin()
        time.sleep(seconds)
        end()
    going()


def test_postgres_fails_in_every_way_under_load(tmp_path: Path) -> None:
    """N1: restarted, stopped, cut off and disconnected."""
    with postgres_server() as own, closing(Proxy(own.port)) as proxy, ExitStack() as held:
        store = own.url(tmp_path / "r0", port=proxy.port, lease=5, timeout=TIMEOUT)
        load = LoadOnPostgres(store, f"file://{tmp_path}/shared", held)
        with load:
            faults(load.until_answered, own, proxy)
        turns = sum(map(len, load.replies.values()))
        print(f"{turns} turns, longest {load.longest:.1f} s, {dict(load.errors)}")
        load.check()
        for name, replies in load.replies.items():
            if replies:
                kept = [
                    str(turn.reply.content) for turn in load.runtimes[0].session(name).history() if turn.reply
                ]
                # The last one may have been kept when its client had an error and the test was over.
                assert kept[: len(replies)] == replies, name
                assert len(kept) <= len(replies) + 1, name
    # A read, a lease and a commit may each be given up, and the commit's end is asked for.
    assert load.longest < 3 * TIMEOUT + DOUBT


def test_redis_fails_in_every_way_under_load(
    postgres: PostgresServer, redis: RedisServer, tmp_path: Path
) -> None:
    """N1."""
    with closing(Proxy(redis.port)) as proxy:
        _run(postgres, tmp_path, f"redis://127.0.0.1:{proxy.port}/0?tokens=100000", redis, proxy)


def test_s3_fails_in_every_way_under_load(postgres: PostgresServer, s3: MotoServer, tmp_path: Path) -> None:
    """N1."""
    with closing(Proxy(s3.port)) as proxy:
        _run(postgres, tmp_path, s3.url(proxy.port), s3, proxy)


def _run(postgres: PostgresServer, folder: Path, place: str, server: Server, proxy: Proxy) -> None:
    with ExitStack() as held:
        load = Load(postgres.url(folder / "r0"), place, held)
        with load:
            faults(load.until_written, server, proxy)
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
    """N1, as with a hard mount of NFS whose server is gone: calls neither return nor fail."""
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
