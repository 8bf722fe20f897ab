"""Families of models: how each marks its reasoning and its tool calls."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perdure.chat import formats, reasoning
from perdure.chat.calls import CallFormat
from perdure.chat.message import Tool
from perdure.chat.reader import Part, Reader, read, watch
from perdure.chat.reasoning import Markers
from perdure.decode.grammar import Grammar
from perdure.errors import InvalidInputError

__all__ = ["Family", "Markers", "Part", "Reader", "detect", "family", "names", "read", "register"]


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of models writes. No marker of it is the beginning of another.

    A template is of the family if it holds all of `signs`; where no template tells, an architecture that
    starts with one of `architectures` does.
    """

    name: str
    reasoning: Markers | None = None
    calls: CallFormat | None = None
    signs: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        marks = sorted(watch(self).meanings)
        for mark, following in zip(marks, [*marks[1:], ""], strict=False):
            if not mark or mark[0].isspace():
                raise InvalidInputError(f"a marker of {self.name} is empty or starts with space: {mark!r}")
            if following.startswith(mark):
                raise InvalidInputError(
                    f"of the markers of {self.name}, {mark!r} is the beginning of {following!r}"
                )

    @property
    def marks(self) -> frozenset[str]:
        """All texts that mean something of their own in a reply."""
        return frozenset(watch(self).meanings)

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends inside reasoning, so that the reply begins there."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.open)

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, control: Mapping[str, int] | None = None
    ) -> Grammar:
        """What holds a reply to a call of `tools` in this family's format, or to several.

        `control` maps those of `marks` that are control tokens of the model to their ids.
        """
        calls = self.calls if self.calls is not None else formats.JSON
        return calls.grammar(tools, parallel=parallel, control=control)


GENERIC = Family("generic", calls=formats.JSON)

# The first whose signs are all there is taken, so what is more special stands before what is less so.
_BUILT_IN = (
    Family("harmony", reasoning.CHANNEL, formats.HARMONY, ("<|channel|>",), ("gpt-oss",)),
    Family("deepseek", reasoning.THINK, formats.DEEPSEEK, ("<｜Assistant｜>",), ("deepseek",)),
    Family(
        "command", reasoning.COMMAND, formats.COMMAND, ("<|START_OF_TURN_TOKEN|>",), ("cohere", "command")
    ),
    Family("granite", reasoning.THINK, formats.GRANITE, ("<|start_of_role|>",), ("granite",)),
    Family("phi", None, formats.PHI, ("<|/tool_call|>",)),
    Family("magistral", reasoning.BRACKETS, formats.MISTRAL_NAMED, ("[THINK]", "[ARGS]")),
    Family("mistral-named", None, formats.MISTRAL_NAMED, ("[TOOL_CALLS]", "[ARGS]")),
    Family("mistral-thinking", reasoning.BRACKETS, formats.MISTRAL, ("[THINK]",)),
    Family("mistral", None, formats.MISTRAL, ("[TOOL_CALLS]",), ("mistral",)),
    Family("llama3-thinking", reasoning.THINK, formats.LLAMA, ("<|start_header_id|>", "<think>")),
    Family("llama3", None, formats.LLAMA, ("<|start_header_id|>",)),
    Family("qwen3", reasoning.THINK, formats.HERMES, ("<tool_call>", "<think>"), ("qwen3", "smollm3")),
    Family("hermes", None, formats.HERMES, ("<tool_call>",), ("qwen2",)),
    Family("gemma", None, formats.GEMMA, ("<start_of_turn>",), ("gemma",)),
    Family("chatml-thinking", reasoning.THINK, formats.CHATML_JSON, ("<|im_start|>", "<think>")),
    Family("chatml", None, formats.CHATML_JSON, ("<|im_start|>",)),
    Family("thinking", reasoning.THINK, formats.JSON, ("<think>",)),
    GENERIC,
)

_lock = threading.Lock()
_registered: dict[str, Family] = {each.name: each for each in _BUILT_IN}


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
    try:
        return _registered[name]
    except KeyError:
        raise InvalidInputError(
            f"there is no family {name!r}; known are {', '.join(names())}: register() adds others"
        ) from None


def names() -> tuple[str, ...]:
    return tuple(sorted(_registered))


def detect(template_source: str, architecture: str = "") -> Family:
    """The family that a template's own markers tell of, else the architecture's, else a generic one."""
    known = tuple(_registered.values())
    for each in known:
        if each.signs and all(sign in template_source for sign in each.signs):
            return each
    if not template_source:
        for each in known:
            if each.architectures and architecture.startswith(each.architectures):
                return each
    return _registered["generic"]
