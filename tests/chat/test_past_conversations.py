"""What is remembered of conversations: by namespace, within a limit, and never more than a request says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chat.templates.test_renderer import conversation, renderer
from chat.test_transcript import TOY, marked
from counting import size_of
from perdure import Template
from perdure.chat.message import Message, Tool, ToolCall
from perdure.chat.options import ChatOptions
from perdure.chat.past_conversations import CallKeys, PastConversation, PastConversations, closest
from perdure.chat.template.template import Rendering
from perdure.chat.transcript import Transcript


def said(role: str, text: str) -> Message:
    return Message(role=role, content=text)


def past(
    text: str,
    *messages: Message,
    namespace: str = "",
    rendering: Rendering | None = None,
    reasoning: Mapping[tuple[str, ...], str] = {},
) -> PastConversation:
    tokens = TOY.encode(text)
    return PastConversation(
        namespace, messages, (), {}, tokens, rendering=rendering, reasoning=reasoning, conversation="c"
    )


def transcript(under_test: PastConversations, text: str, namespace: str = "") -> Transcript | None:
    return under_test.transcript(text, under_test.near(text, namespace))


# Tokens.


@given(st.lists(marked, min_size=1, max_size=12), marked)
def test_the_longest_beginning_is_recalled(texts: list[str], wanted: str) -> None:
    """At least up to the last mark before the text parts from everything that is remembered. Behind a mark
    any conversation can be continued; between marks only the one whose tokens end there, and of several that
    begin alike the longest is remembered."""
    under_test = PastConversations(TOY)
    known = [TOY.encode(text) for text in texts]
    for text in texts:
        under_test.store(past(text))
    shared = [TOY.shared_prefix(wanted, each) for each in known]
    longest = max((len(each.text) for each in shared if each is not None), default=0)
    behind_a_mark = max(
        (
            chars
            for each in known
            for chars, count in each.cuts
            if wanted.startswith(each.text[:chars]) and each.tokens[count - 1] in TOY.marks
        ),
        default=0,
    )
    found = transcript(under_test, wanted)
    assert behind_a_mark <= (len(found.text) if found else 0) <= longest
    assert found is None or wanted.startswith(found.text)
    assert transcript(under_test, wanted, "another") is None


# Renderings.


def test_what_was_rendered_is_found_by_the_messages_that_go_on_from_it() -> None:
    under_test, renders = PastConversations(TOY), renderer(Template.named("chatml"))
    messages = conversation("s", ["a", "b", "c", "d", "e"])
    first_text, first = renders.prompt(messages[:2])
    second_text, second = renders.prompt(messages[:4], before=first)
    under_test.store(past(first_text, namespace="mine", rendering=first))
    assert under_test.rendering(messages[:4], "mine") is first
    assert under_test.rendering(messages[:4], "another's") is None
    assert under_test.rendering(messages[:2], "mine") is None
    assert under_test.rendering(conversation("other", ["a", "b", "c"]), "mine") is None
    under_test.store(past(second_text, namespace="mine", rendering=second))
    assert under_test.rendering(messages[:4], "mine") is None, "it was continued"
    assert under_test.rendering(messages, "mine") is second


# Reasoning.


def called(*ids: str, reasoning: str | None = None, name: str = "look") -> Message:
    calls = tuple(ToolCall(id=each, name=name, arguments="{}") for each in ids)
    return Message(role="assistant", tool_calls=calls, reasoning=reasoning)


class Remembering:
    """Conversations, and the reasoning of their calls."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.past = PastConversations(TOY, limit=limit)
        self._count = 0

    def store(
        self,
        asked: Sequence[Message],
        reply: Message,
        options: ChatOptions | None = None,
        namespace: str = "",
    ) -> None:
        self._count += 1
        key = CallKeys(namespace, options, asked).of(reply)
        assert reply.reasoning is not None
        text = f"{self._count:03d} {reply.reasoning}"
        self.past.store(past(text, namespace=namespace, reasoning={key: reply.reasoning}))

    def last(self, *messages: Message, options: ChatOptions | None = None, namespace: str = "") -> str | None:
        return self.past.with_reasoning(messages, namespace, options)[0][-1].reasoning


