"""Replicas under load that are killed, drained and started again, behind HAProxy and under Ray.

Clients keep count of what was acknowledged to them. At the end that is compared with what everybody reads,
and with the replies of one process that nobody disturbed.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

import perdure
from ext.cluster.servers import Server, free_port, program
from perdure.testing.toy import ToyModel

CONFIG = Path(__file__).parents[3] / "deploy" / "cluster" / "haproxy.cfg"
REPLICA = Path(__file__).with_name("replica.py")
TURNS = 6
"""Of a conversation."""
SETTINGS = {"max_tokens": 8, "temperature": 0, "seed": 1}
HONEST = (409, 429, 502, 503, 504)
"""Answers besides 200 that tell a client to ask again."""


def soak_seconds(usual: float) -> float:
    return float(os.environ.get("PERDURE_SOAK_SECONDS", usual))


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
    waits: list[float] = field(default_factory=list)
    """Seconds between a message and its reply, with all that was tried in between, for each turn."""
    slowest: list[tuple[str, float]] = field(default_factory=list)
    """What was tried for the longest of them, and how long each took."""

    def waited(self, seconds: float, tried: list[tuple[str, float]]) -> None:
        if seconds >= max(self.waits, default=0.0):
            self.slowest = tried
        self.waits.append(seconds)

    def __str__(self) -> str:
        in_order = sorted(self.waits) or [0.0]
        median, most = in_order[len(in_order) // 2], in_order[int(0.99 * (len(in_order) - 1))]
        tried = Counter(what for what, _ in self.slowest)
        one = max(self.slowest, key=lambda each: each[1], default=("nothing", 0.0))
        return (
            f"{len(self.waits)} acknowledged turns of {len(self.acknowledged)} conversations, "
            f"{dict(self.seen)}; waits for one turn: median {median:.2f} s, 99 of 100 under {most:.1f} s, "
            f"longest {in_order[-1]:.1f} s ({dict(tried)}, the longest of them {one[0]} after {one[1]:.1f} s)"
        )


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
            began, tried = time.monotonic(), list[tuple[str, float]]()
            text = f"Message {len(self.said)} of {self.name}."
            self.said.append((text, self._say(client, text, tried)))
            self.outcome.waited(time.monotonic() - began, tried)
            self.ending.wait(0.05)

    def _say(self, client: httpx.Client, text: str, tried: list[tuple[str, float]]) -> str:
        """The reply, whatever it takes."""
        asked = {
            "model": "toy",
            "messages": [{"role": "user", "content": text}],
            "perdure": {"session": self.name},
            **SETTINGS,
        }
        # Sent again, it is the same message: whoever reads the first one late keeps no second turn.
        key = {"idempotency-key": text}
        while True:
            began = time.monotonic()
            try:
                answer = client.post("/v1/chat/completions", json=asked, headers=key)
                self._note(str(answer.status_code), began, tried)
                if answer.status_code == 200 and answer.json()["perdure"]["kept"]:
                    return str(answer.json()["choices"][0]["message"]["content"])
                assert answer.status_code in (200, *HONEST), f"{answer.status_code}: {answer.text}"
            except httpx.TransportError as error:
                self._note(type(error).__name__, began, tried)
            # Honest errors say that nothing was kept; a broken connection says nothing. So it is looked up.
            if (reply := self._kept(client, tried)) is not None:
                self.outcome.seen["kept, answer lost"] += 1
                return reply
            time.sleep(0.05)

    def _kept(self, client: httpx.Client, tried: list[tuple[str, float]]) -> str | None:
        while True:
            began, what = time.monotonic(), ""
            try:
                answer = client.get(f"/v1/sessions/{self.name}/turns", params={"limit": 1000})
                if answer.status_code == 404:
                    return None
                if answer.status_code == 200:
                    turns = answer.json()["data"]
                    assert len(turns) in (len(self.said), len(self.said) + 1), "an acknowledged turn is gone"
                    return str(turns[-1]["reply"]["content"]) if len(turns) > len(self.said) else None
                what = str(answer.status_code)
            except httpx.TransportError as error:
                what = type(error).__name__
            self._note(f"looked up: {what}", began, tried)
            time.sleep(0.05)

    def _note(self, what: str, began: float, tried: list[tuple[str, float]]) -> None:
        self.outcome.seen[what] += 1
        tried.append((what, time.monotonic() - began))


@contextmanager
def talking(
    url: str, outcome: Outcome, conversations: int, *, again: bool = True, prefix: str = "c"
) -> Iterator[Sequence[Talker]]:
    """Clients while the body runs; then each ends with its turn, or not `again` with its conversation."""
    ending = threading.Event()
    talkers = [Talker(url, f"{prefix}{number}", outcome, ending, again) for number in range(conversations)]
    for talker in talkers:
        talker.start()
    try:
        yield talkers
    finally:
        if again or sys.exc_info()[0] is not None:
            ending.set()
        for talker in talkers:
            talker.join()
    for talker in talkers:
        if talker.failed is not None:
            raise talker.failed


def under_kills(
    url: str,
    outcome: Outcome,
    kill: Callable[[], bool],
    *,
    conversations: int,
    seconds: float,
    every: float,
    again: bool = True,
) -> int:
    """Load while `kill` takes one replica away every few seconds; how often it did."""
    killed, began = 0, time.monotonic()
    with talking(url, outcome, conversations, again=again) as talkers:
        while time.monotonic() - began < seconds and any(talker.is_alive() for talker in talkers):
            time.sleep(every)
            killed += kill()
    return killed


def check(url: str, outcome: Outcome) -> None:
    """What was acknowledged is what everybody reads now, and what an undisturbed run says."""
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        for name, said in outcome.acknowledged.items():
            answer = client.get(f"/v1/sessions/{name}/turns", params={"limit": 1000})
            if answer.status_code == 404 and not said:
                continue
            kept = answer.json()["data"]
            assert [str(turn["reply"]["content"]) for turn in kept] == [reply for _, reply in said], name
    for name, replies in undisturbed(outcome.acknowledged).items():
        assert [reply for _, reply in outcome.acknowledged[name]] == replies, name


def undisturbed(conversations: dict[str, list[tuple[str, str]]]) -> dict[str, list[str]]:
    """The replies of one process that nobody kills, to the same messages."""
    replies: dict[str, list[str]] = {}
    with perdure.open(ToyModel(), n_ctx=1024, slots=4) as runtime:
        for name, said in conversations.items():
            session = runtime.session(name)
            replies[name] = [str(session.say(text, **SETTINGS).text) for text, _ in said]  # type: ignore[arg-type]
    return replies


@contextmanager
def replicas(store: str, folder: Path, count: int) -> Iterator[list[Replica]]:
    """Replicas with folders of their own and a shared one; `store` is the URL of the first, in `r0`."""
    running: list[Replica] = []
    try:
        for number in range(count):
            url = store.replace("%2Fr0", f"%2Fr{number}")
            place = f"file://{folder}/shared"
            running.append(Replica(url, free_port(), folder / f"{number}.log", place))
        for replica in running:
            replica.wait()
        yield running
    finally:
        for replica in running:
            replica.kill()


def haproxy_program() -> str:
    found = program("haproxy") or "/usr/sbin/haproxy"
    if not Path(found).exists():
        pytest.skip("HAProxy is not installed: apt-get install haproxy")
    return found


class Router(NamedTuple):
    server: Server
    url: str


@contextmanager
def haproxy(folder: Path, ports: Iterable[int]) -> Iterator[Router]:
    """HAProxy with the configuration of deploy/cluster, but for addresses."""
    found, port = haproxy_program(), free_port()
    servers = "\n".join(f"    server r{each} 127.0.0.1:{each}" for each in ports)
    text = CONFIG.read_text().replace("bind :8080", f"bind 127.0.0.1:{port}")
    text = re.sub(r" +server-template .*", lambda _: servers, text)
    (folder / "haproxy.cfg").write_text(text)
    # Fewer connections than there: other tests of this process may have lowered its limit of open files.
    server = Server(
        [found, "-db", "-n", "500", "-f", str(folder / "haproxy.cfg")], port, folder / "haproxy.log"
    )
    try:
        yield Router(server, f"http://127.0.0.1:{port}")
    finally:
        server.kill()


@contextmanager
def nginx(folder: Path, ports: Sequence[int]) -> Iterator[Router]:
    """nginx with the configuration of deploy/cluster, but for addresses."""
    found, port = program("nginx") or "/usr/sbin/nginx", free_port()
    if not Path(found).exists():
        pytest.skip("nginx is not installed: apt-get install nginx-light")
    text = (CONFIG.parent / "nginx.conf").read_text().replace("listen 8080", f"listen 127.0.0.1:{port}")
    for number, each in enumerate(ports, 1):
        text = text.replace(f"replica{number}:8080", f"127.0.0.1:{each}")
    (folder / "nginx.conf").write_text(text)
    # Its workers would be those of a user who may not write here.
    own = "daemon off; pid nginx.pid; error_log nginx.log;" + (" user root;" if os.geteuid() == 0 else "")
    command = [found, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", own]
    server = Server(command, port, folder / "nginx.out")
    try:
        yield Router(server, f"http://127.0.0.1:{port}")
    finally:
        server.kill()
