"""Replicas that come and go behind HAProxy: one that goes hands its sessions over, and nobody notices."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

import perdure
from ext.cluster.harness import SETTINGS, Outcome, Replica, check, haproxy, replicas, soak_seconds, talking
from ext.cluster.servers import PostgresServer, free_port
from perdure.chat.reply import ChatReply
from perdure.testing.toy import ToyModel


def say(port: int, session: str, text: str) -> httpx.Response:
    return httpx.post(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json={
            "model": "toy",
            "messages": [{"role": "user", "content": text}],
            "perdure": {"session": session},
            **SETTINGS,
        },
        trust_env=False,
        timeout=60,
    )


def test_a_replica_that_goes_hands_its_sessions_over(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it drains it answers, and says that it goes; then all its state is in the shared place, also of
    sessions that nobody put to sleep, and their leases are free."""
    monkeypatch.setenv("PERDURE_TEST_DRAIN", "2")
    place = f"file://{tmp_path}/shared"
    first = postgres.url(tmp_path / "r0")
    replica = Replica(first, free_port(), tmp_path / "log", place)
    try:
        replica.wait()
        said = {
            name: [
                say(replica.port, name, f"{name} {number}: long enough for a block or two of state.")
                for number in range(3)
            ]
            for name in ("a", "b", "c")
        }
        assert all(each.status_code == 200 for answers in said.values() for each in answers)
        replica.process.send_signal(signal.SIGTERM)
        while httpx.get(f"http://127.0.0.1:{replica.port}/ready", trust_env=False).status_code != 503:
            pass
        assert say(replica.port, "a", "One more.").status_code == 200
        assert replica.process.wait(60) == 0
    finally:
        replica.kill()
    tokens = {name: answers[-1].json()["usage"]["prompt_tokens"] for name, answers in said.items()}
    second = first.replace("%2Fr0", "%2Fr1")
    with perdure.open(ToyModel(), n_ctx=1024, slots=4, store=second, blocks=[place]) as runtime:
        tier = runtime.backend.slot_cache.tiers.lower[-1].tier  # type: ignore[attr-defined]
        tier.refresh()
        for name, count in tokens.items():
            session = runtime.session(name)
            assert session.turns == (4 if name == "a" else 3)
            reply = session.say("And now here.", max_tokens=4, temperature=0)
            assert reply.kept
            assert moved(reply) >= count, reply.reuse


def moved(reply: ChatReply) -> int:
    """Tokens whose state is there. Whether it is read goes by what was measured, and a toy computes fast."""
    passed_by = re.search(r"moving (\d+) tokens from elsewhere costs more", reply.reuse.why)
    return max(reply.reuse.reused, int(passed_by[1]) if passed_by else 0)


@pytest.mark.parametrize("sleeps", [True, False])
def test_state_that_is_more_than_may_wait_to_be_written_is_handed_over_whole(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    """A long conversation is larger than what may wait to be written: a replica that goes writes the rest
    when that is done, and so does one that puts a session to sleep."""
    monkeypatch.setattr("perdure.backend._WAITING", 1 << 10)
    place, first = f"file://{tmp_path}/shared", postgres.url(tmp_path / "r0")
    # Of this, half may wait.
    room = 120_000
    with perdure.open(ToyModel(), n_ctx=4096, slots=1, store=first, blocks=[place], cache=room) as runtime:
        session = runtime.session("long")
        session.say("Words and words. " * 200, max_tokens=4, temperature=0)
        tiers = runtime.backend.slot_cache.tiers.lower  # type: ignore[attr-defined]
        if sleeps:
            session.sleep()
        tokens = session.token_count
    assert all(tier.turned_down for tier in tiers)
    second = first.replace("%2Fr0", "%2Fr1")
    with perdure.open(ToyModel(), n_ctx=4096, slots=1, store=second, blocks=[place]) as runtime:
        tier = runtime.backend.slot_cache.tiers.lower[-1].tier  # type: ignore[attr-defined]
        tier.refresh()
        assert tier.nbytes > room / 2
        reply = runtime.session("long").say("And now here.", max_tokens=4, temperature=0)
        assert moved(reply) >= tokens - 1, reply.reuse


@pytest.mark.soak
def test_one_to_four_and_back_without_a_failed_request(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas are added and drained under load, twice: every answer is a 200."""
    monkeypatch.setenv("PERDURE_TEST_DRAIN", "5")
    outcome, seconds = Outcome(), soak_seconds(20)
    with (
        replicas(postgres.url(tmp_path / "r0", lease=5), tmp_path, 4) as running,
        haproxy(tmp_path, [each.port for each in running]) as router,
    ):
        drain(running[1:])
        with talking(router.url, outcome, 16):
            for _ in range(2):
                for each in running[1:]:
                    each.start()
                    each.wait()
                time.sleep(seconds / 4)
                drain(running[1:])
                time.sleep(seconds / 4)
        print(outcome)
        check(router.url, outcome)
    assert set(outcome.seen) == {"200"}


def drain(running: Sequence[Replica]) -> None:
    for each in running:
        each.process.send_signal(signal.SIGTERM)
        assert each.process.wait(120) == 0
