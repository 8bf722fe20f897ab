"""Looking inside a reply: what the server makes of it, in a frame that reaches nothing (page 3, I3)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import FrameLocator, expect

from page.conftest import OpenPage
from page.test_look import check_accessible
from page.user import User
from perdure import Model
from perdure.server.core.keys import Keys, new_key
from server.live_server import PATIENCE, LiveServer, live_server, opened

HOSTILE = "</script><img src=x onerror=alert(1)><script>alert(2)</script> hello"


@pytest.fixture(scope="module")
def keyed(
    zoo_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LiveServer, str]]:
    """A server on a toy model of llama.cpp that needs a key, and the key."""
    secret, key = new_key("alice")
    store = tmp_path_factory.mktemp("store")
    with (
        opened(Model(zoo_path("llama")), store=store, threads=1) as rt,
        live_server(rt, keys=Keys([key])) as server,
    ):
        yield server, secret


def inside(user: User) -> FrameLocator:
    return user.page.frame_locator("iframe.inside")


def test_a_reply_shows_its_plots_and_its_frame_reaches_nothing(
    open_page: OpenPage, keyed: tuple[LiveServer, str]
) -> None:
    """I3: what was said stays text there too, no script but the report's runs, and the key stays outside."""
    server, secret = keyed
    user = open_page(server)
    user.expected += ["status of 401 ", "Content Security Policy"]
    user.page.get_by_label("Key", exact=True).fill(secret)
    user.button("Use this key").click()
    user.set(max_tokens="6", temperature="0")
    user.ask(HOSTILE)
    expect(user.show_reuse(1)).to_contain_text(" computed in ")
    user.button("Look inside", user.turn(1)).click()
    expect(user.page.get_by_role("progressbar")).to_be_visible()
    check_accessible(user)
    report = inside(user)
    for part in (
        "Surprise along",
        "Attention by head",
        "Keys and values",
        "Logit lens",
        "Where the state came",
    ):
        expect(report.get_by_role("heading", name=part).first).to_be_visible()
    assert report.locator("polyline").count() >= 2
    assert report.locator("svg.heat rect").count() > 10
    expect(report.locator("#heads button")).to_have_count(12)
    report.locator("#search").fill("L2H3")
    expect(report.locator("#heads button")).to_have_count(1)
    report.locator("#heads button").click()
    expect(report.locator("#chosen")).to_contain_text("L2H3: ")
    expect(report.locator("text=/tokens in \\d/").first).to_be_visible()
    assert report.locator("img").count() == 0
    reached = report.locator("body").evaluate(
        """async () => {
          const tries = {
            parent: () => parent.document.title,
            storage: () => sessionStorage.length,
            network: () => fetch(new URL("/v1/sessions", document.baseURI)),
            script: () => {
              const script = document.createElement("script");
              script.textContent = "window.ran = true";
              document.body.append(script);
              if (!window.ran) throw new Error("it did not run");
            },
          };
          const found = [];
          for (const [name, work] of Object.entries(tries))
            try { await work(); found.push(name); } catch {}
          return [origin, found];
        }"""
    )
    assert reached == ["null", []]
    user.button("Close", user.page.locator("dialog form")).click()
    expect(user.page.locator("iframe.inside")).to_have_count(0)


def test_whoever_closes_it_ends_it_and_another_is_told_to_wait(
    open_page: OpenPage, keyed: tuple[LiveServer, str]
) -> None:
    server, secret = keyed
    with server.client(secret) as client:
        client.post("/v1/sessions", json={"name": "left"})
        client.post("/v1/sessions/left/turns", json={"message": "hello " * 60, "max_tokens": 2})
    user = open_page(server, "/#/c/left")
    user.expected += ["status of 401 ", "status of 429 "]
    user.page.get_by_label("Key", exact=True).fill(secret)
    user.button("Use this key").click()
    user.look_inside(1)
    wait_for(lambda: server.state.analysis is not None)
    other = open_page(server, "/#/c/left", beside=user)
    other.expected += ["status of 401 ", "status of 429 "]
    other.page.get_by_label("Key", exact=True).fill(secret)
    other.button("Use this key").click()
    other.look_inside(1)
    alert = other.page.get_by_role("dialog").get_by_role("alert")
    expect(alert.or_(other.page.locator("iframe.inside"))).to_be_visible()
    # On a fast machine the first one is there before the second was asked for.
    user.page.get_by_role("dialog").get_by_role("button", name=re.compile("^(Cancel|Close)$")).last.click()
    expect(user.page.get_by_role("dialog")).to_have_count(0)
    if alert.is_visible():
        expect(alert).to_contain_text("one at a time")
        wait_for(lambda: server.state.analysis is None)
        other.button("Try again").click()
    expect(inside(other).get_by_role("heading", name="Attention by head")).to_be_visible()


def test_an_engine_without_layers_is_told_in_words(open_page: OpenPage, served: LiveServer) -> None:
    user = open_page(served)
    user.expected += ["status of 400 "]
    user.ask("What is inside?")
    user.look_inside(1)
    expect(user.page.get_by_role("dialog").get_by_role("alert")).to_contain_text("cannot be looked into")
    check_accessible(user)
    user.button("Close", user.page.locator("dialog form")).click()
    expect(user.page.get_by_role("dialog")).to_have_count(0)


@pytest.mark.model
@pytest.mark.skipif(
    "PERDURE_SCREENSHOTS" not in os.environ, reason="PERDURE_SCREENSHOTS=1 makes the pictures"
)
def test_picture_of_the_inside_of_a_reply(open_page: OpenPage, tmp_path: Path, images: Path) -> None:
    from perdure import models

    with opened(models.path(None), n_ctx=1024, store=tmp_path) as rt, live_server(rt) as server:
        user = open_page(server, color_scheme="light", viewport={"width": 1200, "height": 1000})
        user.set(max_tokens="24", temperature="0")
        user.ask("Why is the sky blue?")
        user.look_inside(1)
        report = inside(user)
        report.get_by_role("heading", name="Attention by head").scroll_into_view_if_needed()
        report.locator("#looks .token").last.hover()
        user.page.screenshot(path=images / "inside-light.png", animations="disabled")


def wait_for(done: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)
