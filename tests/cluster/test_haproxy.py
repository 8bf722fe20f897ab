"""Replicas behind HAProxy, killed at random under load: no acknowledged turn is lost, and nobody gets a
foreign word. The configuration is that of deploy/cluster."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

import perdure
from cluster.servers import PostgresServer, Server, free_port, program
from perdure.testing.toy import ToyModel

CONFIG = Path(__file__).parents[2] / "deploy" / "cluster" / "haproxy.cfg"
REPLICA = Path(__file__).with_name("replica.py")
TURNS = 6
"""Of a conversation."""
SETTINGS = {"max_tokens": 8, "temperature": 0, "seed": 1}


class Replica:
    """A process that can be killed and comes back at the same port."""

    def __init__(self, url: str, port: int, log: Path, *blocks: str) -> None:
        self._command = [sys.executable, str(REPLICA), url, str(port), *blocks]
        self._log = log
        self.port = port
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(
                self._command,
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def wait(self) -> None:
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/ready", trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                assert self.process.poll() is None, self._log.read_text()[-3000:]
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Outcome:
    """What all clients saw."""

    acknowledged: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Each conversation as its client knows it: what was said, and what came back."""
    seen: Counter[str] = field(default_factory=Counter)
    """Answers by status, and broken connections."""
    longest: float = 0.0
    """Seconds between a message and its reply, with all that was tried in between."""


class Talker(threading.Thread):
    """A client with one conversation after the other: it says the next thing when the last was answered, and
    asks what became of a message whose answer was lost."""

    def __init__(self, url: str, name: str, outcome: Outcome, ending: threading.Event, again: bool) -> None:
        super().__init__(name=name)
        self.url, self.ending, self.again = url, ending, again
        self.outcome = outcome
        self.said: list[tuple[str, str]] = []
        self.failed: BaseException | None = None

    def run(self) -> None:
        first = self.name
        try:
            for number in itertools.count():
                self.name, self.said = f"{first}-{number}", []
                self.outcome.acknowledged[self.name] = self.said
                headers = {"x-session-id": self.name}
                with httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False) as client:
                    self._converse(client)
                if not self.again or self.ending.is_set():
                    return
        except BaseException as error:
            self.failed = error

    def _converse(self, client: httpx.Client) -> None:
        while len(self.said) < TURNS and not self.ending.is_set():
            began = time.monotonic()
            text = f"Message {len(self.said)} of {self.name}."
            self.said.append((text, self._say(client, text)))
            self.outcome.longest = max(self.outcome.longest, time.monotonic() - began)
            self.ending.wait(0.05)

    def _say(self, client: httpx.Client, text: str) -> str:
        """The reply, whatever it takes."""
        while True:
            try:
                answer = client.post(
                    "/v1/chat/completions",
                    json={
                        "model": "toy",
                        "messages": [{"role": "user", "content": text}],
                        "perdure": {"session": self.name},
                        **SETTINGS,
                    },
                )
                self.outcome.seen[str(answer.status_code)] += 1
                if answer.status_code == 200 and answer.json()["perdure"]["kept"]:
                    return str(answer.json()["choices"][0]["message"]["content"])
                assert answer.status_code in (200, 404, 409, 429, 500, 502, 503, 504, 507), answer.text
            except httpx.TransportError:
                self.outcome.seen["broken"] += 1
            # Honest errors say that nothing was kept; a broken connection says nothing. So it is looked up.
            if (reply := self._kept(client)) is not None:
                self.outcome.seen["kept, answer lost"] += 1
                return reply
            time.sleep(0.05)

    def _kept(self, client: httpx.Client) -> str | None:
        while True:
            try:
                answer = client.get(f"/v1/sessions/{self.name}/turns", params={"limit": 1000})
                if answer.status_code == 404:
                    return None
                if answer.status_code == 200:
                    turns = answer.json()["data"]
                    assert len(turns) in (len(self.said), len(self.said) + 1), "an acknowledged turn is gone"
                    return str(turns[-1]["reply"]["content"]) if len(turns) > len(self.said) else None
            except httpx.TransportError:
                pass
            time.sleep(0.05)


