"""Hermes, and the many that write alike (Qwen 2.5, Qwen3, SmolLM3, Granite 4, Reka): a JSON object in a tag.

    <think>I need the weather.</think>
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Also the families of ChatML templates that show no calls: a bare object of a known tool is one there.
"""

from __future__ import annotations

from perdure.chat.parsing.family import CHATML_MARKS, JSON, ROLE_MARKS, THINK, Family, JsonCalls, json_object

HERMES_CALLS = JsonCalls(json_object(head="<tool_call>\n", tail="\n</tool_call>", between="\n"))

HERMES = Family("hermes", None, HERMES_CALLS, ends=CHATML_MARKS)
QWEN3 = Family("qwen3", THINK, HERMES_CALLS, ends=CHATML_MARKS)
GRANITE4 = Family("granite4", None, HERMES_CALLS, ends=ROLE_MARKS)
REKA = Family(
    "reka",
    THINK,
    HERMES_CALLS,
    ends=("<sep>",),
    quotes_calls=True,
)
CHATML = Family("chatml", None, JSON, ends=CHATML_MARKS)
CHATML_THINKING = Family("chatml-thinking", THINK, JSON, ends=CHATML_MARKS)
