"""Several samples and log probabilities, together with budgets, shifting, grammars and calls."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import perdure
from perdure import ChatReply, Runtime, Template
from perdure.chat.reply import ChatDelta
from perdure.engine.logits import LogitsView
from perdure.testing.toy import ToyModel

THINKS = Template(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
SAID = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "enum": ["sea", "sky"]}},
            "required": ["at"],
        },
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 24},
    "budget": {"reasoning_budget": 6, "max_tokens": 24},
    "hidden": {"reasoning_budget": 6, "reasoning": "hide", "max_tokens": 24},
    "budget and regex": {"reasoning_budget": 6, "regex": "[ab]{8}", "max_tokens": 40},
    "budget and call": {
        "reasoning_budget": 6,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 120,
    },
    "shift": {"overflow": "shift", "max_tokens": 150, "ignore_eos": True},
    "shift and regex": {
        "overflow": "shift",
        "reasoning_budget": 6,
        "regex": "[ab]{140}!",
        "max_tokens": 200,
    },
    "budget that the context is too short for": {
        "overflow": "shift",
        "reasoning_budget": 130,
        "max_tokens": 150,
        "ignore_eos": True,
    },
}


def opened(way: str) -> Runtime:
    n_ctx = 64 if "shift" in way or "short" in way else 1024
    return perdure.open(ToyModel(), n_ctx=n_ctx, slots=2, template=THINKS)


def read(reply: ChatReply) -> tuple[Any, ...]:
    calls = tuple((call.name, call.arguments) for call in reply.tool_calls)
    return (reply.tokens, reply.text, reply.reasoning, calls, reply.finish_reason, reply.shifted, reply.seed)


@pytest.mark.parametrize("way", WAYS)
def test_each_sample_is_what_its_seed_gives_by_itself(way: str) -> None:
    """M6: n samples are those of the seeds that follow each other, however their replies go on."""
    with opened(way) as rt:
        replies = rt.submit_chat(SAID, n=3, seed=7, **WAYS[way]).replies()
        assert [reply.index for reply in replies] == [0, 1, 2]
        for number, reply in enumerate(replies):
            assert read(reply) == read(rt.chat(SAID, seed=7 + number, **WAYS[way]))
        assert len({reply.tokens for reply in replies}) == 3

        async def asked() -> list[ChatReply]:
            return await rt.submit_chat(SAID, n=3, seed=7, **WAYS[way]).areplies()

        assert list(map(read, asyncio.run(asked()))) == list(map(read, replies))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_deltas_of_each_sample_add_up_to_it(way: str, asynchronous: bool) -> None:
    """With a log probability for each token, and the likeliest beside those that were drawn."""
    with opened(way) as rt:
        job = rt.submit_chat(SAID, n=2, seed=3, logprobs=2, **WAYS[way])

        async def deltas() -> list[Any]:
            return [delta async for delta in job]

        found = asyncio.run(deltas()) if asynchronous else list(job)
        for reply in job.replies():
            mine = [delta for delta in found if delta.index == reply.index]
            assert tuple(token for delta in mine for token in delta.tokens) == reply.tokens
            assert "".join(delta.text for delta in mine) == (reply.text or "")
            assert "".join(delta.reasoning for delta in mine) == (reply.reasoning or "")
            assert [delta.finish_reason for delta in mine if delta.finish_reason] == [reply.finish_reason]
            logprobs = [entry for delta in mine for entry in delta.logprobs]
            assert tuple(logprobs) == reply.logprobs
            assert [entry.token for entry in logprobs] == list(reply.tokens)
            assert reply.usage.completion_tokens == len(reply.tokens)


@pytest.mark.parametrize("way", WAYS)
def test_who_takes_no_more_is_called_no_more_until_it_asks_again(way: str) -> None:
    """H3: also where the reply goes on in another request, which has separate deltas."""
    calls: list[list[ChatDelta]] = []

    def take(deltas: list[ChatDelta]) -> bool:
        calls.append(deltas)
        return False

    async def drained(job: Any) -> None:
        ended = False
        while not ended:
            before = len(calls)
            ended = await job.consume(take)
            assert len(calls) <= before + 1

    with opened(way) as rt:
        job = rt.submit_chat(SAID, seed=3, **WAYS[way])
        asyncio.run(drained(job))
        found = tuple(token for deltas in calls for delta in deltas for token in delta.tokens)
        assert found == job.reply().tokens


def test_a_grammar_goes_on_where_the_context_is_shifted() -> None:
    """C4: what was left out of the context is not left out of the grammar."""
    with opened("shift") as rt:
        for reply in rt.submit_chat(SAID, n=2, seed=1, **WAYS["shift and regex"]).replies():
            assert re.fullmatch("[ab]{140}!", reply.text)
            assert reply.shifted > 0
            assert reply.finish_reason == "stop"


def test_each_sample_has_a_call_of_its_own() -> None:
    with opened("budget and call") as rt:
        replies = rt.submit_chat(SAID, n=4, seed=2, **WAYS["budget and call"]).replies()
        assert len({reply.tool_calls[0].id for reply in replies}) == 4
        for reply in replies:
            assert json.loads(reply.tool_calls[0].arguments)["at"] in ("sea", "sky")
            assert (reply.finish_reason, reply.problems) == ("tool_calls", ())


def test_a_cancel_ends_all_samples_h7() -> None:
    with opened("budget") as rt:
        job = rt.submit_chat(SAID, n=3, seed=1, reasoning_budget=50, max_tokens=900, ignore_eos=True)
        for _ in job:
            job.cancel()
        assert [reply.finish_reason for reply in job.replies()] == ["cancelled"] * 3
        assert rt.load == (0, 0)


def written(script: bytes, **settings: Any) -> ChatReply:
    """What is read of a reply that is `script`, whole and as a stream, in a context much shorter than it."""

    def processor() -> Any:
        left = iter(script)

        def forced(tokens: Sequence[int], logits: LogitsView) -> Any:
            row = np.full(len(logits), -1000, np.float32)
            row[next(left)] = 0
            return row

        return forced

    asked: dict[str, Any] = {"overflow": "shift", "max_tokens": len(script), "temperature": 0, **settings}
    with perdure.open(ToyModel(), n_ctx=48, slots=1) as rt:
        reply = rt.chat(SAID, processors=[processor()], **asked)
        deltas = list(rt.chat_stream(SAID, processors=[processor()], **asked))
        assert "".join(delta.text for delta in deltas) == reply.text
        return reply


@pytest.mark.parametrize("before", range(3))
def test_a_character_is_whole_where_the_context_is_shifted_within_it(before: int) -> None:
    text = "x" * before + "海" * 40
    reply = written(text.encode())
    assert (reply.text, reply.finish_reason) == (text, "length")
    assert reply.shifted > 0


def test_a_stop_is_met_wherever_the_context_is_shifted_within_it() -> None:
    """M6: of a stop that is begun before the shift nothing shows, and what was not one is told in full."""
    for before in range(0, 60, 3):
        text = "x" * before + "[EN]" + "y" * 5
        reply = written((text + "[END]" + "z" * 70).encode(), stop="[END]")
        assert (reply.text, reply.finish_reason, reply.raw.stop) == (text, "stop", "[END]")