@contextmanager
def haproxy(folder: Path, ports: list[int], *, check: str = "inter 100 fall 1") -> Iterator[str]:
    """HAProxy with the configuration of deploy/cluster, but for addresses and how often it asks; its URL."""
    found = program("haproxy") or "/usr/sbin/haproxy"
    if not Path(found).exists():
        pytest.skip("HAProxy is not installed: apt-get install haproxy")
    port = free_port()
    servers = "\n".join(f"    server r{each} 127.0.0.1:{each}" for each in ports)
    text = CONFIG.read_text().replace("bind :8080", f"bind 127.0.0.1:{port}")
    text = re.sub(r" +server-template .*", lambda _: servers, text).replace("inter 1s fall 2", check)
    (folder / "haproxy.cfg").write_text(text)
    server = Server([found, "-db", "-f", str(folder / "haproxy.cfg")], port, folder / "haproxy.log")
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()


def undisturbed(conversations: dict[str, list[tuple[str, str]]]) -> dict[str, list[str]]:
    """The replies of one process that nobody kills, to the same messages."""
    replies: dict[str, list[str]] = {}
    with perdure.open(ToyModel(), n_ctx=1024, slots=4) as runtime:
        for name, said in conversations.items():
            session = runtime.session(name)
            replies[name] = [str(session.say(text, **SETTINGS).text) for text, _ in said]  # type: ignore[arg-type]
    return replies


def kills(
    postgres: PostgresServer,
    folder: Path,
    *,
    replicas: int,
    conversations: int,
    again: bool,
    seconds: float,
    every: float,
) -> tuple[Outcome, int]:
    """Load on some replicas, one of which is killed every few seconds; what clients saw, and how many."""
    outcome, ending, dice, count = Outcome(), threading.Event(), random.Random(1), 0
    schema = postgres.url(folder / "r0", lease=5)
    with ExitStack() as held:
        running = []
        for number in range(replicas):
            url = schema.replace("%2Fr0", f"%2Fr{number}")
            running.append(Replica(url, free_port(), folder / f"{number}.log", f"file://{folder}/shared"))
            held.callback(running[-1].kill)
        for replica in running:
            replica.wait()
        url = held.enter_context(haproxy(folder, [replica.port for replica in running]))
        talkers = [Talker(url, f"c{number}", outcome, ending, again) for number in range(conversations)]
        for talker in talkers:
            talker.start()
        began = time.monotonic()
        while time.monotonic() - began < seconds and any(talker.is_alive() for talker in talkers):
            ending.wait(every)
            victim = dice.choice(running)
            victim.process.send_signal(signal.SIGKILL)
            victim.process.wait()
            count += 1
            victim.start()
        if again:
            ending.set()
        for talker in talkers:
            talker.join()
        for talker in talkers:
            if talker.failed is not None:
                raise talker.failed
        # What was acknowledged is what everybody reads now, through any replica.
        for replica in running:
            replica.wait()
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            for name, said in outcome.acknowledged.items():
                kept = client.get(f"/v1/sessions/{name}/turns", params={"limit": 1000}).json()["data"]
                assert [str(turn["reply"]["content"]) for turn in kept] == [reply for _, reply in said], name
    return outcome, count


def check(outcome: Outcome) -> None:
    for name, replies in undisturbed(outcome.acknowledged).items():
        assert [reply for _, reply in outcome.acknowledged[name]] == replies, name


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [300])
def test_replicas_that_are_killed_lose_no_acknowledged_turn(
    postgres: PostgresServer, tmp_path: Path, seconds: float
) -> None:
    """4 replicas, 64 conversations, one kill -9 every 5 s for 5 minutes."""
    outcome, killed = kills(
        postgres, tmp_path, replicas=4, conversations=64, again=True, seconds=seconds, every=5
    )
    turns = sum(map(len, outcome.acknowledged.values()))
    print(
        f"{killed} kills, {turns} acknowledged turns of {len(outcome.acknowledged)} conversations, "
        f"longest wait {outcome.longest:.1f} s, {dict(outcome.seen)}"
    )
    assert killed > seconds / 20
    check(outcome)


def test_one_replica_of_two_is_killed_under_load(postgres: PostgresServer, tmp_path: Path) -> None:
    outcome, killed = kills(
        postgres, tmp_path, replicas=2, conversations=4, again=False, seconds=1, every=0.5
    )
    assert killed
    check(outcome)
