"""Side requests: titles of known clients are told from conversations, and evict none."""

from __future__ import annotations

from typing import Any

import pytest

import perdure
from inside import inside
from perdure.chat.message import Message
from perdure.ext.agents.side_requests import SIDE_REQUESTS, side_request
from perdure.testing.toy import ToyModel

TITLES = {
    "opencode": [
        ("system", "You are a title generator. You output ONLY a thread title. Nothing else.\n\n<task>"),
        ("user", "Generate a title for this conversation:"),
        ("user", "Fix the tests"),
    ],
    "Claude Code": [
        ("system", "You are Claude Code, Anthropic's official CLI for Claude."),
        (
            "system",
            "Analyze if this message indicates a new conversation topic.",
        ),
        ("user", "Fix the tests"),
    ],
    "Open WebUI": [
        ("user", "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history."),
    ],
}


def said(parts: list[tuple[str, str]]) -> list[Message]:
    return [Message(role=role, content=text) for role, text in parts]


@pytest.mark.parametrize("client", TITLES)
def test_a_title_is_known_by_its_words(client: str) -> None:
    found = side_request(said(TITLES[client]))
    assert found is not None
    assert found.client == client


def test_every_client_of_the_table_is_tried() -> None:
    assert {kind.client for kind in SIDE_REQUESTS} == TITLES.keys()


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [("system", "You are an agent."), ("user", "You are a title generator, are you?"), ("user", "Hi")],
        [("user", "Tell me: what is a title generator? You are a title generator.")],
        [("user", "### Task:\nGenerate a list of all users")],
        # A conversation about titles goes on.
        [("system", "You are a title generator."), ("user", "One"), ("assistant", "A"), ("user", "Two")],
    ],
)
def test_a_conversation_is_none(parts: list[tuple[str, str]]) -> None:
    assert side_request(said(parts)) is None


def test_titles_evict_no_conversation_and_say_what_they_said() -> None:
    """The mechanism as a whole: with and without it, the same tokens."""
    title: Any = [{"role": role, "content": text} for role, text in TITLES["opencode"]]
    replies = []
    for side in (None, False):
        with perdure.open(ToyModel(), n_ctx=2048, slots=1, cache=150_000) as rt:
            asked: dict[str, Any] = {} if side is None else {"side": side}
            main: Any = [{"role": "user", "content": "Read all of this. " * 20}]
            first = rt.chat(main, max_tokens=4, temperature=0)
            replies.append([rt.chat(title, max_tokens=8, temperature=0, ignore_eos=True, **asked).raw.tokens])
            main += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Go on."}]
            replies[-1].append(rt.chat(main, max_tokens=8, temperature=0, ignore_eos=True).raw.tokens)
            uses = [slot.use.side for slot in inside(rt).slot_cache.table.all]
            assert uses == [False]
    assert replies[0] == replies[1]
