"""A cache that explains itself, over HTTP and in the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

import perdure
from chat.test_difference import CAUSES, TEMPLATE, Conversation
from decode.observed import open_toy
from perdure.chat.message import Message
from perdure.cli.app import app
from perdure.server.core.keys import Keys, new_key
from server.live_server import LiveServer, live_server

SYSTEM = "You are an agent.\nThe branch is {branch}.\nBe brief."


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with open_toy(n_ctx=4096, slots=2) as rt, live_server(rt) as server:
        yield server


def ask(server: LiveServer, branch: str, *more: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
    system = SYSTEM.format(branch=branch)
    messages = [{"role": "user", "content": "Hello, you there."}, *more]
    body: dict[str, Any] = {"max_tokens": 2, "messages": [{"role": "system", "content": system}, *messages]}
    if path == "/v1/messages":
        body = {"max_tokens": 2, "system": system, "messages": messages}
    with server.client() as client:
        return client.post(path, json=body, headers={"user-agent": "tester/1.0"})


def test_an_answer_its_header_the_list_and_the_command_say_what_differed(server: LiveServer) -> None:
    """A5: the line, the tokens that it cost, and what would have kept them."""
    first = ask(server, "main").json()
    assert first["perdure"]["miss"] is None
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    answer = ask(server, "dev", said, {"role": "user", "content": "Go on."})
    miss = answer.json()["perdure"]["miss"]
    assert (miss["cause"], miss["why"]) == ("system", "system prompt, line 2")
    assert (miss["before"], miss["now"]) == ("The branch is main.", "The branch is dev.")
    assert miss["tokens"] > 0
    assert miss["advice"].startswith("Keep the system prompt the same")
    header = answer.headers["x-perdure-reuse"]
    assert header.endswith("; system prompt, line 2")
    assert "branch" not in header, "no text of a conversation is in a header"

    with server.client() as client:
        [latest, before] = client.get("/v1/requests?limit=2").json()["data"]
        assert latest["miss"] == miss
        assert latest["agent"] == "tester"
        assert before["miss"] is None
        report = client.get("/v1/report").json()
    assert report["misses"] == {"system": {"tester": miss["tokens"]}}
    assert report["reused_tokens"] > 0

    shown = CliRunner().invoke(app, ["why", "--url", server.url])
    assert shown.exit_code == 0
    assert "- The branch is main.\n+ The branch is dev.\n" in shown.stdout
    assert "system prompt, line 2" in shown.stdout
    earlier = CliRunner().invoke(app, ["why", str(before["number"]), "--url", server.url, "--json"])
    assert json.loads(earlier.stdout)["number"] == before["number"]
    week = CliRunner().invoke(app, ["report", "--url", server.url])
    assert f"{miss['tokens']:,} tokens by system: tester" in week.stdout


def test_a_request_that_there_is_not_is_said(server: LiveServer) -> None:
    missing = CliRunner().invoke(app, ["why", "999", "--url", server.url])
    assert missing.exit_code != 0
    assert "no such request" in str(missing.exception)
    nobody = CliRunner().invoke(app, ["why", "--url", "http://127.0.0.1:9"])
    assert "does not answer" in str(nobody.exception)


def test_text_of_a_conversation_cannot_steer_the_terminal(server: LiveServer) -> None:
    """I6: a line is shown without what a terminal would obey."""
    first = ask(server, "one").json()
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    ask(server, "\x1b[31mtwo", said, {"role": "user", "content": "Go on."})
    shown = CliRunner().invoke(app, ["why", "--url", server.url])
    assert "\x1b[31mtwo" not in shown.stdout
    assert "two" in shown.stdout


@pytest.fixture(scope="module")
def keyed() -> Iterator[tuple[LiveServer, dict[str, str]]]:
    """A server on which every planted cause has a key, and so a past, of its own."""
    made = {name: new_key(f"n{number}") for number, name in enumerate(CAUSES)}
    with (
        open_toy(n_ctx=4096, slots=2, template=perdure.Template(TEMPLATE)) as rt,
        live_server(rt, keys=Keys([key for _, key in made.values()])) as server,
    ):
        yield server, {name: secret for name, (secret, _) in made.items()}


@pytest.mark.parametrize("name", CAUSES)
def test_the_command_names_the_cause_of_a_request(
    name: str, keyed: tuple[LiveServer, dict[str, str]]
) -> None:
    """A5: thirty planted causes, sent over HTTP and asked for by the request's number."""
    server, secrets = keyed
    plant, cause, place = CAUSES[name]

    def send(each: Conversation) -> Any:
        settings = {"date": "2026-11-17", **each.settings}
        body = {
            "messages": [message.to_dict() for message in each.messages],
            "tools": each.tools or None,
            "max_tokens": 4,
            "seed": 1,
            "chat_template_kwargs": settings.get("chat_template_kwargs"),
            "perdure": {"date": settings["date"], "stable_prefix": False},
        }
        with server.client(secrets[name]) as client:
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            (latest, *_) = client.get("/v1/requests?limit=1").json()["data"]
        return latest["number"], answer.json()["choices"][0]["message"]["content"]

    _, text = send(Conversation())
    again = Conversation()
    plant(again)
    again.messages += [Message(role="assistant", content=text), Message(role="user", content="And more?")]
    number, _ = send(again)
    options = ["why", str(number), "--url", server.url, "--key", secrets[name]]
    found = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout)
    assert (found["miss"]["cause"], found["miss"]["why"]) == (cause, place)
    shown = CliRunner().invoke(app, options).stdout
    assert place in " ".join(shown.split())
