"""Families of models: how each marks its reasoning and its tool calls."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from perdure.chat.message import Tool
from perdure.chat.parsing import markers
from perdure.chat.parsing.call_format import CallFormat
from perdure.chat.parsing.call_writer import CallWriter
from perdure.chat.parsing.formats import (
    gemma4,
    harmony,
    json_objects,
    minimax_m3,
    named,
    python_calls,
    recipients,
    tagged,
)
from perdure.chat.parsing.markers import Markers, MarkerScanner, Meaning
from perdure.decode.sampling.grammar import Grammar
from perdure.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of models writes. No marker of it is the beginning of another.

    A template is of the family if it holds all of `signs` and none of `unless`; where no template tells, an
    architecture that starts with one of `architectures` does.
    """

    name: str
    reasoning: Markers | None = None
    calls: CallFormat | None = None
    signs: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    _: KW_ONLY
    unless: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    """Marks around turns, which nobody should see."""
    answers: tuple[str, ...] = ()
    """Marks that begin the answer."""
    quotes_calls: bool = False
    """Whether a call within reasoning is only quoted; for other models it ends the reasoning."""
    prompt_opener: str = ""
    """What a prompt may end with that is the beginning of a call, or of a message's header."""
    restart: str = ""
    """What stands between reasoning and the rest, for models that write these as messages of their own."""
    answer_open: str = ""
    """What an answer begins with."""

    def __post_init__(self) -> None:
        marks = sorted(self.scanner.meanings)
        for mark, following in zip(marks, [*marks[1:], ""], strict=False):
            if not mark or mark[0].isspace():
                raise InvalidInputError(f"a marker of {self.name} is empty or starts with space: {mark!r}")
            if following.startswith(mark) and self.scanner.meanings[mark] not in ("nothing", "call mark"):
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
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.open.rstrip())

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, control: Mapping[str, int] | None = None
    ) -> Grammar:
        """What holds a reply to a call of `tools` in this family's format, or to several.

        `control` maps those of `marks` that are control tokens of the model to their ids.
        """
        calls = self.calls if self.calls is not None else json_objects.JSON
        return calls.grammar(tools, parallel=parallel, control=control)

    @property
    def calls_stand_apart(self) -> bool:
        """Whether what opens a call opens nothing else, such as reasoning or a message to the user."""
        openers = self.calls.openers if self.calls is not None else ()
        thinks_apart = self.reasoning is None or not self.reasoning.open.startswith(openers or "\0")
        return thinks_apart and not self.prompt_opener

    @property
    def writer(self) -> CallWriter:
        return (self.calls if self.calls is not None else json_objects.JSON).writer


