"""The families that are known, and which one a template belongs to.

What a template shows of its family is here; how the family writes is in the file of the family, here or in an
extension, which is imported when a template belongs to it.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from importlib import import_module

from perdure.chat.parsing.family import JSON, THINK, Family
from perdure.errors import InvalidInputError
from perdure.extension import by_name, imported

log = logging.getLogger("perdure.chat")

GENERIC = Family("generic", calls=JSON)
THINKING = Family("thinking", THINK, JSON, ("<think>",))


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    """A family of ours, with the signs that `Family` explains."""

    name: str
    value: str | None
    """The file and the name of its value here; None: an extension brings it."""
    signs: tuple[str, ...]
    architectures: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()


# The first whose signs are all there is taken, so what is more special stands before what is less so.
_BUILT_IN: tuple[_BuiltIn | Family, ...] = (
    _BuiltIn("muse", None, ("<atem:function_calls>",)),
    _BuiltIn("harmony", None, ("<|channel|>",), ("gpt-oss",)),
    _BuiltIn("gemma4", None, ("<|tool_call>", "<|turn>"), ("gemma4",)),
    _BuiltIn("deepseek-dsml", None, ("｜DSML｜",)),
    _BuiltIn("deepseek", None, ("<｜Assistant｜>",), ("deepseek",)),
    _BuiltIn(
        "command-r-plus",
        None,
        ("<|CHATBOT_TOKEN|>", "Action:"),
        unless=("<|START_ACTION|>",),
    ),
    _BuiltIn("command", None, ("<|START_OF_TURN_TOKEN|>",), ("cohere", "command")),
    _BuiltIn("granite4", "hermes:GRANITE4", ("<|start_of_role|>", "<tool_call>")),
    _BuiltIn("granite", None, ("<|start_of_role|>",), ("granite",)),
    _BuiltIn("phi", None, ("<|/tool_call|>",)),
    _BuiltIn("magistral", None, ("[THINK]", "[ARGS]")),
    _BuiltIn("mistral-named", None, ("[TOOL_CALLS]", "[ARGS]")),
    _BuiltIn("mistral-thinking", None, ("[THINK]",)),
    _BuiltIn("mistral", None, ("[TOOL_CALLS]",), ("mistral",)),
    _BuiltIn("kimi-k3", None, ("<|open|>", "<|close|>")),
    _BuiltIn("kimi-thinking", None, ("<|tool_calls_section_begin|>", "<think>")),
    _BuiltIn("solar", None, ("<|tool_call:begin|>",)),
    _BuiltIn("hunyuan", None, ("HYTK",)),
    _BuiltIn("minimax-m1", None, ("<tool_calls>", "<beginning_of_sentence>")),
    _BuiltIn("kimi", None, ("<|tool_calls_section_begin|>",), ("kimi",)),
    _BuiltIn("functionary", None, ("<|start_header_id|>", ">>>")),
    _BuiltIn("functionary-tagged", None, ("<|start_header_id|>", "<function=")),
    _BuiltIn("firefunction", None, ("<|start_header_id|>", "functools")),
    _BuiltIn("nemotron", None, ("<TOOLCALL>",)),
    _BuiltIn("llama3-thinking", "llama3:LLAMA3_THINKING", ("<|start_header_id|>", "<think>")),
    _BuiltIn("llama3", "llama3:LLAMA3", ("<|start_header_id|>",), unless=("<tool_call>",)),
    _BuiltIn("llama4", None, ("<|header_start|>",), ("llama4",)),
    _BuiltIn("lfm2-thinking", None, ("<|tool_call_start|>", "<think>")),
    _BuiltIn("lfm2", None, ("<|tool_list_start|>",), ("lfm2",)),
    _BuiltIn("lfm2.5", None, ("<|im_start|>", "List of tools: [")),
    _BuiltIn("apriel-thinking", None, ("Here are my reasoning steps:", "<|begin_assistant|>")),
    _BuiltIn("apriel", None, ("<tool_calls>", "<|assistant|>"), unless=("<arg_key>",)),
    _BuiltIn("apertus", None, ("<|tools_prefix|>",)),
    _BuiltIn("gigachat", None, ("<|role_sep|>",)),
    _BuiltIn("seed", None, ("<seed:tool_call>",)),
    _BuiltIn("minimax-m3", None, ("]<]minimax[>[",)),
    _BuiltIn("minimax", None, ("<minimax:tool_call>",), ("minimax",)),
    _BuiltIn("minicpm", None, ('<param name="',)),
    _BuiltIn("ling", None, ("<arg_key>", "<|role_end|>")),
    _BuiltIn("glm", None, ("<arg_key>",), ("glm4",)),
    _BuiltIn("qwen3-coder", None, ("<function=", "<parameter=")),
    _BuiltIn("reka", "hermes:REKA", ("<tool_call>", "<think>", "<sep>")),
    _BuiltIn("qwen3", "hermes:QWEN3", ("<tool_call>", "<think>"), ("qwen3", "smollm3")),
    _BuiltIn("hermes", "hermes:HERMES", ("<tool_call>",), ("qwen2",)),
    _BuiltIn("gemma", None, ("<start_of_turn>",), ("gemma",)),
    _BuiltIn("chatml-thinking", "hermes:CHATML_THINKING", ("<|im_start|>", "<think>")),
    _BuiltIn("chatml", "hermes:CHATML", ("<|im_start|>",)),
    THINKING,
    GENERIC,
)

_lock = threading.Lock()
_registered: dict[str, _BuiltIn | Family] = {each.name: each for each in _BUILT_IN}


def register(family: Family) -> None:
    """Add a family, or replace the one of that name. It is looked for before all others."""
    if not isinstance(family, Family):
        raise InvalidInputError(f"a Family can be registered, got {type(family).__name__}")
    global _registered
    with _lock:
        others = {name: each for name, each in _registered.items() if name != family.name}
        _registered = {family.name: family, **others}


def family(name: str) -> Family:
    """The family of that name."""
    known = _registered.get(name)
    found = None if known is None else _imported(known)
    if found is None:
        raise InvalidInputError(
            f"there is no family {name!r}; known are {', '.join(names())}: register() adds others"
        )
    return found


def names() -> tuple[str, ...]:
    brought = by_name("families")
    return tuple(
        sorted(
            name
            for name, each in _registered.items()
            if isinstance(each, Family) or each.value is not None or name in brought
        )
    )


def detect(template_source: str, architecture: str = "") -> Family:
    """The family that a template's own markers tell of, else the architecture's, else a generic one."""
    for each in _registered.values():
        if template_source:
            is_it = bool(each.signs) and all(sign in template_source for sign in each.signs)
            is_it = is_it and not any(sign in template_source for sign in each.unless)
        else:
            is_it = bool(each.architectures) and architecture.startswith(each.architectures)
        if not is_it:
            continue
        if (found := _imported(each)) is not None:
            return found
        log.warning(
            "the chat template is of the family %s, which needs perdure's extension 'families'; "
            "its reasoning and tool calls may show as text",
            each.name,
        )
    return _imported(_registered["generic"]) or GENERIC


def _imported(known: _BuiltIn | Family) -> Family | None:
    """A family's value; None where it is an extension's that is not installed."""
    if isinstance(known, Family):
        return known
    if known.value is not None:
        module, _, name = known.value.partition(":")
        family: Family = getattr(import_module(f"perdure.chat.formats.{module}"), name)
        return family
    reference = by_name("families").get(known.name)
    return None if reference is None else imported(reference)
