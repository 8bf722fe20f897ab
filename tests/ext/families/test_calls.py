"""Calls in syntaxes of their own that are cut short, or are none."""

from __future__ import annotations

import pytest

from chat.parsing.test_call_formats import TOOL
from perdure.chat.formats.registry import family
from perdure.chat.parsing.reply_parser import ReplyParser, gather

M3 = "]<]minimax[>["


@pytest.mark.parametrize(
    ("name", "reply", "content", "calls"),
    [
        ("lfm2", "<|tool_call_start|>[do_it(text='a'), oops]<|tool_call_end|>", ", oops]", ['{"text": "a"}']),
        ("lfm2", "<|tool_call_start|>[do_it(text='a') oops]", "[do_it(text='a') oops]", []),
        ("lfm2", "<|tool_call_start|>[do_it(text='a'", "[do_it(text='a'", []),
        ("lfm2", "<|tool_call_start|>[do_it(text='a')]", "", ['{"text": "a"}']),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", "[]", []),
        ("lfm2", "<|tool_call_start|>do_it(text='a', text='b')", "do_it(text='a', text='b')", []),
        ("lfm2", "<|tool_call_start|>do_it(text='a', 2)", "do_it(text='a', 2)", []),
        (
            "lfm2",
            "<|tool_call_start|>do_it(text='a<|tool_call_end|>')",
            "",
            ['{"text": "a<|tool_call_end|>"}'],
        ),
        ("lfm2", "<|tool_call_start|>do_it(text=<|tool_call_end|> b", "do_it(text= b", []),
        ("lfm2", "<|tool_call_start|>do_it('a', 2,)", "", ['{"text": "a", "count": 2}']),
        ("lfm2", '<|tool_call_start|>do_it("""a\n"b\'""")', "", ['{"text": "a\\n\\"b\'"}']),
        ("lfm2", "<|tool_call_start|>do_it('', \"\")", "", ['{"text": "", "count": ""}']),
        (
            "gemma",
            "```tool_code\n# It's one, (two\ndo_it('a', # b)\n  count=2)\nprint(do_it('c'))\n```",
            "",
            ['{"text": "a", "count": 2}', '{"text": "c"}'],
        ),
        ("gemma", "```tool_code\nprint(do_it('c'), 1)\n```", "```tool_code\nprint(do_it('c'), 1)\n```", []),
        ("llama4", "[do_it(text='a'), do_it(text='b')] c", "c", ['{"text": "a"}', '{"text": "b"}']),
        ("llama4", "[do_it(text='a'), other(text='b')]", ", other(text='b')]", ['{"text": "a"}']),
        ("llama4", '[{"name": "other", "arguments": {}}]', '[{"name": "other", "arguments": {}}]', []),
        ("llama4", "[do_it is what I would call]", "[do_it is what I would call]", []),
        ("gemma4", "<|tool_call>call:do_it{count:1,}<tool_call|>", "call:do_it{count:1,}", []),
        ("gemma4", "<|tool_call>call:do_it{count:1} no", "call:do_it{count:1} no", []),
        ("gemma4", "<|tool_call>call:do_it{count:1", "call:do_it{count:1", []),
        (
            "minimax-m3",
            f'{M3}<tool_call>{M3}<invoke name="do_it">a{M3}</invoke>',
            '<invoke name="do_it">a</invoke>',
            [],
        ),
    ],
)
def test_what_only_begins_as_a_call_is_text_again(
    name: str, reply: str, content: str, calls: list[str]
) -> None:
    """Whatever was given out of it before is taken back, wherever it is cut."""
    for pieces in ([reply], list(reply), *([reply[:at], reply[at:]] for at in range(1, len(reply)))):
        parser = ReplyParser(family(name), tools=[TOOL])
        made = gather([part for piece in pieces for part in parser.push(piece)] + parser.finish())
        assert (made.content or "", [call.arguments for call in made.tool_calls]) == (content, calls)
