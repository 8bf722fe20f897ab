"""Heads of known clients' prompts: remembered over a restart, and read while nobody is served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import perdure
from decode.observed import Turnstile, open_toy
from inside import inside
from perdure import Runtime
from perdure.cache.tiers.codec import BEGINNINGS
from perdure.cli.app import app
from perdure.ext.agents.prompt_heads import PromptHeads
from perdure.memory import FullAttention, Hybrid, MemorySpec, Recurrent, SlidingWindow
from perdure.testing.toy import ToyModel
from server.live_server import PATIENCE, LiveServer, live_server

SYSTEM = "You are an agent with a long system prompt. " * 20
DAY = 86_400.0


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def used(known: PromptHeads, about: str, length: int, *, times: int = 4, namespace: str = "") -> None:
    for _ in range(times):
        known.use(about, lambda: [len(about)] * length, namespace=namespace, adapters=None)


def lengths(known: PromptHeads) -> list[int]:
    return [len(each.tokens) for each in known.by_value()]


def test_the_longest_that_was_used_lately_has_the_most_value(tmp_path: Path) -> None:
    clock = Clock()
    known = PromptHeads(tmp_path, "ab" * 32, clock=clock)
    used(known, "long, three days ago", 800)
    clock.now += 3 * DAY
    used(known, "short", 200)
    used(known, "once", 600, times=1)
    assert lengths(known) == [200, 600, 800]
    used(known, "long, three days ago", 800)
    assert lengths(known) == [800, 200, 600]
    known.save()
    assert lengths(PromptHeads(tmp_path, "ab" * 32, clock=clock)) == [800, 200, 600]
    assert lengths(PromptHeads(tmp_path, "cd" * 32, clock=clock)) == []


def test_what_is_remembered_is_bounded(tmp_path: Path) -> None:
    clock = Clock()
    known = PromptHeads(tmp_path, "ab" * 32, clock=clock)
    used(known, "the long one", 300_000)
    for number in range(80):
        clock.now += 0.01
        used(known, f"number {number}", 8_000, times=1)
    assert lengths(known)[0] == 300_000
    assert len(lengths(known)) <= 32
    assert sum(lengths(known)) <= 1 << 19
    used(known, "the longest", 600_000)
    assert sum(lengths(known)) <= 1 << 19


def test_new_heads_are_written_seldom(tmp_path: Path) -> None:
    """A client whose system prompt never comes again does not have the disk written at every request."""
    clock = Clock()
    known = PromptHeads(tmp_path, "ab" * 32, clock=clock)
    file = tmp_path / BEGINNINGS / ("ab" * 8 + ".json")
    used(known, "first", 20, times=1)
    written = file.stat().st_mtime_ns, file.read_bytes()
    for number in range(20):
        clock.now += 0.2
        used(known, f"number {number}", 20, times=1)
    assert (file.stat().st_mtime_ns, file.read_bytes()) == written
    clock.now += 5
    used(known, "last", 20, times=1)
    assert len(json.loads(file.read_bytes())["beginnings"]) == 22


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b'{"version": 1}',
        b'{"version": 2, "beginnings": 3}',
        b'{"version": 1, "beginnings": [{"key": "a"}]}',
        b'{"version": 1, "beginnings": [{"key": "a", "namespace": "", "adapters": 3, "tokens": "AAAA", '
        b'"used": 1, "uses": 1}]}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_damaged_file_costs_what_was_remembered_and_no_more(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / BEGINNINGS).mkdir()
    (tmp_path / BEGINNINGS / ("ab" * 8 + ".json")).write_bytes(damage)
    known = PromptHeads(tmp_path, "ab" * 32)
    assert lengths(known) == []
    used(known, "new", 20)
    assert lengths(PromptHeads(tmp_path, "ab" * 32)) == [20]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / BEGINNINGS).write_text("a file")
    known = PromptHeads(tmp_path, "ab" * 32)
    used(known, "new", 20)
    assert lengths(known) == [20]


def test_what_was_cleared_does_not_come_back(tmp_path: Path) -> None:
    clock = Clock()
    known = PromptHeads(tmp_path, "ab" * 32, clock=clock)
    used(known, "of one", 20, namespace="one")
    used(known, "of another", 30, namespace="another")
    known.clear("one")
    assert lengths(known) == [30]
    # By the command, while a server runs.
    shutil.rmtree(tmp_path / BEGINNINGS)
    clock.now += 100
    used(known, "new", 40)
    assert lengths(known) == [40]
    known.clear()
    assert lengths(PromptHeads(tmp_path, "ab" * 32)) == []


# After a restart.


@contextmanager
def serving(runtime: Runtime, **settings: Any) -> Iterator[tuple[LiveServer, httpx.Client]]:
    """A server whose warming is over."""
    with live_server(runtime, **settings) as server, server.client() as client:
        client.get("/health").raise_for_status()
        for thread in server.state.models.warming.values():
            thread.join(PATIENCE)
            assert not thread.is_alive()
        yield server, client


def asked(client: httpx.Client, text: str, system: str = SYSTEM) -> dict[str, Any]:
    body = {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": text}],
        "max_tokens": 6,
        "temperature": 0,
    }
    answer = client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def lived(runtime: Runtime, **settings: Any) -> None:
    """A server's life: two conversations of a client, and what they leave."""
    with serving(runtime, warm=4096, **settings) as (_, client):
        asked(client, "What is the time?")
        asked(client, "And where are we?")
        runtime.chat_format.prefetcher.wait()


