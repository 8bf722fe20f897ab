"""The published `anthropic` client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import TextBlock, ToolUseBlock

from perdure.server.core.keys import Keys
from server.live_server import LiveServer

USER: Any = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0}
LIGHT: Any = {
    "name": "light",
    "description": "Switches the light.",
    "input_schema": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
}
MODEL = "toy"
"""Any name is served, and the answer says by whom."""


@pytest.fixture
def client(here: LiveServer, key: tuple[str, Keys]) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=here.url, api_key=key[0], max_retries=0) as client:
        yield client


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if isinstance(block, TextBlock))


def test_a_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model=MODEL, max_tokens=8, messages=USER, extra_body=GREEDY)
    assert message.role == "assistant"
    assert message.model == "toy"
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.output_tokens > 0
    assert message._request_id


def test_a_stream_says_the_same_as_the_whole(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model=MODEL, max_tokens=24, messages=USER, extra_body=GREEDY)
    with client.messages.stream(model=MODEL, max_tokens=24, messages=USER, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(whole) == text_of(final)
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_usage_counts_real_tokens_and_what_was_cached_h6(client: anthropic.Anthropic) -> None:
    """H6: what was read is the sum of the three figures."""
    said: Any = [{"role": "user", "content": "Count me, please: é 한국 🙂"}]
    counted = client.messages.count_tokens(model=MODEL, messages=said).input_tokens
    client.messages.create(model=MODEL, max_tokens=2, messages=said)
    usage = client.messages.create(model=MODEL, max_tokens=2, messages=said).usage
    assert usage.cache_creation_input_tokens is not None
    assert usage.cache_read_input_tokens == counted - 1
    assert usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens == counted


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "light"}])
@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_their_results(client: anthropic.Anthropic, choice: Any, stream: bool) -> None:
    asked: Any = {
        "model": MODEL,
        "max_tokens": 200,
        "extra_body": GREEDY,
        "tools": [LIGHT, {"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }
    if stream:
        with client.messages.stream(messages=USER, **asked) as events:
            message: Any = events.get_final_message()
    else:
        message = client.messages.create(messages=USER, **asked)
    [call] = [block for block in message.content if isinstance(block, ToolUseBlock)]
    assert message.stop_reason == "tool_use"
    assert call.name == "light"
    assert isinstance(call.input["on"], bool)
    after: Any = [
        *USER,
        {"role": "assistant", "content": message.content},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Well?"},
                {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "lit"}]},
            ],
        },
    ]
    reply = client.messages.create(
        model=MODEL, max_tokens=4, messages=after, tools=[LIGHT], tool_choice={"type": "none"}
    )
    assert reply.stop_reason in ("end_turn", "max_tokens")


def test_structured_output(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"good": {"type": "boolean"}},
        "required": ["good"],
        "additionalProperties": False,
    }
    message = client.messages.create(
        model=MODEL,
        max_tokens=64,
        messages=USER,
        extra_body=GREEDY,
        output_config={
            "format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
        },
    )
    assert '"good"' in text_of(message)


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    whole = text_of(client.messages.create(model=MODEL, max_tokens=24, messages=USER, extra_body=GREEDY))
    stop = whole[3:6]
    message = client.messages.create(
        model=MODEL, max_tokens=24, messages=USER, extra_body=GREEDY, stop_sequences=[stop]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == whole[: whole.index(stop)]


def test_errors_have_the_classes_of_the_client(client: anthropic.Anthropic, here: LiveServer) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
        client.messages.create(model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "é " * 9000}])
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    with pytest.raises(anthropic.BadRequestError, match="images cannot be read here"):
        client.messages.create(model=MODEL, max_tokens=4, messages=[{"role": "user", "content": [image]}])
    wrong = anthropic.Anthropic(base_url=here.url, api_key="wrong", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError) as refused:
        wrong.messages.create(model=MODEL, max_tokens=4, messages=USER)
    assert refused.value.body == {
        "type": "error",
        "error": {"type": "authentication_error", "message": refused.value.body["error"]["message"]},  # type: ignore[index]
    }


def test_many_at_once_from_asyncio(here: LiveServer, key: tuple[str, Keys]) -> None:
    async def all_of_them() -> list[str | None]:
        async with anthropic.AsyncAnthropic(
            base_url=here.url, auth_token=key[0], api_key=None, max_retries=0
        ) as client:
            replies = await asyncio.gather(
                *(client.messages.create(model=MODEL, max_tokens=8, messages=USER) for _ in range(8))
            )
        return [reply.stop_reason for reply in replies]

    assert set(asyncio.run(all_of_them())) <= {"end_turn", "max_tokens"}


def test_another_models_name_is_not_found(client: anthropic.Anthropic) -> None:
    for ask in (
        lambda: client.messages.create(model="claude-x", max_tokens=4, messages=USER),
        lambda: client.messages.count_tokens(model="claude-x", messages=USER),
    ):
        with pytest.raises(anthropic.NotFoundError, match="claude-x"):
            ask()
