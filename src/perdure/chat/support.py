"""What is known of chat templates, as a table: `python -m perdure.chat.support FILE…`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from perdure.chat.message import Message
from perdure.chat.parsing.families import detect
from perdure.chat.parsing.learned import learn
from perdure.chat.templates.renderer import TemplateRenderer
from perdure.chat.templates.template import Template
from perdure.errors import PerdureError

_HEAD = ("template", "family", "reasoning", "calls", "parallel", "forced", "reuse")


def row(name: str, template: Template) -> tuple[str, ...]:
    """The family, and how reasoning, calls and their forced form are treated."""
    family = detect(template.source)
    form = learn(template, family)
    reasoning = "no"
    if family.reasoning is not None:
        reasoning = "opened by the prompt" if _opens(template) else "yes"
    calls = type(family.calls).__name__ if family.calls is not None else "JsonCalls"
    forced = "as the family does"
    if form.exact:
        forced = "as the template writes it" if form.shown else "as it is written into the text"
    reuse = "turn by turn" if TemplateRenderer(template).opening is not None else "whole"
    shown = calls if form.shown else f"{calls}, written into the text"
    return name, family.name, reasoning, shown, "yes" if form.parallel else "no", forced, reuse


def table(paths: Sequence[Path]) -> str:
    """The rows of template files, in Markdown."""
    lines = [_HEAD, ("---",) * len(_HEAD)]
    lines += [row(path.stem, Template.from_file(path, bos="<s>", eos="</s>")) for path in paths]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _opens(template: Template) -> bool:
    try:
        prompt = template.render([Message(role="user", content="Hi")], enable_thinking=True)
    except PerdureError:
        return False
    return detect(template.source).opens_reasoning(prompt)


if __name__ == "__main__":
    print(table([Path(each) for each in sys.argv[1:]]))
