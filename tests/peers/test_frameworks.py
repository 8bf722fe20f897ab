"""Frameworks that people build on, installed from `perdure[clients]`: several turns, tools, a restart (soak).

Each speaks through the client of one protocol; the model says what a script tells it to.
"""

from __future__ import annotations

import importlib
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
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage  # type: ignore[import-not-found]

    said: list[Any] = [HumanMessage("Light, please.")]
    for texts in ((CALL, "It is lit."), ("Goodbye.",)):
        with restarted(tmp_path / "store", *texts) as server:
            filled = {
                key: value.replace("{url}", server.url) if isinstance(value, str) else value
                for key, value in settings.items()
            }
            model = chat_class(model="gpt-any", **filled)
            for _ in texts:
                reply = model.bind_tools([light]).invoke(said)
                assert isinstance(reply, AIMessage)
                said.append(reply)
                for call in reply.tool_calls:
                    assert (call["name"], call["args"]) == ("light", {"on": True})
                    said.append(ToolMessage("lit", tool_call_id=call["id"]))
            chunks = "".join(str(getattr(chunk.content, "text", chunk.text)) for chunk in model.stream(said))
            assert chunks == texts[-1]
        said.append(HumanMessage("Thank you."))
    assert said[-2].text == "Goodbye." or "Goodbye." in str(said[-2].content)


@pytest.mark.parametrize(
    ("model", "base"),
    [("openai/gpt-any", "{url}/v1"), ("anthropic/gpt-any", "{url}")],
)
def test_litellm(model: str, base: str, tmp_path: Path) -> None:
    litellm = pytest.importorskip("litellm")
    with restarted(tmp_path / "store", "Blue.") as server:
        asked = {
            "model": model,
            "api_base": base.replace("{url}", server.url),
            "api_key": "x",
            "messages": [{"role": "user", "content": "Why?"}],
            "max_tokens": 64,
        }
        reply = litellm.completion(**asked)
        assert reply.choices[0].message.content == "Blue."
        chunks = litellm.completion(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Blue."


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(kind: str, tmp_path: Path) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = importlib.import_module("pydantic_ai.models.openai")
    providers = importlib.import_module("pydantic_ai.providers.openai")
    with restarted(tmp_path / "store", CALL, "It is lit.") as server:
        provider = providers.OpenAIProvider(base_url=f"{server.url}/v1", api_key="x")
        model = getattr(models, kind)("gpt-any", provider=provider)
        agent = pydantic_ai.Agent(model, tools=[light])
        assert agent.run_sync("Light, please.").output == "It is lit."


def test_instructor(tmp_path: Path) -> None:
    instructor = pytest.importorskip("instructor")
    import openai
    from pydantic import BaseModel

    class Answer(BaseModel):
        good: bool

    with restarted(tmp_path / "store", '{"good": true}') as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
        found = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).chat.completions.create(
            model="gpt-any",
            response_model=Answer,
            messages=[{"role": "user", "content": "Well?"}],
            max_tokens=64,
        )
        assert isinstance(found, Answer)


@pytest.mark.parametrize("kind", ["openai_like.OpenAILike", "ollama.Ollama"])
def test_llama_index(kind: str, tmp_path: Path) -> None:
    module, _, name = kind.partition(".")
    pytest.importorskip(f"llama_index.llms.{module}")
    found = importlib.import_module(f"llama_index.llms.{module}")
    with restarted(tmp_path / "store", "Blue.") as server:
        settings: dict[str, Any] = (
            {"base_url": server.url}
            if name == "Ollama"
            else {"api_base": f"{server.url}/v1", "api_key": "x", "is_chat_model": True}
        )
        llm = getattr(found, name)(model="gpt-any", **settings)
        message = importlib.import_module("llama_index.core.llms").ChatMessage(role="user", content="Why?")
        assert str(llm.chat([message]).message.content) == "Blue."
