"""Qwen3-Coder, Qwen3.5, Nemotron 3 and StepFun: a line for each tag and each value.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Seed-OSS writes `<seed:tool_call>` and its values on the lines of their tags. MiniCPM writes

    <function name="get_weather"><param name="city">Paris</param></function>
"""

from __future__ import annotations

from perdure.chat.parsing.call_writer import TaggedText
from perdure.chat.parsing.family import CHATML_MARKS, THINK, Family, Markers
from perdure.chat.parsing.tagged import TaggedCalls

QWEN3_CODER = Family(
    "qwen3-coder",
    THINK,
    TaggedCalls(
        TaggedText(
            head="<tool_call>\n<function=",
            name_end=">\n",
            key_head="<parameter=",
            key_end=">\n",
            value_end="\n</parameter>\n",
            tail="</function>\n</tool_call>",
            between="\n",
        ),
        or_json=True,
        or_bare=True,
    ),
    ("<function=", "<parameter="),
    ends=CHATML_MARKS,
)

SEED = Family(
    "seed",
    Markers(open="<seed:think>", close="</seed:think>"),
    TaggedCalls(
        TaggedText(
            head="<seed:tool_call>\n<function=",
            name_end=">\n",
            key_head="<parameter=",
            key_end=">",
            value_end="</parameter>\n",
            tail="</function>\n</seed:tool_call>",
            between="\n",
        )
    ),
    ("<seed:tool_call>",),
    ends=("<seed:eos>", "<seed:bos>"),
)

MINICPM = Family(
    "minicpm",
    THINK,
    TaggedCalls(
        TaggedText(
            head='<function name="',
            name_end='">',
            key_head='<param name="',
            key_end='">',
            value_end="</param>",
            tail="</function>",
            between="\n",
        ),
        cdata=True,
    ),
    ('<param name="',),
    ends=CHATML_MARKS,
)
