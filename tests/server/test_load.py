"""Many clients of several keys at once, beside all that a server does besides: models are unloaded,
sessions are searched and exported, prompts are prefetched, a backup is made, and the engine is killed now and
then. Every word of every prompt is checked for where it comes from.

The server, the clients and who watches `/health` are processes of their own, so that the time that is
measured is the server's. PERDURE_LOAD_CLIENTS, PERDURE_LOAD_SECONDS and PERDURE_LOAD_HEALTH (the most
seconds for `/health`; not held to any without it) say how much.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from perdure.cli.runtime import session_folder
from perdure.server.core.keys import new_key
from server.live_server import PATIENCE, opened

CLIENTS = int(os.environ.get("PERDURE_LOAD_CLIENTS", "200"))
SECONDS = float(os.environ.get("PERDURE_LOAD_SECONDS", "300"))
HEALTH = float(os.environ.get("PERDURE_LOAD_HEALTH", "inf"))
KEYS = 20
PREFETCHED = 128
"""Tokens of next prompts."""
PROCESSES = max(1, min(8, (os.cpu_count() or 2) // 2, CLIENTS))
"""Of clients."""
TESTS = Path(__file__).parents[1]
BUSY = (200, 404, 409, 429, 500, 503, 504)


class Load:
    """What is asked of a server while clients talk to it."""

    def __init__(self, url: str, server: psutil.Process, operator: str) -> None:
        self._url = url
        self._operator = operator
        self._server = server
        self._ends = time.monotonic() + SECONDS
        self.counts: Counter[str] = Counter()
        self.errors: list[BaseException] = []

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self._ends

    def thread(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                while self.goes_on:
                    work()
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def client(self, secret: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {secret}"}
        return httpx.Client(base_url=self._url, headers=headers, timeout=5 * PATIENCE, trust_env=False)

    def ask(
        self, secret: str, path: str, allowed: tuple[int, ...] = (200,), **body: object
    ) -> Callable[[], None]:
        """The same request again and again."""

        def ask() -> None:
            with self.client(secret) as client:
                while self.goes_on:
                    answer = client.post(path, json=body) if body else client.get(path)
                    assert answer.status_code in allowed, (path, answer.text)
                    self.counts[path.partition("?")[0]] += 1

        return ask

    def kill(self) -> None:
        """End the engine's process, which the server starts again: once it is there and had some time."""
        with httpx.Client(base_url=self._url, timeout=PATIENCE, trust_env=False) as client:
            while self.goes_on and client.get("/ready").status_code != 200:
                time.sleep(0.1)
        time.sleep(min(15.0, SECONDS / 2))
        for child in self._server.children():
            if "perdure.ext.workers.child" in child.cmdline():
                child.kill()
                self.counts["kills"] += 1

    def unload(self, secret: str) -> Callable[[], None]:
        """Have a second model loaded by a request, and both let go: the one that is in use stays."""

        def unload() -> None:
            body = {"model": "second", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            with self.client(secret) as client, self.client(self._operator) as operator:
                while self.goes_on:
                    answer = client.post("/v1/chat/completions", json=body)
                    assert answer.status_code in BUSY, answer.text
                    for name in ("second", "first"):
                        answer = operator.post(f"/v1/models/{name}/unload", json={})
                        assert answer.status_code in (200, 409), answer.text
                        self.counts["unloads" if answer.status_code == 200 else "unloads refused"] += 1

        return unload

    def prefetch(self, secret: str) -> Callable[[], None]:
        """Have a message read ahead, and delete its session before or after that."""

        def prefetch() -> None:
            with self.client(secret) as client:
                while self.goes_on:
                    name = f"ahead-{self.counts['prefetches']}"
                    assert client.post("/v1/sessions", json={"name": name}).status_code == 201
                    answer = client.post(f"/v1/sessions/{name}/append", json={"message": f"{name} says this"})
                    assert answer.status_code in BUSY, answer.text
                    assert client.delete(f"/v1/sessions/{name}").status_code in BUSY
                    self.counts["prefetches"] += 1

        return prefetch


@pytest.mark.extension("upkeep")
@pytest.mark.soak
def test_many_clients_beside_unloads_searches_backups_exports_compactions_and_kills(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """Nothing that was acknowledged is lost, no word comes from another conversation, and `/health` answers
    at once."""
    from perdure.ext.upkeep.store import back_up

    model, store = zoo_path("llama"), tmp_path / "store"
    keys = [new_key(f"team-{number}") for number in range(KEYS)]
    operator, metrics = new_key("metrics")
    (tmp_path / "keys").write_text("".join(f"{key.line}\n" for _, key in [*keys, (operator, metrics)]))
    (tmp_path / "secrets").write_text("\n".join(secret for secret, _ in keys))
    first = keys[0][0]
    options = ["--store", store, "--ctx", 512, "--slots", 8, "--threads", 1, "--queue", 2 * CLIENTS]
    options += ["--keys", tmp_path / "keys", "--settle", PREFETCHED]
    options += ["--model", f"first={model}", "--model", f"second={zoo_path('gemma3')}"]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "perdure.cli", "serve", "--port", "0", *map(str, options)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"PERDURE_CHECK_PROMPTS": "1"},
        )
    try:
        assert server.stdout is not None
        url = next(line for line in server.stdout if line.startswith("address")).split()[1]
        # The address is told before the server answers.
        assert httpx.get(f"{url}/health", timeout=PATIENCE, trust_env=False).status_code == 200
        share = -(-CLIENTS // PROCESSES)
        clients = [
            subprocess.Popen(
                [sys.executable, "-m", "server.load_clients", url, *map(str, numbers), tmp_path / "secrets"],
                cwd=TESTS,
                stdout=subprocess.PIPE,
                text=True,
            )
            for start in range(0, CLIENTS, share)
            for numbers in [(start, min(share, CLIENTS - start), SECONDS)]
        ]

        for each in clients:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"
        watch = subprocess.Popen(
            [sys.executable, "-m", "server.load_watch", url, str(SECONDS)],
            cwd=TESTS,
            stdout=subprocess.PIPE,
            text=True,
        )
        load = Load(url, psutil.Process(server.pid), operator)

        def back_up_once() -> None:
            back_up(session_folder(store), tmp_path / "backup")
            (tmp_path / "backup").unlink()
            load.counts["backups"] += 1

        threads = [
            load.thread(work)
            for work in (
                load.kill,
                load.unload(first),
                load.prefetch(first),
                back_up_once,
                load.ask(first, "/v1/sessions?text=says"),
                load.ask(first, "/v1/sessions/client-0/export?state=false", BUSY),
                load.ask(first, "/v1/responses/compact", BUSY, input="The sea is wide."),
            )
        ]
        acknowledged: dict[str, list[str]] = {}
        for each in clients:
            out, _ = each.communicate(timeout=SECONDS + 10 * PATIENCE)
            assert each.returncode == 0
            found = json.loads(out)
            acknowledged |= found["acknowledged"]
            load.counts.update(found["counts"])
        watched, _ = watch.communicate(timeout=SECONDS + 10 * PATIENCE)
        assert watch.returncode == 0
        for thread in threads:
            thread.join()
        assert not load.errors, load.errors[0]
        assert server.poll() is None
    finally:
        server.kill()
        server.communicate()
    health = sorted(json.loads(watched))
    print(
        f"{CLIENTS} clients in {PROCESSES} processes for {SECONDS:g} s: {dict(load.counts)}; /health took "
        f"{health[len(health) // 2]:.3f} s in the middle, {health[-1 - len(health) // 100]:.3f} s at the "
        f"99th of 100 and {health[-1]:.3f} s at most, of {len(health)}"
    )
    # Also after this: the server was ended by a kill.
    with opened(model, store=store, threads=1) as rt:
        for name, texts in acknowledged.items():
            namespace = keys[int(name.rpartition("-")[2]) % KEYS][1].namespace
            history = rt.session(name, namespace=namespace).history()
            said = {str(each.content) for turn in history for each in turn.messages if each.role == "user"}
            assert said >= set(texts)
            assert all(text.startswith(f"{name} says ") for text in said)
    assert "ProvenanceError" not in (tmp_path / "server.log").read_text()
    for what in ("turns", "kills", "backups", "unloads", "/v1/sessions", "prefetches"):
        assert load.counts[what], what
    assert health[-1] < HEALTH
