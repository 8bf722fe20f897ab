"""What goes along with a message, chats of other programs, and titles by the model (page 2)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect

import perdure
from ext.chat_imports.exports import CHATGPT, CLAUDE, OPEN_WEBUI
from ext.documents import files
from page.conftest import OpenPage
from page.test_look import check_accessible
from page.user import User
from page.words import open_words
from server.live_server import LiveServer, live_server

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
BOX = ".composer input[type=file]"


def give(user: User, name: str, kind: str, data: bytes, *, how: str = "drop") -> None:
    """Drop a file on the message box, or paste it there."""
    user.page.locator("#message").evaluate(
        """(element, {how, name, kind, data}) => {
            const carried = new DataTransfer();
            carried.items.add(new File([Uint8Array.from(data)], name, {type: kind}));
            const init = {bubbles: true, cancelable: true};
            const event = how === "drop" ? new DragEvent("drop", {...init, dataTransfer: carried})
                : new ClipboardEvent("paste", {...init, clipboardData: carried});
            element.dispatchEvent(event);
        }""",
        {"how": how, "name": name, "kind": kind, "data": list(data)},
    )


@pytest.mark.extension("documents")
@pytest.mark.parametrize("settings", [{}, PHONE], ids=["desk", "phone"])
def test_a_pdf_goes_along_with_its_text_and_says_what_it_costs(
    open_page: OpenPage, served: LiveServer, tmp_path: Path, settings: dict[str, object]
) -> None:
    user = open_page(served, **settings)
    (tmp_path / "garden.pdf").write_bytes(files.pdf("Ferns like shade", "Herbs do not"))
    user.page.locator(BOX).set_input_files([tmp_path / "garden.pdf"])
    item = user.page.locator(".files li")
    text = "garden.pdf:\n```\nPage 1\nFerns like shade\n\nPage 2\nHerbs do not\n```"
    expect(item).to_contain_text(f"{len(text)} tokens, 2 pages")
    check_accessible(user)
    user.ask("What grows?")
    [turn] = served.runtime.session(user.name).history()
    assert turn.messages[0].content == f"{text}\n\nWhat grows?"
    # It is a card that opens, and an edit changes what was typed alone.
    card = user.turn(1).locator(".file-card")
    expect(card.locator("summary")).to_contain_text("garden.pdf")
    expect(card.locator("pre")).to_be_hidden()
    card.locator("summary").click()
    expect(card.locator("pre")).to_contain_text("Ferns like shade")
    check_accessible(user)
    user.button("Edit", user.turn(1)).click()
    expect(user.page.get_by_label("New text")).to_have_value("What grows?")
    user.page.get_by_label("New text").fill("What does not?")
    user.page.keyboard.press("Enter")
    expect(user.page.get_by_role("img", name="Branch 2 of 2")).to_be_visible()
    expect(user.pending).to_have_count(0)
    [turn] = served.runtime.session(user.name).history()
    assert turn.messages[0].content == f"{text}\n\nWhat does not?"


@pytest.mark.extension("documents")
def test_a_file_that_cannot_be_read_is_refused_in_words(open_page: OpenPage, served: LiveServer) -> None:
    user = open_page(served)
    user.expected.append("status of 400")
    give(user, "scan.pdf", "application/pdf", files.pdf(""))
    expect(user.page.get_by_text("this PDF has no text")).to_be_visible()
    give(user, "tool.bin", "application/octet-stream", b"\0\1\2\xff")
    expect(user.page.get_by_text("tool.bin is no text, PDF or picture")).to_be_visible()
    expect(user.page.locator(".files li")).to_have_count(0)


@pytest.fixture(scope="module")
def seeing(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[], LiveServer]]:
    """A server whose model reads pictures; it can be started again on its store."""
    toys = pytest.importorskip("ext.images.toys")
    folder = tmp_path_factory.mktemp("seeing")
    model, _ = toys.write(folder, "llava")
    from contextlib import ExitStack

    with ExitStack() as last:
        stack = ExitStack()
        last.callback(lambda: stack.close())

        def start() -> LiveServer:
            stack.close()
            runtime = perdure.open(model, store=folder / "store", n_ctx=4096, slots=2, threads=1)
            return stack.enter_context(live_server(stack.enter_context(runtime)))

        yield start


@pytest.mark.extension("images")
def test_a_picture_is_shown_with_its_cost_sent_and_there_after_a_restart(
    open_page: OpenPage, seeing: Callable[[], LiveServer], tmp_path: Path
) -> None:
    pictures = pytest.importorskip("ext.images.pictures")
    server = seeing()
    user = open_page(server)
    user.set(max_tokens="4")
    items = user.page.locator(".files li")
    give(user, "one.png", "image/png", pictures.picture(seed=1), how="paste")
    expect(items).to_have_count(1)
    give(user, "two.png", "image/png", pictures.picture(seed=2))
    expect(items).to_have_count(2)
    (tmp_path / "three.png").write_bytes(pictures.picture(seed=3))
    user.page.locator(BOX).set_input_files([tmp_path / "three.png"])
    expect(items).to_have_count(3)
    for at in range(3):
        expect(items.nth(at)).to_contain_text("tokens")
        expect(items.nth(at).locator("img")).to_be_visible()
    check_accessible(user)
    user.button("Remove two.png").click()
    said = items.nth(0).locator(".hint").text_content() or ""
    user.ask("What is in them?")
    [turn] = server.runtime.session(user.name).history()
    assert [at for at, _ in turn.messages[0].images] == [0, 0]
    assert turn.counts["prompt_tokens"] > 2 * int(said.split()[0])
    drawn = "all => all.length === 2 && all.every(each => each.naturalWidth === 120)"
    user.page.wait_for_function(
        f"() => ({drawn})([...document.querySelectorAll('.turn .picture-button img')])"
    )
    user.button("Show picture 1 large").click()
    expect(user.page.get_by_role("dialog").locator("img")).to_be_visible()
    check_accessible(user)
    user.page.keyboard.press("Escape")
    # Another reply has the same pictures, which the page reads back.
    user.button("Regenerate", user.turn(1)).click()
    expect(user.page.get_by_role("img", name="Branch 2 of 2")).to_be_visible()
    expect(user.pending).to_have_count(0)
    [again] = server.runtime.session(user.name).history()
    assert again.messages[0].images == turn.messages[0].images
    name = user.name
    user.page.goto("about:blank")
    user = open_page(seeing(), f"/#/c/{name}")
    user.page.wait_for_function(
        f"() => ({drawn})([...document.querySelectorAll('.turn .picture-button img')])"
    )


@pytest.mark.extension("images")
def test_another_reply_to_a_picture_in_less_detail_and_to_a_sound_has_them_as_they_were(
    open_page: OpenPage, tmp_path: Path
) -> None:
    toys = pytest.importorskip("ext.images.toys")
    pictures = pytest.importorskip("ext.images.pictures")
    shown = {
        "llava": (perdure.Image(pictures.picture(seed=1), detail="low"), "img", "naturalWidth === 120"),
        "qwen2a": (perdure.Sound(pictures.sound()), "audio", "readyState > 0"),
    }
    for kind, (medium, element, is_shown) in shown.items():
        model, _ = toys.write(tmp_path, kind)
        with (
            perdure.open(model, store=tmp_path / kind, n_ctx=4096, slots=2, threads=1) as rt,
            live_server(rt) as server,
        ):
            rt.session("talk").say({"role": "user", "content": [medium, "What is it?"]}, max_tokens=4)
            user = open_page(server, "/#/c/talk")
            user.page.wait_for_function(
                f"() => document.querySelector('.turn .pictures {element}')?.{is_shown}"
            )
            check_accessible(user)
            user.button("Regenerate", user.turn(1)).click()
            expect(user.page.get_by_role("img", name="Branch 2 of 2")).to_be_visible()
            expect(user.pending).to_have_count(0)
            [again] = rt.session("talk").history()
            assert again.messages[0].images == ((0, medium),)
            assert again.messages[0].to_dict()["images"][0][2] in ("low", "sound")
            user.page.goto("about:blank")


@pytest.mark.skipif(
    "PERDURE_SCREENSHOTS" not in os.environ, reason="PERDURE_SCREENSHOTS=1 makes the pictures"
)
def test_picture_of_what_goes_along(
    open_page: OpenPage, seeing: Callable[[], LiveServer], images: Path
) -> None:
    pictures = pytest.importorskip("ext.images.pictures")
    down, across = np.mgrid[0:160, 0:240]
    sky = np.stack([90 + down, 140 + down // 2, 220 - down // 3 + across // 12], axis=-1).astype(np.uint8)
    user = open_page(seeing(), color_scheme="light", viewport={"width": 1200, "height": 760})
    give(user, "evening.png", "image/png", pictures.as_file(sky))
    give(user, "garden.pdf", "application/pdf", files.pdf("Ferns like shade", "Herbs do not"))
    expect(user.page.locator(".files li").nth(1)).to_contain_text("pages")
    expect(user.page.locator(".files li").nth(0)).to_contain_text("tokens")
    user.write("What grows in the shade, and when was this taken?")
    user.page.screenshot(path=images / "attached-light.png", animations="disabled")


@pytest.mark.extension("images")
def test_a_model_that_reads_no_pictures_says_so_before_anything_is_sent(
    open_page: OpenPage, served: LiveServer
) -> None:
    user = open_page(served)
    user.expected.append("status of 400")
    give(user, "one.png", "image/png", b"\x89PNG\r\n\x1a\n")
    expect(user.page.get_by_text("this model reads no images")).to_be_visible()
    expect(user.page.locator(".files li")).to_have_count(0)


@pytest.mark.extension("chat_imports")
@pytest.mark.parametrize("settings", [{}, PHONE], ids=["desk", "phone"])
def test_chats_of_other_programs_come_as_conversations_with_branches(
    open_page: OpenPage, tmp_path: Path, settings: dict[str, object]
) -> None:
    (tmp_path / "conversations.json").write_text(json.dumps([CHATGPT, CLAUDE, OPEN_WEBUI, {"no": 1}]))
    with open_words(store=tmp_path / "store") as rt, live_server(rt) as server:
        user = open_page(server, "/#/sessions", **settings)
        user.page.locator(".drop input[type=file]").set_input_files([tmp_path / "conversations.json"])
        expect(user.page.get_by_text("Imported 3 chats and 3 further branches")).to_be_visible()
        expect(user.page.get_by_text("chat 4 not taken")).to_be_visible()
        row = user.page.get_by_role("link", name="Why the sky is blue", exact=True)
        if not settings:
            # In the sidebar they are in a folder with the program's name.
            expect(user.page.locator("#menu").get_by_role("button", name="ChatGPT 2")).to_be_visible()
        row.locator("visible=true").last.click()
        expect(user.replies).to_have_count(2)
        expect(user.page.get_by_role("img", name="Branch 1 of 2")).to_be_visible()
        expect(user.page.locator(".reasoning").first).to_be_attached()
        user.ask("And on Venus?")
        assert rt.session(user.name).turns == 3


@pytest.mark.extension("titles")
def test_the_model_writes_a_title_and_a_person_has_the_last_word(open_page: OpenPage, tmp_path: Path) -> None:
    with open_words(store=tmp_path) as rt, live_server(rt) as server:
        user = open_page(server, titles=True)
        user.ask("What grows in the shade?")
        heading = user.page.locator(".talk-head h1")
        expect(heading).not_to_have_text("What grows in the shade?")
        title = str(rt.session(user.name).origin["title"])
        expect(heading).to_have_text(title)
        expect(user.page.locator("#menu").get_by_role("link", name=title)).to_be_visible()
        assert rt.session(user.name).turns == 1
        user.button("Rename").click()
        user.page.get_by_label("Title").fill("My garden")
        user.page.keyboard.press("Enter")
        expect(heading).to_have_text("My garden")
        user.ask("And ferns?")
        expect(heading).to_have_text("My garden")
        # Who wants none has the first words.
        user.button("Settings").click()
        user.page.get_by_role("checkbox", name="Titles by the model").uncheck()
        user.button("Done").click()
        user.page.get_by_role("link", name="New conversation").first.click()
        user.ask("What else grows?")
        expect(heading).to_have_text("What else grows?")
        assert rt.session(user.name).origin["title"] == "What else grows?"
