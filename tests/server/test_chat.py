"""OpenAI's chat route: its shapes, streamed and whole, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from decode.observed import toy
from perdure import Template
from server.live_server import LiveServer, hello, live_server, opened, streamed, text_of

CHAT = "/v1/chat/completions"


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error  # type: ignore[no-any-return]


def test_a_reply_has_openais_shape(client: httpx.Client) -> None:
    answer = client.post(CHAT, json=hello()).json()
    [choice] = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length")
    assert answer["usage"]["total_tokens"] == (
        answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    )
    assert answer["perdure"]["reuse"]["why"]


def test_a_stream_says_the_same_as_the_whole(client: httpx.Client) -> None:
    whole = client.post(CHAT, json=hello(max_tokens=24)).json()["choices"][0]
    chunks = streamed(client, CHAT, hello(max_tokens=24))
    assert text_of(chunks) == whole["message"]["content"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert chunks[-1]["perdure"]["timings"]["decoded_tokens"] > 0
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_counts_real_tokens_h6(client: httpx.Client) -> None:
    """H6."""
    body = hello(messages=[{"role": "user", "content": "Count me, please: é 한국 🙂"}], max_tokens=12)
    first, second = (client.post(CHAT, json=body).json() for _ in range(2))
    template = "<|im_start|>user\nCount me, please: é 한국 🙂<|im_end|>\n<|im_start|>assistant\n"
    counted = client.post("/tokenize", json={"content": template, "special": True}).json()["count"]
    assert first["usage"]["prompt_tokens"] == counted
    assert first["usage"]["completion_tokens"] <= 12
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == counted - 1
    assert sum(second["perdure"]["reuse"]["tiers"].values()) == cached
    assert second["choices"] == first["choices"]


def test_usage_comes_last_in_a_stream_that_asks_for_it(client: httpx.Client) -> None:
    chunks = streamed(client, CHAT, hello(stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_several_samples_have_indices_of_their_own(client: httpx.Client) -> None:
    body = hello(n=3, temperature=1, seed=7, max_tokens=12)
    choices = client.post(CHAT, json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    chunks = streamed(client, CHAT, body)
    ended = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert ended == [0, 1, 2]


def test_the_same_seed_gives_the_same_reply(client: httpx.Client) -> None:
    body = hello(temperature=1, seed=-3, max_tokens=16)
    texts = {client.post(CHAT, json=body).json()["choices"][0]["message"]["content"] for _ in range(3)}
    assert len(texts) == 1


def test_log_probabilities_in_openais_shape(client: httpx.Client) -> None:
    body = hello(logprobs=True, top_logprobs=3, max_tokens=5)
    choice = client.post(CHAT, json=body).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert 1 <= len(entries) <= 5
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] <= 0
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    chunks = streamed(client, CHAT, body)
    found = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert [entry["token"] for entry in found] == [entry["token"] for entry in entries]


def test_a_bias_of_minus_100_rules_a_token_out(client: httpx.Client) -> None:
    """The first 256 tokens of the toy are the single bytes."""
    body = hello(max_tokens=4, logprobs=True, temperature=1, seed=1)
    bias = {str(token): -100 for token in range(256)}
    for bound, expected in ((body, True), ({**body, "logit_bias": bias}, False)):
        entries = client.post(CHAT, json=bound).json()["choices"][0]["logprobs"]["content"]
        assert any(len(entry["bytes"]) == 1 for entry in entries) is expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_kept_to(client: httpx.Client, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    body = hello(response_format=asked, max_tokens=64)
    if stream:
        text = text_of(streamed(client, CHAT, body))
    else:
        text = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    assert set(json.loads(text)) == {"age"}


def test_a_tool_that_is_required_is_called(client: httpx.Client) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    body = hello(tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=60)
    choice = client.post(CHAT, json=body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]).keys() == {"a"}
    chunks = streamed(client, CHAT, body)
    deltas = [
        call for chunk in chunks for each in chunk["choices"] for call in each["delta"].get("tool_calls", ())
    ]
    assert deltas[0]["function"]["name"] == "add"
    assert deltas[0]["id"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    joined = "".join(call["function"]["arguments"] for call in deltas)
    assert json.loads(joined).keys() == {"a"}


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_is_400_before_any_work_c3(here: LiveServer, client: httpx.Client, stream: bool) -> None:
    """C3."""
    before = here.runtime.cache.stats().computed_tokens
    body = hello(messages=[{"role": "user", "content": "word " * 9000}], stream=stream)
    response = client.post(CHAT, json=body)
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"
    assert here.runtime.cache.stats().computed_tokens == before


def test_too_long_with_a_policy_says_what_was_dropped(client: httpx.Client) -> None:
    said = []
    for number in range(12):
        said += [
            {"role": "user", "content": f"Question {number}: " + "why " * 20},
            {"role": "assistant", "content": "Because."},
        ]
    body = hello(messages=[*said, {"role": "user", "content": "And now?"}])
    assert client.post(CHAT, json=body).status_code == 400
    answer = client.post(CHAT, json={**body, "perdure": {"overflow": "drop_oldest"}}).json()
    assert answer["perdure"]["dropped"] > 0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"n": 1000}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {"x": 1}}, "web_search_options"),
        ({"perdure": {"overflow": "pray"}}, "perdure.overflow"),
        ({"perdure": {"variables": {"messages": []}}}, "perdure.variables"),
    ],
)
def test_bad_input_is_400_and_says_where(client: httpx.Client, change: dict[str, Any], param: str) -> None:
    response = client.post(CHAT, json=hello(**change))
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wat"}}}},
        {"perdure": {"regex": "("}},
        {"tool_choice": "required"},
        {"stop": [""]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
    ],
    ids=["image", "audio", "file", "schema", "regex", "no tools", "empty stop", "surrogate"],
)
def test_what_cannot_be_done_is_400(client: httpx.Client, change: dict[str, Any]) -> None:
    response = client.post(
        CHAT, content=json.dumps(hello(**change)), headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text
    error_of(response)


def test_harmless_fields_are_ignored(client: httpx.Client) -> None:
    more = {
        "user": "u",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "prediction": {"type": "content", "content": "Hello"},
        "reasoning_effort": "low",
        "verbosity": "low",
        "safety_identifier": "x",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "never_heard_of": [1],
    }
    plain = client.post(CHAT, json=hello()).json()
    answer = client.post(CHAT, json=hello(**more)).json()
    assert answer["choices"] == plain["choices"]


def test_another_model_is_404(client: httpx.Client) -> None:
    response = client.post(CHAT, json=hello(model="gpt-9"))
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"
    assert client.post(CHAT, json=hello(model="toy")).status_code == 200


def test_unknown_urls_and_methods_have_the_same_shape(client: httpx.Client) -> None:
    assert error_of(client.get("/nowhere"))["code"] == "unknown_url"
    response = client.delete(CHAT)
    assert response.status_code == 405
    error_of(response)


def test_a_stop_text_ends_a_reply_and_does_not_show(client: httpx.Client) -> None:
    text = client.post(CHAT, json=hello(max_tokens=24)).json()["choices"][0]["message"]["content"]
    stop = text[3:5]
    answer = client.post(CHAT, json=hello(max_tokens=24, stop=stop)).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert answer["message"]["content"] == text[: text.index(stop)]


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_the_tokens_of_reasoning_h6(stream: bool) -> None:
    """H6. The model opens its reasoning itself, so that the regex holds all of the reply."""
    thinking = Template("{{ messages[0].content }}{% if think %}<think>{% endif %}", name="may think")
    written = "<think>let me see</think>fine"
    with opened(toy(), template=thinking) as rt, live_server(rt) as server, server.client() as client:
        usage, reasoning = reasoned(client, stream, max_tokens=40, perdure={"regex": written})
    assert reasoning == "let me see"
    # A toy's token is a byte; the last one of a mark begins the reasoning, and ends it.
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(">let me see</think")}
    assert usage["completion_tokens"] == len(written)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_reasoning_that_the_prompt_opens_and_a_budget_ends_h6(stream: bool) -> None:
    """H6. The regex holds the answer alone: the reasoning before it is free."""
    thinking = Template("{{ messages[0].content }}<think>", name="thinks")
    with opened(toy(), template=thinking) as rt, live_server(rt) as server, server.client() as client:
        asked = {"regex": "fine", "reasoning_budget": 10}
        # Without the new lines that may stand before an answer.
        usage, reasoning = reasoned(
            client, stream, max_tokens=40, perdure=asked, logit_bias={str(ord("\n")): -100}
        )
        closing = len(rt.model.tokenize("</think>", special=True, bos=False))
    assert len(reasoning) == 10
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 10}
    assert usage["completion_tokens"] == 10 + closing + len("fine")


def reasoned(client: httpx.Client, stream: bool, **asked: Any) -> tuple[dict[str, Any], str]:
    """The usage and the reasoning of a reply that says `fine`."""
    if stream:
        *chunks, last = streamed(client, CHAT, hello(stream_options={"include_usage": True}, **asked))
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        message = {
            key: "".join(delta.get(key) or "" for delta in deltas) for key in ("content", "reasoning_content")
        }
        usage = last["usage"]
    else:
        answer = client.post(CHAT, json=hello(**asked)).json()
        message, usage = answer["choices"][0]["message"], answer["usage"]
    assert message["content"] == "fine"
    return usage, message["reasoning_content"]


def test_a_last_message_of_the_assistant_is_continued(client: httpx.Client) -> None:
    """As vLLM takes it, whole and as a stream, with samples and log probabilities."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "continue_final_message": True, "seed": 3, "max_tokens": 6}
    answer = client.post(CHAT, json={**body, "n": 2, "logprobs": True}).json()
    begun = client.post(CHAT, json={**body, "continue_final_message": False}).json()
    # What ends the message and opens another is not there.
    assert answer["usage"]["prompt_tokens"] < begun["usage"]["prompt_tokens"]
    assert [len(choice["logprobs"]["content"]) for choice in answer["choices"]] == [6, 6]
    text = "".join(
        each["delta"].get("content", "")
        for chunk in streamed(client, CHAT, body)
        for each in chunk["choices"]
    )
    assert text == client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    for wrong in ({"messages": messages[:1]}, {"add_generation_prompt": True}):
        refused = client.post(CHAT, json={**body, **wrong})
        assert refused.status_code == 400
        assert "continue_final_message" in refused.json()["error"]["message"]