def count(client: httpx.Client, source: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f'perdure_warmed_tokens_total{{source="{source}"}}')]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


def forget_blocks(store: Path) -> None:
    for path in store.iterdir():
        if path.name == "blocks" or path.name.startswith("index.sqlite"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("kind", [FullAttention, SlidingWindow, Recurrent, Hybrid])
@pytest.mark.parametrize("blocks", ["kept", "gone"])
def test_a_known_client_finds_its_beginning_in_memory(
    kind: type[MemorySpec], blocks: str, tmp_path: Path
) -> None:
    """A new conversation of it computes its own words, and nothing is read from the disk for it; the reply
    has the tokens that it has without."""
    settings: dict[str, Any] = {"n_ctx": 2048, "slots": 2, "store": tmp_path}
    with perdure.open(ToyModel(kind), **settings) as rt:
        lived(rt)
    if blocks == "gone":
        forget_blocks(tmp_path)
    with perdure.open(ToyModel(kind), **settings) as rt, serving(rt, warm=4096) as (_, client):
        warm = asked(client, "Say who you are.")
        woken, computed = count(client, "woken"), count(client, "computed")
    reuse = warm["perdure"]["reuse"]
    assert reuse["tiers"].get("disk", 0) == 0
    assert reuse["computed"] < 60
    assert (computed > 500) if blocks == "gone" else (woken > 500)
    with perdure.open(ToyModel(kind), n_ctx=2048, slots=2) as rt, serving(rt) as (_, client):
        assert asked(client, "Say who you are.")["choices"] == warm["choices"]


def test_with_a_budget_of_none_nothing_is_read_or_remembered(tmp_path: Path) -> None:
    with open_toy(n_ctx=2048, slots=2, store=tmp_path) as rt:
        lived(rt)
    with open_toy(n_ctx=2048, slots=2, store=tmp_path) as rt, serving(rt, warm=0) as (_, client):
        assert inside(rt).slot_cache.computed == 0
        asked(client, "Hi", "Another system prompt. " * 9)
        rt.chat_format.prefetcher.wait()
        assert count(client, "woken") == count(client, "computed") == 0
        assert len(PromptHeads(tmp_path, rt.model.digest).by_value()) == 1


def test_the_budget_bounds_what_is_computed(tmp_path: Path) -> None:
    with open_toy(n_ctx=2048, slots=2, store=tmp_path) as rt:
        lived(rt)
    forget_blocks(tmp_path)
    with open_toy(n_ctx=2048, slots=2, store=tmp_path) as rt, serving(rt, warm=100) as (_, client):
        assert 90 <= count(client, "computed") <= 101
        reuse = asked(client, "Say who you are.")["perdure"]["reuse"]
        assert reuse["tiers"]["slot"] >= 90


def test_a_request_does_not_wait_for_it(tmp_path: Path) -> None:
    """The step in flight ends, then the request is served, and then the rest is read."""
    with open_toy(n_ctx=2048, slots=1, store=tmp_path) as rt:
        lived(rt)
    forget_blocks(tmp_path)
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=2048, slots=1, n_batch=128, store=tmp_path) as rt:
        known = PromptHeads(tmp_path, rt.model.digest)
        with live_server(rt, warm=4096) as server:
            gate.pass_through(100)
            assert rt.load == (0, 0)
            job = rt.submit([1, 2, 3], max_tokens=2, temperature=0, ignore_eos=True)
            gate.admit(28 + 3 + 1)
            assert len(job.reply().tokens) == 2
            [warming] = server.state.models.warming.values()
            assert warming.is_alive()
            gate.open()
            warming.join(PATIENCE)
            held = rt.cache.held(known.by_value()[0].tokens)
            assert max(each.tokens for each in held.values()) > 500


@pytest.mark.extension("upkeep")
def test_a_key_forgets_its_own_and_the_command_all(tmp_path: Path) -> None:
    with open_toy(n_ctx=2048, slots=2, store=tmp_path) as rt:
        with serving(rt, warm=4096) as (_, client):
            asked(client, "Hi")
            rt.chat_format.prefetcher.wait()
            assert len(PromptHeads(tmp_path, rt.model.digest).by_value()) == 1
            client.delete("/v1/cache").raise_for_status()
            assert PromptHeads(tmp_path, rt.model.digest).by_value() == []
        lived(rt)
        digest = rt.model.digest
    assert PromptHeads(tmp_path, digest).by_value()
    answered = CliRunner().invoke(app, ["cache", "clear", "--all", "--yes", "--store", str(tmp_path)])
    assert answered.exit_code == 0, answered.output
    assert PromptHeads(tmp_path, digest).by_value() == []


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_a_known_client_finds_its_beginning_on_llama_cpp(
    name: str, zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"n_ctx": 1024, "slots": 2, "exact": True, "threads": 1, "template": "chatml"}
    with perdure.open(zoo_path(name), store=tmp_path, **settings) as rt:
        lived(rt)
    opened = perdure.open(zoo_path(name), store=tmp_path, **settings)
    with opened as rt, serving(rt, warm=4096) as (_, client):
        warm = asked(client, "Say who you are.")
    with perdure.open(zoo_path(name), **settings) as rt, serving(rt) as (_, client):
        cold = asked(client, "Say who you are.")
    assert warm["choices"] == cold["choices"]
    assert warm["perdure"]["reuse"]["computed"] < cold["perdure"]["reuse"]["computed"] // 2
    assert warm["perdure"]["reuse"]["tiers"].get("disk", 0) == 0
