"""Kimi K2: a section of calls, each with its id, which holds the name, and its arguments.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>
    {"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>

Kimi K3 writes tags:

    <|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>
    <|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>

(without the line breaks). Solar writes as K2 does, with a mark before each of id, name and arguments:

    <|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>
    {"city": "Paris"}<|tool_call:end|>
"""

from __future__ import annotations

from perdure.ext.families.named import NamedCalls
from perdure.ext.families.tagged import TaggedCalls, TaggedText, tag
from perdure.spi.chat import ID, THINK, CallText, Family, Markers

_TURN_MARKS = ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")

_K2_CALLS = NamedCalls(
    CallText(
        start="<|tool_calls_section_begin|>",
        head="<|tool_call_begin|>functions.",
        middle=":0<|tool_call_argument_begin|>",
        tail="<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
    ),
    # The name is a part of the id.
    header=r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*",
)
KIMI = Family("kimi", None, _K2_CALLS, ends=_TURN_MARKS)
KIMI_THINKING = Family("kimi-thinking", THINK, _K2_CALLS, ends=_TURN_MARKS)

KIMI_K3 = Family(
    "kimi-k3",
    Markers(open="<|open|>think<|sep|>", close="<|close|>think<|sep|>"),
    TaggedCalls(
        TaggedText(
            start="<|open|>tools<|sep|>",
            head='<|open|>call tool="',
            name_end='" index="1"<|sep|>',
            key_head='<|open|>argument key="',
            key_end='" type="number"<|sep|>',
            key_ends=tuple(
                (kind, f'" type="{kind}"<|sep|>') for kind in ("string", "boolean", "object", "array", "null")
            ),
            value_end="<|close|>argument<|sep|>",
            tail="<|close|>call<|sep|>",
            end="<|close|>tools<|sep|>",
        ),
        openers=("<|open|>call ",),
        call=tag("<|open|>call ", "<|sep|>", r"tool=\"(?P<name>[^\"]+)\".*"),
        parameter=tag(
            "<|open|>argument ", "<|sep|>", r"key=\"(?P<key>[^\"]*)\"(?:\s+type=\"(?P<kind>\w+)\")?.*"
        ),
        marks=(
            "<|open|>tools<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
            "<|end_of_msg|>",
        ),
    ),
    answers=("<|open|>response<|sep|>",),
    answer_open="<|open|>response<|sep|>",
)

SOLAR = Family(
    "solar",
    None,
    NamedCalls(
        CallText(
            start="<|tool_calls|>",
            head=f"<|tool_call:begin|>{ID}<|tool_call:name|>",
            middle="<|tool_call:args|>",
            tail="<|tool_call:end|>",
            # The template asks for ten small letters or digits.
            id_pattern="[a-z0-9]{10}",
        )
    ),
    ends=("<|calls|>", "<|end|>", "<|begin|>", "<|content|>"),
)
