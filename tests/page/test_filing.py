"""Greeting, titles, folders, pins, models and exports: on a wide screen, a small one and a phone."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Route, expect

from ext.fetching.test_pulls import hub
from page.conftest import OpenPage
from page.test_look import check_accessible
from page.test_talk import kept_turn
from page.user import User
from page.words import open_words
from perdure.engine_config import EngineConfig
from perdure.ext.fetching import catalogue
from perdure.server.core.keys import Keys, new_key
from perdure.server.pool import ModelPool
from server.live_server import LiveServer, hello, live_server, opened
from server.test_pool import served as served_pool
from server.test_pool import spec
from serving import Site, put_repo

__all__ = ["hub"]

SIZES = [(1440, 900), (1024, 768), (390, 844)]


def sized(open_page: OpenPage, server: LiveServer, size: tuple[int, int], path: str = "/") -> User:
    width, height = size
    return open_page(server, path, viewport={"width": width, "height": height}, has_touch=width < 760)


def show_menu(user: User) -> None:
    """The sidebar, which is a drawer on a phone."""
    menu = user.button("Menu")
    if menu.is_visible():
        menu.click()


@pytest.mark.parametrize("size", SIZES)
def test_an_empty_conversation_greets_and_says_what_answers(
    open_page: OpenPage, served: LiveServer, size: tuple[int, int]
) -> None:
    user = sized(open_page, served, size)
    expect(user.page.get_by_text("Good ")).to_be_visible()
    ways = user.page.get_by_role("group", name="Ways to begin").get_by_role("button")
    expect(ways).to_have_count(3)
    expect(user.page.locator(".context")).to_contain_text("toy · 0 of 2,048 tokens of context")
    expect(user.page.locator("#branches")).to_have_count(0)
    check_accessible(user)
    ways.first.click()
    box = user.page.get_by_label("Message", exact=True)
    expect(box).to_be_focused()
    expect(box).not_to_have_value("")
    user.ask("Hello to you")
    expect(ways).to_have_count(0)
    tokens = served.runtime.session(user.name).token_count
    expect(user.page.locator(".context")).to_contain_text(f"{tokens:,} of 2,048 tokens")


@pytest.mark.parametrize("size", SIZES)
def test_a_conversation_is_renamed_pinned_filed_and_deleted_in_the_sidebar(
    open_page: OpenPage, served: LiveServer, size: tuple[int, int]
) -> None:
    user = sized(open_page, served, size)
    said = f"plan a day at the sea, {size[0]}"
    user.ask(said)
    name, title = user.name, said[0].upper() + said[1:]
    expect(user.page.get_by_role("heading", level=1)).to_have_text(title)
    user.pick("More", "Rename")
    user.page.get_by_label("Title", exact=True).fill(f"The sea {size[0]}")
    user.page.keyboard.press("Enter")
    expect(user.page.get_by_role("heading", level=1)).to_have_text(f"The sea {size[0]}")
    show_menu(user)
    if size[0] < 760:
        check_accessible(user)
    menu = f"Actions of The sea {size[0]}"
    user.pick(menu, "Rename")
    user.page.get_by_label("Title", exact=True).fill(f"Waves {size[0]}")
    user.page.keyboard.press("Enter")
    menu = f"Actions of Waves {size[0]}"
    user.pick(menu, "Pin")
    expect(
        user.page.locator("nav section", has_text="Pinned").get_by_text(f"Waves {size[0]}")
    ).to_be_visible()
    user.pick(menu, "Unpin")
    user.pick(menu, "Move to a folder")
    user.page.get_by_label("New folder").fill("Journeys")
    user.button("Move").click()
    folder = user.page.locator("nav section", has=user.page.get_by_role("button", name="Journeys"))
    expect(folder.get_by_text(f"Waves {size[0]}")).to_be_visible()
    with served.client() as client:
        [row] = [each for each in client.get("/v1/sessions").json()["data"] if each["name"] == name]
    assert (row["title"], row["folder"], row["pinned"]) == (f"Waves {size[0]}", "Journeys", False)
    user.page.get_by_role("searchbox", name="Search conversations").fill("plan a day at the sea")
    expect(user.page.get_by_role("heading", name="Found")).to_be_visible()
    user.pick(menu, "Delete")
    expect(user.button(menu)).to_have_count(0)
    user.button("Undo").click()
    show_menu(user)
    expect(user.button(menu)).to_have_count(1)


def test_agents_and_the_api_are_a_group_with_readable_names(open_page: OpenPage, served: LiveServer) -> None:
    agent = {"user-agent": "opencode/1.0"}
    with served.client() as client:
        body = hello(perdure={"session": "opencode:ses_e10b2ffe77aa"})
        body["messages"][0]["content"] = "mend the parser"
        assert client.post("/v1/chat/completions", json=body, headers=agent).status_code == 200
    user = open_page(served)
    group = user.page.get_by_role("button", name="Agents and API")
    expect(user.page.locator("nav").get_by_text("Mend the parser")).to_have_count(0)
    group.click()
    entry = user.page.locator("nav .conversation").filter(has_text="Mend the parser")
    expect(entry).to_contain_text("OpenCode")
    expect(entry).not_to_contain_text("ses_")
    with served.client() as client:
        conversation = client.post("/v1/conversations", json={}).json()["id"]
        asked = {"input": "name the planets", "conversation": conversation, "max_output_tokens": 4}
        assert client.post("/v1/responses", json=asked).status_code == 200
    user.page.reload()
    expect(user.page.locator("nav .conversation").filter(has_text="Name the planets")).to_be_visible()
    expect(user.page.locator("nav")).not_to_contain_text("conv_")


def test_a_conversation_is_exported_as_markdown_and_json(
    open_page: OpenPage, served: LiveServer, tmp_path: Path
) -> None:
    kept_turn(served, "to-export", "What is kept?", {"content": "Every turn."})
    user = open_page(served, "/#/c/to-export")
    expect(user.replies).to_have_count(1)
    for form, suffix in (("Markdown", "md"), ("JSON", "json")):
        with user.page.expect_download() as download:
            user.pick("More", f"Export as {form}")
        assert download.value.suggested_filename == f"to-export.{suffix}"
        download.value.save_as(tmp_path / suffix)
    assert "Every turn." in (tmp_path / "md").read_text()
    messages = json.loads((tmp_path / "json").read_text())["messages"]
    assert [message["content"] for message in messages] == ["What is kept?", "Every turn."]


def test_a_file_says_how_many_tokens_it_has(open_page: OpenPage, served: LiveServer, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("some words\n")
    user = open_page(served)
    user.page.locator(".composer input[type=file]").set_input_files([tmp_path / "notes.txt"])
    expect(user.page.locator(".files li")).to_contain_text("tokens")


def test_enter_sends_an_edit(open_page: OpenPage, served: LiveServer) -> None:
    user = open_page(served)
    user.ask("Edit and send")
    user.button("Edit", user.turn(1)).click()
    user.page.get_by_label("New text", exact=True).fill("Edited and sent")
    user.page.keyboard.press("Enter")
    expect(user.page.get_by_role("img", name="Branch 2 of 2")).to_be_visible()
    expect(user.pending).to_have_count(0)
    expect(user.turn(1)).to_contain_text("Edited and sent")


def test_actions_are_quiet_until_they_are_wanted(open_page: OpenPage, served: LiveServer) -> None:
    for number in (1, 2):
        kept_turn(served, f"quiet-{number}", "Quiet?", {"content": "Quiet."})
    served.runtime.session("quiet-1").say("and on", max_tokens=2)
    user = open_page(served, "/#/c/quiet-1")
    actions = user.turn(1).locator(".actions .on-hover")
    user.page.get_by_label("Message", exact=True).hover()
    expect(actions).to_have_css("opacity", "0")
    user.turn(1).hover()
    expect(actions).to_have_css("opacity", "1")
    phone = sized(open_page, served, (390, 844), "/#/c/quiet-1")
    phone.page.emulate_media()
    expect(phone.turn(2).locator(".actions .on-hover")).to_have_css("opacity", "1")


def test_a_message_that_failed_stays_while_another_is_sent(open_page: OpenPage, served: LiveServer) -> None:
    user = open_page(served)
    user.expected.append("status of 429 ")
    user.ask("Before it")

    def refuse(route: Route) -> None:
        error = {"error": {"message": "not now", "type": "x", "param": None, "code": None}}
        route.fulfill(status=429, json=error)

    user.page.route("**/turns", refuse)
    user.say("The first that failed")
    expect(user.pending.get_by_role("alert")).to_contain_text("not now")
    user.page.unroute("**/turns")
    user.say("The second one")
    expect(user.replies).to_have_count(2)
    expect(user.pending).to_have_count(1)
    expect(user.pending).to_contain_text("The first that failed")
    user.button("Send again").click()
    expect(user.replies).to_have_count(3)
    expect(user.pending).to_have_count(0)
    said = [turn.messages[0].content for turn in served.runtime.session(user.name).history()]
    assert said == ["Before it", "The second one", "The first that failed"]


def test_a_model_is_chosen_on_a_server_with_several(open_page: OpenPage, tmp_path: Path) -> None:
    with served_pool(spec("small"), spec("large", "sliding"), store=tmp_path) as server:
        user = open_page(server)
        user.button("Model: small").click()
        large = user.page.get_by_role("menuitemradio", name="large")
        expect(large).to_contain_text("Fits, loads when it is asked")
        check_accessible(user)
        large.click()
        user.set(max_tokens="4")
        user.ask("Answer me")
        with server.client() as client:
            states = {each["id"]: each["state"] for each in client.get("/v1/models").json()["data"]}
        assert states["large"] == "ready"
        user.page.reload()
        user.button("Model: large").click()
        expect(user.page.get_by_role("menuitemradio", name="large")).to_be_checked()
        expect(user.page.get_by_role("menuitemradio", name="large")).to_contain_text("Loaded")


def test_the_models_of_the_header_say_which_of_them_fit(open_page: OpenPage) -> None:
    specs = (spec("small"), spec("other"), spec("vast", memory=1 << 60))
    with served_pool(*specs, memory=None) as server, server.client() as client:
        assert client.post("/v1/chat/completions", json=hello(model="small")).status_code == 200
        user = open_page(server)
        user.button("Model: small").click()
        shown = {"small": "Loaded", "other": "Fits, loads", "vast": "Needs more memory than there is"}
        for name, says in shown.items():
            expect(user.page.get_by_role("menuitemradio", name=name)).to_contain_text(says)
        check_accessible(user)


def test_a_better_model_is_shown_with_the_command_or_a_download(open_page: OpenPage, tmp_path: Path) -> None:
    secret, key = new_key("metrics")
    with open_words(store=tmp_path) as rt, live_server(rt, keys=Keys([key])) as server:
        user = open_page(server, "/#/machine")
        user.expected += ["status of 401 ", "status of 403 ", "status of 404 "]
        told = {
            "object": "model.pull",
            "model": "llama3.2:3b",
            "state": "running",
            "completed": 30,
            "total": 120,
        }
        more = {"error": "", "started": 1.0, "ended": None}
        pull = {**told, **more, "serves": ""}

        def under_way(route: Route) -> None:
            response = route.fetch()
            if response.ok:
                route.fulfill(response=response, json={**response.json(), "pull": pull})
            else:
                route.fulfill(response=response)

        user.page.route("**/v1/models/pull", lambda route: route.fulfill(status=200, json=pull))
        user.page.route("**/v1/catalogue", under_way)
        user.page.get_by_label("Key", exact=True).fill(secret)
        user.button("Use this key").click()
        models = user.page.get_by_role("list", name="Models to choose from")
        expect(models.get_by_role("heading").first).to_be_visible()
        more_models = user.page.get_by_role("button", name="that this machine has too little")
        if more_models.count():
            more_models.click()
        progress = models.get_by_role("progressbar", name="Download of llama3.2:3b")
        if progress.count():
            expect(progress).to_have_attribute("aria-valuenow", "25")
        user.page.goto("about:blank")
    with open_words(store=tmp_path / "other") as rt, live_server(rt) as server:
        user = open_page(server)
        user.pick("Model: toy", "Get a better model")
        dialog = user.page.get_by_role("dialog", name="Get a better model")
        expect(dialog.get_by_role("heading", level=3).first).to_be_visible()
        check_accessible(user)


@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
def test_a_model_is_downloaded_and_used_without_a_restart(
    open_page: OpenPage,
    zoo_path: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hub: Site,
    size: tuple[int, int],
) -> None:
    """On a server without keys, by its own page."""
    model = catalogue.find("smollm2:360m")
    assert model is not None
    put_repo(hub, model.repo, {model.file: zoo_path("llama").read_bytes()})
    source = "ext.workers.engines:full"
    with (
        opened(source, store=tmp_path / "store", isolated=True) as rt,
        closing(ModelPool.of_runtime("toy", rt, source=source, config=EngineConfig(n_ctx=512))) as pool,
        live_server(rt, pool=pool) as server,
    ):
        user = sized(open_page, server, size)
        user.pick("Model: toy", "Get a better model")
        dialog = user.page.get_by_role("dialog", name="Get a better model")
        expect(dialog.get_by_role("heading", level=3).first).to_be_visible()
        if (more := dialog.get_by_role("button", name="that this machine has too little")).count():
            more.click()
        card = dialog.locator(".model-card").filter(
            has=user.page.get_by_role("heading", name=model.name, exact=True)
        )
        hub.pages[f"/{model.repo}/resolve/main/{model.file}"].hold = hold = threading.Event()
        try:
            user.button("Download", card).click()
            expect(card.get_by_role("progressbar", name=f"Download of {model.name}")).to_be_visible()
            check_accessible(user)
        finally:
            hold.set()
        # By the keyboard alone.
        user.button("Use it", card).focus()
        check_accessible(user)
        user.page.keyboard.press("Enter")
        expect(dialog).to_have_count(0)
        label = model.file.removesuffix(".gguf")
        expect(user.page.get_by_role("button", name=f"Model: {label}")).to_be_visible()
        user.set(max_tokens="4")
        user.ask("Who answers?")
        with server.client() as client:
            states = {each["id"]: each["state"] for each in client.get("/v1/models").json()["data"]}
        assert states[label] == "ready"
        user.page.reload()
        expect(user.page.get_by_role("button", name=f"Model: {label}")).to_be_visible()


def test_settings_have_values_ranges_and_a_sentence(open_page: OpenPage, served: LiveServer) -> None:
    user = open_page(served)
    user.button("Settings").click()
    field = user.page.get_by_label("Temperature")
    expect(field).to_have_attribute("placeholder", "0.8")
    expect(field).to_have_accessible_description(
        "Divides the logits; 0 always takes the likeliest token. From 0 to 100."
    )
    expect(user.button("Done")).to_be_in_viewport()


def test_a_phone_has_sessions_as_cards_and_a_drawer(open_page: OpenPage, served: LiveServer) -> None:
    kept_turn(served, "a-card", "On a phone?", {"content": "Yes."})
    user = sized(open_page, served, (390, 844), "/#/sessions")
    card = user.page.locator("tbody tr").filter(has_text="A card")
    box = card.bounding_box()
    assert box is not None
    assert box["width"] > 340
    user.button("Delete a-card").scroll_into_view_if_needed()
    expect(user.button("Delete a-card")).to_be_in_viewport()
    drawer = user.page.locator("nav")
    expect(drawer).not_to_be_visible()
    user.button("Menu").click()
    expect(user.page.get_by_role("link", name="Machine", exact=True)).to_be_in_viewport()
    user.page.keyboard.press("Escape")
    expect(user.page.get_by_role("link", name="Machine", exact=True)).not_to_be_visible()


def test_the_machine_shows_no_marks_of_a_template(open_page: OpenPage, served: LiveServer) -> None:
    user = open_page(served)
    user.ask("Plain words")
    user.page.goto(f"{served.url}/#/machine")
    slot = user.page.locator(".slots li").filter(has_text="Plain words")
    expect(slot).to_have_count(1)
    expect(slot).not_to_contain_text("<|")
