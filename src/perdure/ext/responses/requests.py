"""Requests for a response, read into the inner form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import BeforeValidator, Field

from perdure import Message
from perdure.ext.responses.items import (
    Decrypt,
    FindItems,
    OutputForm,
    content_text,
    messages_of,
)
from perdure.spi.server import (
    AppState,
    Items,
    NamingFields,
    PromptCacheOptions,
    RequestSchema,
    SamplingSchema,
    SessionExtension,
    extend,
    invalid,
    tier_options,
)

_ITEMS = 1 << 14
_TOOLS = 1024
"""Of one request, those in namespaces included."""
_ECHOED: tuple[tuple[str, Any], ...] = (
    ("model", ""),
    ("instructions", None),
    ("tools", []),
    ("tool_choice", "auto"),
    ("truncation", "disabled"),
    ("parallel_tool_calls", True),
    ("text", {"format": {"type": "text"}}),
    ("top_p", 1.0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("top_logprobs", 0),
    ("temperature", 1.0),
    ("reasoning", {"effort": None, "summary": None}),
    ("max_output_tokens", None),
    ("max_tool_calls", None),
    ("store", True),
    ("background", False),
    ("metadata", {}),
    ("safety_identifier", None),
    ("prompt_cache_key", None),
    ("user", None),
    ("previous_response_id", None),
)
"""What a response says of its request, and what it says where that was left out."""


def _few(metadata: Any) -> Any:
    if isinstance(metadata, Mapping) and len(metadata) > 16:
        raise ValueError(f"{len(metadata)} entries, 16 are allowed")
    return metadata


ItemOrder = Literal["asc", "desc"]
AfterItem = Annotated[str | None, Query(max_length=100)]
"""Behind which item a page of them begins."""
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], BeforeValidator(_few)
]


class ConversationNamed(RequestSchema):
    id: str


class ReasoningAsked(RequestSchema):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextAsked(RequestSchema):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class PromptRequest(RequestSchema):
    """What a prompt is made of."""

    model: str | None = None
    input: str | Annotated[Items[dict[str, Any]], Field(max_length=_ITEMS)] | None = None
    instructions: str | Annotated[Items[dict[str, Any]], Field(max_length=_ITEMS)] | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationNamed | None = None
    tools: Annotated[Items[dict[str, Any]], Field(max_length=1024)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextAsked | None = None
    reasoning: ReasoningAsked | None = None
    truncation: Literal["auto", "disabled"] | None = None


class ResponseRequest(NamingFields, SamplingSchema, PromptRequest):
    stream: bool | None = None
    include: Annotated[list[str], Field(max_length=64)] | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_tool_calls: int | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    metadata: Metadata | None = None
    background: bool | None = None
    service_tier: str | None = Field(None, max_length=40)
    """`flex` is a request of lower priority; others are taken."""
    prompt_cache_key: str | None = Field(None, max_length=512)
    """The latest prompt that came with this key is kept for a time."""
    prompt_cache_options: PromptCacheOptions | None = None
    perdure: SessionExtension | None = None

    @property
    def conversation_id(self) -> str | None:
        named = self.conversation
        return named.id if isinstance(named, ConversationNamed) else named

    @property
    def echo(self) -> dict[str, Any]:
        """What the response says of its request."""
        fields = self.model_dump(exclude_none=True)
        shown: dict[str, Any] = {name: fields.get(name, default) for name, default in _ECHOED}
        shown["service_tier"] = "flex" if self.service_tier == "flex" else "default"
        shown["conversation"] = {"id": self.conversation_id} if self.conversation_id else None
        text: dict[str, Any] = shown["text"]
        shown["text"] = {**text, "format": text.get("format") or {"type": "text"}}
        return shown


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of a request in the runtime's words, and what tells them apart in the answer."""

    functions: Sequence[dict[str, Any]]
    custom: frozenset[str]
    namespaces: Mapping[str, str]


