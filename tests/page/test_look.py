"""Light and dark, phone to wide screen, screen readers (page 6). PERDURE_SCREENSHOTS=1 makes the pictures."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import expect

from page.conftest import OpenPage
from page.test_talk import kept_turn
from page.user import User
from page.words import open_words
from server.live_server import LiveServer, live_server

REPLY = """A **ledger** says which tokens are truly in the cache, so a turn only computes what is new.

```python
with perdure.open("model.gguf", store="./sessions") as rt:
    s = rt.session("alice")
    print(s.say("Hello").text)
```

The cost of a turn of $n$ new tokens after $m$ kept ones is

$$T(n, m) = n\\,c + \\frac{m}{r}$$

| tier | cost |
|:--|--:|
| slot | none |
| memory | a copy |
| disk | a read |
"""


SAID = [
    (
        "how-sessions-last",
        "And after a restart?",
        "Its state is read back from the disk, block by block, and only what is new is computed.",
    ),
    (
        "how-sessions-last~2",
        "What about two users?",
        "Each has their own sessions. What their prompts share is kept once.",
    ),
    ("trip-to-lisbon", "When is it warm?", "From May on, and the evenings stay mild until October."),
    ("release-notes", "What changed?", "Sessions wake from the disk, and branches can be compared."),
    ("garden", "What grows in the shade?", "Ferns, hostas, and most herbs that like it moist."),
]
"""Sessions of the pictures. The toy is held to write these replies."""


def as_pattern(text: str) -> str:
    """A regular expression that matches a text of plain sentences and nothing else."""
    return re.sub(r"([.?])", r"\\\1", text)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with something to look at."""
    store = tmp_path_factory.mktemp("shown")
    with open_words(store=store) as rt, live_server(rt) as server:
        kept_turn(
            server,
            "how-sessions-last",
            "How does a session last?",
            {
                "content": REPLY,
                "reasoning_content": "The reader wants the idea, then a snippet and a figure.",
            },
            usage={
                "prompt_tokens": 412,
                "completion_tokens": 148,
                "cached_tokens": 389,
                "slot_tokens": 289,
                "memory_tokens": 100,
                "first_token_ms": 41,
                "decode_ms": 2900,
                "why": "the rest of the prompt is new",
            },
        )
        rt.session("how-sessions-last").fork("how-sessions-last~2")
        with server.client() as client:
            for name, said, reply in SAID:
                body = {"message": said, "perdure": {"regex": as_pattern(reply)}}
                answer = client.post(f"/v1/sessions/{name}/turns", json=body)
                if answer.status_code == 404:
                    client.post("/v1/sessions", json={"name": name})
                    answer = client.post(f"/v1/sessions/{name}/turns", json=body)
                assert answer.json()["choices"][0]["message"]["content"] == reply
        rt.session("how-sessions-last").label("the idea", turn=1)
        rt.session("garden").sleep()
        start = "You are a careful assistant who answers in short sentences and says what is not known. " * 2
        rt.cache.warm(start + "Answer about gardens. " * 6, labels=["garden"])
        rt.cache.warm(start + "Answer about ships and the sea. " * 5, labels=["sea"])
        yield server


VIEWS = {
    "new": "/",
    "talk": "/#/c/how-sessions-last",
    "compare": "/#/compare/how-sessions-last/how-sessions-last~2",
    "sessions": "/#/sessions",
    "machine": "/#/machine",
}
READY = {
    "new": ".context-words",
    "talk": "math mfrac",
    "compare": "article.side-text",
    "sessions": "tbody .status",
    "machine": ".prefixes .badge",
}
SIZES = {"phone": (390, 800), "desk": (1280, 860), "wide": (2200, 1200)}


def settled(user: User, view: str) -> None:
    expect(user.page.locator(READY[view]).first).to_be_attached()
    if view == "talk":
        expect(user.page.locator(".hljs-keyword").first).to_be_attached()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_no_violations_that_axe_finds_and_fits_every_screen(
    open_page: OpenPage, shown: LiveServer, view: str, scheme: str
) -> None:
    user = open_page(shown, VIEWS[view], color_scheme=scheme)
    settled(user, view)
    for name, (width, height) in SIZES.items():
        user.page.set_viewport_size({"width": width, "height": height})
        beyond = user.page.evaluate(
            "Math.max(document.documentElement.scrollWidth, document.querySelector('main').scrollWidth)"
            " - innerWidth"
        )
        assert beyond <= 0, f"{view} on a {name} is {beyond} pixels too wide"
        check_controls(user)
        if name != "wide":
            check_accessible(user)


def check_controls(user: User) -> None:
    """Choices, files and progress have controls of the page, not those of a browser."""
    expect(user.page.locator("select, progress, meter")).to_have_count(0)
    expect(user.page.locator("input[type=file]:visible, input[type=range]:visible")).to_have_count(0)


def check_accessible(user: User) -> None:
    found = Axe().run(user.page)
    told = [
        f"{each['id']}: {each['help']}: {[node['html'][:160] for node in each['nodes']][:3]}"
        for each in found.response["violations"]
    ]
    assert not told, told


def test_dialogs_and_tokens_have_no_violations_either(open_page: OpenPage, shown: LiveServer) -> None:
    user = open_page(shown, VIEWS["talk"])
    settled(user, "talk")
    user.button("Settings").click()
    user.choose("Form of the reply", "JSON by a schema")
    user.page.get_by_role("checkbox", name="Token probabilities").check()
    check_controls(user)
    check_accessible(user)
    user.button("Done").click()
    user.button("Edit", user.turn(2)).click()
    check_accessible(user)
    user.page.keyboard.press("Escape")
    user.set(max_tokens="10")
    user.ask("More tokens")
    user.button("Tokens").click()
    user.page.locator("button.token").nth(2).focus()
    check_accessible(user)
    user.page.keyboard.press("?")
    check_accessible(user)


def test_colours_can_be_chosen_and_are_remembered(open_page: OpenPage, shown: LiveServer) -> None:
    user = open_page(shown, color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = user.page.evaluate(background)
    user.pick("Colours", "Dark")
    user.page.wait_for_function(f"() => {background} !== '{light}'")
    dark = user.page.evaluate(background)
    user.page.reload()
    user.button("Colours").click()
    expect(user.page.get_by_role("menuitemradio", name="Dark")).to_be_checked()
    assert user.page.evaluate(background) == dark


@pytest.mark.skipif(
    "PERDURE_SCREENSHOTS" not in os.environ, reason="PERDURE_SCREENSHOTS=1 makes the pictures"
)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_pictures_of_the_main_views(
    open_page: OpenPage, shown: LiveServer, images: Path, view: str, scheme: str
) -> None:
    user = open_page(shown, VIEWS[view], color_scheme=scheme, viewport={"width": 1200, "height": 760})
    settled(user, view)
    if view == "talk":
        user.page.locator("#conversation").evaluate("element => element.scrollTop = 0")
    images.mkdir(exist_ok=True)
    user.page.screenshot(path=images / f"{view}-{scheme}.png", animations="disabled")
    if scheme == "light" and view in ("talk", "sessions"):
        user.page.set_viewport_size({"width": 390, "height": 760})
        user.page.screenshot(path=images / f"{view}-phone.png", animations="disabled")
