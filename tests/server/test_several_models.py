"""Models that are loaded, unloaded, die, and take each other's place: nobody else notices (H10)."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

import perdure
from perdure import Runtime
from perdure.engine_config import EngineConfig
from perdure.ext.workers.remote import RemoteBackend
from perdure.restart_policy import RestartPolicy
from perdure.server.pool import ModelPool
from server.live_server import LiveServer, hello, live_server, opened
from server.pool.test_pool import say, spec

CHAT = "/v1/chat/completions"
OTHERS = ("gemma3", "mamba", "jamba")
SWIFT = RestartPolicy(backoff=0.01, backoff_limit=0.05, grace=10.0)
SETTINGS: dict[str, Any] = {"n_ctx": 512, "n_batch": 32, "threads": 1, "slots": 2, "exact": True}
"""In exact mode a reply is the same to the bit, whoever else is served."""
ZooPath = Callable[[str], Path]


def kill(rt: Runtime) -> None:
    assert isinstance(rt.backend, RemoteBackend)
    rt.model.tokenize("are you there?")
    pid = rt.backend.health().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def prompt(number: int) -> dict[str, Any]:
    return {**hello(max_tokens=12), "messages": [{"role": "user", "content": f"Tell me about {number}"}]}


def answer(client: httpx.Client, number: int) -> str:
    response = client.post(CHAT, json=prompt(number))
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


@dataclass
class Load:
    """Asks one server the same few questions until it is told to stop."""

    server: LiveServer
    wanted: list[str]
    asked: int = 0
    wrong: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self, start: int) -> None:
        with self.server.client() as client:
            at = start
            while not self.stopped.is_set() or at == start:
                response = client.post(CHAT, json=prompt(at % len(self.wanted)))
                told = response.json()["choices"][0]["message"] if response.status_code == 200 else None
                if told is None or told["content"] != self.wanted[at % len(self.wanted)]:
                    self.wrong.append(response.text)
                at += 1
            self.asked += at - start


@contextmanager
def under_load(server: LiveServer, wanted: list[str]) -> Iterator[Load]:
    load = Load(server, wanted)
    threads = [threading.Thread(target=load.run, args=(start,)) for start in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.stopped.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("isolated", [SWIFT, False], ids=["processes", "one-process"])
def test_models_that_come_go_and_die_disturb_no_request_to_another(
    zoo_path: ZooPath, tmp_path: Path, isolated: RestartPolicy | bool
) -> None:
    """H10, C10: those that are asked all the while answer each request, as they do alone, and live on."""
    with opened(zoo_path("llama"), **SETTINGS) as rt, live_server(rt) as alone, alone.client() as client:
        wanted = [answer(client, number) for number in range(4)]
    dice = random.Random(3)
    with (
        opened(zoo_path("llama"), **SETTINGS, isolated=isolated) as rt,
        live_server(rt) as server,
        under_load(server, wanted) as load,
    ):
        for number in range(4):
            store = tmp_path / str(dice.randrange(2))
            with (
                opened(zoo_path(dice.choice(OTHERS)), store=store, **SETTINGS, isolated=isolated) as other,
                live_server(other) as beside,
                beside.client() as client,
            ):
                job = other.submit("the man", max_tokens=400, ignore_eos=True)
                next(iter(job))
                if isolated and number % 2:
                    kill(other)
                answer(client, number)
                # Every second one is unloaded in the middle of a reply.
                if dice.random() < 0.5:
                    job.cancel()
        health = rt.backend.health() if isinstance(rt.backend, RemoteBackend) else None
    assert not load.wrong
    assert load.asked >= 2
    assert health is None or health.restarts == 0


class Talker(threading.Thread):
    """Takes turns in a session until the server is gone, and notes those that were acknowledged."""

    def __init__(self, server: LiveServer, name: str, acknowledged: list[str]) -> None:
        super().__init__(name=name)
        self.progress = threading.Semaphore(0)
        self.strange: list[str] = []
        self._server = server
        self._acknowledged = acknowledged

    def run(self) -> None:
        path = f"/v1/sessions/{self.name}/turns"
        with self._server.client() as client:
            client.post("/v1/sessions", json={"name": self.name})
            number = len(self._acknowledged)
            while True:
                text = f"{self.name} {number}"
                body = {"message": text, "max_tokens": 5, "temperature": 0}
                try:
                    told = client.post(path, json={**body, "perdure": {"overflow": "drop_oldest"}})
                except httpx.TransportError:
                    return
                number += 1
                if told.status_code == 200 and told.json()["perdure"]["kept"]:
                    self._acknowledged.append(text)
                elif told.status_code != 503:
                    self.strange.append(told.text)
                self.progress.release()


@pytest.mark.extension("upkeep")
def test_a_store_changes_its_model_at_random_under_load_and_no_conversation_loses_anything(
    zoo_path: ZooPath, tmp_path: Path
) -> None:
    """H10, S1, W≡C: every acknowledged turn is there, in its order; what is computed anew after the last
    switch is what kept state gives; and each model finds state of its own again."""
    from perdure.ext.upkeep.backup import back_up, restore

    store = tmp_path / "store"
    names = ["one", "two"]
    acknowledged: dict[str, list[str]] = {name: [] for name in names}
    dice = random.Random(5)
    models = ["llama", "gemma3", "llama"]
    for model in models:
        with (
            opened(zoo_path(model), store=store, isolated=SWIFT, **SETTINGS) as rt,
            live_server(rt) as server,
        ):
            talkers = [Talker(server, name, acknowledged[name]) for name in names]
            for talker in talkers:
                talker.start()
            for _ in range(dice.randrange(1, 4)):
                assert dice.choice(talkers).progress.acquire(timeout=60)
            if dice.random() < 0.4:
                kill(rt)
            # In order: what is being answered is finished and kept.
            server.http_server.stop()
            for talker in talkers:
                talker.join(60)
                assert not talker.is_alive()
                assert not talker.strange
    assert all(acknowledged.values())
    back_up(store, tmp_path / "saved")
    restore(tmp_path / "saved", tmp_path / "cold")
    reused = dict.fromkeys(models, 0)
    for model in dict.fromkeys(models):
        for name in names:
            replies = []
            for folder in (store, tmp_path / "cold"):
                with perdure.open(zoo_path(model), store=folder, **SETTINGS) as rt:
                    session = rt.session(name, create=False)
                    said = [turn.messages[0].content for turn in session.history()]
                    assert [text for text in said if text in acknowledged[name]] == acknowledged[name]
                    assert len(set(said)) == len(said)
                    fork = session.fork(f"{name}-{model}")
                    replies.append(fork.say("And now?", max_tokens=8, temperature=0, overflow="drop_oldest"))
            warm, cold = replies
            assert cold.reuse.tiers.get("disk", 0) == 0
            assert (warm.text, warm.raw.tokens) == (cold.text, cold.raw.tokens)
            reused[model] += warm.reuse.reused
    assert all(reused.values()), reused


@pytest.mark.parametrize("isolated", [SWIFT, False], ids=["process", "in-process"])
def test_a_server_of_one_model_gets_a_second_one(tmp_path: Path, isolated: RestartPolicy | bool) -> None:
    source = "ext.workers.engines:full"
    with (
        perdure.open(source, n_ctx=512, slots=2, store=tmp_path, isolated=isolated) as rt,
        closing(ModelPool.of_runtime("a", rt, source=source, config=EngineConfig(n_ctx=512))) as pool,
    ):
        assert say(pool, pool.default, "a", "hello").kept
        b = pool.add(spec("b", "hybrid"))
        assert pool.room is not None
        for number in range(2):
            assert say(pool, b, "b", f"message {number}").kept
            assert say(pool, pool.default, "a", f"message {number}").kept
    with perdure.open("ext.workers.engines:hybrid", n_ctx=512, slots=2, store=tmp_path) as rt:
        assert [rt.session(name).turns for name in ("a", "b")] == [3, 2]
        assert rt.session("b").say("and on", max_tokens=4, temperature=0).usage.cached_tokens > 0
