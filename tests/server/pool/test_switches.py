"""Models that take each other's place: whatever the order, no conversation loses a token."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from perdure.backend import BlockStorage
from perdure.engine_config import EngineConfig
from perdure.restart_policy import RestartPolicy
from perdure.server.pool import ModelPool, ModelSpec, PooledModel

SWIFT = RestartPolicy(backoff=0.01, backoff_limit=0.05, grace=10.0)
ONE, NEED = 3 << 20, 2 << 20
_TURNS = 12
"""Of a session, before its context is full."""


def said(pool: ModelPool, model: PooledModel, session: str, text: str) -> Any:
    """A turn as a server has it: with a lease. Its reply is of letters: bytes that are no text would be
    read again with the next turn, whichever model is loaded."""

    async def turn() -> Any:
        await pool.acquire(model)
        try:
            return await asyncio.to_thread(
                lambda: model.runtime.session(session).say(
                    text, max_tokens=16, temperature=0, regex="[a-z]{3,6}"
                )
            )
        finally:
            pool.release(model)

    return asyncio.run(turn())


def check_turn(pool: ModelPool, model: PooledModel, session: str, text: str) -> None:
    """Say something, and see that all that was said before was there."""
    before = model.runtime.session(session).token_count
    reply = said(pool, model, session, text)
    assert reply.kept, reply.not_kept
    assert reply.usage.cached_tokens >= before - 1, (model.name, session, before, reply.reuse)


@dataclass
class Talk:
    """Clients that go on with their conversations until there were enough switches."""

    pool: ModelPool
    switches: int
    failed: list[BaseException] = field(default_factory=list)
    turns: int = 0

    @property
    def done(self) -> bool:
        return bool(self.failed) or sum(model.loads for model in self.pool.models.values()) > self.switches

    def run(self, model: PooledModel, client: int) -> None:
        number = 0
        try:
            while not self.done:
                name = f"{model.name}, client {client}, {number // _TURNS}"
                check_turn(self.pool, model, name, f"message {number}")
                number += 1
                self.turns += 1
        except BaseException as error:
            self.failed.append(error)


def talk(specs: list[ModelSpec], store: Path, switches: int) -> None:
    storage = BlockStorage(folder=store)
    with closing(ModelPool.open(specs, storage=storage, memory=ONE, restart_policy=SWIFT)) as pool:
        talking = Talk(pool, switches)
        threads = [
            threading.Thread(target=talking.run, args=(model, client))
            for model in pool.models.values()
            for client in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if talking.failed:
            raise talking.failed[0]
        assert talking.turns >= switches
        assert all(model.leases == 0 for model in pool.models.values())


def specs_of(sources: dict[str, str]) -> list[ModelSpec]:
    return [
        ModelSpec(name=name, source=source, config=EngineConfig(n_ctx=1024, slots=2, threads=1), memory=NEED)
        for name, source in sources.items()
    ]


def test_a_few_switches_under_load(zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    """On llama.cpp: full attention and a window take turns."""
    talk(specs_of({"a": str(zoo_path("llama")), "b": str(zoo_path("gemma3"))}), tmp_path, 3)


@pytest.mark.soak
@pytest.mark.parametrize("other", ["gemma3", "mamba", "jamba"])
def test_fifty_switches_under_load(zoo_path: Callable[[str], Path], tmp_path: Path, other: str) -> None:
    talk(specs_of({"a": str(zoo_path("llama")), "b": str(zoo_path(other))}), tmp_path, 50)


class Switching(RuleBasedStateMachine):
    """Loads, unloads, kills and turns in any order, with memory for one of two models."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        sources = {"a": "ext.workers.engines:full", "b": "ext.workers.engines:hybrid"}
        self.pool = ModelPool.open(
            specs_of(sources),
            storage=BlockStorage(folder=Path(self._folder.name)),
            memory=ONE,
            restart_policy=SWIFT,
        )
        self.turns: dict[str, int] = {}

    def teardown(self) -> None:
        self.pool.close()
        self._folder.cleanup()

    models = st.sampled_from(["a", "b"])

    @rule(model=models, session=st.integers(0, 2))
    def say(self, model: str, session: int) -> None:
        name = f"{model}{session}"
        number = self.turns[name] = self.turns.get(name, 0) + 1
        check_turn(self.pool, self.pool.models[model], f"{name}, {number // _TURNS}", f"message {number}")

    @rule(model=models)
    def load(self, model: str) -> None:
        found = self.pool.models[model]
        asyncio.run(self.pool.acquire(found))
        self.pool.release(found)
        assert found.resident

    @rule(model=models)
    def unload(self, model: str) -> None:
        asyncio.run(self.pool.unload(self.pool.models[model]))
        assert not self.pool.models[model].resident

    @rule(model=models, seconds=st.sampled_from([-1.0, 0.0]))
    def keep(self, model: str, seconds: float) -> None:
        self.pool.keep(self.pool.models[model], seconds)

    @rule(model=models, session=st.integers(0, 2))
    def kill(self, model: str, session: int) -> None:
        """Its state may not have been written: the turns are there all the same."""
        found = self.pool.models[model]
        pid = found.runtime.backend.health().pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        name = f"{model}{session}"
        number = self.turns[name] = self.turns.get(name, 0) + 1
        kept = found.runtime.session(f"{name}, {number // _TURNS}").turns
        assert said(self.pool, found, f"{name}, {number // _TURNS}", "after a death").kept
        assert found.runtime.session(f"{name}, {number // _TURNS}").turns == kept + 1
        # From here on everything is written again.
        for each in range(3):
            if self.turns.get(f"{model}{each}"):
                self.turns[f"{model}{each}"] += _TURNS

    @invariant()
    def fits(self) -> None:
        assert sum(model.resident for model in self.pool.models.values()) <= 1
        assert all(model.leases == 0 for model in self.pool.models.values())


def _run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Switching,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_order_of_loads_unloads_kills_and_turns() -> None:
    _run(1, 8)


@pytest.mark.soak
def test_any_order_for_long() -> None:
    _run(20, 50)
