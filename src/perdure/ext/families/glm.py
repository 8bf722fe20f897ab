"""GLM 4.5 and later, Ling, Spark: a name, then pairs of keys and values.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

Hunyuan 3 writes `:opensource` in each tag, and a mark behind the name:

    <tool_call:opensource>get_weather<tool_sep:opensource>
"""

from __future__ import annotations

from perdure.ext.families.tagged import TaggedCalls, TaggedText
from perdure.spi.chat import THINK, Family, Markers

_CALLS = TaggedCalls(
    TaggedText(
        head="<tool_call>",
        name_end="\n",
        key_head="<arg_key>",
        key_end="</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
        tail="</tool_call>",
        between="\n",
    ),
    or_json=True,
)

GLM = Family(
    "glm",
    THINK,
    _CALLS,
    ends=("<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
)
LING = Family("ling", THINK, _CALLS, ends=("<|role_end|>",))

HUNYUAN = Family(
    "hunyuan",
    Markers(open="<think:opensource>", close="</think:opensource>"),
    TaggedCalls(
        TaggedText(
            start="<tool_calls:opensource>\n",
            head="<tool_call:opensource>",
            name_end="<tool_sep:opensource>\n",
            key_head="<arg_key:opensource>",
            key_end="</arg_key:opensource>\n<arg_value:opensource>",
            value_end="</arg_value:opensource>\n",
            tail="</tool_call:opensource>\n",
            end="</tool_calls:opensource>",
        )
    ),
    ends=("<｜hy_eos:opensource｜>",),
)
