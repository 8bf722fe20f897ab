"""The same by keyboard alone and by touch; the sidebar by age; the pages of an operator."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from page.conftest import OpenPage
from page.test_filing import SIZES, show_menu, sized
from page.test_look import check_accessible
from page.test_talk import kept_turn
from page.words import open_words
from perdure.server.core.keys import Keys, new_key
from server.live_server import LiveServer, hello, live_server
from server.test_pool import served as served_pool
from server.test_pool import spec

DAY = 86_400


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("days", "group"), [(0, "Today"), (1, "Yesterday"), (4, "Last week"), (40, "Older")])
def test_the_sidebar_has_conversations_by_age(
    open_page: OpenPage, served: LiveServer, days: int, group: str, size: tuple[int, int]
) -> None:
    name = f"aged-{days}-{size[0]}"
    kept_turn(served, name, "When was it?", {"content": "Then."})
    user = open_page(served, "/#/machine", viewport={"width": size[0], "height": size[1]})
    user.page.clock.set_fixed_time(time.time() + days * DAY)
    user.page.goto("about:blank")
    user.page.goto(served.url)
    show_menu(user)
    section = user.page.locator("nav section", has=user.page.get_by_role("heading", name=group, exact=True))
    expect(section.locator(f'a[title="{name}"]')).to_be_visible()


def test_models_titles_and_menus_are_used_by_keyboard_alone(open_page: OpenPage, tmp_path: Path) -> None:
    with served_pool(spec("small"), spec("large", "sliding"), store=tmp_path) as server:
        user = open_page(server)
        keys = user.page.keyboard
        user.button("Model: small").focus()
        keys.press("Enter")
        expect(user.page.get_by_role("menuitemradio", name="small")).to_be_focused()
        keys.press("ArrowDown")
        expect(user.page.get_by_role("menuitemradio", name="large")).to_be_focused()
        keys.press("Enter")
        picker = user.button("Model: large")
        expect(picker).to_be_visible()
        picker.focus()
        keys.press("Enter")
        expect(user.page.get_by_role("menuitemradio", name="large")).to_be_focused()
        keys.press("Escape")
        expect(user.page.get_by_role("menu")).to_have_count(0)
        expect(picker).to_be_focused()
        user.set(max_tokens="4")
        user.ask("By keys alone")
        user.button("More").focus()
        keys.press("Enter")
        expect(user.page.get_by_role("menuitem", name="Rename")).to_be_focused()
        keys.press("Enter")
        user.page.get_by_label("Title", exact=True).fill("Typed")
        keys.press("Enter")
        expect(user.page.get_by_role("heading", level=1)).to_have_text("Typed")
        user.button("Actions of Typed").focus()
        keys.press("Enter")
        expect(user.page.get_by_role("menuitem", name="Rename")).to_be_focused()
        keys.press("ArrowDown")
        expect(user.page.get_by_role("menuitem", name="Pin")).to_be_focused()
        keys.press("Enter")
        pinned = user.page.locator("nav section", has_text="Pinned")
        expect(pinned.get_by_text("Typed")).to_be_visible()
        user.button("Show branches").focus()
        keys.press("Enter")
        expect(user.page.locator("#branches")).to_be_visible()
        user.button("Hide branches", user.page.locator("#branches")).focus()
        keys.press("Enter")
        expect(user.page.locator("#branches")).to_have_count(0)


def test_actions_of_a_message_show_where_the_keyboard_is(open_page: OpenPage, served: LiveServer) -> None:
    kept_turn(served, "by-keys", "Quiet?", {"content": "Quiet."})
    served.runtime.session("by-keys").say("and on", max_tokens=2)
    user = open_page(served, "/#/c/by-keys")
    actions = user.turn(1).locator(".actions .on-hover")
    user.page.get_by_label("Message", exact=True).focus()
    expect(actions).to_have_css("opacity", "0")
    user.turn(1).focus()
    expect(actions).to_have_css("opacity", "1")
    user.button("Regenerate", user.turn(1)).focus()
    expect(actions).to_have_css("opacity", "1")


def test_a_phone_is_used_by_touch(open_page: OpenPage, served: LiveServer) -> None:
    """Fingers alone: nothing is hovered, and nothing is clicked."""
    user = sized(open_page, served, (390, 844))
    user.page.get_by_role("group", name="Ways to begin").get_by_role("button").first.tap()
    box = user.page.get_by_label("Message", exact=True)
    box.fill("Touched")
    user.button("Send").tap()
    expect(user.replies).to_have_count(1)
    expect(user.pending).to_have_count(0)
    user.button("Edit", user.turn(1)).tap()
    user.page.get_by_label("New text", exact=True).fill("Touched again")
    user.button("Send as a new branch").tap()
    expect(user.page.get_by_role("img", name="Branch 2 of 2")).to_be_visible()
    expect(user.pending).to_have_count(0)
    user.button("Previous branch").tap()
    expect(user.turn(1)).to_contain_text("Touched")
    user.button("Show branches").tap()
    expect(user.page.locator("#branches")).to_be_in_viewport()
    check_accessible(user)
    user.button("Hide branches", user.page.locator("#branches")).tap()
    user.turn(1).locator(".reuse-line").tap()
    expect(user.turn(1).locator(".reuse")).to_be_visible()
    user.button("Menu").tap()
    machine = user.page.get_by_role("link", name="Machine", exact=True)
    machine.tap()
    expect(user.page.get_by_role("heading", name="Machine", level=1)).to_be_visible()
    expect(machine).not_to_be_in_viewport()


@pytest.mark.parametrize("size", SIZES)
def test_header_and_message_box_stay_in_view(
    open_page: OpenPage, served: LiveServer, size: tuple[int, int]
) -> None:
    """However long the conversation is, and whatever is opened in it: the turns alone scroll."""
    name = f"long-{size[0]}"
    kept_turn(served, name, "Much?", {"content": "A line of it.\n\n" * 60})
    served.runtime.session(name).say("And more?", max_tokens=2)
    user = sized(open_page, served, size, f"/#/c/{name}")
    expect(user.replies).to_have_count(2)
    user.show_reuse(2)
    for part in (user.page.locator("header.talk-head"), user.page.locator(".composer-box")):
        expect(part).to_be_in_viewport(ratio=1)
    user.page.locator("#conversation").evaluate("element => element.scrollTop = 0")
    expect(user.turn(1).locator(".said.user")).to_be_in_viewport()
    expect(user.page.locator(".composer-box")).to_be_in_viewport(ratio=1)


@pytest.mark.parametrize("size", SIZES)
def test_lists_have_nothing_out_of_sight_or_upon_each_other(
    open_page: OpenPage, served: LiveServer, size: tuple[int, int]
) -> None:
    name = f"listed-{size[0]}"
    kept_turn(served, name, "Is it seen?", {"content": "All of it."})
    with served.client() as client:
        title = f"A title of {size[0]} that is longer than any sidebar is wide, and so is cut"
        assert client.patch(f"/v1/sessions/{name}", json={"title": title}).status_code == 200
    user = sized(open_page, served, size, "/#/sessions")
    remove = user.button(f"Delete {name}")
    remove.scroll_into_view_if_needed()
    expect(remove).to_be_in_viewport(ratio=1)
    beyond = "each => each.scrollWidth - each.clientWidth"
    assert user.page.locator(".page .wide").evaluate(beyond) <= 0
    show_menu(user)
    entry = user.page.locator("nav .conversation").filter(has_text=title)
    entry.hover()
    text, dots = entry.get_by_role("link"), entry.get_by_role("button")
    expect(dots).to_have_css("opacity", "1")
    inner = "each => each.getBoundingClientRect().right - parseFloat(getComputedStyle(each).paddingRight)"
    assert text.evaluate(inner) <= dots.evaluate("each => each.getBoundingClientRect().left")


def test_prefixes_and_branches_are_read_on_a_phone(open_page: OpenPage, served: LiveServer) -> None:
    kept_turn(served, "narrow", "First?", {"content": "Yes."})
    served.runtime.session("narrow").fork("narrow~2")
    for name in ("narrow", "narrow~2"):
        served.runtime.session(name).say(f"and {name}", max_tokens=3)
    served.runtime.cache.warm("A beginning that is kept for everybody. " * 4, labels=["kept-for-all"])
    user = sized(open_page, served, (390, 844), "/#/machine")
    text = user.page.locator(".prefix-text").first
    expect(text).to_be_attached()
    for each in user.page.locator(".prefix").all():
        box = each.locator(".prefix-text").bounding_box()
        assert box is not None
        assert box["width"] > 250
        assert each.evaluate("row => row.scrollWidth - row.clientWidth") <= 0
    user.page.goto(f"{served.url}/#/compare/narrow/narrow~2")
    sides = user.page.locator("article.side-text")
    expect(sides).to_have_count(2)
    for at, title in enumerate(("narrow", "narrow · 2")):
        expect(sides.nth(at).get_by_role("link", name=title, exact=True)).to_be_visible()
    check_accessible(user)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
def test_usage_has_cards_and_figures_in_columns(
    open_page: OpenPage, tmp_path: Path, size: tuple[int, int], scheme: str
) -> None:
    secret, key = new_key("ada")
    with open_words(store=tmp_path) as rt, live_server(rt, keys=Keys([key])) as server:
        with server.client(secret) as client:
            used = client.post("/v1/chat/completions", json=hello()).json()["usage"]
        width, height = size
        user = open_page(server, "/#/usage", viewport={"width": width, "height": height}, color_scheme=scheme)
        user.expected.append("status of 401 ")
        user.page.get_by_label("Key", exact=True).fill(secret)
        user.button("Use this key").click()
        expect(user.page.locator(".tiles")).to_contain_text(str(used["prompt_tokens"]))
        for figure in user.page.locator("td.num").all():
            expect(figure).to_have_css("text-align", "right")
            expect(figure).to_have_css("font-variant-numeric", "tabular-nums")
        check_accessible(user)
        beyond = user.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert beyond <= 0
