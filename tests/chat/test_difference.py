"""A5: the reason given for tokens that were computed again is the true first difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import perdure
from perdure import Runtime
from perdure.chat.message import Message, ToolCall
from perdure.testing.toy import ToyModel

SYSTEM = "You are an agent.\nWork in /home.\nThe branch is main.\nBe brief."
CALL = ToolCall(id="call_1", name="read", arguments='{"path": "a.txt"}')


def said(role: str, text: str | None = None, **more: Any) -> Message:
    return Message(role=role, content=text, **more)


def tool(name: str, about: str = "Does it.") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


@dataclass
class Conversation:
    """What a client sends: planted causes change it."""

    messages: list[Message] = field(
        default_factory=lambda: [
            said("system", SYSTEM),
            said("user", "Read a.txt and tell me of it."),
            said("assistant", tool_calls=(CALL,)),
            said("tool", "first line\nsecond line\nthird line", tool_call_id="call_1", name="read"),
            said("assistant", "It has three lines, all of them short."),
            said("user", "Which is the second one?\nQuote it."),
        ]
    )
    tools: list[dict[str, Any]] = field(default_factory=lambda: [tool("read"), tool("write"), tool("list")])
    settings: dict[str, Any] = field(default_factory=dict)

    def text(self, at: int, text: str) -> Conversation:
        self.messages[at] = replace(self.messages[at], content=text)
        return self


Plant = Callable[[Conversation], object]


def system(line: int, text: str) -> Plant:
    lines = SYSTEM.split("\n")
    lines[line - 1] = text
    return lambda each: each.text(0, "\n".join(lines))


CAUSES: dict[str, tuple[Plant, str, str]] = {
    # What a client changes, and the cause and place that are to be named.
    "a line of the system prompt": (system(3, "The branch is dev."), "system", "system prompt, line 3"),
    "its first line": (system(1, "You are a helper."), "system", "system prompt, line 1"),
    "its last line": (system(4, "Be very brief."), "system", "system prompt, line 4"),
    "a line more": (system(4, "Be brief.\nBe kind."), "system", "system prompt, line 4"),
    "a line less": (system(2, ""), "system", "system prompt, line 2"),
    "a date": (system(2, "The day is 2026-11-17."), "system", "system prompt, line 2"),
    "a tool more": (lambda each: each.tools.append(tool("grep")), "tools", "tools: grep is new"),
    "two tools more": (
        lambda each: each.tools.extend([tool("grep"), tool("find")]),
        "tools",
        "tools: grep, find are new",
    ),
    "a tool in front": (lambda each: each.tools.insert(0, tool("grep")), "tools", "tools: grep is new"),
    "a tool less": (lambda each: each.tools.pop(), "tools", "tools: list is gone"),
    "no tools": (lambda each: each.tools.clear(), "tools", "tools: read, write, list are gone"),
    "another description": (
        lambda each: each.tools.__setitem__(1, tool("write", "Writes.")),
        "tools",
        "tools: write changed",
    ),
    "tools in another order": (lambda each: each.tools.reverse(), "tools", "tools: another order"),
    "the first message edited": (
        lambda each: each.text(1, "Read b.txt and tell me of it."),
        "message",
        "messages[1] (user), line 1",
    ),
    "the second line of a message": (
        lambda each: each.text(5, "Which is the second one?\nWrite it."),
        "message",
        "messages[5] (user), line 2",
    ),
    "a message cut short": (
        lambda each: each.text(5, "Which is the second one?"),
        "message",
        "messages[5] (user): shorter than it was",
    ),
    "a message that grew": (
        lambda each: each.text(1, "Read a.txt and tell me of it. Now."),
        "message",
        "messages[1] (user): longer than it was",
    ),
    "a pruned tool result": (
        lambda each: each.text(3, "[cleared]"),
        "message",
        "messages[3] (tool), line 1",
    ),
    "a tool result cut short": (
        lambda each: each.text(3, "first line"),
        "message",
        "messages[3] (tool): shorter than it was",
    ),
    "an answer trimmed": (
        lambda each: each.text(4, "It has three lines"),
        "message",
        "messages[4] (assistant): shorter than it was",
    ),
    "an answer reworded": (
        lambda each: each.text(4, "There are three lines."),
        "message",
        "messages[4] (assistant), line 1",
    ),
    "another call": (
        lambda each: each.messages.__setitem__(
            2, said("assistant", tool_calls=(replace(CALL, arguments='{"path": "b.txt"}'),))
        ),
        "message",
        "messages[2] (assistant): calls",
    ),
    "a message left out": (
        lambda each: each.messages.pop(4),
        "history",
        "messages[4] (assistant): left out",
    ),
    "the system prompt left out": (
        lambda each: each.messages.pop(0),
        "history",
        "messages[0] (system): left out",
    ),
    "a message put in": (
        lambda each: each.messages.insert(1, said("user", "Hello.")),
        "history",
        "messages[1] (user): put in",
    ),
    "compacted": (
        lambda each: each.messages.__setitem__(slice(1, 5), [said("assistant", "Summary: three lines.")]),
        "history",
        "messages[1] on: replaced by fewer messages",
    ),
    "another role": (
        lambda each: each.messages.__setitem__(4, said("user", "It has three lines, all of them short.")),
        "history",
        "messages[4]: user was assistant",
    ),
    "a template variable": (
        lambda each: each.settings.update(chat_template_kwargs={"mood": "gay"}),
        "variables",
        "template variable mood",
    ),
    "the system prompt and the tools": (
        lambda each: (each.text(0, "You are a helper."), each.tools.pop()),
        "system",
        "system prompt, line 1",
    ),
    "the day that the template shows": (
        lambda each: each.settings.update(date="2026-11-18"),
        "template",
        "the template",
    ),
}

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% if loop.first %}{% if tools %}{{ tools | tojson }}{% endif %}{{ mood or '' }}"
    "{{ strftime_now('%Y-%m-%d') }}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    with perdure.open(ToyModel(), n_ctx=4096, slots=2, template=perdure.Template(TEMPLATE)) as found:
        yield found


def ask(rt: Runtime, each: Conversation, name: str) -> perdure.ChatReply:
    settings = {"date": "2026-11-17", **each.settings}
    return rt.chat(each.messages, tools=each.tools, max_tokens=4, seed=1, namespace=name, **settings)


@pytest.mark.parametrize("name", CAUSES)
def test_the_first_difference_is_named(name: str, rt: Runtime) -> None:
    """A5: thirty planted causes."""
    plant, cause, place = CAUSES[name]
    first = ask(rt, Conversation(), name)
    assert first.miss is None
    again = Conversation()
    plant(again)
    again.messages += [said("assistant", first.text), said("user", "And the third?")]
    miss = ask(rt, again, name).miss
    assert miss is not None
    assert (miss.cause, miss.why) == (cause, place)
    assert miss.tokens > 0
    assert miss.advice


def test_a_conversation_that_goes_on_has_nothing_computed_again(rt: Runtime) -> None:
    each = Conversation()
    for _ in range(3):
        reply = ask(rt, each, "going on")
        assert reply.miss is None
        each.messages += [said("assistant", reply.text), said("user", "Go on.")]


def test_a_new_conversation_is_no_miss(rt: Runtime) -> None:
    ask(rt, Conversation(), "new")
    other = Conversation(messages=[said("system", SYSTEM), said("user", "Something else.")])
    assert ask(rt, other, "new").miss is None


def test_a_reply_that_comes_back_trimmed_is_named_as_a_reply(rt: Runtime) -> None:
    each = Conversation()
    reply = ask(rt, each, "trimmed")
    each.messages += [said("assistant", "Other words."), said("user", "Go on.")]
    miss = ask(rt, each, "trimmed").miss
    # Nothing behind it was read before: it costs itself.
    assert reply.text
    assert miss is None or miss.cause == "reply"


def test_state_that_is_gone_is_the_cache_s_doing() -> None:
    """What differs is named only where it is what the tokens were lost by."""
    with perdure.open(ToyModel(), n_ctx=4096, slots=1) as rt:
        each = Conversation(messages=[said("system", SYSTEM * 10), said("user", "Hi")], tools=[])
        reply = rt.chat(each.messages, max_tokens=4, seed=1)
        rt.cache.clear()
        each.messages += [said("assistant", reply.text), said("user", "Go on.")]
        miss = rt.chat(each.messages, max_tokens=4, seed=1).miss
    assert miss is not None
    assert miss.cause == "cache"


def test_another_namespace_is_never_compared_with(rt: Runtime) -> None:
    """H5: no line of another's prompt is shown."""
    ask(rt, Conversation(), "mine")
    other = Conversation()
    other.text(0, "You are a helper.")
    assert ask(rt, other, "yours").miss is None
