"""Every option is on every protocol, with the bounds of its one definition."""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from decode.observed import toy
from perdure.options import Option, options_of
from perdure.request_options import RequestOptions, Sampling
from perdure.server.core.middleware import JsonLinesHandler
from server.live_server import live_server, opened

SAID = [{"role": "user", "content": "Hello"}]
PROTOCOLS: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 1},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 1},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 1, "store": False},
    "/v1/messages": {"messages": SAID, "max_tokens": 1},
    "/api/chat": {"messages": SAID, "stream": False, "options": {"num_predict": 1}},
}
SAMPLING = list(options_of(Sampling).values())
STOP = options_of(RequestOptions)["stops"]
NO_NUMBERS = [math.inf, -math.inf, math.nan, 10**400, -(10**400)]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with opened(toy(), n_ctx=512, slots=2) as rt, live_server(rt) as server, server.client() as client:
        yield client


def send(client: httpx.Client, path: str, options: Mapping[str, Any]) -> httpx.Response:
    """A request with these options, where the protocol has them."""
    body = dict(PROTOCOLS[path])
    if path == "/api/chat":
        body["options"] = {**body["options"], **options}
    else:
        body |= options
    # Python writes numbers that are none, as some clients do.
    text = json.dumps(body)
    return client.post(path, content=text, headers={"content-type": "application/json"})


def at_the_bound(option: Option) -> list[Any]:
    if option.kind is list:
        return [["x" * (option.characters or 1)] * (option.items or 1)]
    if option.kind is dict:
        return [{str(token): 1.0 for token in range(200)}]
    assert option.low is not None
    assert option.high is not None
    return [option.low, option.high]


def beyond(option: Option) -> list[Any]:
    if option.kind is list:
        most, longest = option.items or 0, option.characters or 0
        return [["x"] * (most + 1), ["x" * (longest + 1)], "x" * (longest + 1), [1], {"a": 1}]
    if option.kind is dict:
        return [{str(token): 1.0 for token in range((option.items or 0) + 1)}, {"a": 1.0}, {"1": "b"}, [1]]
    assert option.low is not None
    assert option.high is not None
    if option.name == "seed":
        # Numbers of 64 bits are taken as they come, and wrapped.
        return ["1", [1], *NO_NUMBERS]
    return [option.low - 1, option.high * 2 + 1, "1", [1], {"a": 1}, *NO_NUMBERS]


@pytest.mark.parametrize("path", PROTOCOLS)
@pytest.mark.parametrize("option", SAMPLING, ids=lambda option: option.name)
def test_every_setting_can_be_set_up_to_its_bounds(client: httpx.Client, path: str, option: Option) -> None:
    for value in at_the_bound(option):
        answer = send(client, path, {option.name: value})
        assert answer.status_code == 200, (value, answer.text)
        assert "x-perdure-ignored" not in answer.headers


@pytest.mark.parametrize("path", PROTOCOLS)
@pytest.mark.parametrize("option", [*SAMPLING, STOP], ids=lambda option: option.name)
def test_x15_a_setting_beyond_its_bounds_is_a_400(client: httpx.Client, path: str, option: Option) -> None:
    """X15: also Infinity and NaN, which Python's JSON has, and numbers that no float holds."""
    for value in beyond(option):
        if option is STOP and isinstance(value, str) and path == "/api/chat":
            value = [value]
        answer = send(client, path, {option.name: value})
        assert answer.status_code == 400, (value, answer.text)


@pytest.mark.parametrize("path", PROTOCOLS)
def test_x9_stops_are_bounded_alike_on_every_protocol(client: httpx.Client, path: str) -> None:
    """X9: 64 of 1,024 characters."""
    name = "stop_sequences" if path == "/v1/messages" else "stop"
    assert send(client, path, {name: ["x" * 1024] * 64}).status_code == 200
    assert send(client, path, {name: ["x"] * 65}).status_code == 400
    assert send(client, path, {name: ["x" * 1025]}).status_code == 400


def test_a_setting_over_a_protocol_is_the_setting_of_the_draw(client: httpx.Client) -> None:
    """A bias on one token makes it the reply, whatever protocol brings it."""
    for path in PROTOCOLS:
        answers = [
            send(client, path, {"logit_bias": {"70": 100}, "temperature": 0, "typical_p": 0.5}).text
            for _ in range(2)
        ]
        texts = [_text(json.loads(answer)) for answer in answers]
        assert texts[0] == texts[1] == "F", (path, texts)


def _text(answer: dict[str, Any]) -> Any:
    if "choices" in answer:
        choice = answer["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    if "output" in answer:
        return answer["output"][-1]["content"][0]["text"]
    return answer["content"][0]["text"] if "content" in answer else answer["message"]["content"]


@pytest.mark.parametrize("path", PROTOCOLS)
@pytest.mark.parametrize("name", ["timeout", "reasoning_budget"])
def test_x15_options_under_perdure_are_no_infinities(client: httpx.Client, path: str, name: str) -> None:
    """X15."""
    if path == "/api/chat":
        return
    for value in NO_NUMBERS:
        assert send(client, path, {"perdure": {name: value}}).status_code == 400


def test_a_field_that_nobody_knows_is_named_in_the_answer_and_the_log() -> None:
    out = io.StringIO()
    handler, log = JsonLinesHandler(out), logging.getLogger("perdure.server")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with opened(toy(), n_ctx=512) as rt, live_server(rt) as server, server.client() as client:
            for path, body in PROTOCOLS.items():
                answer = client.post(path, json={**body, "min_pp": 0.1, "é\n": 1})
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-perdure-ignored"] == "min_pp, \\u00e9\\n"
                assert answer.json()["perdure"]["ignored"] == ["min_pp", "é\n"]
                assert streamed(client, path, {**body, "min_pp": 0.1}) == ["min_pp"]
                plain = client.post(path, json=body)
                assert "x-perdure-ignored" not in plain.headers
                assert plain.json()["perdure"]["ignored"] == []
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    lines = [line for line in map(json.loads, out.getvalue().splitlines()) if line["event"] == "request"]
    named = [line["ignored"] for line in lines if "ignored" in line]
    assert named == [["min_pp", "é\n"], ["min_pp"]] * len(PROTOCOLS)


def streamed(client: httpx.Client, path: str, body: Mapping[str, Any]) -> list[str]:
    """What the end of a stream says was ignored."""
    answer = client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    ends = [event.get("response", event).get("perdure") for event in events]
    [ignored] = [end["ignored"] for end in ends if end is not None]
    assert isinstance(ignored, list)
    return ignored


def test_a_strict_server_refuses_it_on_every_protocol() -> None:
    with (
        opened(toy(), n_ctx=512) as rt,
        live_server(rt, strict=True) as server,
        server.client() as client,
    ):
        for path, body in PROTOCOLS.items():
            assert client.post(path, json=body).status_code == 200
            answer = client.post(path, json={**body, "min_pp": 0.1})
            assert answer.status_code == 400
            assert "min_pp" in answer.text
