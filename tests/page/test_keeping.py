"""Nothing typed is lost at limits, refusals, a server that is away, a full context; names; use of keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Route, expect

from page.conftest import OpenPage
from page.words import open_words
from perdure.server.core.keys import Keys, new_key
from server.live_server import LiveServer, hello, live_server

AWAY = ["ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE", "ERR_FAILED"]


def refusing(status: int) -> Callable[[Route], None]:
    """A server that refuses with a status, or with 0 is not there."""
    error = {"error": {"message": "not now", "type": "x", "param": None, "code": None}}
    return lambda route: route.fulfill(status=status, json=error) if status else route.abort()


def test_a_message_stays_until_the_server_has_it_and_outlasts_a_reload(
    open_page: OpenPage, served: LiveServer
) -> None:
    user = open_page(served)
    user.expected += [*AWAY, "status of 4"]
    box = user.page.get_by_label("Message", exact=True)
    # A new conversation: the first request makes it, and is refused or never arrives.
    for status in (429, 403, 0):
        user.page.route("**/v1/sessions", refusing(status))
        user.say(f"precious words {status}")
        expect(box).to_have_value(f"precious words {status}")
        user.page.unroute("**/v1/sessions")
    user.page.reload()
    expect(box).to_have_value("precious words 0")
    # In a conversation: the message is in the failed turn, also after a reload.
    user.write("")
    user.ask("hello there")
    user.page.route("**/turns", refusing(429))
    user.say("more words")
    expect(user.pending.get_by_role("alert")).to_contain_text("not now")
    expect(box).to_have_value("")
    user.page.reload()
    expect(user.pending.get_by_role("alert")).to_contain_text("not now")
    expect(user.pending).to_contain_text("more words")
    user.page.unroute("**/turns")
    user.button("Send again").click()
    expect(user.pending).to_have_count(0)
    expect(box).to_have_value("")
    turns = served.runtime.session(user.name).history()
    assert [turn.messages[0].content for turn in turns] == ["hello there", "more words"]
    # What the server has is not offered again.
    user.page.reload()
    expect(user.replies).to_have_count(2)
    expect(box).to_have_value("")


def test_a_full_context_offers_its_choices_beside_the_message(open_page: OpenPage, tmp_path: Path) -> None:
    with open_words(store=tmp_path, n_ctx=256) as rt, live_server(rt) as server:
        user = open_page(server)
        user.expected.append("status of 400 ")
        user.ask("one two three four five " * 3)
        user.say("six seven eight nine ten " * 6)
        alert = user.pending.get_by_role("alert")
        expect(alert).to_contain_text("no longer fits into the context")
        user.button("Leave out the oldest messages", alert).click()
        expect(user.pending).to_have_count(0)
        turns = rt.session(user.name).history()
        assert len(turns) == 2
        assert turns[1].settings["overflow"] == "drop_oldest"


def test_a_name_with_a_slash_is_refused_in_words_and_an_old_one_is_not_called_deleted(
    open_page: OpenPage, served: LiveServer
) -> None:
    served.runtime.session("plain").say("hello")
    turns = served.runtime.session("plain").standing().turns
    # As it was made before there was a rule.
    served.runtime.sessions.store.create("", "my plans/2026", turns)
    user = open_page(served, "/#/c/my%20plans%2F2026")
    user.expected.append("status of 40")
    expect(user.page.get_by_text("has a slash in its name")).to_be_visible()
    expect(user.page.get_by_text("was deleted")).to_have_count(0)
    user.page.goto(f"{served.url}/#/c/plain")
    user.turn(1).focus()
    user.page.keyboard.press("f")
    dialog = user.page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("a/b")
    user.button("Fork", dialog).click()
    expect(user.page.get_by_text("a session's name has no slash")).to_be_visible()


def test_the_page_names_the_model_and_says_how_branches_differ(
    open_page: OpenPage, served: LiveServer
) -> None:
    long = "the beginning of a very long name " * 3 + "and its end"
    session = served.runtime.session(long)
    session.say("the same for both")
    other = session.fork(f"{long}~2")
    session.say("about ships")
    other.say("about trees")
    user = open_page(served)
    user.page.goto(f"{served.url}/#/c/{long}")
    expect(user.page.locator(".talk-head .model")).to_have_text("toy")
    shown = user.page.locator("nav a[aria-current=page]")
    expect(shown).to_have_attribute("title", long)
    labels = user.show_branches().locator(".differs")
    expect(labels).to_have_count(2)
    assert set(labels.all_text_contents()) == {"about ships", "about trees"}


def test_half_a_reply_is_not_called_none(open_page: OpenPage, served: LiveServer) -> None:
    user = open_page(served)
    delta = {"index": 0, "delta": {"content": "half a"}, "logprobs": None, "finish_reason": None}
    told = [{"choices": [delta]}, {"error": {"message": "the engine died", "code": None}}]
    broken = "".join(f"data: {json.dumps(each)}\n\n" for each in told) + "data: [DONE]\n\n"
    user.page.route("**/turns", lambda route: route.fulfill(content_type="text/event-stream", body=broken))
    user.say("hello")
    alert = user.pending.get_by_role("alert")
    expect(alert).to_contain_text("The reply broke off: the engine died")
    expect(alert).not_to_contain_text("No reply")


def test_the_operator_sees_who_uses_what_and_a_key_is_changed(open_page: OpenPage, tmp_path: Path) -> None:
    (ada, ada_key), (operator, operator_key) = new_key("ada", tokens_per_day=1000), new_key("metrics")
    with open_words(store=tmp_path) as rt, live_server(rt, keys=Keys([ada_key, operator_key])) as server:
        with server.client(ada) as client:
            used = client.post("/v1/chat/completions", json=hello()).json()["usage"]
        user = open_page(server, "/#/usage")
        user.expected += ["status of 401 ", "status of 403 "]
        user.page.get_by_label("Key", exact=True).fill(operator)
        user.button("Use this key").click()
        row = user.page.get_by_role("row", name="ada")
        expect(row).to_contain_text(str(used["prompt_tokens"]))
        expect(row).to_contain_text(str(1000 - used["total_tokens"]))
        user.button("Change key").click()
        user.page.get_by_label("Key", exact=True).fill(ada)
        user.button("Use this key").click()
        expect(user.page.get_by_role("heading", name="New conversation")).to_be_visible()
        user.ask("hello")
        assert rt.sessions.store.has("ada", user.name)


def test_who_has_used_up_a_day_still_reads_and_keeps_the_message(open_page: OpenPage, tmp_path: Path) -> None:
    ada, ada_key = new_key("ada", tokens_per_day=1)
    with open_words(store=tmp_path) as rt, live_server(rt, keys=Keys([ada_key])) as server:
        rt.session("old talk", namespace="ada").say("hello there")
        with server.client(ada) as client:
            assert client.post("/v1/chat/completions", json=hello()).status_code == 200
        user = open_page(server, "/#/c/old%20talk")
        user.expected += ["status of 401 ", "status of 429 "]
        user.page.get_by_label("Key", exact=True).fill(ada)
        user.button("Use this key").click()
        # The conversation that the address names, though its first request was refused.
        expect(user.replies).to_have_count(1)
        user.say("more words")
        expect(user.pending.get_by_role("alert")).to_contain_text("00:00 UTC")
        expect(user.pending).to_contain_text("more words")
        assert len(rt.session("old talk", namespace="ada").history()) == 1


def test_a_reply_that_its_limit_ended_says_so(open_page: OpenPage, served: LiveServer) -> None:
    user = open_page(served)
    user.set(max_tokens="4")
    user.ask("hello")
    expect(user.turn(1)).to_contain_text("Cut at the length limit")


def test_the_machine_shows_which_models_it_could_run(open_page: OpenPage, served: LiveServer) -> None:
    user = open_page(served, "/#/machine")
    table = user.page.get_by_role("region", name="Models to choose from")
    expect(table.locator("li")).not_to_have_count(0)
    table.get_by_role("button", name=re.compile("^Show .* more")).click()
    expect(table).to_contain_text("llama3.2:3b")
    expect(table.get_by_text("best here")).to_have_count(1)
