"""Requests of Ollama's API, read into the inner form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from perdure import InvalidInputError
from perdure.spi.base import SEED_LIMIT, Option, is_number, options_of_replies
from perdure.spi.chat import Image, parse_messages
from perdure.spi.server import (
    AppState,
    Items,
    NamingFields,
    ReplyRequest,
    RequestSchema,
    SessionExtension,
    extend,
    image_of_base64,
    invalid,
    option_value,
    parse_duration,
)

_SAMPLING = {
    name: each
    for each in options_of_replies().values()
    for name in (each.ollama, each.name)
    if each.name != "max_tokens"
}
"""Sampling settings by Ollama's names, and by ours."""
_ENGINE = frozenset(
    {
        "num_batch",
        "num_gpu",
        "main_gpu",
        "use_mmap",
        "use_mlock",
        "num_thread",
        "num_keep",
        "numa",
        "low_vram",
    }
    | {"vocab_only", "f16_kv", "logits_all", "draft_num_predict", "num_gqa", "rope_frequency_base"}
    | {"rope_frequency_scale", "penalize_newline"}
)
"""Settings of the engine, which are chosen when the server is started."""
_LARGE = 2**63
"""No option has larger numbers; Infinity and NaN, which Python's JSON reads, are none."""

Format = Literal["", "json"] | dict[str, Any]
KeepAlive = Annotated[str, Field(max_length=40)] | int | float


class OllamaCallFunction(RequestSchema):
    name: str = Field(min_length=1)
    arguments: dict[str, Any] | str = Field(default_factory=dict)


class OllamaCall(RequestSchema):
    id: str = ""
    function: OllamaCallFunction


