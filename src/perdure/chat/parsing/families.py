"""Families of models: how each marks its reasoning and its tool calls."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perdure.chat.message import Tool
from perdure.chat.parsing import markers
from perdure.chat.parsing.call_format import CallFormat
from perdure.chat.parsing.formats import fenced, harmony, json_objects, named
from perdure.chat.parsing.markers import Markers, MarkerScanner, Meaning
from perdure.decode.grammar import Grammar
from perdure.errors import InvalidInputError


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
        marks = sorted(self.scanner.meanings)
        for mark, following in zip(marks, [*marks[1:], ""], strict=False):
            if not mark or mark[0].isspace():
                raise InvalidInputError(f"a marker of {self.name} is empty or starts with space: {mark!r}")
            if following.startswith(mark):
                raise InvalidInputError(
                    f"of the markers of {self.name}, {mark!r} is the beginning of {following!r}"
                )

    @property
    def scanner(self) -> MarkerScanner:
        return _scanner(self)

    @property
    def marks(self) -> frozenset[str]:
        """All texts that mean something of their own in a reply."""
        return frozenset(self.scanner.meanings)

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends inside reasoning, so that the reply begins there."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.open)

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, control: Mapping[str, int] | None = None
    ) -> Grammar:
        """What holds a reply to a call of `tools` in this family's format, or to several.

        `control` maps those of `marks` that are control tokens of the model to their ids.
        """
        calls = self.calls if self.calls is not None else json_objects.JSON
        return calls.grammar(tools, parallel=parallel, control=control)


@functools.lru_cache(maxsize=64)
def _scanner(family: Family) -> MarkerScanner:
    meanings: dict[str, Meaning] = {}
    if family.calls is not None:
        meanings |= dict.fromkeys(family.calls.marks, "nothing")
        meanings |= dict.fromkeys(family.calls.openers, "call")
    openers = family.calls.openers if family.calls is not None else ()
    if family.reasoning is not None:
        meanings[family.reasoning.close] = "answer"
        # Where calls and reasoning begin alike, the parser behind the opener tells them apart.
        if not family.reasoning.open.startswith(openers or "\0"):
            meanings[family.reasoning.open] = "reasoning"
    return MarkerScanner(meanings)


GENERIC = Family("generic", calls=json_objects.JSON)

# The first whose signs are all there is taken, so what is more special stands before what is less so.
_BUILT_IN = (
    Family("harmony", markers.CHANNEL, harmony.HARMONY, ("<|channel|>",), ("gpt-oss",)),
    Family("deepseek", markers.THINK, named.DEEPSEEK, ("<｜Assistant｜>",), ("deepseek",)),
    Family(
        "command", markers.COMMAND, json_objects.COMMAND, ("<|START_OF_TURN_TOKEN|>",), ("cohere", "command")
    ),
    Family("granite", markers.THINK, json_objects.GRANITE, ("<|start_of_role|>",), ("granite",)),
    Family("phi", None, json_objects.PHI, ("<|/tool_call|>",)),
    Family("magistral", markers.BRACKETS, named.MISTRAL_NAMED, ("[THINK]", "[ARGS]")),
    Family("mistral-named", None, named.MISTRAL_NAMED, ("[TOOL_CALLS]", "[ARGS]")),
    Family("mistral-thinking", markers.BRACKETS, named.MISTRAL, ("[THINK]",)),
    Family("mistral", None, named.MISTRAL, ("[TOOL_CALLS]",), ("mistral",)),
    Family("llama3-thinking", markers.THINK, json_objects.LLAMA, ("<|start_header_id|>", "<think>")),
    Family("llama3", None, json_objects.LLAMA, ("<|start_header_id|>",)),
    Family("qwen3", markers.THINK, json_objects.HERMES, ("<tool_call>", "<think>"), ("qwen3", "smollm3")),
    Family("hermes", None, json_objects.HERMES, ("<tool_call>",), ("qwen2",)),
    Family("gemma", None, fenced.GEMMA, ("<start_of_turn>",), ("gemma",)),
    Family("chatml-thinking", markers.THINK, json_objects.CHATML_JSON, ("<|im_start|>", "<think>")),
    Family("chatml", None, json_objects.CHATML_JSON, ("<|im_start|>",)),
    Family("thinking", markers.THINK, json_objects.JSON, ("<think>",)),
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
