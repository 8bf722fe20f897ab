"""OpenAI's older route, tokens and models."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server.live_server import LiveServer, streamed

COMPLETE = "/v1/completions"


def asked(**more: Any) -> dict[str, Any]:
    return {"prompt": "Once upon", "max_tokens": 8, "temperature": 0, **more}


def test_a_completion_is_what_the_library_gives(here: LiveServer, client: httpx.Client) -> None:
    answer = client.post(COMPLETE, json=asked()).json()
    expected = here.runtime.generate("Once upon", max_tokens=8, temperature=0)
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == expected.text
    assert answer["choices"][0]["finish_reason"] == expected.finish_reason
    assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens


def test_a_stream_says_the_same_as_the_whole(client: httpx.Client) -> None:
    whole = client.post(COMPLETE, json=asked(n=2, seed=3, temperature=1)).json()["choices"]
    chunks = streamed(client, COMPLETE, asked(n=2, seed=3, temperature=1))
    for choice in whole:
        pieces = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in pieces) == choice["text"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]


def test_tokens_are_a_prompt_too(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"content": "Once upon"}).json()["tokens"]
    by_text, by_tokens = (
        client.post(COMPLETE, json=asked(prompt=prompt)).json()["choices"] for prompt in ("Once upon", tokens)
    )
    assert by_tokens == by_text


def test_several_prompts_are_answered_in_order(client: httpx.Client) -> None:
    prompts = ["One", "Two", "Three"]
    answer = client.post(COMPLETE, json=asked(prompt=prompts, n=2)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for at, prompt in enumerate(prompts):
        alone = client.post(COMPLETE, json=asked(prompt=prompt)).json()["choices"][0]
        assert answer["choices"][2 * at]["text"] == alone["text"]


def test_log_probabilities_line_up_with_the_text(client: httpx.Client) -> None:
    choice = client.post(COMPLETE, json=asked(logprobs=2)).json()["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"][0] == 0
    assert all(len(top) == 2 for top in found["top_logprobs"])


def test_an_echo_has_the_prompt_with_its_probabilities(client: httpx.Client) -> None:
    choice = client.post(COMPLETE, json=asked(echo=True, logprobs=0)).json()["choices"][0]
    assert choice["text"].startswith("Once upon")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 4}, "best_of"),
        ({"prompt": ["a", "b"], "stream": True}, "stream"),
        ({"logprobs": 99}, "logprobs"),
    ],
)
def test_what_cannot_be_done_is_400(client: httpx.Client, change: dict[str, Any], param: str) -> None:
    response = client.post(COMPLETE, json=asked(**change))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_token_outside_the_vocabulary_is_400(client: httpx.Client) -> None:
    assert client.post(COMPLETE, json=asked(prompt=[1, 2, 10**6])).status_code == 400
    assert client.post("/detokenize", json={"tokens": [10**6]}).status_code == 400


def test_text_comes_back_from_its_tokens(client: httpx.Client) -> None:
    text = "é 한국 🙂 <|im_end|>"
    tokens = client.post("/tokenize", json={"content": text}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json()["content"] == text
    marked = client.post("/tokenize", json={"content": text, "special": True}).json()
    assert marked["count"] < len(tokens)


def test_the_model_is_listed(here: LiveServer, client: httpx.Client) -> None:
    [model] = client.get("/v1/models").json()["data"]
    assert model["id"] == "toy"
    assert model["n_ctx"] == here.runtime.n_ctx
    assert client.get("/v1/models/toy").json() == model
    assert client.get("/v1/models/other").status_code == 404
