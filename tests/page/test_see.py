"""Seeing: where a prompt came from, why not more was reused, tokens and their alternatives (page 3)."""

from __future__ import annotations

import json

from playwright.sync_api import expect

from page.conftest import OpenPage
from server.live_server import LiveServer


def test_under_each_reply_stands_where_its_prompt_came_from(open_page: OpenPage, served: LiveServer) -> None:
    user = open_page(served)
    user.ask("What was reused?")
    user.ask("And now?")
    last = served.state.ledger.latest("", limit=1)[0]

    def check() -> None:
        # One quiet line, which opens.
        expect(user.turn(2).locator(".reuse")).to_contain_text("tokens reused")
        expect(user.turn(2).locator(".reuse-bar")).to_have_count(0)
        bar = user.show_reuse(2)
        expect(bar).to_contain_text(f"{last.reuse.tiers['slot']} from a slot")
        expect(bar).to_contain_text(f"{last.reuse.computed} computed")
        expect(bar).to_contain_text("first token")
        expect(bar).to_contain_text("tokens/s")
        expect(bar).to_contain_text(f"Why not more was reused: {last.reuse.why}")
        label = bar.get_by_role("img").get_attribute("aria-label") or ""
        assert f"{last.reuse.tiers['slot']} from a slot" in label

    check()
    # Later the turn itself tells.
    user.page.reload()
    check()


def test_a_token_shows_its_alternatives_and_another_one_makes_a_branch(
    open_page: OpenPage, served: LiveServer
) -> None:
    user = open_page(served)
    user.button("Settings").click()
    user.page.get_by_role("checkbox", name="Token probabilities").check()
    user.button("Done").click()
    user.set(max_tokens="12", seed="3")
    user.ask("Tokens please")
    session = user.name
    tokens = user.page.locator("button.token")
    alternatives = user.page.get_by_role("list", name="Other tokens here").get_by_role("button")
    user.button("Tokens").click()
    expect(tokens).to_have_count(12)
    # Each is coloured by surprise, and no two degrees of it alike.
    degree = "each => [/surprise-\\d/.exec(each.className)[0], getComputedStyle(each).backgroundColor]"
    colours = set(map(tuple, tokens.evaluate_all(f"all => all.map({degree})")))
    assert len(colours) == len({name for name, _ in colours}) == len({colour for _, colour in colours}) > 1
    expect(user.page.get_by_role("img", name="Surprise along the reply")).to_be_visible()
    [turn] = served.runtime.session(session).history()
    before = "".join(tokens.nth(at).text_content() or "" for at in range(4))
    assert turn.text.startswith(before)
    tokens.nth(4).hover()
    expect(alternatives.first).to_contain_text("%")
    chosen = json.loads(alternatives.first.locator("code").inner_text())
    alternatives.first.click()
    expect(user.page.get_by_role("img", name="Branch 2 of 2")).to_be_visible()
    expect(user.pending).to_have_count(0)
    [turn] = served.runtime.session(f"{session}~2").history()
    assert turn.text.startswith(before + chosen)
    assert turn.settings["continue_final_message"] is True
    assert [message.role for message in turn.messages] == ["user"]
    assert turn.usage["completion_tokens"] == 12
    # What was gone on from has no tokens of its own, and is still the beginning of any further branch.
    user.button("Tokens").click()
    expect(tokens).to_have_count(12)
    expect(user.turn(1).locator(".token-text")).to_have_text(turn.text)
    tokens.nth(2).focus()
    chosen = json.loads(alternatives.first.locator("code").inner_text())
    alternatives.first.click()
    expect(user.page.get_by_role("img", name="Branch 3 of 3")).to_be_visible()
    expect(user.pending).to_have_count(0)
    [third] = served.runtime.session(f"{session}~3").history()
    assert third.text.startswith(turn.text[: len(before) + 3] + chosen)
