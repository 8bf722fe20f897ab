"""Y18: every word for an end or a status that the server can send is one that the vendors' SDKs have.

SDKs take what they are sent as it is; checked against their own types, an unknown word is an error, as it is
in clients whose enumerations are closed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import ollama
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from decode.observed import open_toy
from perdure.chat.reply import ChatReply
from perdure.decode.request import FinishReason
from perdure.ext.completions.routes import CompletionHead, CompletionRequest, CompletionWriter
from perdure.ext.dialects.llama_server import InfillWriter
from perdure.ext.messages.answers import MessagesHead, MessagesWriter
from perdure.ext.messages.requests import MessagesRequest
from perdure.ext.ollama.answers import OllamaWriter, idle
from perdure.ext.responses.answers import ResponseHead
from perdure.ext.responses.items import OutputForm
from perdure.ext.responses.stream import ResponseWriter
from perdure.server.core.api_error import stopping
from perdure.server.core.app_state import AppState
from perdure.server.core.protocol import Events
from perdure.server.core.server_state import ServerState
from perdure.server.protocols.chat import ChatHead, ChatWriter

REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
MESSAGES: Any = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "model": "toy"}


@pytest.fixture(scope="module")
def said() -> Iterator[tuple[AppState, ChatReply]]:
    with open_toy(n_ctx=256) as rt:
        reply = rt.chat([{"role": "user", "content": "Hi"}], max_tokens=4, temperature=0)
        yield AppState.of(ServerState(runtime=rt, name="toy")), reply


def ended(reply: ChatReply, reason: FinishReason) -> ChatReply:
    return replace(reply, raw=replace(reply.raw, finish_reason=reason))


def data(events: Events) -> list[dict[str, Any]]:
    return [json.loads(event.data) for event in events if event.data != b"[DONE]"]


def response_head(app_state: AppState) -> ResponseHead:
    echo = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return ResponseHead(id="resp_1", created=1, model=app_state.name, echo=echo, form=OutputForm("resp_1"))


Make = Callable[[AppState, ChatReply], list[Any]]
"""All that one protocol can send at the end of a reply, whole and as events, checked."""


def chat(app_state: AppState, reply: ChatReply) -> list[Any]:
    head = ChatHead(app_state, None, with_logprobs=False)
    whole = ChatCompletion.model_validate(head.whole([reply]).model_dump())
    writer, broken = (ChatWriter(head, 1, include_usage=False) for _ in range(2))
    error, cut = data(broken.error(stopping()))
    assert "error" in error
    chunks = [*data(writer.start()), *data(writer.end([reply])), cut]
    return [whole, *map(ChatCompletionChunk.model_validate, chunks)]


def completions(app_state: AppState, reply: ChatReply) -> list[Any]:
    body = CompletionRequest.model_validate({"prompt": "Hi"})
    head = CompletionHead(app_state, body)
    whole = Completion.model_validate(head.whole([[reply.raw]]).model_dump())
    error, cut = data(CompletionWriter(head, body).error(stopping()))
    assert "error" in error
    # A chunk that is not the last has no reason yet, which the SDK's type does not say.
    return [
        whole,
        *map(Completion.model_validate, [*data(CompletionWriter(head, body).end([reply.raw])), cut]),
    ]


def messages(app_state: AppState, reply: ChatReply) -> list[Any]:
    head = MessagesHead(MessagesRequest.model_validate(MESSAGES), app_state, "")
    whole = Message.model_validate(head.whole([reply]).model_dump())
    writer = MessagesWriter(head, 3)
    events = [*data(writer.start()), *data(writer.end([reply]))]
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    return [whole, *(adapter.validate_python(each) for each in events if each["type"] != "ping")]


def responses(app_state: AppState, reply: ChatReply) -> list[Any]:
    head = response_head(app_state)
    whole = Response.model_validate(head.whole([reply]))
    writer, broken = ResponseWriter(head), ResponseWriter(head)
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = [*data(writer.start()), *data(writer.end([reply])), *data(broken.start())]
    return [whole, *map(adapter.validate_python, events)]


def ollama_lines(app_state: AppState, reply: ChatReply) -> list[Any]:
    # Its SDK has a text there: these are the words of its server.
    writer = OllamaWriter("toy", "chat")
    lines = [writer.whole([reply]), *data(writer.end([reply])), idle("toy", "chat", "load")]
    assert {line["done_reason"] for line in lines} <= {"stop", "length", "load", "unload"}
    return list(map(ollama.ChatResponse.model_validate, lines))


def infill(app_state: AppState, reply: ChatReply) -> list[Any]:
    # The words of llama-server, which has no SDK.
    whole = InfillWriter().whole([reply.raw])
    assert whole["stop_type"] in ("none", "eos", "word", "limit")
    return [whole]


PROTOCOLS: dict[str, Make] = {
    "chat": chat,
    "completions": completions,
    "messages": messages,
    "responses": responses,
    "ollama": ollama_lines,
    "infill": infill,
}


ENDS = [(protocol, reason) for protocol in PROTOCOLS for reason in REASONS]
# A completion has no tool calls.
ENDS.remove(("completions", "tool_calls"))


@pytest.mark.parametrize(("protocol", "reason"), ENDS)
def test_every_end_of_a_reply_is_one_that_the_sdk_knows_y18(
    protocol: str, reason: FinishReason, said: tuple[AppState, ChatReply]
) -> None:
    app_state, reply = said
    assert PROTOCOLS[protocol](app_state, ended(reply, reason))
