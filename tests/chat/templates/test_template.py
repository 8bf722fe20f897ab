"""Templates: the same text as transformers gives, and errors that say what is wrong."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from chat.conversations import CONVERSATIONS, TOOLS, user
from perdure import InvalidInputError, TemplateError
from perdure.chat.message import Message, Tool, parse_messages
from perdure.chat.template import template as module
from perdure.chat.template.template import Template

FOLDER = Path(__file__).parent
PUBLISHED = {path.stem: path.read_text("utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
OURS = {f"our {name}": Template.named(name).source for name in Template.names()}
BOS, EOS = "<s>", "</s>"

VARIABLES: dict[str, dict[str, Any]] = {
    "llama-3.1": {"builtin_tools": ["search", "code_interpreter"], "tools_in_user_message": False},
    "llama-3.2": {"date_string": "1 Jan 2025"},
    "qwen-3": {"enable_thinking": False},
    "smollm3": {"enable_thinking": False},
    "gpt-oss": {"reasoning_effort": "high"},
    "granite-3.3": {"documents": [{"doc_id": 1, "text": "A text."}], "controls": {"length": "short"}},
    "command-r7b": {"documents": [{"title": "A", "text": "A text."}, {"title": "B", "text": "é"}]},
}

SCRAPS = {
    "blocks": "{% block a %}{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}{% endblock %}",
    "scoped": "{% for m in messages %}{% block b scoped %}{{ m.role }}{% endblock %}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}"
    "{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "continue": "{% for m in messages %}{% if m.role == 'system' %}"
    "{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "for else": "{% for m in [] %}a{% else %}b{% endfor %}",
    "for if": "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }} {% endfor %}",
    "around": "{% for m in messages %}{{ loop.previtem.role }}"
    "{{ loop.nextitem.role }}{{ loop.revindex }}{% endfor %}",
    "changed": "{% for m in messages %}{{ loop.changed(m.role) }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "recursive": "{% for m in [[1, [2]], [3]] recursive %}{{ loop.depth }}"
    "{{ m if m is number else loop(m) }}{% endfor %}",
    "macro": "{% macro f(a, b='x') %}{{ a ~ b ~ varargs ~ kwargs }}"
    "{% endmacro %}{{ f(1) }}{{ f(1, 2, 3, c=4) }}",
    "call block": "{% macro f() %}<{{ caller(1) }}>{% endmacro %}{% call(x) f() %}in {{ x }}{% endcall %}",
    "set block": "{% set x %}a{{ messages | length }}b{% endset %}{{ x | upper }}",
    "filter block": "{% filter upper %}a{{ messages[0].role }}{% endfilter %}",
    "with": "{% with a = 1, b = a %}{{ a }}{{ b }}{% endwith %}",
    "slices": "{{ messages[::-1] | map(attribute='role') | join(',') }}"
    "{{ 'abc'[1:] }}{{ 'abc'[:-1] }}{{ [1, 2][:1] }}",
    "sums": "{{ 1 + 2 * 3 ** 2 % 4 // 1 - 1 / 2 }}{{ [1] + [2] }}"
    "{{ 'ab' * 3 }}{{ [0] * 2 }}{{ (1,) + (2,) }}",
    "formats": "{{ '%s-%03d' % ('a', 7) }}{{ '{:>5}|{a}'.format('x', a=1) }}{{ '%s' | format('b') }}",
    "format map": "{{ '{a}'.format_map({'a': 1}) }}",
    "strings": "{{ 'a b'.split() }}{{ 'a,b'.split(',') }}"
    "{{ 'ab'.replace('a', 'cc') }}{{ '-'.join(['a', 'b']) }}",
    "padding": "{{ 'a'.center(5) }}{{ 'a'.ljust(3, '.') }}{{ '7'.zfill(3) }}"
    "{{ 'a' | center(7) }}{{ 'a\tb'.expandtabs(4) }}",
    "json": "{{ {'b': 1, 'a': 'é<'} | tojson }}{{ {'b': [1]} | tojson(indent=2, sort_keys=true) }}",
    "json separators": "{{ {'b': 1, 'a': [1, 2]} | tojson(separators=(',', ':'), ensure_ascii=true) }}",
    "dicts": "{{ dict(a=1) }}{{ {'a': 1}.items() | list }}"
    "{{ {'a': 1} | dictsort }}{{ {'a': none}.get('b', 'c') }}",
    "filters": "{{ [3, 1, 2] | sort | join }}{{ [1, 2, 3] | sum }}"
    "{{ 'a b' | title }}{{ [1, 1] | unique | list }}",
    "more filters": "{{ [1, 2, 3] | batch(2, 0) | list }}"
    "{{ [1, 2, 3] | slice(2) | list }}{{ 2.345 | round(1) }}",
    "flat": "{{ [[1], [2, 3]] | sum(start=[]) }}{{ [1, 2] == [1, 2] }}{{ 1 in [1] }}{{ 3 is in [1] }}",
    "groups": "{% for role, each in messages | groupby('role') %}{{ role }}{{ each | length }}{% endfor %}",
    "select": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}",
    "indent": "{{ 'a\nb' | indent(2) }}{{ 'a\nb' | indent('> ', true) }}{{ 'aaa bbb' | wordwrap(3) }}",
    "tests": "{{ 1 is odd }}{{ none is none }}{{ 'a' is string }}"
    "{{ x is defined }}{{ [] is iterable }}{{ {} is mapping }}",
    "undefined": "{{ x }}{{ messages[0].nothing }}{{ x | default('y') }}{{ x.y is defined }}",
    "escapes": "{{ '<' | escape }}{{ '<' | e + '<' }}{{ '<b>' | safe }}",
    "namespace": "{% set ns = namespace(a=1) %}{% for m in messages %}"
    "{% set ns.a = ns.a + 1 %}{% endfor %}{{ ns.a }}",
    "cycler": "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}"
    "{{ c.current }}{% set j = joiner() %}{{ j() }}{{ j() }}",
    "ranges": "{{ range(3) | list }}{% for i in range(0, 10, 5) %}{{ i }}{% endfor %}",
    "generation": "{% generation %}{% set x = 1 %}a{{ messages | length }}{% endgeneration %}{{ x }}",
    "white space": "  {%- if true %}\n  a\n  {%- endif %}\n   {% if true %}  \nb{% endif %}\n\n{# c #}\n d",
    "last line": "a\n",
    "condition": "{{ 'a' if false }}{{ 'a' if messages else 'b' }}",
    "raw": "{% raw %}{{ x }}{% endraw %}",
}


def theirs(source: str, messages: tuple[Message, ...], tools: tuple[Tool, ...], **variables: Any) -> str:
    """What transformers makes of it, out of plain dicts that it is given."""
    chat = []
    for message in messages:
        given = message.to_dict()
        given["content"] = given["content"] or ""
        for call in given.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        chat.append(given)
    rendered, _ = render_jinja_template(
        [chat],
        tools=[tool.to_dict() for tool in tools] or None,
        chat_template=source,
        bos_token=BOS,
        eos_token=EOS,
        **variables,
    )
    text = rendered[0]
    assert isinstance(text, str)
    return text


@functools.cache
def ours(source: str) -> Template:
    """The template, compiled once: transformers keeps its own too."""
    return Template(source, bos=BOS, eos=EOS)


def check_same(source: str, messages: tuple[Message, ...], tools: tuple[Tool, ...], **variables: Any) -> None:
    template = ours(source)
    try:
        expected = theirs(source, messages, tools, **variables)
    except Exception as error:
        refused = error
    else:
        assert template.render(messages, tools=tools, **variables) == expected
        return
    with pytest.raises(TemplateError) as caught:
        template.render(messages, tools=tools, **variables)
    assert str(refused) in str(caught.value)


def test_there_are_enough_templates_to_compare() -> None:
    assert len(PUBLISHED) >= 18


@pytest.mark.parametrize("name", [*PUBLISHED, *OURS])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_a_template_gives_the_text_that_transformers_gives_c9(name: str, conversation: str) -> None:
    """C9 among them: any Unicode stays what it is."""
    source, messages = (PUBLISHED | OURS)[name], CONVERSATIONS[conversation]
    for tools in ((), TOOLS):
        for prompt in (True, False):
            check_same(source, messages, tools, add_generation_prompt=prompt)
            check_same(source, messages, tools, add_generation_prompt=prompt, **VARIABLES.get(name, {}))


@pytest.mark.parametrize("name", SCRAPS)
def test_a_construct_of_jinja_gives_what_it_gives_in_transformers(name: str) -> None:
    for conversation in ("turns", "parallel"):
        check_same(SCRAPS[name], CONVERSATIONS[conversation], TOOLS, add_generation_prompt=True)


def test_the_comparison_has_teeth(monkeypatch: pytest.MonkeyPatch) -> None:
    """With HTML escaped as Jinja's own filter does it, or content left out, the texts differ."""
    check_same(SCRAPS["json"], CONVERSATIONS["one"], ())
    monkeypatch.setitem(module.sandbox().filters, "tojson", lambda value, **_: json.dumps(value))
    ours.cache_clear()
    with pytest.raises(AssertionError):
        check_same(SCRAPS["json"], CONVERSATIONS["one"], ())
    ours.cache_clear()


