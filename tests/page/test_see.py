"""Seeing: where a prompt came from, why not more was reused, tokens and their alternatives (page 3)."""

from __future__ import annotations

from playwright.sync_api import expect

from page.conftest import OpenPage
from server.live_server import LiveServer


def test_under_each_reply_stands_where_its_prompt_came_from(open_page: OpenPage, served: LiveServer) -> None:
    user = open_page(served)
    user.ask("What was reused?")
    user.ask("And now?")
    last = served.app_state.recent.latest("", limit=1)[0]
    bar = user.turn(2).locator(".reuse")
    expect(bar).to_contain_text(f"{last.reuse.tiers['slot']} slot")
    expect(bar).to_contain_text(f"{last.reuse.computed} computed")
    expect(bar).to_contain_text("first token")
    expect(bar).to_contain_text("tokens/s")
    expect(bar).to_contain_text(last.reuse.why)
    label = bar.get_by_role("img").get_attribute("aria-label") or ""
    assert f"{last.reuse.tiers['slot']} slot" in label
    user.page.reload()
    # Later the turn itself tells, all but the reason.
    expect(bar).to_contain_text(f"{last.reuse.tiers['slot']} slot")
    expect(bar).to_contain_text("tokens/s")


def test_a_token_shows_its_alternatives_and_another_one_makes_a_branch(
    open_page: OpenPage, served: LiveServer
) -> None:
    user = open_page(served)
    user.button("Settings").click()
    user.page.get_by_label("Token probabilities").check()
    user.button("Done").click()
    user.set(max_tokens="12")
    user.ask("Tokens please")
    session = user.name
    user.button("Tokens").click()
    tokens = user.page.locator("button.token")
    assert tokens.count() == 12
    fifth = tokens.nth(4)
    before = "".join(tokens.nth(at).inner_text() for at in range(4))
    fifth.hover()
    alternatives = user.page.get_by_role("list", name="Other tokens here").get_by_role("button")
    expect(alternatives.first).to_contain_text("%")
    chosen = alternatives.first.locator("code").inner_text().strip('"')
    alternatives.first.click()
    expect(user.page.get_by_role("img", name="Branch 2 of 2")).to_be_visible()
    [turn] = served.runtime.session(f"{session}~2").history()
    assert turn.text.startswith(before)
    assert turn.text[len(before) :].startswith(chosen[:1])
