"""`/v1/report` and `perdure report`: a week by day, over restarts, within bounds (A5)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from decode.observed import open_toy
from perdure.chat.difference import Miss
from perdure.cli.app import app
from perdure.decode.request import ReuseReport, Timings, Usage
from perdure.server.core.keys import Keys, new_key
from perdure.server.core.metrics import REPORT, DailyReports, RecentRequest
from server.live_server import live_server

DAY = 86_400


class Clock:
    now = 20_000.0 * DAY

    def __call__(self) -> float:
        return self.now


def request(reused: int = 30, computed: int = 10, *, agent: str = "", cause: Any = None) -> RecentRequest:
    miss = None
    if cause is not None:
        miss = Miss(cause=cause, why="", before="", now="", tokens=7, seconds=0.0, advice="")
    return RecentRequest(
        number=1,
        ended=0.0,
        session=None,
        finish_reason="stop",
        usage=Usage(prompt_tokens=reused + computed, completion_tokens=1, cached_tokens=reused),
        reuse=ReuseReport(tiers={"slot": reused}, computed=computed, why=""),
        timings=Timings(queued=0.0, prefill=1.0, decode=0.0, prefilled_tokens=computed, decoded_tokens=1),
        agent=agent,
        miss=miss,
    )


def sums(daily: DailyReports, namespace: str = "") -> list[tuple[int, int]]:
    return [(report.requests, nbytes) for _, report, nbytes in daily.week(namespace)]


def test_a_week_has_seven_days_and_each_namespace_its_own(tmp_path: Path) -> None:
    clock = Clock()
    daily = DailyReports(clock=clock)
    for number in range(10):
        daily.add("ann", request())
        if number == 9:
            daily.add("bob", request(cause="system", agent="tester"))
            break
        clock.now += DAY
    assert sums(daily, "ann") == [(1, 0)] * 7
    assert sums(daily, "bob") == [(0, 0)] * 6 + [(1, 0)]
    days = [day for day, _, _ in daily.week("ann")]
    assert days == sorted(days)
    assert days[-1] == "2024-10-13"
    assert daily.week("bob")[-1][1].misses == {"system": {"tester": 7}}


def test_bytes_are_counted_on_the_day_and_over_new_engines(tmp_path: Path) -> None:
    clock, told = Clock(), {1: 100}
    daily = DailyReports(tmp_path / REPORT, written=lambda: told, clock=clock)
    daily.save()
    told[1] = 250
    clock.now += DAY
    assert sums(daily)[-2:] == [(0, 100), (0, 150)]
    # A worker that was started anew, and a second model.
    told.update({1: 30, 2: 5})
    assert sums(daily)[-1] == (0, 185)
    daily.save()
    again = DailyReports(tmp_path / REPORT, written=dict, clock=clock)
    assert sums(again)[-2:] == [(0, 100), (0, 185)]


def test_days_are_kept_over_a_restart_and_old_ones_go(tmp_path: Path) -> None:
    clock = Clock()
    first = DailyReports(tmp_path / REPORT, clock=clock)
    first.add("", request(cause="tools", agent="one"))
    first.save()
    clock.now += 2 * DAY
    second = DailyReports(tmp_path / REPORT, clock=clock)
    second.add("", request())
    assert [count for count, _ in sums(second)] == [0, 0, 0, 0, 1, 0, 1]
    second.save()
    clock.now += 5 * DAY
    third = DailyReports(tmp_path / REPORT, clock=clock)
    assert [count for count, _ in sums(third)] == [0, 1, 0, 0, 0, 0, 0]
    third.save()
    assert len(json.loads((tmp_path / REPORT).read_bytes())["days"]) == 1


def test_what_is_kept_is_bounded(tmp_path: Path) -> None:
    clock = Clock()
    daily = DailyReports(tmp_path / REPORT, clock=clock)
    for number in range(400):
        daily.add(f"n{number}", request())
        daily.add("n0", request(cause="system", agent=f"client {number}"))
    clock.now += 1
    daily.save()
    [stored] = json.loads((tmp_path / REPORT).read_bytes())["days"].values()
    assert len(stored) == 256
    assert len(stored["n0"]["misses"]["system"]) <= 17
    assert sum(stored["n0"]["misses"]["system"].values()) == 400 * 7


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b"{}",
        b'{"days": 3, "written": {}}',
        b'{"days": {"a": {}}, "written": {}}',
        b'{"days": {"20000": {"": {}}}, "written": {}}',
        b'{"days": {}, "written": {"1": 1e999}}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_damaged_file_costs_the_days_before_and_no_more(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / REPORT).write_bytes(damage)
    clock = Clock()
    daily = DailyReports(tmp_path / REPORT, clock=clock)
    daily.add("", request())
    daily.save()
    assert sums(DailyReports(tmp_path / REPORT, clock=clock))[-1] == (1, 0)


@pytest.fixture
def chat() -> dict[str, Any]:
    system = {"role": "system", "content": "You are terse. " * 30}
    return {"messages": [system, {"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}


def test_the_week_outlasts_the_server(tmp_path: Path, chat: dict[str, Any]) -> None:
    """A5: what it told before it tells after a restart, and what the cache wrote is in it."""
    with open_toy(n_ctx=2048, slots=2, store=tmp_path) as rt:
        with live_server(rt) as server, server.client() as client:
            for _ in range(2):
                client.post("/v1/chat/completions", json=chat).raise_for_status()
            rt.cache.warm("A prefix that is written to the disk. " * 20, labels=["one"])
            rt.session("kept").say("Hello there, and a good day to you.", max_tokens=4)
            rt.session("kept").sleep()
            before = client.get("/v1/report").json()
            [*earlier, today] = before["days"]
            assert [day["requests"] for day in earlier] == [0] * 6
            assert today["requests"] == before["requests"] == 2
            assert today["reused_tokens"] == before["reused_tokens"] > 0
            assert today["written_bytes"] > 0
        with live_server(rt) as server, server.client() as client:
            after = client.get("/v1/report").json()
            assert after["requests"] == 0
            assert after["days"][-1]["requests"] == 2
            shown = CliRunner().invoke(app, ["report", "--url", server.url])
            assert shown.exit_code == 0, shown.exception
            lines = shown.stdout.splitlines()
            assert len(lines) <= 24, "one screen"
            assert lines[-1].split()[:3] == ["the", "week", "2"]
            assert lines[-2].split()[:3] == [today["day"], "2", f"{today['reused_tokens']:,}"]
            as_json = CliRunner().invoke(app, ["report", "--url", server.url, "--json"])
            assert json.loads(as_json.stdout)["days"] == after["days"]


def test_a_key_sees_its_own_days_and_no_bytes(chat: dict[str, Any]) -> None:
    (one, first), (two, second) = new_key("one"), new_key("two")
    with open_toy(n_ctx=2048, slots=2) as rt, live_server(rt, keys=Keys([first, second])) as server:
        with server.client(one) as client:
            client.post("/v1/chat/completions", json=chat).raise_for_status()
            today = client.get("/v1/report").json()["days"][-1]
            assert (today["requests"], today["written_bytes"]) == (1, None)
        with server.client(two) as client:
            assert client.get("/v1/report").json()["days"][-1]["requests"] == 0
        shown = CliRunner().invoke(app, ["report", "--url", server.url, "--key", two])
        assert shown.exit_code == 0, shown.exception
