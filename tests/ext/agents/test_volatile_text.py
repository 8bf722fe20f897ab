"""Text that changes at every turn costs no more than itself (A2)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import perdure
from chat.test_normaliser import ALL, TOOL, normalised, rendered
from counting import size_of
from perdure.chat.message import Message, Tool
from perdure.chat.transcript import shared_length
from perdure.ext.agents.agent_conversation import AgentConversation, find_line
from perdure.ext.agents.volatile_text import RULES, TOOLS, Rule, VolatileText
from perdure.testing.toy import ToyModel


def said(role: str, text: str) -> Message:
    return Message(role=role, content=text)


USER, ANSWER, AGAIN = said("user", "zquser"), said("assistant", "zqanswer"), said("user", "zqagain")
HABITS = {
    "billing header": "x-anthropic-billing-header: cc_version=2.1.181.{n}; cch=0000{n};",
    "tokens left": "<total_tokens>{n}0000 tokens left</total_tokens>",
    "date": "Today's date: 2026-11-1{n}",
    "current date": "- Current date and time: 2026-11-1{n} 10:4{n}",
    "percentage": "Memory: {n}% used",
}
IN_MESSAGES = [
    "<system-reminder>\nPlan mode is on.\n</system-reminder>",
    "<total_tokens>900 left</total_tokens>",
    "The TodoWrite tool hasn't been used recently. Consider it.",
]


def words(messages: Sequence[Message]) -> list[str]:
    return [message.content or "" for message in messages]


@pytest.mark.parametrize("habit", HABITS)
def test_a_line_of_the_system_prompt_moves_behind_the_last_message(habit: str) -> None:
    """A2: the system prompt is the same at every turn, and so is all before the last message. C13: the line
    is there once, and none of an earlier request."""
    volatile, line = VolatileText(), HABITS[habit]
    history: list[Message] = []
    for n in range(1, 5):
        history.append(said("user", f"question {n}"))
        system = said("system", f"You are an agent.\n{line.format(n=n)}\nBe brief.")
        canonical, notes = volatile.canonicalise([system, *history])
        assert words(canonical) == ["You are an agent.\nBe brief.", *words(history), line.format(n=n)]
        assert any("moved behind the messages" in note for note in notes)
        history.append(said("assistant", f"answer {n}"))


def test_a_value_that_stays_is_read_where_it_was_read_first() -> None:
    """A2: a date costs nothing until it changes."""
    volatile = VolatileText()
    system = said("system", "You are an agent.\nToday's date: 2026-11-17")
    first, _ = volatile.canonicalise([system, USER])
    second, notes = volatile.canonicalise([system, USER, ANSWER, AGAIN])
    assert words(second) == [*words(first), "zqanswer", "zqagain"]
    assert notes == ("moved behind the messages: date",)


def test_a_value_that_changes_is_read_at_the_end_and_stays_there() -> None:
    volatile = VolatileText()
    sunday, monday = (said("system", f"Be brief.\nToday's date: 2026-11-1{day}") for day in (5, 6))
    volatile.canonicalise([sunday, USER])
    changed, _ = volatile.canonicalise([monday, USER, ANSWER, AGAIN])
    assert words(changed) == ["Be brief.", "zquser", "zqanswer", "zqagain", "Today's date: 2026-11-16"]
    later, _ = volatile.canonicalise([monday, USER, ANSWER, AGAIN, ANSWER, USER])
    assert words(later) == [*words(changed), "zqanswer", "zquser"]


def test_a_line_stands_before_the_beginning_of_a_reply() -> None:
    """What goes on from the assistant's last message still ends with it."""
    system = said("system", "Be brief.\nToday's date: 2026-11-17")
    canonical, _ = VolatileText().canonicalise([system, USER, ANSWER])
    assert words(canonical) == ["Be brief.", "zquser", "Today's date: 2026-11-17", "zqanswer"]


def USER_WITH(text: str, word: str) -> Message:  # noqa: N802
    return said("user", f"{word}\n{text}")


@pytest.mark.parametrize("text", IN_MESSAGES)
def test_what_a_message_was_sent_with_is_read_there_and_nowhere_else(text: str) -> None:
    """Y1: what is not sent any more is not put back, and what is sent is not replaced."""
    volatile = VolatileText()
    requests = [
        [USER_WITH(text, "zquser")],
        [USER, said("system", text)],
        [USER, ANSWER, USER_WITH(text, "zqagain")],
        [USER, ANSWER, AGAIN],
        [USER_WITH("<system-reminder>other</system-reminder>", "zquser"), ANSWER, AGAIN],
    ]
    for messages in [*requests, *requests]:
        assert volatile.canonicalise(messages) == (tuple(messages), ())


