"""Command R7B and Command A: a list of JSON objects with ids, between marks.

    <|START_THINKING|>I need the weather.<|END_THINKING|><|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}
    ]<|END_ACTION|>

Command R+ writes it in a fence behind the word `Action:`.
"""

from __future__ import annotations

from perdure.spi.chat import CallText, Family, JsonCalls, Markers

_TURN_MARKS = (
    *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"),
)

COMMAND = Family(
    "command",
    Markers(open="<|START_THINKING|>", close="<|END_THINKING|>"),
    JsonCalls(
        CallText(
            start="<|START_ACTION|>[\n    ",
            head='{"tool_call_id": "0", "tool_name": "',
            middle='", "parameters": ',
            tail="}",
            between=",\n    ",
            end="\n]<|END_ACTION|>",
        )
    ),
    ends=_TURN_MARKS,
)

COMMAND_R_PLUS = Family(
    "command-r-plus",
    None,
    JsonCalls(
        CallText(
            start="Action:\n```json\n[\n    ",
            head='{\n        "tool_name": "',
            middle='",\n        "parameters": ',
            tail="\n    }",
            between=",\n    ",
            end="\n]```",
        ),
        openers=("Action:\n```json\n", "Action: ```json\n"),
        opener_is_text=True,
    ),
    ends=_TURN_MARKS,
)
