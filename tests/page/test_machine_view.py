"""Machine: the model, slots and queue live, kept prefixes as a tree, the last requests, plots (page 5)."""

from __future__ import annotations

from playwright.sync_api import expect

from page.conftest import OpenPage
from page.gates import PatientTurnstile
from server.live_server import LiveServer


def test_the_machine_shows_model_slots_and_requests_as_they_are(
    open_page: OpenPage, served: LiveServer, gate: PatientTurnstile
) -> None:
    runtime = served.runtime
    user = open_page(served)
    user.ask("Show the machine")
    user.page.get_by_role("link", name="Machine", exact=True).click()
    model = user.page.get_by_role("region", name="toy")
    expect(model).to_contain_text("ready")
    expect(model).to_contain_text("2,048 tokens a request")
    slots = model.locator(".slots li")
    expect(slots).to_have_count(3)
    expect(slots.filter(has_text="Show the machine")).to_have_count(1)
    row = user.page.get_by_role("row").filter(has_text="show-the-machine").first
    expect(row).to_contain_text(served.app_state.recent.latest("", limit=1)[0].reuse.why)
    expect(user.page.get_by_role("img", name="Tokens a second:")).to_be_visible()
    gate.shut()
    job = runtime.submit("Busy", max_tokens=30)
    gate.arrive()
    # The engine answers between two steps only: let some pass while the page looks.
    expect(user.page.get_by_text("The server does not answer")).to_have_count(0)
    gate.open()
    job.reply()


def test_kept_prefixes_are_a_tree_that_unfolds(open_page: OpenPage, served: LiveServer) -> None:
    start = "a beginning that all of them share, longer than one block of tokens is by itself. " * 2
    for label, end in (("left", "and left it goes " * 8), ("right", "and right it goes " * 8)):
        served.runtime.cache.warm(start + end, labels=[label])
    user = open_page(served, "/#/machine")
    badges = user.page.locator(".prefixes .badge")
    expect(badges.filter(has_text="left")).to_be_visible()
    expect(badges.filter(has_text="right")).to_be_visible()
    user.page.get_by_role("button", name="a beginning that all").click()
    expect(badges.filter(has_text="left")).to_have_count(0)