class OllamaMessage(RequestSchema):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Items[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    @property
    def is_begun(self) -> bool:
        """Whether, as the last one, it is the beginning of the reply."""
        return self.role == "assistant" and bool(self.content) and not self.tool_calls

    @property
    def plain(self) -> dict[str, Any]:
        """As the runtime takes it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.images:
            message["content"] = [*_images(self.images, "images"), self.content or ""]
        if self.role == "assistant":
            if self.thinking:
                message["reasoning_content"] = self.thinking
            if self.tool_calls:
                message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
                message["content"] = self.content or None
        if self.role == "tool":
            message |= {"name": self.tool_name, "tool_call_id": self.tool_call_id}
        return message


class ModelNamed(RequestSchema):
    model: str = ""
    name: str = ""
    """An older word for `model`."""


class OptionsRequest(ModelNamed):
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None
    stream: bool | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False


class ReplyOptions(NamingFields, OptionsRequest):
    format: Format | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    perdure: SessionExtension | None = None
    """What Ollama has no words for; what is asked of the reply may stand among `options` too."""


class OllamaChatRequest(ReplyOptions):
    messages: Items[OllamaMessage] = Field(default_factory=list)
    tools: Annotated[Items[dict[str, Any]], Field(max_length=1024)] | None = None


class GenerateRequest(ReplyOptions):
    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: Items[int] | None = None
    raw: bool | None = None
    images: list[Any] | None = None


class EmbedRequest(OptionsRequest):
    input: str | Annotated[Items[str], Field(max_length=2048)]
    truncate: bool | None = None
    dimensions: int | None = Field(None, ge=1)


class EmbeddingsRequest(OptionsRequest):
    prompt: str


class CopyRequest(RequestSchema):
    source: str
    destination: str = Field(min_length=1, max_length=200)


def chat_request(body: OllamaChatRequest, app_state: AppState) -> tuple[ReplyRequest, list[str]]:
    """What a chat asks for, in the inner form, and what could not be done as it was said."""
    app_state.server.check_message_count(len(body.messages))
    options, notes = reply_options(body, app_state)
    if body.tools:
        options["tools"] = body.tools
    if body.messages and body.messages[-1].is_begun:
        options["continue_final_message"] = True
    return ReplyRequest(
        messages=parse_messages(message.plain for message in body.messages),
        options=options,
        place=body.perdure.place if body.perdure is not None else None,
        stores=body.stores,
    ), notes


def generate_request(body: GenerateRequest, app_state: AppState) -> tuple[ReplyRequest, list[str]]:
    """The same for a prompt, which is a conversation of one message unless it is `raw`."""
    for name, instead in _REFUSED.items():
        if getattr(body, name):
            raise invalid(name, instead, code="unsupported_parameter")
    if body.images and (body.raw or body.suffix):
        raise invalid("images", "only for a prompt by the chat template, without raw and suffix")
    options, notes = reply_options(body, app_state)
    messages: list[dict[str, Any]] = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": [*_images(body.images or (), "images"), body.prompt]})
    place = body.perdure.place if body.perdure is not None else None
    request = ReplyRequest(
        messages=parse_messages(messages), options=options, place=place, stores=body.stores
    )
    return request, notes


_REFUSED = {
    "template": "the chat template is chosen when the server is started",
    "context": "send the conversation to /api/chat instead: what was computed for it is found again",
}


def reply_options(body: ReplyOptions, app_state: AppState) -> tuple[dict[str, Any], list[str]]:
    """What is asked of a reply in the runtime's words, and what could not be done as it was said."""
    keep_alive_seconds(body.keep_alive)
    options, notes = _mapped(body.options or {}, app_state)
    if isinstance(body.format, dict):
        options["schema"] = body.format
    elif body.format == "json":
        options["schema"] = {"type": "object"}
    if isinstance(body.think, bool):
        options["variables"] = {"enable_thinking": body.think}
    elif body.think is not None:
        options["variables"] = {"enable_thinking": True, "reasoning_effort": body.think}
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    extend(options, body.perdure, app_state)
    options |= app_state.model_options(body.model or body.name)
    return app_state.server.defaults.fill(options), notes


def _mapped(ollama_options: Mapping[str, Any], app_state: AppState) -> tuple[dict[str, Any], list[str]]:
    options: dict[str, Any] = {}
    notes: list[str] = []
    n_ctx = app_state.runtime.n_ctx
    for name, value in ollama_options.items():
        if value is None:
            continue
        if name in _SAMPLING:
            setting = _SAMPLING[name]
            options[setting.name] = _setting(name, setting, value)
        elif name in ("num_predict", "max_tokens"):
            limit = _number(name, value)
            # Below 1 it is "as many as there are".
            options["max_tokens"], options["limit_to_context"] = int(limit) if limit > 0 else None, True
        elif name == "stop":
            if not isinstance(value, (str, list)) or not all(isinstance(each, str) for each in value):
                raise invalid("options.stop", "a text, or a list of texts")
            options["stop"] = [each for each in ([value] if isinstance(value, str) else value) if each]
        elif name == "num_ctx":
            if _number(name, value) != n_ctx:
                notes.append(f"num_ctx is {n_ctx} here, as the server was started, not {value}")
        elif name in _ENGINE:
            notes.append(f"{name} is chosen when the server is started, and was left out")
        else:
            raise invalid(f"options.{name[:100]}", "there is no such option here; leave it out")
    return options, notes


def _setting(name: str, setting: Option, value: Any) -> Any:
    """A sampling setting. Clients send whole numbers as 40.0 too."""
    if setting.kind is list:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise invalid(f"options.{name}", "a list of texts")
        value = tuple(value)
    elif setting.kind is dict:
        if not isinstance(value, dict) or len(value) > (setting.items or 0):
            raise invalid(f"options.{name}", f"at most {setting.items} biases by token id")
        value = option_value(setting, {key: _number(name, bias) for key, bias in value.items()})
    elif setting.kind is not str:
        value = _number(name, value)
        if setting.kind is int:
            value = int(value)
        if setting.name == "seed":
            # Below 0 it is "a new one each time".
            value = None if value < 0 else value % SEED_LIMIT
    try:
        setting.check(value)
    except InvalidInputError as error:
        raise invalid(f"options.{name}", str(error)) from None
    return value


def keep_alive_seconds(keep_alive: KeepAlive | None) -> float | None:
    """How long the model is to stay loaded without a request; below 0 for ever, None: as it is."""
    if keep_alive is None:
        return None
    try:
        return parse_duration(keep_alive)
    except InvalidInputError:
        raise invalid("keep_alive", "a number of seconds, or a duration such as 5m") from None


def _images(images: Sequence[Any], where: str) -> list[Image]:
    return [image_of_base64(image, where) for image in images]


def _number(name: str, value: Any) -> float | int:
    if not is_number(value) or not -_LARGE < value < _LARGE:
        raise invalid(f"options.{name}", f"a number, got {str(value)[:40]!r}")
    return value
