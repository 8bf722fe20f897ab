"""Mistral: a list of JSON objects behind a mark; newer models write a name, a mark and the arguments.

[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1b2c3d4e"}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
[THINK]I need the weather.[/THINK][TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}
"""

from __future__ import annotations

from perdure.ext.families.named import NamedCalls
from perdure.spi.chat import ID, CallText, Family, Markers, json_object

_TURN_MARKS = ("[INST]", "[/INST]", "</s>")
_THINK = Markers(open="[THINK]", close="[/THINK]")

_NAMED = CallText(head="[TOOL_CALLS]", middle="[ARGS]")
_VARIANTS = (
    CallText(head="[TOOL_CALLS]", middle=f"[CALL_ID]{ID}[ARGS]"),
    CallText(head="[TOOL_CALLS]", middle=f"[CALL_ID]{ID}"),
    CallText(head="[TOOL_CALLS]", middle=""),
)
_LIST_CALLS = NamedCalls(json_object(start="[TOOL_CALLS][", between=", ", end="]"), also=(_NAMED, *_VARIANTS))
_NAMED_CALLS = NamedCalls(_NAMED, also=_VARIANTS, marks=("[CALL_ID]",))

MISTRAL = Family("mistral", None, _LIST_CALLS, ends=_TURN_MARKS)
MISTRAL_THINKING = Family("mistral-thinking", _THINK, _LIST_CALLS, ends=_TURN_MARKS)
MISTRAL_NAMED = Family("mistral-named", None, _NAMED_CALLS, ends=_TURN_MARKS)
MAGISTRAL = Family("magistral", _THINK, _NAMED_CALLS, ends=_TURN_MARKS, quotes_calls=True)
