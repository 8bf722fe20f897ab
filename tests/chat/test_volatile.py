"""Text that changes at every turn costs no more than itself (A2)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

import perdure
from chat.test_normaliser import ALL, TOOL, normalised, rendered
from counting import size_of
from perdure.chat.message import Message, Tool
from perdure.chat.transcript import shared_length
from perdure.chat.volatile import RULES, TOOLS, Rule, VolatileText
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


def words(messages: Sequence[Message]) -> list[str]:
    return [message.content or "" for message in messages]


@pytest.mark.parametrize("habit", HABITS)
def test_a_line_of_the_system_prompt_moves_behind_the_last_message(habit: str) -> None:
    """A2: the system prompt is the same at every turn, each value is read once, and no word is lost."""
    volatile, line = VolatileText(), HABITS[habit]
    history: list[Message] = []
    before: list[str] = []
    for n in range(1, 5):
        history.append(said("user", f"question {n}"))
        system = said("system", f"You are an agent.\n{line.format(n=n)}\nBe brief.")
        stabilised, notes = volatile.stabilise([system, *history])
        assert stabilised[0].content == "You are an agent.\nBe brief."
        assert line.format(n=n) in words(stabilised)[-1]
        assert words(stabilised)[: len(before)] == before, "what was read is read again as it was"
        assert any("moved behind the messages" in note for note in notes)
        before = words(stabilised)
        history.append(said("assistant", f"answer {n}"))


def test_a_value_that_stays_is_said_once() -> None:
    volatile = VolatileText()
    system = said("system", "You are an agent.\nToday's date: 2026-11-17")
    first, _ = volatile.stabilise([system, USER])
    second, notes = volatile.stabilise([system, USER, ANSWER, AGAIN])
    assert words(second) == [*words(first), "zqanswer", "zqagain"]
    assert notes == ("moved behind the messages: date",)


@pytest.mark.parametrize(
    "text",
    [
        "<system-reminder>\nPlan mode is on.\n</system-reminder>",
        "<total_tokens>900 left</total_tokens>",
    ],
)
def test_a_reminder_that_moves_on_is_read_where_it_was_sent_first(text: str) -> None:
    """As opencode's, which is always at the latest message."""
    volatile = VolatileText()
    first, _ = volatile.stabilise([USER_WITH(text, "zquser")])
    second, notes = volatile.stabilise([USER, ANSWER, USER_WITH(text, "zqagain")])
    assert words(second) == [*words(first), "zqanswer", f"zqagain\n{text}"]
    assert notes
    assert all(note.startswith("kept as it was read: ") for note in notes)


def USER_WITH(text: str, word: str) -> Message:  # noqa: N802
    return said("user", f"{word}\n{text}")


def test_a_counter_behind_a_message_that_is_not_sent_again_stays_where_it_was() -> None:
    """As Claude Code's trailing messages of role system, and its task nudges."""
    volatile = VolatileText()
    nudge = "The TodoWrite tool hasn't been used recently. Consider it."
    for text in ("<total_tokens>5</total_tokens>", nudge):
        first, _ = volatile.stabilise([USER, said("system", text)])
        assert words(first) == ["zquser", text]
        second, _ = volatile.stabilise([USER, ANSWER, AGAIN])
        assert words(second) == ["zquser", text, "zqanswer", "zqagain"]


def test_another_conversation_and_another_namespace_learn_nothing() -> None:
    """H5: what is put back is only what this conversation was sent with."""
    volatile = VolatileText()
    volatile.stabilise([USER_WITH("<system-reminder>secret</system-reminder>", "zquser")], "a")
    assert words(volatile.stabilise([USER, ANSWER, AGAIN], "b")[0]) == ["zquser", "zqanswer", "zqagain"]
    other = said("user", "zqother")
    assert words(volatile.stabilise([other, ANSWER, AGAIN], "a")[0]) == ["zqother", "zqanswer", "zqagain"]


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
    assert volatile.stabilise(messages) == (tuple(messages), ())


def test_tools_keep_the_order_in_which_they_came_first() -> None:
    volatile = VolatileText()
    tools = tuple(Tool(name=name, parameters={"type": "object"}) for name in "abc")
    assert volatile.ordered(tools) == (tools, ())
    assert volatile.ordered(tools[::-1]) == (tools, ("put back: order of tools",))
    fewer = tools[1:]
    assert volatile.ordered(fewer) == (fewer, ())


def test_what_is_remembered_is_bounded() -> None:
    volatile = VolatileText(limit=2000)
    sizes = []
    for at in range(100):
        volatile.stabilise([said("user", f"{at} <system-reminder>{'x' * 100}</system-reminder>")])
        sizes.append(size_of(volatile))
    assert sizes[0] < max(sizes) < 1.1 * max(sizes[:25])


def test_every_rule_says_whose_text_it_is_and_why_it_may_move() -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
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
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
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
                reply = rt.chat(
                    sent,
                    tools=tools if rule is TOOLS else None,
                    max_tokens=4,
                    seed=n,
                    stable_prefix=stable,
                    namespace=str(stable),
                )
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