def test_variables_of_the_template_come_as_others_send_them(client: httpx.Client) -> None:
    assert client.post(CHAT, json=hello(chat_template_kwargs={"enable_thinking": False})).status_code == 200
    refused = client.post(CHAT, json=hello(chat_template_kwargs={"messages": []}))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template_kwargs"


def test_the_answer_says_what_the_template_does_not_show(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    answer = client.post(CHAT, json=hello(tools=[tool], max_tokens=1)).json()
    assert answer["perdure"]["notes"] == ["tools: written into a system message"]
    last = streamed(client, CHAT, hello(tools=[tool], max_tokens=1))[-1]
    assert last["perdure"]["notes"] == ["tools: written into a system message"]
    assert client.post(CHAT, json=hello(max_tokens=1)).json()["perdure"]["notes"] == []


def test_what_cannot_be_read_is_named_with_its_place(client: httpx.Client) -> None:
    parts = [
        {"type": "text", "text": "See:"},
        {"type": "input_audio", "input_audio": {"data": "", "format": "mp3"}},
    ]
    refused = client.post(CHAT, json=hello(messages=[{"role": "user", "content": parts}]))
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "messages.0.content.1"
    assert "sounds other than WAV files cannot be read here; send text" in error_of(refused)["message"]


def test_a_developer_is_read_as_a_system_is() -> None:
    """Where a template knows no developer."""
    template = Template(
        "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}{{ m.role }}:"
        "{{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
        name="older",
    )
    said = [{"role": "user", "content": "Hello"}]
    with opened(toy(), template=template) as rt, live_server(rt) as server, server.client() as client:
        system, developer = (
            client.post(CHAT, json=hello(messages=[{"role": role, "content": "Be brief."}, *said])).json()
            for role in ("system", "developer")
        )
    assert system["usage"]["prompt_tokens"] == developer["usage"]["prompt_tokens"]
    assert system["choices"] == developer["choices"]
    assert developer["perdure"]["notes"] == ["developer: written as system"]


@pytest.mark.parametrize("name", ["reasoning_effort", "verbosity"])
def test_efforts_reach_the_template(name: str) -> None:
    template = Template("{{ messages[0].content }}{{ " + name + " or '' }}", name="told")
    with opened(toy(), template=template) as rt, live_server(rt) as server, server.client() as client:
        plain, told = (
            client.post(CHAT, json=hello(**more)).json()["usage"]["prompt_tokens"]
            for more in ({}, {name: "minimal"})
        )
        assert told == plain + len(rt.model.tokenize("minimal", bos=False))


def test_a_template_gets_the_date_that_a_request_gives() -> None:
    days = Template(
        "{{ ' ' * (strftime_now('%d') | int) }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with opened(toy(), template=days) as rt, live_server(rt) as server, server.client() as client:

        def tokens(**extension: str) -> int:
            answer = client.post(CHAT, json=hello(max_tokens=1, perdure=extension))
            return int(answer.json()["usage"]["prompt_tokens"])

        assert tokens(date="2026-01-31") - tokens(date="2026-01-01") == 30
