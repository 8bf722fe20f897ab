"""DeepSeek V3 and R1: a name and its arguments between marks, in a fence; V3.1 writes them without.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.2 and V4 write tags (DSML), which say whether a value is a string:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>
"""

from __future__ import annotations

from perdure.ext.families.named import NamedCalls
from perdure.ext.families.tagged import TaggedCalls, TaggedText, tag
from perdure.spi.chat import THINK, CallText, Family

_TURN_MARKS = ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")

DEEPSEEK = Family(
    "deepseek",
    THINK,
    NamedCalls(
        CallText(
            start="<｜tool▁calls▁begin｜>",
            head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            middle="\n```json\n",
            tail="\n```<｜tool▁call▁end｜>",
            between="\n",
            end="<｜tool▁calls▁end｜>",
        ),
        # Each of these texts may be missing.
        header=r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[\w.-]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*",
    ),
    ends=_TURN_MARKS,
)

DEEPSEEK_DSML = Family(
    "deepseek-dsml",
    THINK,
    TaggedCalls(
        TaggedText(
            start="<｜DSML｜function_calls>\n",
            head='<｜DSML｜invoke name="',
            name_end='">\n',
            key_head='<｜DSML｜parameter name="',
            key_end='" string="false">',
            key_ends=(("string", '" string="true">'),),
            value_end="</｜DSML｜parameter>\n",
            tail="</｜DSML｜invoke>\n",
            end="</｜DSML｜function_calls>",
        ),
        also_sections=("｜DSML｜tool_calls",),
        parameter=tag(
            '<｜DSML｜parameter name="', ">", r"(?P<key>[^\"\n]+)\"(?:\s+string=\"(?P<kind>true|false)\")?"
        ),
    ),
    ends=_TURN_MARKS,
)
