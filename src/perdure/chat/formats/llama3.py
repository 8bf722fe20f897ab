"""Llama 3: a JSON object, bare or behind a tag.

<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}<|eom_id|>
"""

from __future__ import annotations

from perdure.chat.parsing.call_writer import CallText
from perdure.chat.parsing.family import THINK, Family, JsonCalls

HEADER_MARKS = ("<|eom_id|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>")

_CALLS = JsonCalls(
    CallText(head='{"name": "', middle='", "parameters": ', tail="}", between="; "),
    openers=("<|python_tag|>",),
    leads="{",
)

LLAMA3 = Family("llama3", None, _CALLS, ends=HEADER_MARKS)
LLAMA3_THINKING = Family("llama3-thinking", THINK, _CALLS, ends=HEADER_MARKS)