def test_two_words_do_not_become_one() -> None:
    for around in ("one{}two", "one{}\ntwo", "one\n{}two", "one\n{}\ntwo", "one {} two"):
        system = said("system", around.format("<total_tokens>5</total_tokens>"))
        canonical, _ = VolatileText().canonicalise([system, USER])
        assert "\n".join(words(canonical)).split() == [
            "one",
            "two",
            "zquser",
            "<total_tokens>5</total_tokens>",
        ]


def test_ordinary_text_stays_as_it_is() -> None:
    volatile = VolatileText()
    messages = [
        said(
            "system",
            "Write the date as Today's date would be. Dates: none. A memory of 4%is fine?\nDate: soon",
        ),
        said("user", "<system-reminder> without an end"),
        said("system", "You are now in German."),
        said("user", "Today's date: 2026-11-17"),
    ]
    assert volatile.canonicalise(messages) == (tuple(messages), ())


def test_tools_keep_the_order_in_which_they_came_first() -> None:
    volatile = VolatileText()
    tools = tuple(Tool(name=name, parameters={"type": "object"}) for name in "abc")
    assert volatile.ordered(tools) == (tools, ())
    assert volatile.ordered(tools[::-1]) == (tools, ("put back: order of tools",))
    fewer = tools[1:]
    assert volatile.ordered(fewer) == (fewer, ())


def test_what_is_remembered_is_bounded() -> None:
    volatile = VolatileText(limit=20)
    sizes = []
    for at in range(100):
        volatile.canonicalise([said("system", f"Be brief.\nDate: {at}"), said("user", "x" * 1000)])
        sizes.append(size_of(volatile))
    assert sizes[0] < max(sizes) < 1.1 * max(sizes[:25])


def test_what_another_namespace_sends_changes_no_place() -> None:
    """C13, H5: neither of a line of the system prompt nor of tools, however much it sends."""
    volatile = VolatileText(limit=20)
    tools = tuple(Tool(name=name) for name in ("look", "fly"))
    history = [said("system", "Be brief.\nDate: 1"), said("user", "Hi"), said("assistant", "OK")]
    first, _ = volatile.canonicalise(history[:2], "a")
    volatile.ordered(tools, "a")
    for at in range(200):
        volatile.canonicalise([said("system", f"Be brief.\nDate: {at}"), said("user", "Hi")], "b")
        volatile.ordered((*tools, Tool(name=f"t{at}")), "b")
    second, _ = volatile.canonicalise([*history, said("user", "So?")], "a")
    assert second[: len(first)] == first
    assert volatile.ordered(tools[::-1], "a")[0] == tools


def test_every_rule_says_whose_text_it_is_and_why_it_may_move() -> None:
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()
    for rule in RULES:
        assert rule.name in page
        assert rule.reason in page


SAMPLES = {
    "billing header": "x-anthropic-billing-header: cc_version=2.1.181.{n}; cch=0000{n};",
    "tokens left": "<total_tokens>{n}0000 tokens left</total_tokens>",
    "date": "Today's date: 2026-11-1{n}",
    "percentage": "Memory: {n}% used",
    "reminder": "<system-reminder>Plan mode is on, {n}.</system-reminder>",
    "tokens left, behind a message": "<total_tokens>{n} left</total_tokens>",
    "task nudge": "The TodoWrite tool hasn't been used recently, {n}.",
    "order of tools": "",
}


@pytest.mark.parametrize("rule", [*RULES, TOOLS], ids=lambda rule: rule.name)
def test_each_rule_is_listed_in_the_answer_costs_its_words_and_is_off_by_one_flag(rule: Rule) -> None:
    """A2, for every line of the client table."""
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()
    assert f"| {rule.name} | {rule.client} |" in page
    assert rule.reason in page
    text, tools = SAMPLES[rule.name], [tool(name) for name in "abc"]
    with perdure.open(ToyModel(), n_ctx=4096, slots=2) as rt:
        for stable in (True, False):
            history: list[Message] = [said("system", "You are an agent. " * 8)]
            computed: list[int] = []
            notes: list[str] = []
            for n in range(3):
                if rule is TOOLS:
                    tools.reverse()
                    history.append(said("user", f"question {n}"))
                    sent = list(history)
                elif rule.in_messages:
                    # Only the latest message has it.
                    history.append(said("user", f"question {n}"))
                    sent = [*history, said("system", text.format(n=n))]
                else:
                    history.append(said("user", f"question {n}"))
                    sent = [said("system", f"{text.format(n=n)}\n{history[0].content}"), *history[1:]]
                options: dict[str, Any] = {
                    "tools": tools if rule is TOOLS else None,
                    "max_tokens": 4,
                    "seed": n,
                }
                if rule.in_messages:
                    # Only a session holds what its client leaves out.
                    reads_alike = rt.chat_format.reads_alike(options)
                    named = AgentConversation(name=f"named {stable}")
                    line = find_line(rt.sessions, named, sent, "", reads_alike, stable=stable)
                    assert line is not None
                    with line.session.submit(line.said, extra=line.extra(None), **options) as stream:
                        reply = stream.reply()
                else:
                    reply = rt.chat(sent, **options, stable_prefix=stable, namespace=str(stable))
                computed.append(reply.reuse.computed)
                notes += reply.notes
                history.append(said("assistant", reply.text))
            listed = any(rule.name.partition(",")[0] in note for note in notes)
            if stable:
                assert listed, notes
                kept = computed[2]
            else:
                assert not any("moved" in note or "kept as" in note or "put back" in note for note in notes)
                assert kept < computed[2], "it spoils the prefix where it is left as it was sent"


