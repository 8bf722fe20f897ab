"""A conversation rendered turn by turn is the conversation rendered whole."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure import Message, Template, TemplateError
from perdure.chat.template.template import Guard, Rendering, TemplateRenderer

FILES = sorted(Path(__file__).parent.glob("*.jinja"))
ALL = {path.stem: Template.from_file(path, bos="<s>", eos="</s>") for path in FILES} | {
    f"our {name}": Template.named(name, bos="<s>", eos="</s>") for name in Template.names()
}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def renderer(template: Template) -> TemplateRenderer:
    return TemplateRenderer(template)


def conversation(system: str | None, said: list[str]) -> tuple[Message, ...]:
    head = [] if system is None else [Message(role="system", content=system)]
    roles = ("user", "assistant")
    return tuple(head + [Message(role=roles[at % 2], content=text) for at, text in enumerate(said)])


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25)
@given(system=st.none() | texts, said=st.lists(texts, min_size=1, max_size=15))
def test_turn_by_turn_is_the_whole(name: str, system: str | None, said: list[str]) -> None:
    under_test = renderer(ALL[name])
    messages = conversation(system, said)
    before: Rendering | None = None
    first = len(messages) - len(said) + 1
    for end in range(first, len(messages) + 1, 2):
        try:
            right = under_test.whole(messages[:end])
        except TemplateError:
            return
        text, before = under_test.prompt(messages[:end], before=before)
        assert text == right


def test_most_templates_treat_a_turn_by_itself() -> None:
    local = {name for name, template in ALL.items() if renderer(template).opening is not None}
    assert {"our chatml", "our llama3", "our gemma"} <= local


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content if loop.last else m.content | trim }}{% endfor %}",
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
        "{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ raise_exception('no') }}",
    ],
)
def test_one_that_does_not_is_seen(source: str) -> None:
    assert renderer(Template(source)).opening is None


def test_only_what_is_new_is_rendered() -> None:
    counted: list[str] = []

    def count(text: str) -> str:
        counted.append(text)
        return text

    under_test = TemplateRenderer(Template.named("chatml"), Guard(count, str))
    assert under_test.opening
    messages = conversation("s", [f"text {number}" for number in range(201)])
    _, before = under_test.prompt(messages[:200])
    counted.clear()
    text, after = under_test.prompt(messages[:202], before=before)
    assert len(counted) < 20
    assert text == under_test.whole(messages[:202])
    assert after is not None


def test_reasoning_and_tools_are_rendered_whole() -> None:
    under_test = renderer(Template.named("chatml"))
    messages = conversation(None, ["a", "b", "c"])
    _, before = under_test.prompt(messages[:1])
    thought = (messages[0], Message(role="assistant", content="b", reasoning="r"), messages[2])
    assert under_test.prompt(thought, before=before)[0] == under_test.whole(thought)
    # The beginning is not that of the rendering.
    other = (Message(role="user", content="x"), *messages[1:])
    assert under_test.prompt(other, before=before)[0] == under_test.whole(other)


def test_a_template_that_the_short_conversation_does_not_suit_gets_the_whole() -> None:
    source = (
        "{% if messages[0].content != 'first' %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    under_test = renderer(Template(source))
    # Its trials would fail for the same reason; as if they had not.
    under_test.__dict__["opening"] = "<assistant>"
    messages = conversation(None, ["first", *(f"text {number}" for number in range(14))])
    before: Rendering | None = None
    for end in range(1, len(messages) + 1, 2):
        text, before = under_test.prompt(messages[:end], before=before)
        assert text == under_test.whole(messages[:end])


SWITCHES = ("a", "b /no_think", "<tool_response>\nc\n</tool_response>", "/think d", "e", "f", "g", "h")


@functools.cache
def renderer_of(path: Path) -> TemplateRenderer:
    return renderer(Template(path.read_text(), bos="<s>", eos="</s>"))


@pytest.mark.parametrize("system", [None, "s", "s /no_think", "/think"])
@pytest.mark.parametrize("path", sorted(Path(__file__).parent.rglob("*.jinja")), ids=lambda path: path.stem)
def test_words_that_templates_take_for_switches_are_rendered_as_in_the_whole(
    path: Path, system: str | None
) -> None:
    """Turn by turn it is the same text, also with `/no_think` or what looks like a tool's result."""
    under_test = renderer_of(path)
    if under_test.opening is None:
        return
    texts = [word for each in SWITCHES for word in (each, f"so {each[0]}")]
    messages = conversation(system, texts[:-1])
    head = len(messages) - len(texts) + 1
    before: Rendering | None = None
    for end in range(head + 1, len(messages) + 1, 2):
        try:
            whole = under_test.whole(messages[:end])
        except TemplateError:
            return
        text, before = under_test.prompt(messages[:end], before=before)
        assert text == whole
