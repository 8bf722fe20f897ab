"""Grammars for replies that may think first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from perdure.chat.parsing.family import Family
from perdure.chat.parsing.rules import Rules
from perdure.decode.sampling.grammar import Grammar

Thought = Literal["opened", "closed", "none"]
"""Whether the prompt has begun the reasoning, whether it was just ended, or neither."""


def reasoned(
    answer: Grammar, family: Family, thought: Thought, *, is_call: bool, control: Mapping[str, int]
) -> Grammar:
    """What holds a reply to `answer` once its reasoning is over. The same grammar where there is none."""
    rules, markers = Rules(control), family.reasoning
    before: list[str] = []
    if markers is not None and thought == "opened":
        before.append(rules.text(markers.close))
        before.append(rules.literal(family.restart) or _LINES)
    elif markers is not None and thought == "closed":
        before.append(rules.literal(family.restart) or _LINES)
    elif markers is not None and family.restart:
        opener = markers.open.removeprefix(family.prompt_opener)
        thought_rule = f"{rules.literal(opener)} {rules.text(markers.close)} {rules.literal(family.restart)}"
        before.append(f"({thought_rule})?")
    if not is_call and family.answer_open:
        before.append(rules.literal(family.answer_open))
    if not before:
        return answer
    return rules.grammar(f"{' '.join(before)} {rules.rule(_rule(answer))}")


_LINES = r'("\n\n" | "\n")?'


def _rule(grammar: Grammar) -> str:
    """A grammar as the body of a rule of another."""
    if grammar.kind == "json_schema":
        return f"%json {grammar.text}"
    if grammar.kind == "regex":
        return "/" + grammar.text.replace("\\/", "/").replace("/", "\\/") + "/"
    if grammar.kind == "gbnf":
        from llguidance.gbnf_to_lark import any_to_lark

        return f"%lark {{\n{any_to_lark(grammar.text)}\n}}"
    return f"%lark {{\n{grammar.text}\n}}"