def test_an_id_that_a_model_writes_again_is_told_apart_by_all_that_was_asked() -> None:
    """C13: the same message and the same id are of another conversation where anything before differs."""
    under_test = Remembering()
    head, one, other = said("system", "system"), said("user", "one"), said("user", "other")
    options = ChatOptions(tools=(Tool(name="look"),))
    for asked, reasoning in (([head, one], "Of one."), ([head, other], "Of the other.")):
        under_test.store(asked, called("look:0", reasoning=reasoning), options)
        assert under_test.last(*asked, called("look:0"), options=options) == reasoning
    assert under_test.last(one, called("look:0"), options=options) is None
    assert under_test.last(head, one, called("look:0", name="fly"), options=options) is None
    for changed in (replace(options, tools=()), replace(options, variables={"documents": "other"})):
        assert under_test.last(head, one, called("look:0"), options=changed) is None


def test_of_two_thoughts_that_led_to_one_call_neither_is_put_back() -> None:
    """C13: nothing tells whose of the two conversations it is."""
    under_test, asked = Remembering(), said("user", "one")
    for reasoning in ("Of one.", "Of another.", "Of one."):
        under_test.store([asked], called("look:0", reasoning=reasoning))
    assert under_test.last(asked, called("look:0")) is None


def test_what_a_client_sends_itself_stays() -> None:
    under_test, ours = Remembering(), "call_" + "0" * 24
    under_test.store([], called(ours, reasoning="Mine."))
    assert under_test.last(called(ours, reasoning="")) == ""
    assert under_test.last(called(ours)) == "Mine."
    assert under_test.last(called(ours), namespace="another") is None


# The limit.


def test_it_keeps_to_its_limit_and_forgets_the_oldest() -> None:
    """I2: tokens, renderings and reasoning have one limit."""
    renders, limit = renderer(Template.named("chatml")), 30_000
    under_test = PastConversations(TOY, limit=limit)
    talks = [conversation(None, [f"{number:02d} " + "x" * 500, "b", "c"]) for number in range(50)]
    for number, talk in enumerate(talks):
        text, rendering = renders.prompt(talk[:1])
        reasoning: dict[tuple[str, ...], str] = {("", f"call_{number:024x}"): "x" * 100}
        for _ in range(2):  # Twice is once.
            under_test.store(past(text, *talk[:1], rendering=rendering, reasoning=reasoning))
        assert 0 < under_test.nbytes <= limit
    left = [under_test.rendering(talk, "") is not None for talk in talks]
    assert left == [False] * (50 - sum(left)) + [True] * sum(left)
    assert 3 < sum(left) < 15
    for number, is_left in enumerate(left):
        call = called(f"call_{number:024x}")
        assert (under_test.with_reasoning([call], "")[0][0].reasoning is not None) is is_left
        near = under_test.near("", "")
        assert (closest(near, talks[number][:1], "") is not None) is is_left
    under_test.store(past("x" * limit))
    assert [under_test.rendering(talk, "") is not None for talk in talks] == left, "too large to be stored"


def test_h5_a_namespace_pushes_out_nothing_of_one_that_has_less() -> None:
    """What one key remembers changes what its model reads: another key may not take it away."""
    under_test = PastConversations(TOY, limit=60_000)
    key = ("quiet", "call_" + "0" * 24)
    under_test.store(past("<|im_start|>quiet", namespace="quiet", reasoning={key: "Thought."}))
    for number in range(200):
        under_test.store(past(f"<|im_start|>{number} of the loud one", namespace="loud"))
    assert under_test.nbytes <= 60_000
    sent = called("call_" + "0" * 24)
    assert under_test.with_reasoning([sent], "quiet")[0][0].reasoning == "Thought."


def test_a_conversation_that_is_used_outlives_newer_ones() -> None:
    under_test = PastConversations(TOY, limit=20_000)
    under_test.store(past("<|im_start|>used"))
    for number in range(50):
        under_test.store(past(f"<|im_start|>{number} of others"))
        found = transcript(under_test, "<|im_start|>used again")
        assert found is not None
    assert under_test.near("<|im_start|>used", "")[0].text == "<|im_start|>used"


def test_what_is_gone_leaves_nothing_behind() -> None:
    under_test: Any = PastConversations(TOY, limit=20_000)
    sizes = []
    for number in range(60):
        namespace = f"namespace {number:02d}"
        key = (namespace, f"call_{number:024x}")
        under_test.store(past("<|im_start|>" + "x" * 20, namespace=namespace, reasoning={key: "Thought."}))
        sizes.append(size_of(under_test))
    assert max(sizes) < 1.1 * max(sizes[:15])
