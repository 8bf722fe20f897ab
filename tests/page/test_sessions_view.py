"""Sessions: search, state and size, sleep and wake, export and import, delete with undo (page 4)."""

from __future__ import annotations

import time
from pathlib import Path

from playwright.sync_api import expect

from page.conftest import OpenPage
from server.live_server import PATIENCE, LiveServer, hello


def test_sessions_are_found_put_to_sleep_and_woken_by_a_plan(open_page: OpenPage, served: LiveServer) -> None:
    # Longer than a block of tokens, so that there is state to keep.
    for name, said in (("ships", "a zebra on board"), ("zebra notes", "stripes " * 20), ("trees", "oak")):
        served.runtime.session(name).say(said)
    served.runtime.session("ships").fork("ships-b")
    agent = {"user-agent": "claude-cli/2.1 (external, cli)"}
    with served.client() as client:
        body = hello(perdure={"session": "by an agent"})
        assert client.post("/v1/chat/completions", json=body, headers=agent).status_code == 200
        sessions = client.get("/v1/sessions").json()["data"]
    user = open_page(served, "/#/sessions")
    expect(user.page.get_by_role("row", name="by an agent")).to_contain_text("Claude Code")
    [summary] = [each for each in sessions if each["name"] == "by an agent"]
    for shown in (summary["model"], f"{summary['tokens']:,}"):
        assert shown
        expect(user.page.get_by_role("row", name="by an agent")).to_contain_text(shown)
    user.page.locator("main").get_by_role("searchbox").fill("zebra")
    rows = user.page.locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(user.page.get_by_role("row", name="ships-b")).to_contain_text("fork of ships")
    row = user.page.get_by_role("row").filter(has=user.page.get_by_role("link", name="zebra notes"))
    expect(row).to_contain_text("awake")
    expect(row).to_contain_text("B")
    user.button("Sleep zebra notes").click()
    expect(row).to_contain_text("asleep")
    assert not served.runtime.session("zebra notes").held().keys() & {"slot", "memory"}
    user.button("Wake zebra notes").click()
    plan = user.page.get_by_role("dialog", name="Wake zebra notes")
    expect(plan).to_contain_text("from disk")
    user.button("Wake now").click()
    expect(row).to_contain_text("awake")
    user.page.locator("main").get_by_role("searchbox").fill("nothing at all like it")
    expect(user.page.get_by_text("Nothing has this in its name or text.")).to_be_visible()


def test_a_session_goes_out_as_a_file_comes_back_by_dropping_and_is_deleted_with_undo(
    open_page: OpenPage, served: LiveServer, tmp_path: Path
) -> None:
    sessions = served.runtime.sessions
    served.runtime.session("traveller").say("pack the bags")
    said = sessions.get("traveller").history()[0].text
    user = open_page(served, "/#/sessions")
    with user.page.expect_download() as download:
        user.pick("Export traveller", "Export with its state (.perdure)")
    assert download.value.suggested_filename == "traveller.perdure"
    path = tmp_path / "traveller.perdure"
    download.value.save_as(path)
    user.button("Delete traveller").click()
    expect(user.button("Delete traveller")).to_have_count(0)
    user.button("Undo").click()
    expect(user.button("Delete traveller")).to_have_count(1)
    assert sessions.store.has("", "traveller")
    user.button("Delete traveller").click()
    # Closing the tab does not bring it back.
    user.page.goto("about:blank")
    until = time.monotonic() + PATIENCE
    with served.client() as client:
        while client.get("/v1/sessions/traveller").status_code != 404:
            assert time.monotonic() < until, "it was not deleted"
    user.page.goto(f"{served.url}/#/sessions")
    drop = user.page.evaluate_handle(
        """bytes => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], "traveller.perdure"));
            return data;
        }""",
        list(path.read_bytes()),
    )
    user.page.locator(".drop").dispatch_event("drop", {"dataTransfer": drop})
    expect(user.page.get_by_role("heading", name="traveller", level=1)).to_be_visible()
    assert sessions.get("traveller").history()[0].text == said
