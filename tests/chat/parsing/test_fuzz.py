"""Fuzzer of the reply formats: replies of every family with tools, cut, spliced, doubled and garbled.

What it holds: no reply raises; in whatever pieces it comes, it says the same; what it says can be stored,
sent and read back; and in the prompt that it is sent back in, every word comes from that conversation (C13).
"""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

import perdure
from chat.parsing.test_llama_cpp_replies import DATA, REPLIES, parser, template
from perdure import Message, TemplateError, Tool
from perdure.chat.chat_format import ChatFormat
from perdure.chat.options import ChatOptions
from perdure.chat.parsing.reply_parser import gather
from perdure.chat.transcript import ChatTokenizer, Transcript
from perdure.testing.toy import ToyModel

SECONDS = float(os.environ.get("PERDURE_FUZZ_SECONDS", "3600"))
ODD = (
    "\ud83d",
    "\udc00",
    "\\ud83d",
    "\x00",
    "\u2028",
    "1e999",
    "NaN",
    "-0",
    "\\",
    '"',
    "{",
    "}",
    "[",
    "]",
    "<",
    "\n",
)
SEEDS = (1, 2, 3, 5, 8, 13, 21, 34)
"""Each makes up a hundred replies; one that ever fails is added here."""
_TOOLS = sorted(DATA["tools"])


def garbled(text: str, chance: random.Random) -> str:
    """A reply with a few changes."""
    for _ in range(chance.randrange(4)):
        start, end = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        other = chance.choice(REPLIES)["reply"]
        text = chance.choice(
            (
                text[:start] + text[end:],
                text[:start] + text[start:end] * 2 + text[end:],
                text[:start] + chance.choice(ODD) + text[start:],
                text[:start] + other[: chance.randrange(len(other) + 1)] + text[end:],
                text[:end],
            )
        )
    return text


def pieces(text: str, chance: random.Random) -> list[str]:
    count = chance.choice([1, 2, 5, len(text)])
    ends = [0, *sorted(chance.randrange(len(text) + 1) for _ in range(count)), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


def read(case: dict[str, Any], parts: list[str]) -> Message:
    reading = parser(case)
    return gather([part for piece in parts for part in reading.push(piece)] + reading.finish())


def without_ids(message: Message) -> tuple[object, ...]:
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.tool_calls]


@cache
def chat_format(name: str) -> ChatFormat:
    """Of a template, and one for all conversations: what it remembers of one must not get into another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERDURE_CHECK_PROMPTS", "1")
        with perdure.open(ToyModel(), n_ctx=1 << 14, slots=1, template=template(name)) as runtime:
            return runtime.chat_format


def sent_back(case: dict[str, Any], reply: Message) -> bool:
    """Whether the template takes a reply back: every word of the prompt is then traced."""
    asked = [
        Message.parse(each) for each in case.get("messages", [{"role": "user", "content": "Hey there!"}])
    ]
    results = [
        Message(role="tool", content="Done.", tool_call_id=call.id, name=call.name)
        for call in reply.tool_calls
    ]
    history = [*asked, reply, *results, Message(role="user", content="Go on.")]
    tools = tuple(Tool.parse(DATA["tools"][name]) for name in case["tools"])
    with suppress(TemplateError):
        chat_format(case["template"]).prompt(history, ChatOptions(tools=tools))
        return True
    return False


def check(seed: int, count: int) -> int:
    """How many of the replies were sent back."""
    from perdure.ext.inspection.provenance import ProvenanceError

    chance = random.Random(seed)
    traced = 0
    for number in range(count):
        case = {**chance.choice(REPLIES), "tools": chance.sample(_TOOLS, chance.randrange(len(_TOOLS)))}
        # The engine gives text that encodes: half a pair never leaves its decoder.
        text = garbled(case["reply"], chance).encode("utf-8", "replace").decode()
        where = f"seed {seed}, reply {number}: {text!r}"
        whole = read(case, [text])
        assert without_ids(read(case, pieces(text, chance))) == without_ids(whole), where
        stored = json.dumps(whole.to_dict(), ensure_ascii=False).encode()
        assert Message.parse(json.loads(stored)) == whole, where
        try:
            traced += sent_back(case, whole)
        except ProvenanceError as failure:
            raise AssertionError(where) from failure
    return traced


@pytest.mark.extension("families", "inspection")
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_a_garbled_reply_says_the_same_in_pieces_and_can_be_stored(seed: int) -> None:
    assert check(seed, 25) > 20


@pytest.mark.extension("families", "inspection")
def test_a_foreign_word_behind_a_reply_is_found_c13(monkeypatch: pytest.MonkeyPatch) -> None:
    """C13: with a word planted into what is tokenised."""
    encode = ChatTokenizer.encode

    def foreign(self: ChatTokenizer, text: str, base: Transcript | None = None, *images: Any) -> Transcript:
        return encode(self, f"{text} marzipan", base, *images)

    monkeypatch.setattr(ChatTokenizer, "encode", foreign)
    with pytest.raises(AssertionError, match="seed 1, reply 0"):
        check(1, 1)


@pytest.mark.extension("families", "inspection")
@pytest.mark.soak
def test_garbled_replies_for_long() -> None:
    """Every seed that was kept, and new ones until the time is up."""
    traced = sum(check(seed, 100) for seed in SEEDS)
    ends, start, rounds = time.monotonic() + SECONDS, random.SystemRandom().randrange(1 << 30), 0
    while time.monotonic() < ends:
        traced += check(start + rounds, 100)
        rounds += 1
    replies = 100 * (rounds + len(SEEDS))
    print(f"{replies} garbled replies, {traced} of them sent back and traced, new ones from seed {start}")
