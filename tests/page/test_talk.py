"""Talking: replies as they come, stop, continue, settings, files, tool calls, hostile text (page 1)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from playwright.sync_api import Route, expect

from page.conftest import OpenPage
from page.gates import PatientTurnstile
from page.user import User
from page.words import REPLY, open_words
from perdure.chat.message import Message
from perdure.sessions.turn import Turn
from server.live_server import LiveServer, live_server

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


def kept_turns(server: LiveServer, name: str, count: int) -> None:
    """A session of many turns that nobody had to wait for."""
    turns = [Turn(kind="start", messages=())]
    for number in range(1, count + 1):
        turns.append(
            Turn(
                kind="turn",
                messages=(Message(role="user", content=f"Question number {number}"),),
                reply=Message(role="assistant", content=f"Answer number {number}, *with* `code`. " * 5),
                finish_reason="stop",
                before=turns[-1].digest,
                created=float(number),
            )
        )
    server.runtime.sessions.store.create("", name, turns)


def test_a_reply_is_shown_as_it_comes_and_kept(
    open_page: OpenPage, served: LiveServer, gate: PatientTurnstile
) -> None:
    user = open_page(served)
    gate.shut()
    user.say("Hello there")
    gate.write(REPLY // 2)
    expect(user.written).to_have_text(re.compile("[a-z]"))
    expect(user.replies).to_have_count(0)
    gate.open()
    expect(user.replies).to_have_count(1)
    [turn] = served.runtime.session("hello-there").history()
    assert len(turn.text) == REPLY
    expect(user.said).to_have_text(turn.text)
    user.page.reload()
    expect(user.said).to_have_text(turn.text)
    assert user.name == "hello-there"


def test_a_reply_that_is_stopped_stays_and_can_be_continued(
    open_page: OpenPage, served: LiveServer, gate: PatientTurnstile
) -> None:
    user = open_page(served)
    gate.shut()
    user.say("Go on and on")
    gate.write(REPLY // 2)
    expect(user.written).to_have_text(re.compile("[a-z]"))
    # It ends a step that is held, too; the engine may go on when the server has been told.
    with user.page.expect_response("**/stop"):
        user.page.keyboard.press("Escape")
    gate.open()
    expect(user.page.get_by_text("Stopped", exact=True)).to_be_visible()
    session = served.runtime.session("go-on-and-on")
    before = session.history()[-1].text
    assert 0 < len(before) < REPLY
    user.button("Continue").click()
    expect(user.page.get_by_text("Stopped", exact=True)).to_have_count(0)
    expect(user.pending).to_have_count(0)
    [turn] = session.history()
    assert turn.text.startswith(before)
    assert len(turn.text) == REPLY
    expect(user.said).to_have_text(turn.text)


def test_settings_go_with_every_turn_and_come_back(open_page: OpenPage, served: LiveServer) -> None:
    user = open_page(served)
    user.button("Settings").click()
    user.button("Done").click()
    user.button("System message").click()
    user.page.get_by_label("What the model is told").fill("You are terse.")
    user.button("Done").click()
    user.button("Settings").click()
    user.page.get_by_label("Temperature").fill("0.5")
    user.page.get_by_label("Longest reply in tokens").fill("60")
    user.choose("When the conversation no longer fits", "Leave out the oldest messages")
    user.page.get_by_label("Tokens to reason for").fill("32")
    user.choose("Form of the reply", "JSON by a schema")
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
    user.button("Done").click()
    user.button("System message").click()
    expect(user.page.get_by_label("What the model is told")).to_be_disabled()


def test_a_text_file_goes_along_and_others_are_refused(
    open_page: OpenPage, served: LiveServer, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("first line\n```\nfenced\n```\n")
    (tmp_path / "image.bin").write_bytes(b"\x89PNG\xff\xfe")
    user = open_page(served)
    chooser = user.page.locator(".composer input[type=file]")
    chooser.set_input_files([tmp_path / "notes.txt", tmp_path / "image.bin"])
    expect(user.page.get_by_text("image.bin is no text, PDF or picture")).to_be_visible()
    user.ask("Read this file")
    [turn] = served.runtime.session(user.name).history()
    content = turn.messages[0].content or ""
    assert "notes.txt:\n````\nfirst line\n```\nfenced\n```\n````" in content
    assert content.endswith("Read this file")


DROP = """box => {
  const moved = new DataTransfer();
  moved.items.add(new File(["first line\\n"], "notes.txt"));
  const told = { dataTransfer: moved, bubbles: true, cancelable: true };
  return ["dragover", "drop"].map(kind => !box.dispatchEvent(new DragEvent(kind, told)));
}"""


def test_a_text_file_dropped_on_the_message_box_goes_along(open_page: OpenPage, served: LiveServer) -> None:
    user = open_page(served)
    # Else the browser would show the file in place of the page.
    assert user.page.get_by_label("Message", exact=True).evaluate(DROP) == [True, True]
    expect(user.page.get_by_role("listitem").filter(has_text="notes.txt")).to_be_visible()
    user.ask("Read what I dropped")
    [turn] = served.runtime.session(user.name).history()
    assert "notes.txt:\n```\nfirst line\n```" in (turn.messages[0].content or "")


def test_hostile_markdown_and_html_is_text(open_page: OpenPage, served: LiveServer) -> None:
    kept_turn(served, "hostile", HOSTILE, {"content": HOSTILE, "reasoning_content": HOSTILE})
    user = open_page(served, "/#/c/hostile")
    expect(user.replies).to_have_count(1)
    user.page.get_by_text("Reasoning,").click()
    expect(user.page.locator("pre .hljs-tag").first).to_be_visible()
    expect(user.page.locator(".formula math").first).to_be_attached()
    check_harmless(user, {"http://evil.example/x.png", "https://example.org/"})
    assert "<script>alert(2)</script>" in user.page.locator("#conversation").inner_text()


def check_harmless(user: User, links: set[str]) -> None:
    """Nothing in the conversation is an element that acts, has a handler, or leads elsewhere."""
    conversation = user.page.locator("#conversation")
    for tag in ("img", "script", "iframe", "svg:not(.lucide)", "style", "object", "embed", "form"):
        assert conversation.locator(tag).count() == 0, tag
    hrefs = conversation.locator("[href]").evaluate_all("all => all.map(each => each.getAttribute('href'))")
    assert set(hrefs) == links
    handlers = conversation.evaluate(
        "root => [...root.querySelectorAll('*')].flatMap(each => each.getAttributeNames())"
        ".filter(name => name.startsWith('on'))"
    )
    assert handlers == []


def test_hostile_text_does_nothing_while_it_is_written(
    open_page: OpenPage, served: LiveServer, gate: PatientTurnstile
) -> None:
    """The model is held to write it, token by token."""
    text = (
        "<img src=x onerror=alert(1)><script>alert(2)</script> [x](javascript:alert(3)) <svg onload=alert(4)>"
    )
    user = open_page(served)
    user.button("Settings").click()
    user.choose("Form of the reply", "By a pattern")
    user.page.get_by_label("Regular expression").fill(re.sub(r"([\[\]().])", r"\\\1", text))
    user.button("Done").click()
    gate.shut()
    user.say("Be hostile")
    gate.write(text.index("alert(2)"))
    expect(user.written).to_contain_text("onerror=alert(1)")
    check_harmless(user, set())
    gate.open()
    expect(user.replies).to_have_count(1)
    check_harmless(user, set())
    assert served.runtime.session("be-hostile").history()[0].text == text


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
    user.page.wait_for_function(
        "async text => (await navigator.clipboard.readText()) === text", arg="def f():\n    return 'x'"
    )


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
    expect(user.pending).to_have_count(0)
    user.turn(1).focus()
    press("ArrowLeft")
    expect(user.page.get_by_role("img", name="Branch 1 of 2")).to_be_visible()
    expect(user.turn(1)).to_be_focused()
    press("e")
    editor = user.page.get_by_label("New text", exact=True)
    expect(editor).to_be_focused()
    user.page.keyboard.type(" changed")
    expect(editor).to_have_value("By keyboard changed")
    press("Escape")
    expect(editor).to_have_count(0)
    for key, title in (("m", "Remember this point"), ("f", "Fork this conversation")):
        user.turn(1).focus()
        press(key)
        expect(user.page.get_by_role("dialog", name=title)).to_be_visible()
        press("Escape")
        expect(user.page.get_by_role("dialog")).to_have_count(0)
    press("Alt+c")
    expect(user.page.get_by_label("Message", exact=True)).to_be_focused()
    user.ask("And again")
    user.turn(2).focus()
    press("ArrowUp")
    expect(user.turn(1)).to_be_focused()
    press("ArrowDown")
    expect(user.turn(2)).to_be_focused()
    press("Alt+b")
    expect(user.page.locator("#branches")).to_have_count(1)
    press("Alt+b")
    expect(user.page.locator("#branches")).to_have_count(0)
    press("Alt+Comma")
    expect(user.page.get_by_role("dialog", name="Settings of this conversation")).to_be_visible()
    press("Escape")
    expect(user.page.get_by_role("dialog")).to_have_count(0)
    press("Alt+s")
    expect(user.page.get_by_role("heading", name="Sessions")).to_be_visible()
    press("Alt+m")
    expect(user.page.get_by_role("heading", name="Machine")).to_be_visible()
    press("?")
    expect(user.page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    press("Escape")
    expect(user.page.get_by_role("dialog")).to_have_count(0)
    press("Alt+n")
    expect(user.page.get_by_role("group", name="Ways to begin")).to_be_visible()


def test_a_conversation_of_2000_turns_opens_at_its_end_and_scrolls_to_its_start(
    open_page: OpenPage, served: LiveServer
) -> None:
    kept_turns(served, "long", 2000)
    user = open_page(served, "/#/c/long")
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


_COUNT_DRAWN = """() => {
    window.drawn_ = {};
    new MutationObserver(records => {
        const added = records.flatMap(record => [...record.addedNodes]).filter(node => node.querySelector);
        const found = added.flatMap(node => [node, ...node.querySelectorAll('*')])
            .filter(node => node.matches('.assistant'));
        // The same in all of one frame.
        const frame = document.timeline.currentTime;
        window.drawn_[frame] = (window.drawn_[frame] ?? 0) + new Set(found).size;
    }).observe(document, {childList: true, subtree: true});
}"""
"""Counts the turns that are drawn in each frame."""
_COUNT_DISABLED = """() => {
    window.changed_ = {};
    new MutationObserver(records => {
        const frame = document.timeline.currentTime;
        window.changed_[frame] = (window.changed_[frame] ?? 0) + records.length;
    }).observe(document.querySelector('#conversation'), {attributeFilter: ['disabled'], subtree: true});
}"""
"""Counts the buttons of turns that are turned off or on in each frame."""
GROUP, BUTTONS = 20, 3
"""Turns that learn together what others do, and buttons of each that are off meanwhile."""
_IN_VIEW = """() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => {
    const edge = document.querySelector('#conversation').getBoundingClientRect().top;
    const turns = [...document.querySelectorAll('.turn')];
    const turn = turns.find(each => each.getBoundingClientRect().bottom > edge);
    done([turn.id, turn.getBoundingClientRect().top]);
})))"""
"""The first turn in view and where it is, once what came into view is laid out."""
_WHOLE = "count => document.querySelectorAll('.turn:not(.undrawn)').length === count"


def settled_view(user: User) -> Any:
    """What is in view, once nothing moves any more: what came in may be laid out over several frames."""
    found = None
    for _ in range(200):
        now = user.page.evaluate(_IN_VIEW)
        if now == found:
            break
        found = now
    return found


def test_older_turns_are_drawn_a_few_a_frame_and_leave_the_reader_in_place(
    open_page: OpenPage, served: LiveServer
) -> None:
    kept_turns(served, "older", 160)
    user = open_page(served, "/#/c/older")
    expect(user.turn(160)).to_be_in_viewport()
    user.page.wait_for_function(_WHOLE, arg=40)
    user.page.evaluate(_COUNT_DRAWN)
    held: list[Route] = []
    user.page.route("**/turns?*", lambda route: held.append(route))
    for top, shown in ((600, 140), (0, 160)):
        with user.page.expect_request("**/turns?*"):
            user.page.locator("#conversation").evaluate("(element, top) => element.scrollTop = top", top)
        turn, before = settled_view(user)
        held.pop().continue_()
        user.page.wait_for_function(_WHOLE, arg=shown)
        settled_view(user)
        after = user.page.locator(f"#{turn}").bounding_box()
        assert after is not None
        assert abs(after["y"] - before) <= 1
    drawn = user.page.evaluate("Object.values(window.drawn_)")
    assert sum(drawn) == 120
    assert max(drawn) <= 4
    # The buttons under all of them learn just so that something is said: here, more than fits.
    user.expected.append("status of 400 ")
    user.page.evaluate(_COUNT_DISABLED)
    user.say("One more")
    expect(user.pending.get_by_role("alert")).to_be_visible()
    expect(user.page.locator("article.turn button:disabled")).to_have_count(0)
    changed = user.page.evaluate("Object.values(window.changed_)")
    assert 0 < max(changed) <= 4 * GROUP * BUTTONS


def test_a_turn_far_away_is_gone_to_and_drawn_first(open_page: OpenPage, served: LiveServer) -> None:
    kept_turns(served, "far", 160)
    user = open_page(served, "/#/c/far")
    expect(user.turn(160)).to_be_in_viewport()
    user.page.evaluate(_COUNT_DRAWN)
    user.show_branches().locator(".node").nth(1).click()
    expect(user.turn(1).locator(".assistant")).to_be_in_viewport()
    expect(user.turn(1)).to_be_focused()
    for key, turn in (("ArrowDown", 2), ("ArrowUp", 1)):
        user.page.keyboard.press(key)
        expect(user.turn(turn)).to_be_focused()
    # A turn and the one before it are in groups of their own.
    user.turn(21).focus()
    user.page.keyboard.press("ArrowUp")
    expect(user.turn(20)).to_be_focused()
    # The ring around it is inside of its group, which would cut it off.
    expect(user.turn(20)).to_have_css("outline-offset", "-2px")
    expect(user.turn(20).locator(".assistant")).to_be_in_viewport()
    assert max(user.page.evaluate("Object.values(window.drawn_)")) <= 4


def test_an_adapter_of_the_server_is_chosen_and_stays(
    open_page: OpenPage, gate: PatientTurnstile, tmp_path: Path
) -> None:
    names = {"pirate": "p.gguf", "judge": "j.gguf"}
    with (
        open_words(gate=gate, store=tmp_path, adapter_names=names) as rt,
        live_server(rt, adapters={"pirate": 1.0, "judge": 0.5}) as server,
    ):
        user = open_page(server)
        user.pick("Model: toy", "judge")
        user.ask("Judge this")
        [turn] = rt.session("judge-this").history()
        assert turn.settings["adapters"] == {"judge": 0.5}
        user.page.reload()
        expect(user.replies).to_have_count(1)
        user.button("Model: toy, judge").click()
        expect(user.page.get_by_role("menuitemradio", name="judge")).to_be_checked()
