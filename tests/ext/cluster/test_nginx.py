"""Replicas behind nginx, with the configuration of deploy/cluster."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from ext.cluster.harness import SETTINGS, Outcome, check, nginx, replicas, soak_seconds, under_kills
from ext.cluster.servers import PostgresServer


@pytest.mark.soak
def test_sessions_stay_where_they_are_warm_and_kills_lose_no_acknowledged_turn(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """2 replicas, 8 conversations, one kill -9 every 5 s for half a minute."""
    outcome = Outcome()
    with (
        replicas(postgres.url(tmp_path / "r0", lease=5), tmp_path, 2) as running,
        nginx(tmp_path, [each.port for each in running]) as router,
    ):
        reuse: dict[str, list[str]] = {}
        with httpx.Client(base_url=router.url, timeout=60, trust_env=False) as client:
            for turn in range(3):
                for name in ("ada", "bob", "eve", "mallory"):
                    said = {"role": "user", "content": f"{name} says {turn}, and some more words."}
                    answer = client.post(
                        "/v1/chat/completions",
                        json={"model": "toy", "messages": [said], "perdure": {"session": name}, **SETTINGS},
                        headers={"x-session-id": name},
                    )
                    assert answer.status_code == 200, answer.text
                    reuse.setdefault(name, []).append(answer.headers["x-perdure-reuse"])
            with client.stream(
                "POST",
                "/v1/chat/completions",
                json={"model": "toy", "stream": True, "messages": [{"role": "user", "content": "hi"}]},
            ) as stream:
                assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"
        for name, tiers in reuse.items():
            assert all("slot=" in each or "memory=" in each for each in tiers[1:]), (name, tiers)
        numbers = iter(range(1 << 30))

        def kill() -> bool:
            victim = running[next(numbers) % 2]
            victim.kill()
            victim.start()
            # Two are few: both gone at once would be a test of nothing.
            victim.wait()
            return True

        killed = under_kills(router.url, outcome, kill, conversations=8, seconds=soak_seconds(30), every=5)
        check(router.url, outcome)
    print(f"{killed} kills, {outcome}")
    assert killed
