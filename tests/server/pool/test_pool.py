"""Models of one pool: loaded on request, let go when idle or to make room, and never under anybody's feet."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.backend import BlockStorage
from perdure.engine_config import EngineConfig
from perdure.errors import InvalidInputError, ModelNotFoundError, PerdureError, StoreLockedError
from perdure.restart_policy import RestartPolicy
from perdure.server.pool import ModelPool, ModelSpec, PooledModel

SWIFT = RestartPolicy(backoff=0.01, backoff_limit=0.05, grace=10.0)
ONE = 3 << 20
"""Bytes of which only one model's 2 MiB can be there at once."""


def spec(name: str, kind: str = "full", **more: Any) -> ModelSpec:
    return ModelSpec(
        name=name,
        source=f"ext.workers.engines:{kind}",
        config=EngineConfig(n_ctx=512, slots=2),
        **{"memory": 2 << 20, **more},
    )


@contextmanager
def opened(*specs: ModelSpec, store: Path | None = None, **settings: Any) -> Iterator[ModelPool]:
    storage = BlockStorage(folder=store)
    with closing(ModelPool.open(specs, storage=storage, restart_policy=SWIFT, **settings)) as pool:
        yield pool


def say(pool: ModelPool, model: PooledModel, session: str, text: str) -> Any:
    """A turn as a server has it: with a lease."""

    async def turn() -> Any:
        await pool.acquire(model)
        try:
            return await asyncio.to_thread(
                lambda: model.runtime.session(session).say(text, max_tokens=8, temperature=0)
            )
        finally:
            pool.release(model)

    return asyncio.run(turn())


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        os.sched_yield()


def test_a_model_is_loaded_when_it_is_asked_for_and_not_before() -> None:
    with opened(spec("a"), spec("b", "hybrid")) as pool:
        a, b = pool.models.values()
        assert (a.loading, b.loading) == ("unloaded", "unloaded")
        assert a.facts().n_ctx == 512
        say(pool, b, "s", "hello")
        assert (a.loading, b.loading) == ("unloaded", "ready")
        assert (a.loads, b.loads) == (0, 1)


def test_memory_for_one_has_one_loaded_and_no_conversation_reads_again(tmp_path: Path) -> None:
    """Two models and memory for one: whatever was said before is read from the store after each switch."""
    with opened(spec("a"), spec("b", "hybrid"), store=tmp_path, memory=ONE) as pool:
        known: dict[str, int] = {}
        for number in range(4):
            for model in pool.models.values():
                session = model.runtime.session(f"with {model.name}")
                reply = say(pool, model, f"with {model.name}", f"message {number}")
                assert reply.kept
                before = known.get(model.name, 0)
                assert reply.usage.cached_tokens >= before - 1, reply.reuse
                known[model.name] = session.token_count
                assert sum(each.resident for each in pool.models.values()) == 1
        assert [model.loads for model in pool.models.values()] == [4, 4]


def test_state_outlasts_the_pool_and_a_session_may_change_its_model(tmp_path: Path) -> None:
    with opened(spec("a"), spec("b", "sliding"), store=tmp_path) as pool:
        a, b = pool.models.values()
        say(pool, a, "s", "first")
        changed = say(pool, b, "s", "second")
        assert changed.usage.cached_tokens == 0
        assert [turn.text for turn in b.runtime.session("s").history()][:1]
    with opened(spec("a"), spec("b", "sliding"), store=tmp_path) as pool:
        b = pool.models["b"]
        session = b.runtime.session("s")
        assert len(session.history()) == 2
        tokens = session.token_count
        assert say(pool, b, "s", "third").usage.cached_tokens >= tokens - 1


def test_a_keep_alive_lets_an_idle_model_go_and_it_comes_back(tmp_path: Path) -> None:
    with opened(spec("a"), store=tmp_path, keep_alive=0.0) as pool:
        a = pool.default
        say(pool, a, "s", "first")
        until(lambda: not a.resident)
        assert a.runtime.backend.health().state in ("unloading", "unloaded")
        tokens = a.runtime.session("s").token_count
        pool.keep(a, -1.0)
        assert say(pool, a, "s", "second").usage.cached_tokens >= tokens - 1
        assert a.resident
        assert a.loads == 2
        assert a.runtime.backend.health().restarts == 0


