"""Talking: replies as they come, stop, continue, settings, files, tool calls, hostile text (page 1)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from page.conftest import OpenPage
from page.gates import PatientTurnstile
from page.user import letters
from server.live_server import LiveServer

HOSTILE = """<img src=x onerror="alert(1)"><script>alert(2)</script>
<iframe srcdoc="<script>alert(3)</script>"></iframe><svg onload=alert(4)>

[click](javascript:alert(5)) ![pic](http://evil.example/x.png) [ok](https://example.org/)

<a href="javascript:alert(6)">six</a> `<b>code</b>` <style>body{display:none}</style>

$\\href{javascript:alert(7)}{x}$ $\\htmlData{onclick=alert(8)}{y}$

```html
<script>alert(9)</script>
```

| a | b |
|---|---|
| <img src=y onerror=alert(10)> | &lt;b&gt; |
"""


def kept_turn(server: LiveServer, name: str, said: str, reply: dict[str, Any], **more: Any) -> None:
    """A session with a turn whose reply the toy would never write."""
    from perdure.chat.message import Message
    from perdure.sessions.turn import Turn

    store = server.runtime.sessions.store
    start = Turn(kind="start", messages=())
    turn = Turn(
        kind="turn",
        messages=(Message(role="user", content=said),),
        reply=Message.parse({"role": "assistant", **reply}),
        before=start.digest,
        created=1.0,
        **{"finish_reason": "stop", **more},
    )
    store.create("", name, [start, turn])


def test_a_reply_is_shown_as_it_comes_and_kept(
    open_page: OpenPage, served: LiveServer, gate: PatientTurnstile
) -> None:
    user = open_page(served)
    user.set(temperature="0")
    gate.shut()
    user.say("Hello there")
    pending = user.page.locator("article.pending .assistant .markdown")
    # The prompt, and then the reply token by token.
    gate.arrive()
    seen = ""
    for _ in range(200):
        if pending.count() and (seen := pending.inner_text()):
            break
        gate.pass_through(1)
    assert seen
    gate.open()
    expect(user.replies).to_have_count(1)
    shown = user.replies.inner_text()
    assert letters(shown.removeprefix("Model")) == letters(
        served.runtime.session("hello-there").history()[0].text
    )
    user.page.reload()
    expect(user.replies).to_have_count(1)
    assert user.replies.inner_text() == shown
    assert user.name == "hello-there"


def test_a_reply_that_is_stopped_stays_and_can_be_continued(
    open_page: OpenPage, served: LiveServer, gate: PatientTurnstile
) -> None:
    user = open_page(served)
    user.set(temperature="0")
    gate.shut()
    user.say("Go on and on")
    gate.arrive()
    text = user.page.locator("article.pending .assistant .markdown")
    for _ in range(300):
        gate.pass_through(1)
        if text.count() and len(text.inner_text()) >= 5:
            break
    user.page.keyboard.press("Escape")
    expect(user.button("Stopping")).to_be_visible()
    gate.open()
    expect(user.page.get_by_text("Stopped", exact=True)).to_be_visible()
    session = served.runtime.session("go-on-and-on")
    before = session.history()[-1].text
    assert before
    user.button("Continue").click()
    expect(user.page.get_by_text("Stopped", exact=True)).to_have_count(0)
    expect(user.replies).to_have_count(1)
    [turn] = session.history()
    assert turn.text.startswith(before)
    assert len(turn.text) > len(before)


def test_settings_go_with_every_turn_and_come_back(open_page: OpenPage, served: LiveServer) -> None:
    user = open_page(served)
    user.button("Settings").click()
    user.page.get_by_label("System message").fill("You are terse.")
    user.page.get_by_label("Temperature").fill("0.5")
    user.page.get_by_label("Longest reply in tokens").fill("60")
    user.page.get_by_label("When the conversation no longer fits").select_option("drop_oldest")
    user.page.get_by_label("Tokens to reason for").fill("32")
    user.page.get_by_role("combobox", name="Structured output").select_option("schema")
    schema = user.page.get_by_label("JSON schema")
    schema.fill("{")
    expect(user.page.get_by_text("This is no JSON")).to_be_visible()
    expect(user.button("Done")).to_be_disabled()
    schema.fill(
        '{"type":"object","properties":{"a":{"enum":[1]}},"required":["a"],"additionalProperties":false}'
    )
    user.button("Format", user.page.locator("dialog")).click()
    expect(schema).to_have_value(re.compile(r'\{\n  "type"'))
    user.button("Done").click()
    user.ask("Answer by the schema")
    session = served.runtime.session("answer-by-the-schema")
    [turn] = session.history()
    assert json.loads(turn.text) == {"a": 1}
    assert session.system == "You are terse."
    wanted = {"temperature": 0.5, "max_tokens": 60, "overflow": "drop_oldest", "reasoning_budget": 32}
    assert turn.settings.items() >= wanted.items()
    user.page.reload()
    expect(user.replies).to_have_count(1)
    user.button("Settings").click()
    expect(user.page.get_by_label("Temperature")).to_have_value("0.5")
    expect(user.page.get_by_label("JSON schema")).to_have_value(re.compile("enum"))
    expect(user.page.get_by_label("System message")).to_be_disabled()


def test_a_text_file_goes_along_and_others_are_refused(
    open_page: OpenPage, served: LiveServer, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("first line\n```\nfenced\n```\n")
    (tmp_path / "image.bin").write_bytes(b"\x89PNG\xff\xfe")
    user = open_page(served)
    chooser = user.page.locator("input[type=file]")
    chooser.set_input_files([tmp_path / "notes.txt", tmp_path / "image.bin"])
    expect(user.page.get_by_text("image.bin is not a text file")).to_be_visible()
    user.ask("Read this file")
    [turn] = served.runtime.session(user.name).history()
    content = turn.messages[0].content or ""
    assert "notes.txt:\n````\nfirst line\n```\nfenced\n```\n````" in content
    assert content.endswith("Read this file")


def test_hostile_markdown_and_html_is_text(open_page: OpenPage, served: LiveServer) -> None:
    kept_turn(served, "hostile", HOSTILE, {"content": HOSTILE, "reasoning_content": HOSTILE})
    user = open_page(served, "/#/c/hostile")
    expect(user.replies).to_have_count(1)
    user.page.get_by_text("Reasoning,").click()
    expect(user.page.locator("pre .hljs-tag").first).to_be_visible()
    expect(user.page.locator(".formula math").first).to_be_attached()
    conversation = user.page.locator("#conversation")
    for tag in ("img", "script", "iframe", "svg", "style", "object", "embed", "form"):
        assert conversation.locator(tag).count() == 0, tag
    hrefs = conversation.locator("[href]").evaluate_all("all => all.map(each => each.getAttribute('href'))")
    assert set(hrefs) == {"http://evil.example/x.png", "https://example.org/"}
    handlers = conversation.evaluate(
        "root => [...root.querySelectorAll('*')].flatMap(each => each.getAttributeNames())"
        ".filter(name => name.startsWith('on'))"
    )
    assert handlers == []
    assert "<script>alert(2)</script>" in conversation.inner_text()


def test_a_reply_has_code_with_colours_a_copy_button_mathematics_and_tables(
    open_page: OpenPage, served: LiveServer
) -> None:
    text = "# Title\n\n**bold** $x^2$\n\n$$\\frac{1}{2}$$\n\n|a|\n|-|\n|1|\n\n"
    text += "```python\ndef f():\n    return 'x'\n```\n"
    kept_turn(served, "formats", "Show", {"content": text})
    user = open_page(served, "/#/c/formats")
    user.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    expect(user.page.locator(".hljs-keyword", has_text="def")).to_be_visible()
    expect(user.page.locator("math mfrac")).to_be_visible()
    expect(user.page.locator("math msup")).to_be_visible()
    expect(user.page.locator("td", has_text="1")).to_be_visible()
    user.button("Copy code").click()
    expect(user.button("Copied")).to_be_visible()
    assert user.page.evaluate("navigator.clipboard.readText()") == "def f():\n    return 'x'"


def test_reasoning_is_folded_and_a_tool_call_is_a_card_that_takes_a_result(
    open_page: OpenPage, served: LiveServer
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    reply = {"content": None, "reasoning_content": "I should look.", "tool_calls": [call]}
    kept_turn(served, "tools", "Weather?", reply, finish_reason="tool_calls")
    user = open_page(served, "/#/c/tools")
    expect(user.page.get_by_text("I should look.")).to_be_hidden()
    user.page.get_by_text("Reasoning, 3 words").click()
    expect(user.page.get_by_text("I should look.")).to_be_visible()
    expect(user.page.get_by_role("heading", name="Calls weather")).to_be_visible()
    expect(user.page.get_by_label("Arguments")).to_contain_text('"city": "Oslo"')
    user.page.get_by_label("Result").fill("rain")
    user.button("Send the result").click()
    expect(user.page.get_by_role("heading", name="Result of weather")).to_be_visible()
    expect(user.page.locator("article.pending")).to_have_count(0)
    said = served.runtime.session("tools").history()[1].messages[0]
    assert (said.role, said.content, said.tool_call_id) == ("tool", "rain", "c1")


def test_everything_can_be_done_by_keyboard(open_page: OpenPage, served: LiveServer) -> None:
    user = open_page(served)
    user.ask("By keyboard")
    press = user.page.keyboard.press
    user.turn(1).focus()
    press("r")
    expect(user.page.get_by_role("img", name="Branch 2 of 2")).to_be_visible()
    user.turn(1).focus()
    press("ArrowLeft")
    expect(user.page.get_by_role("img", name="Branch 1 of 2")).to_be_visible()
    user.turn(1).focus()
    press("e")
    user.page.keyboard.type(" changed")
    press("Escape")
    user.turn(1).focus()
    press("m")
    expect(user.page.get_by_role("dialog", name="Remember this point")).to_be_visible()
    press("Escape")
    press("Alt+b")
    expect(user.page.locator("#branches")).to_have_count(0)
    press("Alt+s")
    expect(user.page.get_by_role("heading", name="Sessions")).to_be_visible()
    press("Alt+m")
    expect(user.page.get_by_role("heading", name="Machine")).to_be_visible()
    press("?")
    expect(user.page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    press("Escape")
    press("Alt+n")
    expect(user.page.get_by_text("Say something to begin.")).to_be_visible()


@pytest.fixture(scope="session")
def long_session(served: LiveServer) -> str:
    """A conversation of 2,000 turns."""
    from perdure.chat.message import Message
    from perdure.sessions.turn import Turn

    turns = [Turn(kind="start", messages=())]
    for number in range(1, 2001):
        turns.append(
            Turn(
                kind="turn",
                messages=(Message(role="user", content=f"Question number {number}"),),
                reply=Message(
                    role="assistant", content=f"Answer number {number}, *with* `code` and words. " * 5
                ),
                finish_reason="stop",
                before=turns[-1].digest,
                created=float(number),
            )
        )
    served.runtime.sessions.store.create("", "long", turns)
    return "long"


def test_a_conversation_of_2000_turns_opens_at_its_end_and_scrolls_to_its_start(
    open_page: OpenPage, served: LiveServer, long_session: str
) -> None:
    user = open_page(served, f"/#/c/{long_session}")
    expect(user.page.get_by_text("Question number 2000")).to_be_in_viewport()
    assert user.turns.count() < 300
    conversation = user.page.locator("#conversation")
    for _ in range(40):
        conversation.evaluate("element => element.scrollTop = 0")
        user.page.wait_for_function(
            "() => document.querySelector('#turn-1') || document.querySelector('#conversation').scrollTop > 0"
        )
        if user.turn(1).count():
            break
    conversation.evaluate("element => element.scrollTop = 0")
    expect(user.turn(1)).to_be_in_viewport()
    assert user.turns.count() == 2000
