"""Branching: every edit, regenerate and fork is a branch; step, compare, remember, delete (page 2)."""

from __future__ import annotations

from playwright.sync_api import expect

from page.conftest import OpenPage
from page.test_talk import kept_turns
from page.user import User
from server.live_server import LiveServer


def branch(user: User, at: int, of: int) -> None:
    """Wait until the branch is shown, its reply kept and its siblings known."""
    expect(user.page.get_by_role("img", name=f"Branch {at} of {of}")).to_be_visible()
    expect(user.pending).to_have_count(0)


def test_edit_and_regenerate_make_branches_that_can_be_stepped_through(
    open_page: OpenPage, served: LiveServer
) -> None:
    user = open_page(served)
    user.ask("Tree of words")
    texts = [user.ask("Second thing")]
    user.button("Regenerate", user.turn(2)).click()
    branch(user, 2, 2)
    assert user.name == "tree-of-words~2"
    texts.append(user.said.text_content() or "")
    user.button("Edit", user.turn(2)).click()
    user.page.get_by_label("New text", exact=True).fill("Another second thing")
    user.button("Send as a new branch").click()
    branch(user, 3, 3)
    expect(user.turn(2)).to_contain_text("Another second thing")
    texts.append(user.said.text_content() or "")
    assert len(set(texts)) == 3
    for at in (2, 1):
        user.button("Previous branch", user.turn(2)).click()
        branch(user, at, 3)
        expect(user.replies).to_have_count(2)
        expect(user.said).to_have_text(texts[at - 1])
    sessions = {info.name: info.depth for info in served.runtime.sessions.list() if "tree" in info.name}
    assert sessions == {"tree-of-words": 2, "tree-of-words~2": 2, "tree-of-words~3": 2}


def test_a_reply_can_be_changed_and_goes_on_from_there_in_a_branch(
    open_page: OpenPage, served: LiveServer
) -> None:
    user = open_page(served)
    user.ask("Change your mind")
    user.button("Change the reply", user.turn(1)).click()
    user.page.get_by_label("New text", exact=True).fill("On the contrary")
    user.button("Continue from this text in a new branch").click()
    branch(user, 2, 2)
    [turn] = served.runtime.session("change-your-mind~2").history()
    assert turn.text.startswith("On the contrary")
    assert len(turn.text) > len("On the contrary")
    assert [message.role for message in turn.messages] == ["user"]
    expect(user.said).to_have_text(turn.text)


def test_stepping_stays_at_the_turn_where_branches_part(open_page: OpenPage, served: LiveServer) -> None:
    """Also where that turn is further back than what a conversation first shows."""
    kept_turns(served, "far-back", 90)
    session = served.runtime.session("far-back")
    session.fork("far-back~2", turn=4).say("Another fifth", max_tokens=4)
    user = open_page(served, "/#/c/far-back~2")
    branch(user, 2, 2)
    user.button("Previous branch", user.turn(5)).click()
    branch(user, 1, 2)
    assert user.name == "far-back"
    expect(user.turn(5)).to_be_in_viewport()
    expect(user.turn(5)).to_be_focused()
    expect(user.turn(90)).not_to_be_in_viewport()


def test_the_tree_shows_branches_and_memories_and_goes_to_them(
    open_page: OpenPage, served: LiveServer
) -> None:
    user = open_page(served)
    user.ask("Root of it")
    user.ask("Left way")
    user.button("Fork from here", user.turn(1)).click()
    user.page.get_by_label("Name", exact=True).fill("right")
    user.button("Fork").click()
    expect(user.page.get_by_role("heading", name="right", level=1)).to_be_visible()
    expect(user.replies).to_have_count(1)
    user.ask("Right way")
    tree = user.show_branches()
    expect(tree.get_by_role("button", name="Left way")).to_be_visible()
    user.button("Remember", user.turn(2)).click()
    user.page.get_by_label("Label", exact=True).fill("fork in the road")
    user.button("Remember", user.page.locator("dialog")).click()
    expect(tree.get_by_text("Memory: fork in the road")).to_be_visible()
    [memory] = served.runtime.memories.search(label="fork in the road")
    assert (memory.session, memory.turn) == ("right", 2)
    tree.get_by_role("button", name="Left way").click()
    expect(user.page.get_by_role("heading", name="Root of it", level=1)).to_be_visible()
    expect(user.turn(2)).to_contain_text("Left way")
    tree.get_by_role("button", name="Open fork in the road as a new conversation").click()
    expect(user.turn(2)).to_contain_text("Right way")
    assert user.name.startswith("fork in the road-")


def test_two_branches_are_compared_side_by_side(open_page: OpenPage, served: LiveServer) -> None:
    user = open_page(served)
    user.ask("Compare me")
    user.ask("To what?")
    user.button("Regenerate", user.turn(2)).click()
    branch(user, 2, 2)
    user.show_branches()
    user.page.get_by_role("link", name="Compare with compare-me", exact=True).click()
    expect(user.page.get_by_text("1 turn in common")).to_be_visible()
    sides = user.page.locator("article.side-text")
    expect(sides).to_have_count(2)
    for at, name in enumerate(("compare-me~2", "compare-me")):
        text = served.runtime.session(name).history()[1].text
        expect(sides.nth(at).locator(".plain")).to_have_text(text)
    expect(user.page.locator("mark").first).to_be_visible()


def test_a_deleted_branch_can_be_brought_back_and_else_is_gone(
    open_page: OpenPage, served: LiveServer
) -> None:
    user = open_page(served)
    user.ask("Keep or drop")
    user.button("Regenerate", user.turn(1)).click()
    branch(user, 2, 2)
    sessions = served.runtime.sessions
    user.show_branches()
    drop = user.button("Delete branch keep-or-drop")
    drop.click()
    expect(drop).to_have_count(0)
    user.button("Undo").click()
    expect(drop).to_have_count(1)
    assert sessions.store.has("", "keep-or-drop")
    drop.click()
    # Closing the notice gives up the time that there is to undo.
    user.button("Dismiss").click()
    expect(user.page.get_by_role("img", name="Branch 2 of 2")).to_have_count(0)
    assert not sessions.store.has("", "keep-or-drop")
