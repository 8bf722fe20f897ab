"""Replicas behind HAProxy, killed at random under load: no acknowledged turn is lost, and nobody gets a
foreign word. The configuration is that of deploy/cluster."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from ext.cluster.harness import Outcome, check, haproxy, replicas, soak_seconds, talking, under_kills
from ext.cluster.servers import PostgresServer


def kills(
    postgres: PostgresServer,
    folder: Path,
    *,
    count: int,
    conversations: int,
    again: bool,
    seconds: float,
    every: float,
) -> tuple[Outcome, int]:
    """Load on some replicas, one of which is killed every few seconds, half of them with their disks; what
    clients saw, and how many."""
    outcome, dice = Outcome(), random.Random(1)
    with (
        replicas(postgres.url(folder / "r0", lease=5), folder, count) as running,
        haproxy(folder, [each.port for each in running]) as router,
    ):
        url = router.url

        def kill() -> bool:
            number = dice.randrange(count)
            running[number].kill()
            if dice.random() < 0.5:
                # The machine is gone with its disk.
                shutil.rmtree(folder / f"r{number}")
            running[number].start()
            return True

        killed = under_kills(
            url, outcome, kill, conversations=conversations, again=again, seconds=seconds, every=every
        )
        for replica in running:
            replica.wait()
        check(url, outcome)
    return outcome, killed


@pytest.mark.soak
def test_replicas_that_are_killed_lose_no_acknowledged_turn(postgres: PostgresServer, tmp_path: Path) -> None:
    """N1: 4 replicas, 64 conversations, one kill -9 every 5 s for 5 minutes."""
    seconds = soak_seconds(300)
    outcome, killed = kills(
        postgres, tmp_path, count=4, conversations=64, again=True, seconds=seconds, every=5
    )
    print(f"{killed} kills, {outcome}")
    assert killed > seconds / 20


def test_one_replica_of_two_is_killed_under_load(postgres: PostgresServer, tmp_path: Path) -> None:
    """N1, in short."""
    _, killed = kills(postgres, tmp_path, count=2, conversations=4, again=False, seconds=1, every=0.5)
    assert killed


@pytest.mark.soak
def test_a_replica_that_hangs_and_a_router_that_is_killed_stop_nobody_for_long(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """N1: a replica that hangs is silent for 10 s, then its connections are closed and others go on with its
    conversations, also when it comes back. A router that is started again knows as much as before."""
    outcome = Outcome()
    with (
        replicas(postgres.url(tmp_path / "r0", lease=5), tmp_path, 3) as running,
        haproxy(tmp_path, [each.port for each in running]) as router,
    ):
        with talking(router.url, outcome, 12):
            for victim in running[:2]:
                until_answered(outcome, 12)
                victim.process.send_signal(signal.SIGSTOP)
                # More than each of them says in its own time: nobody is left waiting for it.
                until_answered(outcome, 120)
                victim.process.send_signal(signal.SIGCONT)
                until_answered(outcome, 12)
                router.server.restart()
            until_answered(outcome, 12)
        check(router.url, outcome)
    print(outcome)


def until_answered(outcome: Outcome, turns: int) -> None:
    """Until so many more turns were acknowledged."""
    wanted = len(outcome.waits) + turns
    while len(outcome.waits) < wanted:
        time.sleep(0.1)
