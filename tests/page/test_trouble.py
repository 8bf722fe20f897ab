"""Trouble: a server that restarts, a connection that drops, a wrong key, two tabs on one session."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Route, expect

from page.conftest import OpenPage
from page.gates import PatientTurnstile
from page.user import User, letters
from page.words import REPLY, open_words
from perdure.server.core.keys import Keys, new_key
from perdure.server.core.server_state import ServerState
from perdure.server.http_server import HttpServer, bind
from server.live_server import LiveServer, live_server, opened
from server.test_command import serving

LOST = "The connection was lost."
INTERRUPTED = "This reply was interrupted. What you asked and what was written are kept."
AWAY = [
    "ERR_CONNECTION_REFUSED",
    "ERR_INCOMPLETE_CHUNKED_ENCODING",
    "ERR_CONNECTION_RESET",
    "ERR_EMPTY_RESPONSE",
]


def begin(user: User, gate: PatientTurnstile, text: str) -> str:
    """Say something, and have half of the reply written: what is shown of it."""
    gate.shut()
    user.say(text)
    gate.write(REPLY // 2)
    expect(user.written).to_have_text(re.compile("[a-z]"))
    return (user.written.text_content() or "").strip()


def cut(user: User, server: LiveServer) -> None:
    """Both ways at once: what was being read ends, and nothing new comes through."""
    user.page.context.set_offline(True)
    connections = list(server.http_server.server_state.connections)
    for connection in connections:
        server.http_server._loop.call_soon_threadsafe(connection.transport.abort)  # type: ignore[union-attr]


def drop(user: User, server: LiveServer, gate: PatientTurnstile) -> None:
    """Have the connection drop, and come back."""
    cut(user, server)
    expect(user.page.get_by_text(LOST)).to_be_visible()
    gate.open()
    user.page.context.set_offline(False)
    expect(user.page.get_by_text(INTERRUPTED)).to_be_visible()


def test_a_server_that_restarts_in_the_middle_of_a_reply_is_waited_for(
    open_page: OpenPage, tmp_path: Path
) -> None:
    gate = PatientTurnstile(is_open=True)
    with open_words(gate=gate, store=tmp_path) as rt, live_server(rt) as server:
        user = open_page(server)
        user.expected = [*AWAY, "503"]
        user.ask("Before the restart")
        begin(user, gate, "During the restart")
        port = server.port
        server.http_server.stop(now=True)
        # The engine is let go on when the server has ended the reply, which would else be whole by then.
        expect(user.page.get_by_role("alert")).to_be_visible()
        gate.open()
    with open_words(store=tmp_path) as rt:
        listening = bind("127.0.0.1", port)
        listening.listen(64)
        again = HttpServer(ServerState(runtime=rt, name="toy"))
        thread = threading.Thread(target=again.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            # What was written when the server stopped is there, and goes on behind its last token.
            expect(user.page.get_by_text(INTERRUPTED)).to_be_visible()
            expect(user.written).to_have_text(re.compile("[a-z]"))
            user.button("Continue").click()
            expect(user.pending).to_have_count(0)
            turns = rt.session("before-the-restart").history()
            assert [turn.messages[0].content for turn in turns] == [
                "Before the restart",
                "During the restart",
            ]
            assert turns[1].finish_reason == "stop"
            assert len(turns[1].text) == REPLY
            user.page.goto("about:blank")
        finally:
            again.stop(now=True)
            thread.join()


@pytest.mark.model
def test_a_server_that_is_killed_in_the_middle_of_a_reply_is_gone_on_with(
    open_page: OpenPage, tmp_path: Path
) -> None:
    """The command itself, with the model that newcomers get, and kill -9."""
    from perdure import models

    options = ("--store", str(tmp_path), "--ctx", "1024")
    model = models.path(None)
    with serving(model, *options) as running:
        user = open_page(running)
        user.expected = [*AWAY, "503"]
        user.set(max_tokens="16", temperature="0")
        user.ask("Name a colour.")
        user.set(max_tokens="300")
        user.say("Write a very long story about the sea, with many chapters.")
        expect(user.written).to_have_text(re.compile(r"\w+ \w+ \w+"))
        running.process.kill()
        running.process.wait()
        expect(user.page.get_by_text(LOST)).to_be_visible()
        port = running.url.rpartition(":")[2]
    with serving(model, *options, "--port", port) as running, running.client() as client:
        # The turn before is there, the cut one is pending, and goes on from what was written down of it.
        [turn] = client.get("/v1/sessions/name-a-colour/turns").json()["data"]
        assert turn["reply"]["content"]
        user.page.reload()
        expect(user.page.get_by_text(INTERRUPTED)).to_be_visible()
        pending = client.get("/v1/sessions/name-a-colour/pending").json()["pending"]
        user.button("Continue").click()
        expect(user.replies).to_have_count(2)
        expect(user.pending).to_have_count(0)
        _, turn = client.get(f"/v1/sessions/{user.name}/turns").json()["data"]
        assert letters(turn["reply"]["content"]).startswith(letters(pending["reply"]["content"]))
        user.page.goto("about:blank")


@pytest.mark.parametrize("how", ["Continue", "Ask again", "Discard"])
def test_c12_what_a_killed_server_has_cut_is_settled_on_the_page(
    open_page: OpenPage, zoo_path: Callable[[str], Path], tmp_path: Path, how: str
) -> None:
    """C12: kill -9 in the middle of a reply, a new server, a reload, and each of the three buttons."""
    options = ("--store", str(tmp_path), "--ctx", "2048", "--exact")
    with serving(zoo_path("llama"), *options) as running:
        user = open_page(running)
        user.expected = [*AWAY, "503"]
        user.set(max_tokens="1500", temperature="0")
        user.say("Tell me of the sea")
        expect(user.written).to_have_text(re.compile(r"\w+"))
        with running.client() as client:
            # At most a second behind, what is written is in the store.
            while not (client.get(f"/v1/sessions/{user.name}/pending").json()["pending"] or {}).get("reply"):
                expect(user.written).to_be_visible()
        running.process.kill()
        running.process.wait()
        expect(user.page.get_by_text(LOST)).to_be_visible()
        port = running.url.rpartition(":")[2]
    with serving(zoo_path("llama"), *options, "--port", port) as running, running.client() as client:
        user.page.reload()
        alert = user.page.get_by_role("alert")
        expect(alert).to_contain_text(INTERRUPTED)
        expect(user.pending).to_contain_text("Tell me of the sea")
        pending = client.get(f"/v1/sessions/{user.name}/pending").json()["pending"]
        part = pending["reply"]["content"] or ""
        user.button(how, alert).click()
        if how == "Discard":
            expect(user.pending).to_have_count(0)
            assert client.get(f"/v1/sessions/{user.name}/pending").json()["pending"] is None
            assert client.get(f"/v1/sessions/{user.name}").json()["turns"] == 0
        else:
            expect(user.replies).to_have_count(1)
            expect(user.pending).to_have_count(0)
            [turn] = client.get(f"/v1/sessions/{user.name}/turns").json()["data"]
            # Greedy and exact: another reply from the start is the same one.
            assert turn["reply"]["content"].startswith(part)
            assert turn["usage"]["completion_tokens"] == 1500
        user.page.goto("about:blank")


@pytest.mark.parametrize("how", ["Continue", "Ask again", "Discard", "reload", "another message"])
def test_c12_what_a_dropped_connection_has_cut_is_there_and_can_be_continued(
    open_page: OpenPage, served: LiveServer, gate: PatientTurnstile, how: str
) -> None:
    """C12: the message, and what was written of the reply; also after a reload of the tab."""
    user = open_page(served)
    user.expected = ["ERR_FAILED", "ERR_INTERNET_DISCONNECTED", "net::ERR"]
    user.ask(f"Before the drop {how}")
    shown = begin(user, gate, "During the drop")
    drop(user, served, gate)
    if how == "reload":
        user.page.reload()
        expect(user.page.get_by_text(INTERRUPTED)).to_be_visible()
    expect(user.page.get_by_text("During the drop")).to_be_visible()
    assert (user.written.text_content() or "").strip().startswith(shown)
    if how == "another message":
        user.say("After the drop")
        expect(user.replies).to_have_count(3)
    else:
        user.button("Continue" if how == "reload" else how).click()
        expect(user.replies).to_have_count(1 if how == "Discard" else 2)
    expect(user.pending).to_have_count(0)
    expect(user.page.get_by_text(INTERRUPTED)).to_have_count(0)
    session = served.runtime.session(user.name)
    assert session.pending is None
    said = [turn.messages[0].content for turn in session.history()][1:]
    assert said == {"Discard": [], "another message": ["During the drop", "After the drop"]}.get(
        how, ["During the drop"]
    )
    if how in ("Continue", "reload"):
        assert session.history()[1].text.strip().startswith(shown)
        assert len(session.history()[1].text) == REPLY


def test_going_on_is_offered_once(open_page: OpenPage, served: LiveServer, gate: PatientTurnstile) -> None:
    """A reply that was cut by its limit, and behind it one that was interrupted."""
    user = open_page(served)
    user.expected = ["ERR_FAILED", "ERR_INTERNET_DISCONNECTED", "net::ERR"]
    user.set(max_tokens="4")
    user.ask("Cut by the limit")
    expect(user.button("Continue", user.turn(1))).to_have_count(1)
    user.set(max_tokens="")
    begin(user, gate, "Interrupted")
    drop(user, served, gate)
    for _ in range(2):
        expect(user.button("Continue")).to_have_count(1)
        expect(user.button("Continue", user.page.get_by_role("alert"))).to_be_visible()
        user.page.reload()
        expect(user.page.get_by_text(INTERRUPTED)).to_be_visible()
    user.button("Discard").click()
    expect(user.pending).to_have_count(0)
    expect(user.button("Continue", user.turn(1))).to_have_count(1)


def test_nothing_is_to_be_sent_again_before_the_server_says_what_it_has(
    open_page: OpenPage, served: LiveServer, gate: PatientTurnstile
) -> None:
    """C12: after a reload, the tab's own memory of a lost connection is older than what the server has."""
    user = open_page(served)
    user.expected = ["ERR_FAILED", "ERR_INTERNET_DISCONNECTED", "net::ERR"]
    user.ask("Before it")
    begin(user, gate, "Cut in the middle")
    held: list[Route] = []
    user.page.route("**/pending", lambda route: held.append(route))
    cut(user, served)
    expect(user.button("Send again")).to_be_visible()
    user.page.context.set_offline(False)
    gate.open()
    held.clear()
    user.page.reload()
    while not held:
        user.page.wait_for_timeout(20)
    expect(user.button("Send again")).to_have_count(0)
    held[-1].continue_()
    user.page.unroute("**/pending")
    expect(user.button("Continue")).to_be_visible()
    expect(user.button("Send again")).to_have_count(0)