def test_what_a_message_does_not_have_is_empty_or_not_there() -> None:
    template = Template("{% for m in messages %}{{ m | tojson }}\n{% endfor %}")
    first, second = map(json.loads, template.render(CONVERSATIONS["call"]).splitlines())
    assert first == {"role": "user", "content": "What is the weather in Paris?"}
    assert second["content"] == ""
    assert second["tool_calls"][0]["function"]["arguments"] == {"city": "Paris", "days": [1, 2]}
    assert "reasoning_content" not in second
    reasoned = json.loads(template.render(CONVERSATIONS["reasoned"]).splitlines()[1])
    assert reasoned["reasoning_content"] == "They greet."


def test_arguments_that_do_not_parse_stay_text() -> None:
    messages = parse_messages(
        [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{oops"}}]}]
    )
    template = Template("{{ messages[0].tool_calls[0].function.arguments }}")
    assert template.render(messages) == "{oops"


def test_ids_are_shortened_for_templates_that_take_nothing_else() -> None:
    """Mistral's refuse an id of any other length, also those of their own earlier replies."""
    long = "call_0123456789abcdef01234567"
    messages = parse_messages(
        [
            user(),
            {"role": "assistant", "tool_calls": [{"id": long, "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "1", "tool_call_id": long},
        ]
    )
    text = Template(PUBLISHED["mistral-v3-tekken"]).render(messages)
    short = hashlib.sha256(long.encode()).hexdigest()[:9]
    assert text.count(f'"{short}"') == 2
    assert long not in text
    assert long in Template("{{ messages[1].tool_calls[0].id }}").render(messages)


# Errors.


def test_what_a_template_refuses_is_passed_on_in_its_own_words() -> None:
    template = Template(PUBLISHED["gemma-3"], name="my template")
    with pytest.raises(TemplateError, match=r"my template, line \d+: Conversation roles must alternate"):
        template.render(CONVERSATIONS["two users"])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n{% if x %}\nb", r"line 3.*endif"),
        ("a\n{{ x y }}\nb", r"line 2: .*'y': \{\{ x y \}\}"),
        ("{% nonsense %}", "line 1.*nonsense"),
        ("{{ 'a' | nonsense }}", "No filter named 'nonsense'"),
        ("{% include 'x' %}", "loader"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "does not compile"),
        ("x" * (1 << 19), "characters long"),
        (7, "must be text, got int"),
    ],
)
def test_a_template_that_does_not_compile_says_where(source: Any, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        Template(source).render(CONVERSATIONS["one"])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n{{ messages[0].x.y }}", "line 2: .*no attribute 'x'"),
        ("{{ 1 / 0 }}", "line 1 fails: division by zero"),
        ("{{ messages + 1 }}", "line 1 fails"),
        ("{{ x | tojson }}", "line 1 fails.*Undefined"),
        ("{{ raise_exception('no') }}", "line 1: no$"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "call each other more than 100 deep"),
    ],
)
def test_a_template_that_fails_says_where(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        Template(source).render(CONVERSATIONS["one"])


@pytest.mark.parametrize("source", [None, "", "  \n"])
def test_a_model_without_a_template_is_an_error_that_names_the_ways_out(source: str | None) -> None:
    with pytest.raises(TemplateError, match=r"brings no chat template.*chatml.*from_file"):
        Template.of_model(source)


def test_only_plain_values_reach_a_template() -> None:
    template = Template("{{ x }}")
    assert template.render(CONVERSATIONS["one"], x=[1, {"a": None}]) == "[1, {'a': None}]"
    with pytest.raises(InvalidInputError, match="x must be a plain value for the template, got PosixPath"):
        template.render(CONVERSATIONS["one"], x=Path("a"))


# The library, and what a template tells of itself.


def test_named_templates_are_there_and_others_are_refused() -> None:
    assert "chatml" in Template.names()
    for name in Template.names():
        text = Template.named(name, bos=BOS, eos=EOS).render(CONVERSATIONS["turns"])
        assert "You are terse." in text
        assert "Hello!" in text
    with pytest.raises(TemplateError, match="there is no template 'nonsense'; there are chatml"):
        Template.named("nonsense")
    with pytest.raises(TemplateError, match="there is no template"):
        Template.named("../template")


def test_a_template_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my.jinja"
    path.write_text("{{ messages[0].content }}é", "utf-8")
    assert Template.from_file(path).render(CONVERSATIONS["one"]) == "Hié"
    with pytest.raises(TemplateError, match="cannot be read"):
        Template.from_file(tmp_path / "none.jinja")


def test_the_digest_is_of_the_source() -> None:
    assert Template("a").digest == hashlib.sha256(b"a").hexdigest()
    assert Template("a", bos="x").digest != Template("b", bos="x").digest


def test_threads_share_a_template() -> None:
    template = Template(PUBLISHED["qwen-3"])
    expected = {name: template.render(messages, tools=TOOLS) for name, messages in CONVERSATIONS.items()}
    wrong: list[str] = []

    def check() -> None:
        for name, messages in CONVERSATIONS.items():
            if template.render(messages, tools=TOOLS) != expected[name]:
                wrong.append(name)

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_template_may_add_to_lists_of_its_own() -> None:
    """As Kimi's do."""
    source = (
        "{% set l = [] %}{% for m in messages %}{% set _ = l.append(m.content) %}{% endfor %}{{ l|join }}"
    )
    said = [Message(role="user", content=text) for text in "abc"]
    assert Template(source).render(said) == "abc"
