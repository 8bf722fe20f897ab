"""The formats of tool calls that models were trained on."""

from __future__ import annotations

import re

from perdure.chat.calls import ChannelCalls, FencedCalls, JsonCalls, NamedCalls, Shape

_CHATML_MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

HERMES = JsonCalls(
    openers=("<tool_call>",),
    marks=("</tool_call>", *_CHATML_MARKS),
    shape=Shape(
        head='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        tail="}\n</tool_call>",
        between="\n",
    ),
)
"""Hermes, Qwen, SmolLM3 and many others: an object between tags."""

LLAMA = JsonCalls(
    openers=("<|python_tag|>",),
    leads="{",
    marks=("<|eom_id|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"),
    shape=Shape(head='{"name": "', middle='", "parameters": ', tail="}", between="; "),
)
"""Llama 3: an object, bare or behind a tag."""

MISTRAL = NamedCalls(
    openers=("[TOOL_CALLS]",),
    marks=("[INST]", "[/INST]", "</s>"),
    header=re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*"),
    shape=Shape(
        start="[TOOL_CALLS][", head='{"name": "', middle='", "arguments": ', tail="}", between=", ", end="]"
    ),
)
"""Mistral: a list of objects; newer models write a name and its arguments."""

MISTRAL_NAMED = NamedCalls(
    openers=MISTRAL.openers,
    marks=(*MISTRAL.marks, "[ARGS]", "[CALL_ID]"),
    header=MISTRAL.header,
    shape=Shape(head="[TOOL_CALLS]", middle="[ARGS]"),
)

DEEPSEEK = NamedCalls(
    openers=("<｜tool▁call▁begin｜>",),
    marks=(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<｜end▁of▁sentence｜>",
    ),
    header=re.compile(
        r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[\w.-]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*"
    ),
    after="\n```",
    shape=Shape(
        start="<｜tool▁calls▁begin｜>",
        head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        tail="\n```<｜tool▁call▁end｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
    ),
)
"""DeepSeek: a name and its arguments between marks, in a fence (R1, V3) or without (V3.1)."""

GRANITE = JsonCalls(
    openers=("<|tool_call|>",),
    marks=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    shape=Shape(
        start="<|tool_call|>[", head='{"name": "', middle='", "arguments": ', tail="}", between=", ", end="]"
    ),
)

PHI = JsonCalls(
    openers=("<|tool_call|>",),
    marks=("<|/tool_call|>", "<|end|>", "<|endoftext|>"),
    shape=Shape(
        start="<|tool_call|>[",
        head='{"name": "',
        middle='", "arguments": ',
        tail="}",
        between=", ",
        end="]<|/tool_call|>",
    ),
)

COMMAND = JsonCalls(
    openers=("<|START_ACTION|>",),
    marks=(
        "<|END_ACTION|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|START_TEXT|>",
        "<|END_TEXT|>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    shape=Shape(
        start="<|START_ACTION|>[\n    ",
        head='{"tool_call_id": "0", "tool_name": "',
        middle='", "parameters": ',
        tail="}",
        between=",\n    ",
        end="\n]<|END_ACTION|>",
    ),
)

HARMONY = ChannelCalls(
    shape=Shape(
        head="<|channel|>commentary to=functions.",
        middle=" <|constrain|>json<|message|>",
        between="<|call|><|start|>assistant",
    )
)
"""gpt-oss. A call ends the turn, so its end is not part of what is asked for."""

GEMMA = FencedCalls(
    marks=("<start_of_turn>", "<end_of_turn>"),
    shape=Shape(head='{"name": "', middle='", "parameters": ', tail="}", between="\n"),
)
"""Gemma has no format of its own; these two are what its makers suggest."""

JSON = JsonCalls(
    leads="{[",
    shape=Shape(head='{"name": "', middle='", "arguments": ', tail="}", between="\n"),
)
"""For models of no known format: a bare object of a known tool."""

CHATML_JSON = JsonCalls(leads="{[", marks=_CHATML_MARKS, shape=JSON.shape)
