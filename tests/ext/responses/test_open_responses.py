"""The cases of Open Responses' compliance test, written anew from its specification.

A response and every event must have the fields that the specification requires, of its types; then each case
has separate conditions. The model says what a script tells it to.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ext.responses.test_responses import PATH, events
from server.scripted import scripted


class Strict(BaseModel):
    """Required fields of required types. More fields are allowed."""

    model_config = ConfigDict(strict=True, extra="allow")


class Text(Strict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class Thought(Strict):
    type: Literal["reasoning_text"]
    text: str


class Said(Strict):
    type: Literal["message"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[Text]


class Called(Strict):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


class Reasoned(Strict):
    type: Literal["reasoning"]
    id: str
    summary: list[Any]


Item = Annotated[Said | Called | Reasoned, Field(discriminator="type")]


class Cached(Strict):
    cached_tokens: int


class ReasoningTokens(Strict):
    reasoning_tokens: int


class Usage(Strict):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: Cached
    output_tokens_details: ReasoningTokens


class Format(Strict):
    type: str


class TextField(Strict):
    format: Format


class Reason(Strict):
    reason: str


class Error(Strict):
    code: str
    message: str


class Response(Strict):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: str
    incomplete_details: Reason | None
    model: str
    previous_response_id: str | None
    instructions: str | list[Any] | None
    output: list[Item]
    error: Error | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    truncation: Literal["auto", "disabled"]
    parallel_tool_calls: bool
    text: TextField
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    temperature: float
    reasoning: dict[str, Any] | None
    user: str | None
    usage: Usage | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool
    background: bool
    service_tier: str
    metadata: dict[str, str]
    safety_identifier: str | None
    prompt_cache_key: str | None


class Numbered(Strict):
    sequence_number: int


class OfResponse(Numbered):
    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Response


class OfItem(Numbered):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Item


class Placed(Numbered):
    item_id: str
    output_index: int


class OfPart(Placed):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: Annotated[Text | Thought, Field(discriminator="type")]


class TextDelta(Placed):
    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[Any]


class TextDone(Placed):
    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[Any]


class ThoughtDelta(Placed):
    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ThoughtDone(Placed):
    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsDelta(Placed):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(Placed):
    type: Literal["response.function_call_arguments.done"]
    arguments: str


EVENT: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        OfResponse
        | OfItem
        | OfPart
        | TextDelta
        | TextDone
        | ThoughtDelta
        | ThoughtDone
        | ArgumentsDelta
        | ArgumentsDone,
        Field(discriminator="type"),
    ]
)

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "A city"}},
        "required": ["location"],
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Oslo"}}\n</tool_call>'


def said(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


def whole(reply: str, **body: Any) -> Response:
    with scripted(reply, n_ctx=1024) as server, server.client() as client:
        answer = client.post(PATH, json={"model": "toy", **body})
        assert answer.status_code == 200, answer.text
        return Response.model_validate_json(answer.content)


def streamed(reply: str, **body: Any) -> tuple[list[Any], Response]:
    asked = {"model": "toy", "stream": True, **body}
    with (
        scripted(reply, n_ctx=1024) as server,
        server.client() as client,
        client.stream("POST", PATH, json=asked) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        found = [EVENT.validate_python(event) for event in events(response)]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    last = found[-1]
    assert isinstance(last, OfResponse)
    return found, last.response


@pytest.mark.parametrize("reply", ["Hello to you.", "<think>Hm.</think>Hello to you."])
def test_basic_response(reply: str) -> None:
    response = whole(reply, input=[said("user", "Say hello in exactly three words.")])
    assert (response.status, bool(response.output)) == ("completed", True)


@pytest.mark.parametrize("reply", ["1 2 3 4 5", "<think>Hm.</think>1 2 3 4 5"])
def test_streaming_response(reply: str) -> None:
    found, response = streamed(reply, input=[said("user", "Count from 1 to 5.")])
    assert len(found) > 5
    assert response.status == "completed"


def test_system_prompt() -> None:
    response = whole("Ahoy.", input=[said("system", "You are a pirate."), said("user", "Say hello.")])
    assert (response.status, bool(response.output)) == ("completed", True)


def test_tool_calling() -> None:
    response = whole(CALL, input=[said("user", "What is the weather in Oslo?")], tools=[WEATHER])
    assert [item.type for item in response.output] == ["function_call"]


def test_tool_calling_streaming() -> None:
    found, _ = streamed(CALL, input=[said("user", "What is the weather in Oslo?")], tools=[WEATHER])
    kinds = [event.type for event in found]
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= {*kinds}
    of_calls = [event.type for event in found if isinstance(event, OfItem) and isinstance(event.item, Called)]
    assert of_calls == ["response.output_item.added", "response.output_item.done"]


def test_image_input_is_refused_in_words() -> None:
    """The one case that a model of text cannot pass: it is told why."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    content = [{"type": "input_text", "text": "What do you see?"}, image]
    with scripted("Nothing.", n_ctx=1024) as server, server.client() as client:
        refused = client.post(PATH, json={"model": "toy", "input": [said("user", content)]})
    assert refused.status_code == 400
    assert "images cannot be read here" in refused.json()["error"]["message"]


def test_multi_turn() -> None:
    history = [said("user", "My name is Ada."), said("assistant", "Hello Ada!"), said("user", "Who am I?")]
    response = whole("Ada.", input=history)
    assert (response.status, bool(response.output)) == ("completed", True)