def test_a_pinned_model_stays_and_one_that_never_fits_is_refused() -> None:
    with opened(spec("a", pinned=True), spec("b", "hybrid"), spec("c", "sliding"), memory=5 << 20) as pool:
        a, b, c = pool.models.values()
        until(lambda: a.is_ready)
        for model in (b, c, b):
            say(pool, model, "s" + model.name, "hello")
            assert a.is_ready
        assert (a.loads, b.loads, c.loads) == (1, 2, 1)
    with pytest.raises(InvalidInputError, match="GiB"):
        ModelPool.open([spec("a", pinned=True), spec("b", "hybrid")], memory=ONE)


def test_unloading_waits_for_those_who_use_it() -> None:
    async def scenario(pool: ModelPool, model: PooledModel) -> None:
        await pool.acquire(model)
        letting_go = asyncio.ensure_future(pool.unload(model))
        await asyncio.sleep(0)
        newcomer = asyncio.ensure_future(pool.acquire(model))
        done, _ = await asyncio.wait((letting_go, newcomer), timeout=0.2)
        assert not done
        assert model.is_ready
        pool.release(model)
        assert await letting_go
        # Who came meanwhile has it loaded again.
        await newcomer
        pool.release(model)
        assert model.loads == 2

    with opened(spec("a")) as pool:
        asyncio.run(scenario(pool, pool.default))


def test_a_model_in_use_for_long_stays_and_those_who_wait_for_it_are_served_y2() -> None:
    """Y2: an unload beside a long reply had everybody else wait until that was over."""

    async def scenario(pool: ModelPool, model: PooledModel) -> None:
        await pool.acquire(model)
        letting_go = asyncio.ensure_future(pool.unload(model))
        await asyncio.sleep(0)
        assert model.draining
        newcomer = asyncio.ensure_future(pool.acquire(model))
        # The first one is never released: only the end of the unload lets the second one in.
        await asyncio.wait_for(newcomer, 60)
        assert not await letting_go
        assert (model.loads, model.leases, model.loading) == (1, 2, "ready")

    with opened(spec("a")) as pool:
        asyncio.run(scenario(pool, pool.default))


def test_a_pinned_model_is_not_unloaded_y9() -> None:
    with opened(spec("a", pinned=True)) as pool:
        a = pool.default
        until(lambda: a.is_ready)
        pool.keep(a, 0.0)
        with pytest.raises(InvalidInputError, match="pinned"):
            asyncio.run(pool.unload(a))
        assert a.expires_in is None
        assert say(pool, a, "s", "hello").text
        assert a.loads == 1


@pytest.mark.parametrize(
    ("before", "asked", "after"),
    [(60.0, 0.0, 60.0), (60.0, 90.0, 90.0), (60.0, -1.0, -1.0), (-1.0, 60.0, -1.0), (-1.0, 0.0, -1.0)],
)
def test_one_that_may_only_lengthen_shortens_nothing_y9(before: float, asked: float, after: float) -> None:
    with opened(spec("a", keep_alive=before)) as pool:
        pool.keep(pool.default, asked, only_longer=True)
        assert pool.default.keep_alive == after
        pool.keep(pool.default, asked)
        assert pool.default.keep_alive == asked


