"""The published `openai` client, over Responses and conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from decode.observed import toy
from perdure.sessions.fold import HEADING
from server.live_server import LiveServer, live_server, opened
from server.scripted import THINKS, scripted, steer

PARAMETERS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
LIGHT: Any = {"type": "function", "name": "light", "parameters": PARAMETERS, "strict": True}
CALL = '<tool_call>\n{"name": "light", "arguments": {"on": true}}\n</tool_call>'


def connected(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[openai.OpenAI]:
    said = "<think>Hm.</think>Blue."
    with scripted(said, store=tmp_path / "store", n_ctx=2048) as server, connected(server) as client:
        yield client


def test_a_response_and_its_parts(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="toy", input="Why?", instructions="Be brief.", metadata={"a": "b"}
    )
    assert response.status == "completed"
    assert response.output_text == "Blue."
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.instructions == "Be brief."
    assert response.metadata == {"a": "b"}
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    again = client.responses.retrieve(response.id)
    assert again.output == response.output
    assert again.usage == response.usage
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_its_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model="toy", input="Why?") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "Blue."
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert {"response.reasoning_text.delta", "response.output_text.delta"} <= set(kinds)


def test_an_answer_that_parses_into_a_class(tmp_path: Path) -> None:
    class Answer(BaseModel):
        good: bool

    with opened(toy(), n_ctx=2048) as rt, live_server(rt) as server, connected(server) as client:
        response = client.responses.parse(
            model="toy", input="Well?", text_format=Answer, max_output_tokens=64, temperature=0
        )
        assert isinstance(response.output_parsed, Answer)


def test_a_conversation_with_tools_over_a_restart_costs_only_what_is_new_h9(tmp_path: Path) -> None:
    """H9: each turn by the id of the one before it, the last ones from a new process."""
    previous: str | None = None
    said: Any = "Light?"
    texts = []
    for _ in range(2):
        with opened(toy(), template=THINKS, store=tmp_path / "store", n_ctx=4096) as rt:
            steer(rt, CALL, "Lit.", CALL, "Lit again.")
            with live_server(rt) as server, connected(server) as client:
                for _ in range(4):
                    # Left out of the request, where it has none.
                    before: Any = previous if previous is not None else openai.omit
                    response = client.responses.create(
                        model="toy", input=said, tools=[LIGHT], previous_response_id=before
                    )
                    usage = response.usage
                    assert usage is not None
                    if previous is not None:
                        was = client.responses.retrieve(previous).usage
                        assert was is not None
                        assert usage.input_tokens_details.cached_tokens >= was.total_tokens - 1
                    previous, said = response.id, "And now?"
                    call = response.output[0]
                    if call.type == "function_call":
                        assert json.loads(call.arguments) == {"on": True}
                        output = {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}
                        said = [output]
                    texts.append(response.output_text)
    assert texts == ["", "Lit.", "", "Lit again."] * 2


def test_branches_from_any_earlier_response(client: openai.OpenAI) -> None:
    first = client.responses.create(model="toy", input="One")
    second = client.responses.create(model="toy", input="Two", previous_response_id=first.id)
    other = client.responses.create(model="toy", input="Other", previous_response_id=first.id)
    assert second.usage is not None
    assert other.usage is not None
    assert first.usage is not None
    assert other.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    client.responses.delete(first.id)
    third = client.responses.create(model="toy", input="Three", previous_response_id=second.id)
    assert third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="toy", input="x", previous_response_id=first.id)
    assert missing.value.code == "previous_response_not_found"


def test_items_by_reference_and_reasoning_that_is_echoed(client: openai.OpenAI) -> None:
    """A client that keeps the history itself sends items back; the prompt is the same as by id."""
    first = client.responses.create(model="toy", input="One")
    by_id = client.responses.create(model="toy", input="Two", previous_response_id=first.id)
    echoed: Any = [
        {"role": "user", "content": "One"},
        *(
            item.model_dump(exclude={"content"}) if item.type == "reasoning" else item
            for item in first.output
        ),
        {"role": "user", "content": "Two"},
    ]
    by_items = client.responses.create(model="toy", input=echoed, store=False)
    named: Any = [
        {"role": "user", "content": "One"},
        *({"type": "item_reference", "id": item.id} for item in first.output),
        {"role": "user", "content": "Two"},
    ]
    by_name = client.responses.create(model="toy", input=named)
    counts = {each.usage.input_tokens for each in (by_id, by_items, by_name) if each.usage is not None}
    assert len(counts) == 1


def test_what_is_not_stored_leaves_nothing(client: openai.OpenAI) -> None:
    first = client.responses.create(model="toy", input="One")
    second = client.responses.create(model="toy", input="Two", previous_response_id=first.id, store=False)
    assert second.output_text == "Blue."
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_custom_tools_and_namespaces(tmp_path: Path) -> None:
    patch = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
    fetch = '<tool_call>\n{"name": "fetch", "arguments": {"url": "u"}}\n</tool_call>'
    tools: Any = [
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
        },
        {"type": "web_search"},
        {"type": "namespace", "name": "mcp__web", "tools": [{"type": "function", "name": "fetch"}]},
    ]
    with scripted(patch, fetch, n_ctx=2048) as server, connected(server) as client:
        first: Any = client.responses.create(model="toy", input="Go", tools=tools).output[0]
        assert (first.type, first.name, first.input) == ("custom_tool_call", "patch", "*** Begin")
        stream = client.responses.create(model="toy", input="Go", tools=tools, stream=True)
        done: Any = [event for event in stream if event.type == "response.output_item.done"][-1]
        assert (done.item.name, done.item.namespace) == ("fetch", "mcp__web")


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "light"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "light"}]},
    ],
)
def test_a_tool_that_must_be_called(choice: Any) -> None:
    other: Any = {**LIGHT, "name": "other"} if choice != "required" else LIGHT
    with opened(toy(), n_ctx=2048) as rt, live_server(rt) as server, connected(server) as client:
        response = client.responses.create(
            model="toy",
            input="Go",
            tools=[LIGHT, other],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_output_tokens=300,
            temperature=0,
        )
        [call] = [item for item in response.output if item.type == "function_call"]
        assert call.name == "light"
        assert isinstance(json.loads(call.arguments)["on"], bool)


def test_in_the_background_with_polling(client: openai.OpenAI) -> None:
    response = client.responses.create(model="toy", input="Why?", background=True)
    # The toy may be done before it is answered.
    while response.status in ("queued", "in_progress"):
        response = client.responses.retrieve(response.id)
    assert response.status == "completed"
    assert response.output_text == "Blue."
    assert client.responses.cancel(response.id).status == "completed"


def test_a_conversation_and_its_items(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(
        metadata={"topic": "sea"}, items=[{"type": "message", "role": "user", "content": "I am Ada."}]
    )
    for _ in range(2):
        response = client.responses.create(model="toy", input="Why?", conversation=conversation.id)
        assert response.output_text == "Blue."
    items = client.conversations.items.list(conversation.id, order="asc").data
    assert [item.type for item in items] == ["message", *["message", "reasoning", "message"] * 2]
    assert client.conversations.retrieve(conversation.id).metadata == {"topic": "sea"}
    added = client.conversations.items.create(
        conversation.id, items=[{"type": "message", "role": "user", "content": "More."}]
    )
    assert len(added.data) == 1
    found: Any = client.conversations.items.retrieve(added.data[0].id or "", conversation_id=conversation.id)
    assert found.content[0].text == "More."
    client.conversations.update(conversation.id, metadata={"topic": "sky"})
    assert client.conversations.retrieve(conversation.id).metadata == {"topic": "sky"}
    client.conversations.delete(conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="toy", input="x", conversation=conversation.id)
    assert client.responses.retrieve(response.id).output_text == "Blue."


def test_log_probabilities(client: openai.OpenAI) -> None:
    response: Any = client.responses.create(
        model="toy", input="Why?", top_logprobs=2, include=["message.output_text.logprobs"]
    )
    [part] = response.output[-1].content
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert "Blue." in "".join(entry.token for entry in part.logprobs)


def test_input_items_and_tokens(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="toy", input=[{"role": "user", "content": "One"}, {"role": "user", "content": "Two"}]
    )
    items: Any = client.responses.input_items.list(response.id)
    texts = [item.content[0].text for item in items]
    assert texts == ["Two", "One"]
    assert response.usage is not None
    counted = client.responses.input_tokens.count(
        model="toy", input=[{"role": "user", "content": "One"}, {"role": "user", "content": "Two"}]
    )
    assert counted.input_tokens == response.usage.input_tokens


def test_a_conversation_that_is_made_shorter_goes_on_from_its_summary() -> None:
    with scripted("The sea was spoken of.", "Blue.", n_ctx=1024) as server, connected(server) as client:
        said: list[Any] = [
            {"role": "user", "content": "What of the sea?"},
            {"role": "assistant", "content": "It is wide. " * 20},
            {"role": "user", "content": "And its colour?"},
        ]
        compacted = client.responses.compact(model="toy", input=said)
        assert compacted.object == "response.compaction"
        assert [item.type for item in compacted.output] == ["message", "message", "compaction"]
        assert compacted.usage.output_tokens > 0
        items = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
        going_on: list[Any] = [*items, {"role": "user", "content": "So?"}]
        reply = client.responses.create(model="toy", input=going_on)
        assert reply.output_text == "Blue."
        whole = client.responses.input_tokens.count(model="toy", input=said).input_tokens
        # The summary is read in the place of what it sums up.
        left = [item for item in going_on if item.get("type") != "compaction"]
        without = client.responses.input_tokens.count(model="toy", input=left).input_tokens
        read = client.responses.input_tokens.count(model="toy", input=going_on).input_tokens
        # A toy's token is a byte.
        assert without + len(f"{HEADING}\nThe sea was spoken of.") <= read < whole
