"""The published `openai` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from pydantic import BaseModel

from perdure.server.core.keys import Keys
from server.live_server import LiveServer

USER: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(here: LiveServer, key: tuple[str, Keys]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{here.url}/v1", api_key=key[0], max_retries=0) as client:
        yield client


def test_a_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="toy", messages=USER, max_tokens=8, temperature=0)
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens is not None


def test_a_stream_with_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="toy", messages=USER, max_tokens=8, temperature=0)
    stream = client.chat.completions.create(
        model="toy",
        messages=USER,
        max_completion_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None


def test_an_answer_that_parses_into_a_class(client: openai.OpenAI) -> None:
    class Answer(BaseModel):
        good: bool

    reply = client.chat.completions.parse(
        model="toy",
        messages=USER,
        response_format=Answer,
        max_tokens=64,
        temperature=0,
    )
    assert isinstance(reply.choices[0].message.parsed, Answer)


def test_tools(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "light"}}
    parameters = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    reply = client.chat.completions.create(
        model="toy",
        messages=USER,
        tools=[{"type": "function", "function": {"name": "light", "parameters": parameters}}],
        tool_choice=tool,
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=0,
    )
    message = reply.choices[0].message
    assert message.tool_calls
    call = message.tool_calls[0]
    assert call.type == "function"
    assert set(json.loads(call.function.arguments)) == {"on"}
    # The answer of the tool goes back, with the call as it came.
    answered: Any = [
        *USER,
        message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    again = client.chat.completions.create(model="toy", messages=answered, max_tokens=4)
    assert again.choices[0].finish_reason in ("stop", "length")


def test_log_probabilities(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="toy",
        messages=USER,
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
    )
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.content
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2
    older = client.completions.create(model="toy", prompt="Hello", max_tokens=3, logprobs=2)
    assert older.choices[0].logprobs is not None
    assert older.choices[0].logprobs.tokens


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"


def test_errors_are_of_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="toy", messages=[], max_tokens=8)
    assert bad.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=USER)
    with pytest.raises(openai.APIStatusError) as long:
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "x" * 9000}])
    assert (long.value.status_code, long.value.code) == (400, "context_length_exceeded")
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_embeddings(here: LiveServer, client: openai.OpenAI) -> None:
    """The client asks for base64 by itself, and unpacks it."""
    texts = ["one", "two " * 100]
    expected = here.runtime.embed(texts)
    for asked in (texts, [here.runtime.model.tokenize(text) for text in texts]):
        found = client.embeddings.create(model="toy", input=asked)
        assert [each.index for each in found.data] == [0, 1]
        np.testing.assert_array_equal(
            np.array([each.embedding for each in found.data], np.float32), expected.vectors
        )
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(expected.tokens)
    plain = client.embeddings.create(model="toy", input=texts[0], encoding_format="float")
    np.testing.assert_array_equal(np.array(plain.data[0].embedding, np.float32), expected.vectors[0])
    width = len(plain.data[0].embedding)
    assert len(client.embeddings.create(model="toy", input="one", dimensions=width, user="u").data) == 1


def test_embeddings_that_cannot_be_had(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wide:
        client.embeddings.create(model="toy", input="one", dimensions=100_000)
    assert wide.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError) as empty:
        client.embeddings.create(model="toy", input="")
    assert empty.value.param == "input"
    with pytest.raises(openai.APIStatusError) as long:
        client.embeddings.create(model="toy", input="x" * 9000)
    assert (long.value.status_code, long.value.code) == (400, "context_length_exceeded")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="one")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").embeddings.create(model="toy", input="one")


def test_the_extension_travels_in_extra_body(client: openai.OpenAI) -> None:
    extra = {"perdure": {"session": "by-client"}}
    lengths = []
    for _ in range(2):
        reply = client.chat.completions.create(
            model="toy",
            messages=USER,
            max_tokens=4,
            extra_body=extra,
        )
        assert reply.model_extra is not None
        assert reply.model_extra["perdure"]["session"] == "by-client"
        assert reply.usage is not None
        lengths.append(reply.usage.prompt_tokens)
    assert lengths[1] > lengths[0]


def test_many_at_once_from_asyncio(here: LiveServer, key: tuple[str, Keys]) -> None:
    async def all_of_them() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{here.url}/v1", api_key=key[0], max_retries=0) as client:
            replies = await asyncio.gather(
                *(
                    client.chat.completions.create(model="toy", messages=USER, max_tokens=8, temperature=0)
                    for _ in range(12)
                )
            )
        return [reply.choices[0].finish_reason for reply in replies]

    assert set(asyncio.run(all_of_them())) <= {"stop", "length"}
