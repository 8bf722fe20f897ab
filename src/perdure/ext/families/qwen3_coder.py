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

from perdure.ext.families.tagged import TaggedCalls, TaggedText
from perdure.spi.chat import CHATML_MARKS, THINK, Family, Markers

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
    ends=CHATML_MARKS,
)
