"""Frameworks that people build on, installed from `perdure[clients]`: several turns, tools, a restart (soak).

Each speaks through the client of one protocol; the model says what a script tells it to.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from decode.observed import toy
from server.live_server import LiveServer, live_server, opened
from server.scripted import THINKS, steer

pytestmark = [
    pytest.mark.soak,
    # Of others' code, whose warnings are theirs.
    pytest.mark.filterwarnings("ignore"),
]
RESPONSES = {"use_responses_api": True}
CALL = '<tool_call>\n{"name": "light", "arguments": {"on": true}}\n</tool_call>'


@contextmanager
def restarted(store: Path, *texts: str) -> Iterator[LiveServer]:
    """A server on a store that others may have used before."""
    with opened(toy(), n_ctx=8192, store=store, template=THINKS) as rt:
        steer(rt, *texts)
        with live_server(rt, aliases=("gpt-*",)) as server:
            yield server


def light(on: bool) -> str:
    """Switches the light."""
    return "lit" if on else "dark"


@pytest.mark.parametrize(
    ("module", "name", "settings"),
    [
        ("langchain_openai", "ChatOpenAI", {"base_url": "{url}/v1", "api_key": "x"}),
        (
            "langchain_openai",
            "ChatOpenAI",
            {"base_url": "{url}/v1", "api_key": "x", "use_responses_api": True},
        ),
        ("langchain_anthropic", "ChatAnthropic", {"base_url": "{url}", "api_key": "x", "max_tokens": 256}),
        ("langchain_ollama", "ChatOllama", {"base_url": "{url}"}),
    ],
)
def test_langchain(module: str, name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    chat_class = getattr(pytest.importorskip(module), name)
    words = importlib.import_module("langchain_core.messages")
    said: list[Any] = [words.HumanMessage("Light, please.")]
    for texts in ((CALL, "It is lit."), ("Goodbye.",)):
        with restarted(tmp_path / "store", *texts) as server:
            filled = {
                key: value.replace("{url}", server.url) if isinstance(value, str) else value
                for key, value in settings.items()
            }
            model = chat_class(model="gpt-any", **filled)
            for _ in texts:
                reply = model.bind_tools([light]).invoke(said)
                assert isinstance(reply, words.AIMessage)
                said.append(reply)
                for call in reply.tool_calls:
                    assert (call["name"], call["args"]) == ("light", {"on": True})
                    said.append(words.ToolMessage("lit", tool_call_id=call["id"]))
            chunks = "".join(str(getattr(chunk.content, "text", chunk.text)) for chunk in model.stream(said))
            assert chunks == texts[-1]
        said.append(words.HumanMessage("Thank you."))
    assert said[-2].text == "Goodbye." or "Goodbye." in str(said[-2].content)


LIGHT = {
    "type": "function",
    "function": {
        "name": "light",
        "description": "Switches the light.",
        "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
}


@pytest.mark.parametrize(
    ("model", "base"),
    [
        ("openai/gpt-any", "{url}/v1"),
        ("anthropic/gpt-any", "{url}"),
        ("ollama_chat/gpt-any", "{url}"),
    ],
)
def test_litellm(model: str, base: str, tmp_path: Path) -> None:
    litellm = pytest.importorskip("litellm")
    said: list[Any] = [{"role": "user", "content": "Light, please."}]
    for texts in ((CALL, "It is lit."), ("Blue.",)):
        with restarted(tmp_path / "store", *texts) as server:
            asked = {
                "model": model,
                "api_base": base.replace("{url}", server.url),
                "api_key": "x",
                "messages": said,
                "max_tokens": 256,
            }
            for _ in texts:
                message = litellm.completion(**asked, tools=[LIGHT]).choices[0].message
                said.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or ():
                    assert (call.function.name, json.loads(call.function.arguments)) == (
                        "light",
                        {"on": True},
                    )
                    said.append({"role": "tool", "tool_call_id": call.id, "content": "lit"})
            assert said[-1]["content"] == texts[-1]
            said.append({"role": "user", "content": "Why?"})
            chunks = litellm.completion(**asked, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == texts[-1]


@pytest.mark.parametrize(
    "kind",
    [
        "OpenAIChatModel",
        "OpenAIResponsesModel",
        pytest.param(
            "AnthropicModel",
            marks=pytest.mark.xfail(
                raises=TypeError,
                strict=True,
                reason="pydantic-ai 2.31 calls BetaMessageParam, which is a Union in anthropic 2.8",
            ),
        ),
    ],
)
def test_pydantic_ai(kind: str, tmp_path: Path) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    maker = "anthropic" if kind == "AnthropicModel" else "openai"
    models = importlib.import_module(f"pydantic_ai.models.{maker}")
    providers = importlib.import_module(f"pydantic_ai.providers.{maker}")
    history: list[Any] = []
    for texts in ((CALL, "It is lit."), ("Goodbye.",)):
        with restarted(tmp_path / "store", *texts) as server:
            if maker == "anthropic":
                import anthropic

                client = anthropic.AsyncAnthropic(base_url=server.url, api_key="x")
                provider = providers.AnthropicProvider(anthropic_client=client)
            else:
                provider = providers.OpenAIProvider(base_url=f"{server.url}/v1", api_key="x")
            model = getattr(models, kind)("gpt-any", provider=provider)
            agent = pydantic_ai.Agent(model, tools=[light])
            done = agent.run_sync("Light, please.", message_history=history)
            assert done.output == texts[-1]
            history = done.all_messages()


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS"])
def test_instructor(mode: str) -> None:
    """Nobody tells the model what to write: it is held to the schema, and to a call of the tool."""
    instructor = pytest.importorskip("instructor")
    import openai
    from pydantic import BaseModel

    class Answer(BaseModel):
        good: bool

    with opened(toy(), template=THINKS, n_ctx=2048) as rt, live_server(rt) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
        ask = instructor.from_openai(client, mode=getattr(instructor.Mode, mode)).chat.completions.create
        said: list[Any] = [{"role": "user", "content": "Well?"}]
        for _ in range(2):
            found = ask(model="toy", response_model=Answer, messages=said, max_tokens=256, max_retries=0)
            assert isinstance(found, Answer)
            said += [{"role": "assistant", "content": found.model_dump_json()}, *said[:1]]


@pytest.mark.parametrize("kind", ["openai_like.OpenAILike", "ollama.Ollama"])
def test_llama_index(kind: str, tmp_path: Path) -> None:
    module, _, name = kind.partition(".")
    found = pytest.importorskip(f"llama_index.llms.{module}")
    core = importlib.import_module("llama_index.core.llms")
    tools = importlib.import_module("llama_index.core.tools")
    tool = tools.FunctionTool.from_defaults(light)
    said: list[Any] = [core.ChatMessage(role="user", content="Light, please.")]
    for texts in ((CALL, "It is lit."), ("Blue.",)):
        with restarted(tmp_path / "store", *texts) as server:
            settings: dict[str, Any] = (
                {"base_url": server.url}
                if name == "Ollama"
                else {
                    "api_base": f"{server.url}/v1",
                    "api_key": "x",
                    "is_chat_model": True,
                    "is_function_calling_model": True,
                }
            )
            llm = getattr(found, name)(model="gpt-any", **settings)
            for _ in texts:
                reply = llm.chat_with_tools([tool], chat_history=said)
                said.append(reply.message)
                for call in llm.get_tool_calls_from_response(reply, error_on_no_tool_call=False):
                    assert (call.tool_name, call.tool_kwargs) == ("light", {"on": True})
                    more = {"tool_call_id": call.tool_id}
                    said.append(core.ChatMessage(role="tool", content="lit", additional_kwargs=more))
            assert str(said[-1].content) == texts[-1]
            said.append(core.ChatMessage(role="user", content="Why?"))
            streamed = "".join(chunk.delta or "" for chunk in llm.stream_chat(said))
            assert streamed == texts[-1]
