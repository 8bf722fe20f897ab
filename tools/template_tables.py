"""What is known of chat templates, as tables: `python -m tools.template_tables FILE…`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from perdure.chat.formats.registry import detect
from perdure.chat.message import Message
from perdure.chat.parsing.call_writer import CallForm
from perdure.chat.template.capabilities import capabilities
from perdure.chat.template.template import Template, TemplateRenderer
from perdure.errors import PerdureError
from perdure.ext.families.learned import learn

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


def summary(paths: Sequence[Path]) -> str:
    """How many templates write a forced call back as it was forced, and which do not, in Markdown."""
    forms: list[CallForm] = []
    rest: list[tuple[str, str]] = [("two calls are not exact in", "why"), ("---", "---")]
    for path in paths:
        template = Template.from_file(path, bos="<s>", eos="</s>")
        form = learn(template, detect(template.source))
        forms.append(form)
        if not form.parallel:
            one = form.shown and not capabilities(template, with_tools=True).two_calls
            why = "one call at most" if one else "two are written otherwise than one"
            rest.append((path.stem, why if form.exact else "one is written otherwise than the family does"))
    exact, parallel = [each for each in forms if each.exact], [each for each in forms if each.parallel]
    by_itself = [sum(each.shown for each in some) for some in (exact, parallel)]
    words = (
        f"Of {len(forms)} templates, one call is exact in {len(exact)} ({by_itself[0]} by the template "
        f"itself) and two in {len(parallel)} ({by_itself[1]})."
    )
    return "\n".join([words, "", *(f"| {' | '.join(line)} |" for line in rest)])


def _opens(template: Template) -> bool:
    try:
        prompt = template.render([Message(role="user", content="Hi")], enable_thinking=True)
    except PerdureError:
        return False
    return detect(template.source).opens_reasoning(prompt)


if __name__ == "__main__":
    given = [Path(each) for each in sys.argv[1:]]
    print(table(given), summary(given), sep="\n\n")
