"""C13: no word of another conversation, whatever template, whatever an agent does to its history."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import perdure
from chat.test_normaliser import ALL
from perdure import Runtime, Template
from perdure.chat.formats.registry import family
from perdure.chat.message import Message
from perdure.chat.past_conversations import PastConversations
from perdure.chat.prompt_rules import PromptRules, RuledPrompt
from perdure.chat.transcript import ChatTokenizer
from perdure.decode.request import Request
from perdure.ext.inspection.provenance import Provenance, ProvenanceError
from perdure.testing.toy import ToyModel

PLANTED = re.compile(r"zq[a-z]+\d+")
IN_SYSTEM = {
    "billing header": "x-anthropic-billing-header: cc_version={};",
    "tokens left": "<total_tokens>{} tokens left</total_tokens>",
    "date": "Today's date: 2026-11-17 {}",
    "percentage": "Memory: 5% of {} used",
}
IN_MESSAGES = {
    "reminder": "<system-reminder>Mind {}.</system-reminder>",
    "tokens left, behind a message": "<total_tokens>{} left</total_tokens>",
    "task nudge": "The TodoWrite tool hasn't been used recently: {}.",
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("look", "fly", "wait")
]


@contextmanager
def checked(template: Template | None = None) -> Iterator[tuple[Runtime, list[str]]]:
    """A toy whose prompts are checked, and those that it has read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERDURE_CHECK_PROMPTS", "1")
        rt = perdure.open(ToyModel(), n_ctx=1 << 14, slots=2, template=template)
        # Made when it is first asked for.
        assert rt.chat_format.tokenizer is not None
    prompts: list[str] = []
    submit = rt.backend.submit

    def seen(request: Request) -> Any:
        prompts.append(rt.model.detokenize(request.prompt, special=True))
        return submit(request)

    with rt, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rt.backend, "submit", seen)
        yield rt, prompts


class Agent:
    """A client with habits. Both of them say the same, but for what changes."""

    def __init__(self, letter: str, namespace: str) -> None:
        self._letter = letter
        self._count = 0
        self._turns: list[list[str]] = []
        self.namespace = namespace

    def _planted(self, form: str) -> str:
        self._count += 1
        return form.format(f"zq{self._letter}{self._count}")

    def request(self, in_system: Sequence[str], in_message: Sequence[str], earlier: str) -> list[Message]:
        """The next request, with volatile text of these kinds, and of what came before."""
        lines = [self._planted(IN_SYSTEM[kind]) for kind in in_system]
        self._turns.append([self._planted(IN_MESSAGES[kind]) for kind in in_message])
        messages = [Message(role="system", content="\n".join(["You are an agent.", *lines, "Be brief."]))]
        moved: list[str] = []
        for at, texts in enumerate(self._turns):
            is_last = at == len(self._turns) - 1
            shown = texts if is_last or earlier in ("kept", "duplicated") else []
            if not is_last and earlier in ("moved", "duplicated"):
                moved += texts
            if is_last:
                shown = [*shown, *moved]
            first, behind = shown[:1], shown[1:]
            messages.append(Message(role="user", content="\n".join([f"Question {at}.", *first])))
            messages += [Message(role="system", content=text) for text in behind]
            if not is_last:
                messages.append(Message(role="assistant", content="OK"))
        return messages


steps = st.tuples(
    st.sampled_from((0, 1)),
    st.lists(st.sampled_from(sorted(IN_SYSTEM)), unique=True, max_size=2),
    st.lists(st.sampled_from(sorted(IN_MESSAGES)), unique=True, max_size=2),
    st.sampled_from(("kept", "dropped", "moved", "duplicated")),
    st.permutations(TOOLS),
    st.booleans(),
)


@settings(max_examples=50)
@given(
    path=st.sampled_from(ALL),
    shared=st.booleans(),
    script=st.lists(steps, min_size=2, max_size=6),
)
def test_two_conversations_with_the_same_beginning_never_meet(
    path: Path, shared: bool, script: list[Any]
) -> None:
    """C13, A2: every word that was sent is read as often as without any rule, and none of the other's."""
    spaces = ["", ""] if shared else ["a", "b"]
    agents = [Agent("a", spaces[0]), Agent("b", spaces[1])]
    with checked(Template.from_file(path, bos="<s>", eos="</s>")) as (rt, prompts):
        for turn, (which, in_system, in_message, earlier, tools, has_tools) in enumerate(script):
            agent = agents[which]
            sent = agent.request(in_system, in_message, earlier)
            options: dict[str, Any] = {"max_tokens": 1, "tool_choice": "none" if has_tools else "auto"}
            options["tools"] = tools if has_tools else None
            rt.chat(sent, namespace=agent.namespace, stable_prefix=True, **options)
            stable = Counter(PLANTED.findall(prompts[-1]))
            rt.chat(sent, namespace=f"{turn} as sent", **options)
            as_sent = Counter(PLANTED.findall(prompts[-1]))
            words = [word for message in sent for word in PLANTED.findall(message.content or "")]
            assert stable == as_sent
            assert stable.keys() == set(words)


def test_a_word_that_nobody_said_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """C13: planted in what was moved, in what is put back, and in remembered tokens."""
    said = [Message(role="user", content="Hello there."), Message(role="assistant", content="OK")]
    asked = [*said, Message(role="user", content="Go on.")]
    with checked() as (rt, _):
        rt.chat(asked, max_tokens=1)
        with monkeypatch.context() as patch:
            foreign = (*asked[:2], Message(role="user", content="Go on. marzipan"))
            patch.setattr(PromptRules, "apply", lambda *_: RuledPrompt(foreign, ()))
            with pytest.raises(ProvenanceError, match="'marzipan'"):
                rt.chat(asked, max_tokens=1, stable_prefix=True)
        with monkeypatch.context() as patch:
            thought = (asked[0], Message(role="assistant", content="marzipan"), asked[2])
            patch.setattr(PastConversations, "with_reasoning", lambda *_: (thought, {}))
            with pytest.raises(ProvenanceError, match="'marzipan'"):
                rt.chat(asked, max_tokens=1)
        with monkeypatch.context() as patch:
            other = rt.chat_format.prompt([Message(role="user", content="marzipan")]).transcript
            patch.setattr(ChatTokenizer, "encode", lambda *_: other)
            with pytest.raises(ProvenanceError, match="'marzipan'"):
                rt.chat([*asked, *said, asked[2]], max_tokens=1)


def test_every_word_has_a_source() -> None:
    template = Template("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}reply:")
    messages = [Message(role="user", content='say "hi"'), Message(role="assistant", content="hi")]
    found = Provenance(template, family("hermes").writer).check(
        template.render(messages), messages, {}, (), None, None
    )
    assert (found["say"], found["hi"], found["reply"]) == ("messages[0]", "messages[1]", "the template")
