"""LFM2 and LFM2.5: a list of Python calls between marks.

    <|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>

Llama 4 writes the list bare, or between marks of its own:

    <|python_start|>[get_weather(city="Paris")]<|python_end|>
"""

from __future__ import annotations

from perdure.chat.parsing.family import CHATML_MARKS, THINK, Family
from perdure.chat.parsing.python_calls import PythonCalls, PythonText, ReprText

_START, _END = "<|tool_call_start|>[", "]<|tool_call_end|>"
_CALLS = PythonCalls(PythonText(start=_START, between=", ", end=_END))

LFM2 = Family("lfm2", None, _CALLS, ("<|tool_list_start|>",), ("lfm2",), ends=CHATML_MARKS)
LFM2_5 = Family("lfm2.5", None, _CALLS, ("<|im_start|>", "List of tools: ["), ends=CHATML_MARKS)
LFM2_THINKING = Family(
    "lfm2-thinking",
    THINK,
    # It writes values as Python does: single quotes, True, None.
    PythonCalls(ReprText(start=_START, between=", ", end=_END)),
    ("<|tool_call_start|>", "<think>"),
    ends=CHATML_MARKS,
    quotes_calls=True,
)
LLAMA4 = Family(
    "llama4",
    None,
    PythonCalls(
        PythonText(start="[", between=", ", end="]"),
        opener="<|python_start|>",
        close="<|python_end|>",
        leads="[",
    ),
    ("<|header_start|>",),
    ("llama4",),
    ends=("<|eot|>", "<|eom|>"),
)