def test_a_wrong_key_is_told_and_a_right_one_is_kept_until_the_tab_closes(
    open_page: OpenPage, tmp_path: Path
) -> None:
    secret, key = new_key("alice")
    with open_words(store=tmp_path) as rt, live_server(rt, keys=Keys([key])) as server:
        user = open_page(server)
        user.expected = ["401"]
        question = user.page.get_by_role("dialog", name="This server needs a key")
        expect(question).to_be_visible()
        for given in ("wrong", secret):
            user.page.get_by_label("Key", exact=True).fill(given)
            user.button("Use this key").click()
            if given == "wrong":
                expect(question).to_contain_text("does not know this key")
        expect(question).to_have_count(0)
        user.ask("With a key")
        assert [info.name for info in rt.sessions.list("alice")] == ["with-a-key"]
        user.page.reload()
        expect(user.replies).to_have_count(1)
        assert user.page.evaluate("JSON.stringify(localStorage) + document.cookie").find(secret) == -1
        other = open_page(server)
        other.expected = ["401"]
        expect(other.page.get_by_role("dialog", name="This server needs a key")).to_be_visible()
        user.page.goto("about:blank")
        other.page.goto("about:blank")


def test_two_tabs_on_one_session_see_the_same_turns(
    open_page: OpenPage, served: LiveServer, gate: PatientTurnstile
) -> None:
    one = open_page(served)
    one.ask("Shared between tabs")
    two = open_page(served, f"/#/c/{one.name}", beside=one)
    two.expected = ["409"]
    expect(two.replies).to_have_count(1)
    one.ask("From the first")
    expect(two.replies).to_have_count(2)
    gate.shut()
    one.page.bring_to_front()
    one.say("Slowly now")
    gate.write(1)
    two.page.bring_to_front()
    two.say("At the same time")
    expect(two.page.get_by_text("is being answered elsewhere")).to_be_visible()
    gate.open()
    expect(two.replies).to_have_count(3)
    two.button("Send again").click()
    expect(two.replies).to_have_count(4)
    one.page.bring_to_front()
    expect(one.replies).to_have_count(4)
    said = [turn.messages[0].content for turn in served.runtime.session(one.name).history()]
    assert said[-2:] == ["Slowly now", "At the same time"]


@pytest.mark.model
def test_the_default_model_talks_branches_and_says_what_was_reused(
    open_page: OpenPage, tmp_path: Path
) -> None:
    """Once with the model that newcomers get."""
    from perdure import models

    with (
        opened(models.path(None), n_ctx=1024, store=tmp_path) as rt,
        live_server(rt) as server,
    ):
        user = open_page(server)
        user.set(max_tokens="16", temperature="0")
        user.ask("Name a colour.")
        user.ask("Name another one.")
        expect(user.show_reuse(2)).to_contain_text("slot")
        expect(user.turn(2).locator(".why")).to_be_visible()
        user.button("Regenerate", user.turn(2)).click()
        expect(user.page.get_by_role("img", name="Branch 2 of 2")).to_be_visible()
        expect(user.pending).to_have_count(0)
        user.page.goto("about:blank")