def tool_set(tools: Sequence[Mapping[str, Any]]) -> ToolSet:
    """Functions and custom tools, in namespaces or not. Tools that OpenAI's servers run are left out."""
    functions: dict[str, dict[str, Any]] = {}
    custom: set[str] = set()
    namespaces: dict[str, str] = {}

    def add(tool: Mapping[str, Any], namespace: str | None) -> None:
        name, description = tool.get("name"), tool.get("description")
        if not isinstance(name, str) or not name or name in functions:
            return
        if len(functions) == _TOOLS:
            raise invalid("tools", f"at most {_TOOLS} are allowed")
        if tool.get("type") == "custom":
            custom.add(name)
            description = _custom_description(tool)
            text = {"type": "string", "description": "The input of the tool, as plain text."}
            parameters: Any = {
                "type": "object",
                "properties": {"input": text},
                "required": ["input"],
                "additionalProperties": False,
            }
        else:
            parameters = tool.get("parameters")
        shown = description if isinstance(description, str) else ""
        functions[name] = {"name": name, "description": shown, "parameters": parameters}
        if namespace is not None:
            namespaces[name] = namespace

    for tool in tools:
        if tool.get("type") in ("function", "custom"):
            add(tool, None)
        elif tool.get("type") == "namespace" and isinstance(tool.get("tools"), list):
            for inner in tool["tools"]:
                if isinstance(inner, Mapping) and inner.get("type", "function") in ("function", "custom"):
                    add(inner, str(tool.get("name", "")))
    return ToolSet(list(functions.values()), frozenset(custom), namespaces)


def _custom_description(tool: Mapping[str, Any]) -> str:
    description = tool.get("description") if isinstance(tool.get("description"), str) else ""
    form = tool.get("format")
    if isinstance(form, Mapping) and isinstance(form.get("definition"), str):
        description = f"{description}\nThe input follows this grammar:\n{form['definition']}"
    return str(description)


def output_form(
    body: PromptRequest, tools: ToolSet, response_id: str, app_state: AppState, namespace: str
) -> OutputForm:
    reasoning = body.reasoning
    summary = (reasoning.summary or reasoning.generate_summary) if reasoning is not None else None
    return OutputForm(
        response_id,
        tools.custom,
        tools.namespaces,
        summarised=summary not in (None, "none"),
        encrypt=lambda text: app_state.server.reasoning_cipher.encrypt(text, namespace),
    )


def prompt_options(body: PromptRequest, tools: ToolSet) -> dict[str, Any]:
    """What is asked of the prompt and of the shape of the reply, in the runtime's words."""
    options: dict[str, Any] = {}
    functions, choice = _chosen(tools.functions, body.tool_choice)
    if functions:
        options["tools"] = functions
        options["tool_choice"] = choice
    if body.parallel_tool_calls is not None:
        options["parallel_tool_calls"] = body.parallel_tool_calls
    form = body.text.format if body.text is not None else None
    if form is not None and form.get("type") == "json_schema":
        if not isinstance(form.get("schema"), dict):
            raise invalid("text.format.schema", "the schema is missing")
        options["schema"] = form["schema"]
    elif form is not None and form.get("type") == "json_object":
        options["schema"] = {"type": "object"}
    if body.reasoning is not None and body.reasoning.effort is not None:
        effort = body.reasoning.effort
        options["variables"] = (
            {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
        )
    if body.truncation == "auto":
        options["overflow"] = "drop_oldest"
    return options


def reply_options(body: ResponseRequest, tools: ToolSet, app_state: AppState) -> dict[str, Any]:
    """What is asked of the reply, in the runtime's words."""
    options = prompt_options(body, tools)
    options |= body.sampling | tier_options(body.service_tier)
    extend(options, body.perdure, app_state)
    if body.max_output_tokens is not None:
        options["max_tokens"], options["limit_to_context"] = body.max_output_tokens, True
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        options["logprobs"] = body.top_logprobs or 0
    return options


def _chosen(functions: Sequence[dict[str, Any]], choice: Any) -> tuple[Sequence[dict[str, Any]], Any]:
    """The tools that may be called, and whether one must be."""
    if choice is None or isinstance(choice, str):
        return functions, choice if choice in ("none", "auto", "required") else "auto"
    kind, name = choice.get("type"), choice.get("name")
    if kind in ("function", "custom") and isinstance(name, str):
        return functions, name
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        names = [tool.get("name") for tool in choice["tools"] if isinstance(tool, Mapping)]
        return [each for each in functions if each["name"] in names], choice.get("mode", "auto")
    # Of a tool that is not run here.
    return functions, "auto"


def input_items(body: PromptRequest) -> list[dict[str, Any]]:
    if body.input is None:
        return []
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    return list(body.input)


def preamble(body: PromptRequest, decrypt: Decrypt, find_items: FindItems) -> list[Message]:
    """The instructions. They are of this response alone: another one that goes on from it has its own."""
    instructions = body.instructions
    if instructions is None or instructions == "":
        return []
    if isinstance(instructions, str):
        return [Message(role="system", content=instructions)]
    return messages_of(instructions, decrypt, find_items)


def input_messages(body: PromptRequest, decrypt: Decrypt, find_items: FindItems) -> list[Message]:
    if isinstance(body.input, str):
        return [Message(role="user", content=content_text(body.input, "input"))]
    return messages_of(input_items(body), decrypt, find_items)
