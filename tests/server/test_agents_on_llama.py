"""What agents need, on llama.cpp itself: priorities, the loop guard, filling in, cancelling by id."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perdure
import zoo
from perdure import Model
from perdure.decode.request import Reply
from server.live_server import LiveServer, live_server, opened
from zoo import tokenizer

SAID = [{"role": "user", "content": "Hello"}]
MARKS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy llama with tokens for filling in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "CONTROLS", (*tokenizer.CONTROLS, *MARKS))
        # As many tokens as ever.
        patch.setattr(tokenizer, "MERGES", tokenizer.MERGES - len(MARKS))
        tokenizer.vocabulary.cache_clear()
        try:
            made = zoo.write("llama", tmp_path_factory.mktemp("zoo"))
        finally:
            tokenizer.vocabulary.cache_clear()
    return made


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[LiveServer]:
    with opened(Model(path), n_ctx=8192, slots=2, threads=1) as rt, live_server(rt) as found:
        yield found


def test_an_interactive_reply_is_made_before_a_background_one_goes_on(path: Path) -> None:
    """The background reply has its only slot until then, and is whole in the end."""
    order: list[str] = []
    begun, waiting = threading.Event(), threading.Event()

    def noted(name: str) -> Callable[[Sequence[int], Any], Any]:
        def processor(tokens: Sequence[int], logits: Any) -> Any:
            order.append(name)
            if len(order) == 5:
                begun.set()
                assert waiting.wait(60)
            row = np.full(len(logits), -50.0, np.float32)
            row[97] = 50.0
            return row

        return processor

    settings: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    with perdure.open(Model(path), n_ctx=512, slots=1, threads=1) as rt:
        later = rt.submit(
            "One", max_tokens=40, priority="background", processors=[noted("later")], **settings
        )
        assert begun.wait(60)
        first = rt.submit("Two", max_tokens=10, processors=[noted("first")], **settings)
        waiting.set()
        replies: list[Reply] = [first.reply(), later.reply()]
    assert [len(reply.tokens) for reply in replies] == [10, 40]
    assert order.index("first") <= 6, "the step in flight, and no other"
    start = order.index("first")
    assert order[start : start + 10] == ["first"] * 10


def test_a_reply_that_repeats_itself_is_ended(server: LiveServer) -> None:
    [token, *_] = server.runtime.model.tokenize("a", bos=False)
    body = {"messages": SAID, "max_tokens": 99, "temperature": 0, "logit_bias": {str(token): 100}}
    with server.client() as client:
        for guard, reason in ((32, "repetition"), (0, "length")):
            asked = {**body, "perdure": {"loop_guard": guard}}
            answer = client.post("/v1/chat/completions", json=asked).raise_for_status().json()
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["perdure"]["finish_reason"] == reason


@pytest.mark.extension("completions")
def test_the_middle_of_a_text_is_filled_in(server: LiveServer) -> None:
    rt = server.runtime
    prompt = rt.infill_prompt("def f(", "): pass")
    written = rt.model.tokenize("<fim_prefix>def f(<fim_suffix>): pass<fim_middle>", special=True)
    assert list(prompt) == list(written)
    right = rt.generate(prompt, temperature=0, max_tokens=6, ignore_eos=True).text
    with server.client() as client:
        body = {"prompt": "def f(", "suffix": "): pass", "max_tokens": 6, "temperature": 0}
        answer = client.post("/v1/completions", json={**body, "perdure": {"ignore_eos": True}}).json()
        assert answer["choices"][0]["text"] == right
        asked = {"input_prefix": "def f(", "input_suffix": "): pass", "n_predict": 6, "temperature": 0}
        answer = client.post("/infill", json={**asked, "perdure": {"ignore_eos": True}}).json()
        assert answer["content"] == right


LONG = 8000
PROTOCOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": SAID, "max_tokens": LONG}),
    "completions": ("/v1/completions", {"prompt": "Hello", "max_tokens": LONG}),
    "responses": ("/v1/responses", {"input": "Hello", "store": False, "max_output_tokens": LONG}),
    "messages": ("/v1/messages", {"messages": SAID, "max_tokens": LONG}),
    "ollama chat": ("/api/chat", {"messages": SAID, "options": {"num_predict": LONG}}),
    "ollama generate": ("/api/generate", {"prompt": "Hello", "options": {"num_predict": LONG}}),
    "infill": ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": LONG}),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_stream_of_every_protocol_is_cancelled_by_its_id(protocol: str, server: LiveServer) -> None:
    path, body = PROTOCOLS[protocol]
    name = f"mine-{protocol.replace(' ', '-')}"
    ends = {str(token): -100 for token in server.runtime.model.ends}
    biased = (
        {"options": {**body["options"], "logit_bias": ends}} if "options" in body else {"logit_bias": ends}
    )
    asked = {**body, **biased, "stream": True}
    with (
        server.client() as client,
        client.stream("POST", path, json=asked, headers={"x-request-id": name}) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()
        next(lines)
        with server.client() as other:
            cancelled = other.post(f"/v1/requests/{name}/cancel", json={})
            assert cancelled.json()["replies"] == 1, cancelled.text
        # It ends, and as a stream of its protocol does: nothing is broken off.
        assert sum(1 for _ in lines) < LONG
        assert server.runtime.load == (0, 0)
