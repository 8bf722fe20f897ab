"""LFM2 and LFM2.5: a list of Python calls between marks.

    <|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>

Llama 4 writes the list bare, or between other marks:

    <|python_start|>[get_weather(city="Paris")]<|python_end|>
"""

from __future__ import annotations

from perdure.ext.families.python_calls import PythonCalls, PythonText, ReprText
from perdure.spi.chat import CHATML_MARKS, THINK, Family

_START, _END = "<|tool_call_start|>[", "]<|tool_call_end|>"
_CALLS = PythonCalls(PythonText(start=_START, between=", ", end=_END))

LFM2 = Family("lfm2", None, _CALLS, ends=CHATML_MARKS)
LFM2_5 = Family("lfm2.5", None, _CALLS, ends=CHATML_MARKS)
LFM2_THINKING = Family(
    "lfm2-thinking",
    THINK,
    # It writes values as Python does: single quotes, True, None.
    PythonCalls(ReprText(start=_START, between=", ", end=_END)),
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
    ends=("<|eot|>", "<|eom|>"),
)
