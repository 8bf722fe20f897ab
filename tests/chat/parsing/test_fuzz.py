"""Fuzzer of the reply formats: replies of every family with tools, cut, spliced, doubled and garbled.

What it holds: no reply raises; in whatever pieces it comes, it says the same; and what it says can be stored,
sent and read back.
"""

from __future__ import annotations

import json
import os
import random
import time
from itertools import pairwise

import pytest

from chat.parsing.test_llama_cpp_replies import DATA, REPLIES, parser
from perdure import Message
from perdure.chat.parsing.reply_parser import gather

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


def read(case: dict[str, object], parts: list[str]) -> Message:
    reading = parser(case)
    return gather([part for piece in parts for part in reading.push(piece)] + reading.finish())


def without_ids(message: Message) -> tuple[object, ...]:
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.tool_calls]


def check(seed: int, count: int) -> None:
    chance = random.Random(seed)
    for number in range(count):
        case = {**chance.choice(REPLIES), "tools": chance.sample(_TOOLS, chance.randrange(len(_TOOLS)))}
        # The engine gives text that encodes: half a pair never leaves its decoder.
        text = garbled(case["reply"], chance).encode("utf-8", "replace").decode()
        where = f"seed {seed}, reply {number}: {text!r}"
        whole = read(case, [text])
        assert without_ids(read(case, pieces(text, chance))) == without_ids(whole), where
        stored = json.dumps(whole.to_dict(), ensure_ascii=False).encode()
        assert Message.parse(json.loads(stored)) == whole, where


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_a_garbled_reply_says_the_same_in_pieces_and_can_be_stored(seed: int) -> None:
    check(seed, 25)


@pytest.mark.soak
def test_garbled_replies_for_long() -> None:
    """Every seed that was kept, and new ones until the time is up."""
    for seed in SEEDS:
        check(seed, 100)
    ends, start, rounds = time.monotonic() + SECONDS, random.SystemRandom().randrange(1 << 30), 0
    while time.monotonic() < ends:
        check(start + rounds, 100)
        rounds += 1
    print(f"{100 * (rounds + len(SEEDS))} garbled replies, the new ones from seed {start}")
