"""Granite 3, and those that write a list of JSON objects behind a mark: Phi-4-mini, Nemotron Nano v2, Apriel.

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]

Apertus writes such a list with the tools' names as keys:

    <|tools_prefix|>[{"get_weather": {"city": "Paris"}}]<|tools_suffix|>

GigaChat writes one object behind a header:

    <|message_sep|>

    function call<|role_sep|>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
"""

from __future__ import annotations

from perdure.ext.families.keyed import KeyedCalls
from perdure.spi.chat import ROLE_MARKS, THINK, CallText, Family, JsonCalls, Markers, json_object


def json_list(opener: str, close: str = "") -> CallText:
    """Writes a list of objects between two marks."""
    return json_object(start=f"{opener}[", between=", ", end=f"]{close}")


GRANITE = Family(
    "granite",
    THINK,
    JsonCalls(json_list("<|tool_call|>")),
    ends=ROLE_MARKS,
)
PHI = Family(
    "phi",
    None,
    JsonCalls(json_list("<|tool_call|>", "<|/tool_call|>")),
    ends=("<|end|>", "<|endoftext|>"),
)
NEMOTRON = Family(
    "nemotron",
    THINK,
    JsonCalls(json_list("<TOOLCALL>", "</TOOLCALL>")),
    ends=("<SPECIAL_12>",),
)

_APRIEL_CALLS = JsonCalls(json_list("<tool_calls>", "</tool_calls>"))
APRIEL = Family("apriel", None, _APRIEL_CALLS)
APRIEL_THINKING = Family(
    "apriel-thinking",
    Markers(open="Here are my reasoning steps:\n", close="[BEGIN FINAL RESPONSE]", opens_in_words=True),
    _APRIEL_CALLS,
    ends=("<|end|>", "[END FINAL RESPONSE]"),
)

APERTUS = Family(
    "apertus",
    None,
    KeyedCalls(
        CallText(
            start="<|tools_prefix|>[",
            head='{"',
            middle='": ',
            tail="}",
            between=", ",
            end="]<|tools_suffix|>",
        )
    ),
    ends=("<|assistant_end|>",),
)

_GIGACHAT_HEADER = "<|message_sep|>\n\nfunction call<|role_sep|>\n"
GIGACHAT = Family(
    "gigachat",
    None,
    JsonCalls(json_object(head=_GIGACHAT_HEADER), openers=(_GIGACHAT_HEADER, "<|function_call|>")),
)