def test_two_copies_of_a_model_are_refused_where_state_is_stored_y10(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """Y10: their state has one place in the store, so the second one was 503 for ever."""
    copied = tmp_path / "copied.gguf"
    shutil.copy(zoo_path("llama"), copied)
    for first, second in ((str(zoo_path("llama")), str(copied)), ("ext.workers.engines:full",) * 2):
        specs = [
            ModelSpec(
                name=name,
                source=source,
                config=EngineConfig(n_ctx=512, slots=1, threads=1),
                memory=2 << 20,
            )
            for name, source in (("a", first), ("b", second))
        ]
        with pytest.raises(InvalidInputError, match=r"models a and b are the same .* --alias b=a"):
            ModelPool.open(specs, storage=BlockStorage(folder=tmp_path / "store"))
        with opened(*specs) as pool:
            for model in pool.models.values():
                assert say(pool, model, "s" + model.name, "hello").tokens


def test_one_who_gives_up_leaves_nothing_behind() -> None:
    async def scenario(pool: ModelPool, model: PooledModel) -> None:
        waiting = [asyncio.ensure_future(pool.acquire(model)) for _ in range(8)]
        await asyncio.sleep(0)
        for each in waiting[::2]:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert model.leases == 4
        for _ in range(4):
            pool.release(model)

    with opened(spec("a")) as pool:
        asyncio.run(scenario(pool, pool.default))
        assert pool.default.leases == 0


def test_a_model_that_cannot_be_loaded_fails_its_requests_alone() -> None:
    with opened(spec("a"), spec("broken", "stillborn")) as pool:
        a, broken = pool.models.values()
        with pytest.raises(PerdureError):
            say(pool, broken, "s", "hello")
        assert broken.error is not None
        assert not broken.resident
        assert say(pool, a, "t", "hello").text
        with pytest.raises(PerdureError):
            say(pool, broken, "s", "hello")


def test_killing_one_worker_fails_no_request_to_another(tmp_path: Path) -> None:
    with opened(spec("a"), spec("b", "hybrid"), store=tmp_path) as pool:
        a, b = pool.models.values()
        say(pool, a, "a", "hello")
        say(pool, b, "b", "hello")
        stopped, failed = threading.Event(), []

        def talk() -> None:
            number = 0
            while not stopped.is_set():
                number += 1
                try:
                    assert say(pool, b, f"b{number}", f"message {number}").kept
                except Exception as error:
                    failed.append(error)

        thread = threading.Thread(target=talk)
        thread.start()
        try:
            for number in range(2):
                pid = a.runtime.backend.health().pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                assert say(pool, a, "a", f"again {number}").kept
        finally:
            stopped.set()
            thread.join()
        assert not failed
        assert b.loads == 1


def test_a_store_has_one_pool(tmp_path: Path) -> None:
    with opened(spec("a"), store=tmp_path), pytest.raises(StoreLockedError):
        ModelPool.open([spec("a")], storage=BlockStorage(folder=tmp_path))


def test_another_program_of_the_store_uses_the_first_model(tmp_path: Path) -> None:
    with opened(spec("a"), spec("b", "hybrid"), store=tmp_path) as pool:
        say(pool, pool.models["b"], "s", "hello")
        with perdure.open(store=tmp_path) as other:
            reply = other.session("s").say("and on", max_tokens=8, temperature=0)
            assert reply.kept
        a = pool.models["a"]
        assert a.is_ready
        assert len(a.runtime.session("s").history()) == 2


def test_a_model_is_added_and_removed_beside_those_that_are_used(tmp_path: Path) -> None:
    with opened(spec("a"), store=tmp_path, memory=8 << 20) as pool:
        a = pool.default
        assert say(pool, a, "a", "hello").kept
        b = pool.add(spec("b", "hybrid"))
        assert pool.add(spec("again", "hybrid")) is b, "a copy is the one that is there"
        with pytest.raises(InvalidInputError, match="there is a model b already"):
            pool.add(spec("b", "sliding"))
        assert say(pool, b, "b", "hello").kept
        tokens = b.runtime.session("b").token_count
        asyncio.run(pool.acquire(b))
        assert not pool.remove(b), "somebody uses it"
        pool.release(b)
        until(lambda: pool.remove(b))
        assert list(pool.models) == ["a"]
        with pytest.raises(ModelNotFoundError):
            pool.try_acquire(b)
        assert not pool.remove(a), "the first one is meant where nobody names one"
        back = pool.add(spec("b", "hybrid"))
        assert say(pool, back, "b", "and on").usage.cached_tokens >= tokens - 1
        assert say(pool, a, "a", "and on").kept