def tool(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


MOVERS = {
    "command-r7b",
    "deepseek-r1",
    "DeepSeek-V3.1",
    "DeepSeek-V3.2",
    "DeepSeek-V4",
    "DeepSeek-V4-Flash",
    "Hy3",
    "Solar-Open",
}


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_prompt_goes_on_from_the_system_message_that_ended_the_one_before(path: Path) -> None:
    """A2: what was read up to such a message, and with it, is how the next prompt begins; unless the template
    writes what stands before otherwise later, whoever said it."""

    def pair(last: tuple[Message, ...], tools: tuple[Tool, ...]) -> tuple[str, str, int]:
        shorter = (*long_history(2), said("user", "zqlast"), *last)
        longer = (*shorter, said("assistant", "zqanswer2"), said("user", "zqend"))
        first = rendered(path, normalised(path, shorter, tools))
        second = rendered(path, normalised(path, longer, tools))
        word = last[-1].content if last else "zqlast"
        assert word is not None
        return first, second, first.rindex(word) + len(word)

    for tools in ((), (TOOL,)):
        plain_first, plain_second, end = pair((), tools)
        goes_on = plain_second.startswith(plain_first[:end])
        first, second, end = pair((said("system", "zqleft2"),), tools)
        assert second.startswith(first[:end]) == goes_on
        if not tools and any(path.stem.endswith(name) or name in path.stem for name in MOVERS):
            assert goes_on


def test_the_templates_that_move_such_messages_are_among_them() -> None:
    stems = [path.stem for path in ALL]
    assert all(any(name in stem for stem in stems) for name in MOVERS)
    assert len(ALL) == 89


@cache
def long_history(turns: int) -> tuple[Message, ...]:
    found: list[Message] = [said("system", "zqsystem")]
    for at in range(turns):
        found += [
            said("user", f"zquser{at}"),
            said("system", f"zqleft{at}"),
            said("assistant", f"zqanswer{at}"),
        ]
    return tuple(found)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_system_message_in_the_middle_is_read_at_its_place(path: Path) -> None:
    """A2: a line behind each message of the user costs itself, whatever the template."""
    for tools in ((), (TOOL,)):
        shorter = (*long_history(2), said("user", "zqlast"))
        first = rendered(path, normalised(path, shorter, tools))
        longer = (*shorter, said("system", "zqleft2"), said("assistant", "zqanswer2"), said("user", "zqend"))
        second = rendered(path, normalised(path, longer, tools))
        start, *order = [second.find(message.content or "") for message in longer]
        assert order == sorted(order)
        assert -1 not in (start, *order)
        # What counts is everything up to the last answer. Mistral's templates write tools before the last
        # message, and some of them the system prompt too.
        assert shared_length(first, second) >= first.rfind("zqanswer1") or start > order[0]


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_system_message_at_the_end_does_not_end_the_prompt(path: Path) -> None:
    """Models answer a prompt that ends with the system otherwise than the user's."""
    given = normalised(path, (said("system", "zqsystem"), USER, said("system", "zqleft")), ())
    assert [message.role for message in given.messages][-1] == "user"
    assert "zqleft" in rendered(path, given)


def test_only_new_words_are_computed_while_a_counter_changes_at_every_turn() -> None:
    """A2 on an engine: what is computed are the tokens of the turn, and `notes` lists what was moved."""
    with perdure.open(ToyModel(), n_ctx=4096, slots=2) as rt:
        for stable in (True, False):
            history: list[Message] = []
            computed = []
            for n in range(5):
                history.append(said("user", f"question {n}"))
                system = said("system", f"<total_tokens>{n}</total_tokens>\nYou are an agent.")
                reply = rt.chat(
                    [system, *history], max_tokens=4, seed=n, stable_prefix=stable, namespace=str(stable)
                )
                computed.append(reply.reuse.computed)
                assert bool(reply.notes) == stable
                history.append(said("assistant", reply.text))
            if stable:
                assert computed[-1] <= computed[1] + 8, "each turn costs itself"
            else:
                assert computed[-1] > computed[1] + 60, "everything behind the counter is read again"
