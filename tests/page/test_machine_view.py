"""Machine: the model, slots and queue live, kept prefixes as a tree, the last requests, plots (page 5)."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import expect

from decode.observed import trouble
from ext.workers.engines import pid
from page.conftest import OpenPage
from server.live_server import LiveServer, live_server, opened


def test_the_machine_shows_the_model_its_slots_and_the_last_requests(
    open_page: OpenPage, served: LiveServer
) -> None:
    user = open_page(served)
    user.ask("Show the machine")
    user.page.get_by_role("link", name="Machine", exact=True).click()
    model = user.page.get_by_role("region", name="toy")
    expect(model).to_contain_text("ready")
    expect(model).to_contain_text("2,048 tokens a request")
    expect(model).to_contain_text(re.compile("K/V type ?token"))
    expect(model).to_contain_text(re.compile("Engine restarts ?0"))
    slots = model.locator(".slots li")
    expect(slots).to_have_count(3)
    expect(slots.filter(has_text="Show the machine")).to_have_count(1)
    row = user.page.get_by_role("row").filter(has_text="Show the machine").first
    expect(row).to_be_visible()
    [last] = served.state.ledger.latest("", limit=1)
    expect(row).to_contain_text(last.reuse.why)
    for name in ("Tokens a second", "First token after", "Busy slots", "Waiting requests"):
        expect(user.page.get_by_role("img", name=f"{name}:")).to_be_visible()


def test_the_machine_draws_what_the_cache_saved(open_page: OpenPage, served: LiveServer) -> None:
    """As `perdure report` tells it: tokens, time, and what was computed again by cause and client."""
    with served.client() as client:
        said = [{"role": "user", "content": "Hello, you there."}]
        for branch in ("main", "dev"):
            system = {"role": "system", "content": f"You are an agent.\nThe branch is {branch}.\nBe brief."}
            body = {"messages": [system, *said], "max_tokens": 4}
            agent = {"user-agent": "drawn/1.0"}
            message = client.post("/v1/chat/completions", json=body, headers=agent).json()["choices"][0][
                "message"
            ]
            said += [
                {"role": "assistant", "content": message["content"]},
                {"role": "user", "content": "Go on."},
            ]
        report = client.get("/v1/report").json()
    user = open_page(served, "/#/machine")
    drawn = user.page.get_by_role("region", name="What the cache saved")
    expect(drawn).to_contain_text(f"{report['requests']} requests since")
    expect(drawn).to_contain_text(f"{report['reused_tokens']:,} tokens were not computed again")
    expect(drawn.get_by_role("list").get_by_role("meter")).to_have_count(2)
    week = drawn.get_by_role("region", name="The last seven days")
    # From the first day on that has a request.
    expect(week.get_by_role("row")).to_have_count(1 + 1)
    expect(week.get_by_role("meter")).to_have_count(1)
    today = report["days"][-1]
    last = week.get_by_role("row").filter(has_text=today["day"])
    expect(last).to_contain_text(f"{today['reused_tokens']:,}")
    expect(last).to_contain_text(f"{today['computed_tokens']:,}")
    row = drawn.get_by_role("row").filter(has_text="drawn")
    expect(row).to_contain_text("system")
    expect(row).to_contain_text(f"{report['misses']['system']['drawn']:,}")


def test_slots_and_the_queue_are_shown_as_they_change(open_page: OpenPage, served: LiveServer) -> None:
    user = open_page(served, "/#/machine")
    model = user.page.get_by_role("region", name="toy")
    busy = model.locator(".slots li.busy")
    waiting = model.locator("div", has=user.page.get_by_text("Waiting", exact=True)).locator("dd")
    expect(model).to_be_visible()
    expect(busy).to_have_count(0)
    expect(waiting).to_have_text("0")
    faults = trouble(served.runtime)
    faults.pace = 0.02
    jobs = [served.runtime.submit(f"Keep busy {number}", max_tokens=1500) for number in range(5)]
    try:
        expect(busy).to_have_count(3)
        expect(waiting).to_have_text("2")
    finally:
        for job in jobs:
            job.cancel()
        faults.pace = 0.0
    expect(busy).to_have_count(0)
    expect(waiting).to_have_text("0")


def test_an_engine_that_died_is_counted(open_page: OpenPage, zoo_path: Callable[[str], Path]) -> None:
    with opened(zoo_path("llama"), threads=1, isolated=True) as rt, live_server(rt) as server:
        user = open_page(server, "/#/machine")
        model = user.page.get_by_role("region", name="toy")
        expect(model).to_contain_text(re.compile("Engine restarts ?0"))
        os.kill(pid(rt), signal.SIGKILL)
        rt.generate("after that", max_tokens=1)
        expect(model).to_contain_text(re.compile("Engine restarts ?1"))


def test_kept_prefixes_are_a_tree_that_unfolds(open_page: OpenPage, served: LiveServer) -> None:
    start = "a beginning that all of them share, longer than one block of tokens is by itself. " * 2
    for label, end in (("left", "and left it goes " * 8), ("right", "and right it goes " * 8)):
        served.runtime.cache.warm(start + end, labels=[label])
    user = open_page(served, "/#/machine")
    badges = user.page.locator(".prefixes .badge")
    expect(badges.filter(has_text="left")).to_be_visible()
    expect(badges.filter(has_text="right")).to_be_visible()
    shared = user.page.locator(".prefixes li").filter(has_text="a beginning that all").first
    expect(shared).to_contain_text("memory")
    expect(shared).to_contain_text("tokens")
    user.page.get_by_role("button", name="a beginning that all").click()
    expect(badges.filter(has_text="left")).to_have_count(0)