@functools.lru_cache(maxsize=64)
def _scanner(family: Family) -> MarkerScanner:
    meanings: dict[str, Meaning] = dict.fromkeys(family.ends, "nothing")
    meanings |= dict.fromkeys(family.answers, "answer")
    if family.calls is not None:
        meanings |= dict.fromkeys(family.calls.marks, "call mark")
        meanings |= dict.fromkeys(family.calls.openers, "call")
    openers = family.calls.openers if family.calls is not None else ()
    if family.reasoning is not None:
        meanings[family.reasoning.close] = "answer"
        # Where calls and reasoning begin alike, the parser behind the opener tells them apart.
        if not family.reasoning.open.startswith(openers or "\0"):
            meanings[family.reasoning.open] = "reasoning"
    return MarkerScanner(meanings)


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_LLAMA3 = ("<|eom_id|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>")
_DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")
_MISTRAL = ("[INST]", "[/INST]", "</s>")
_COMMAND = (
    *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"),
)
_GLM = ("<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
_KIMI = ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")

GENERIC = Family("generic", calls=json_objects.JSON)

# The first whose signs are all there is taken, so what is more special stands before what is less so.
_BUILT_IN = (
    Family(
        "muse",
        markers.TO_SELF,
        recipients.MUSE,
        ("<atem:function_calls>",),
        ends=("<|eot|>", "<|eom|>"),
        prompt_opener="<|start|>assistant",
        restart="<|start|>assistant",
        answer_open=" to=user<|message|>",
    ),
    Family(
        "harmony",
        markers.CHANNEL,
        harmony.HARMONY,
        ("<|channel|>",),
        ("gpt-oss",),
        ends=("<|end|>", "<|return|>", "<|call|>"),
        restart="<|start|>assistant",
        answer_open="<|channel|>final<|message|>",
    ),
    Family(
        "gemma4",
        markers.THOUGHT,
        gemma4.GEMMA4,
        ("<|tool_call>", "<|turn>"),
        ("gemma4",),
        ends=("<|turn>", "<turn|>", "<channel|>", "<|tool_response>"),
    ),
    Family("deepseek-dsml", markers.THINK, tagged.DSML, ("｜DSML｜",), ends=_DEEPSEEK),
    Family("deepseek", markers.THINK, named.DEEPSEEK, ("<｜Assistant｜>",), ("deepseek",), ends=_DEEPSEEK),
    Family(
        "command-r-plus",
        None,
        json_objects.COMMAND_R_PLUS,
        ("<|CHATBOT_TOKEN|>", "Action:"),
        unless=("<|START_ACTION|>",),
        ends=_COMMAND,
    ),
    Family(
        "command",
        markers.COMMAND,
        json_objects.COMMAND,
        ("<|START_OF_TURN_TOKEN|>",),
        ("cohere", "command"),
        ends=_COMMAND,
    ),
    Family("granite4", None, json_objects.HERMES, ("<|start_of_role|>", "<tool_call>"), ends=_GRANITE),
    Family(
        "granite",
        markers.THINK,
        json_objects.GRANITE,
        ("<|start_of_role|>",),
        ("granite",),
        ends=_GRANITE,
    ),
    Family("phi", None, json_objects.PHI, ("<|/tool_call|>",), ends=("<|end|>", "<|endoftext|>")),
    Family(
        "magistral",
        markers.BRACKETS,
        named.MISTRAL_NAMED,
        ("[THINK]", "[ARGS]"),
        ends=_MISTRAL,
        quotes_calls=True,
    ),
    Family("mistral-named", None, named.MISTRAL_NAMED, ("[TOOL_CALLS]", "[ARGS]"), ends=_MISTRAL),
    Family("mistral-thinking", markers.BRACKETS, named.MISTRAL, ("[THINK]",), ends=_MISTRAL),
    Family("mistral", None, named.MISTRAL, ("[TOOL_CALLS]",), ("mistral",), ends=_MISTRAL),
    Family(
        "kimi-k3",
        markers.KIMI_K3,
        tagged.KIMI_K3,
        ("<|open|>", "<|close|>"),
        answers=("<|open|>response<|sep|>",),
        answer_open="<|open|>response<|sep|>",
    ),
    Family(
        "kimi-thinking", markers.THINK, named.KIMI, ("<|tool_calls_section_begin|>", "<think>"), ends=_KIMI
    ),
    Family(
        "solar",
        None,
        named.SOLAR,
        ("<|tool_call:begin|>",),
        ends=("<|calls|>", "<|end|>", "<|begin|>", "<|content|>"),
    ),
    Family("hunyuan", markers.HUNYUAN, tagged.HUNYUAN, ("HYTK",), ends=("<｜hy_eos:opensource｜>",)),
    Family(
        "minimax-m1",
        None,
        json_objects.MINIMAX_M1,
        ("<tool_calls>", "<beginning_of_sentence>"),
        ends=("<end_of_sentence>", "<beginning_of_sentence>"),
    ),
    Family("kimi", None, named.KIMI, ("<|tool_calls_section_begin|>",), ("kimi",), ends=_KIMI),
    Family(
        "functionary",
        None,
        recipients.FUNCTIONARY,
        ("<|start_header_id|>", ">>>"),
        ends=_LLAMA3,
        prompt_opener=">>>",
        answer_open="all\n",
    ),
    Family(
        "functionary-tagged",
        None,
        named.FUNCTIONARY_TAGGED,
        ("<|start_header_id|>", "<function="),
        ends=_LLAMA3,
    ),
    Family(
        "firefunction", None, json_objects.FIREFUNCTION, ("<|start_header_id|>", "functools"), ends=_LLAMA3
    ),
    Family("nemotron", markers.THINK, json_objects.NEMOTRON_V2, ("<TOOLCALL>",), ends=("<SPECIAL_12>",)),
    Family(
        "llama3-thinking", markers.THINK, json_objects.LLAMA, ("<|start_header_id|>", "<think>"), ends=_LLAMA3
    ),
    Family(
        "llama3", None, json_objects.LLAMA, ("<|start_header_id|>",), unless=("<tool_call>",), ends=_LLAMA3
    ),
    Family(
        "llama4", None, python_calls.LLAMA4, ("<|header_start|>",), ("llama4",), ends=("<|eot|>", "<|eom|>")
    ),
    Family(
        "lfm2-thinking",
        markers.THINK,
        python_calls.LFM2_REPR,
        ("<|tool_call_start|>", "<think>"),
        ends=_CHATML,
        quotes_calls=True,
    ),
    Family("lfm2", None, python_calls.LFM2, ("<|tool_list_start|>",), ("lfm2",), ends=_CHATML),
    Family("lfm2.5", None, python_calls.LFM2, ("<|im_start|>", "List of tools: ["), ends=_CHATML),
    Family(
        "apriel-thinking",
        markers.FINAL_RESPONSE,
        json_objects.APRIEL,
        ("Here are my reasoning steps:", "<|begin_assistant|>"),
        ends=("<|end|>", "[END FINAL RESPONSE]"),
    ),
    Family("apriel", None, json_objects.APRIEL, ("<tool_calls>", "<|assistant|>"), unless=("<arg_key>",)),
    Family("apertus", None, json_objects.APERTUS, ("<|tools_prefix|>",), ends=("<|assistant_end|>",)),
    Family("gigachat", None, json_objects.GIGACHAT, ("<|role_sep|>",)),
    Family("seed", markers.SEED, tagged.SEED, ("<seed:tool_call>",), ends=("<seed:eos>", "<seed:bos>")),
    Family("minimax-m3", markers.MINIMAX, minimax_m3.MINIMAX_M3, ("]<]minimax[>[",), ends=("[e~[",)),
    Family("minimax", markers.THINK, tagged.MINIMAX, ("<minimax:tool_call>",), ("minimax",), ends=("[e~[",)),
    Family("minicpm", markers.THINK, tagged.MINICPM, ('<param name="',), ends=_CHATML),
    Family("ling", markers.THINK, tagged.GLM, ("<arg_key>", "<|role_end|>"), ends=("<|role_end|>",)),
    Family("glm", markers.THINK, tagged.GLM, ("<arg_key>",), ("glm4",), ends=_GLM),
    Family("qwen3-coder", markers.THINK, tagged.QWEN_CODER, ("<function=", "<parameter="), ends=_CHATML),
    Family(
        "reka",
        markers.THINK,
        json_objects.HERMES,
        ("<tool_call>", "<think>", "<sep>"),
        ends=("<sep>",),
        quotes_calls=True,
    ),
    Family(
        "qwen3",
        markers.THINK,
        json_objects.HERMES,
        ("<tool_call>", "<think>"),
        ("qwen3", "smollm3"),
        ends=_CHATML,
    ),
    Family("hermes", None, json_objects.HERMES, ("<tool_call>",), ("qwen2",), ends=_CHATML),
    Family(
        "gemma",
        None,
        python_calls.GEMMA,
        ("<start_of_turn>",),
        ("gemma",),
        ends=("<start_of_turn>", "<end_of_turn>"),
    ),
    Family("chatml-thinking", markers.THINK, json_objects.JSON, ("<|im_start|>", "<think>"), ends=_CHATML),
    Family("chatml", None, json_objects.JSON, ("<|im_start|>",), ends=_CHATML),
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
        if (
            each.signs
            and all(sign in template_source for sign in each.signs)
            and not any(sign in template_source for sign in each.unless)
        ):
            return each
    if not template_source:
        for each in known:
            if each.architectures and architecture.startswith(each.architectures):
                return each
    return _registered["generic"]
