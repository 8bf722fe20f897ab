"""Going on from the beginning of a reply that a caller wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import perdure
from chat.test_chat_format import saying, toy, user
from perdure import Runtime, Template
from perdure.chat.formats.registry import detect
from perdure.chat.message import Message
from perdure.chat.options import ChatOptions
from perdure.chat.parsing.prefill import Prefill
from perdure.errors import InvalidInputError
from perdure.testing.toy import ToyModel

FOLDER = Path(__file__).parent / "templates"
ALL = [*sorted(FOLDER.glob("*.jinja")), *sorted((FOLDER / "llama.cpp").glob("*.jinja"))]
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def begun(content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.fixture
def rt() -> Any:
    with toy(n_ctx=1024) as runtime:
        yield runtime


def test_the_reply_goes_on_in_the_middle_of_a_word(rt: Runtime) -> None:
    messages = [user("Colour?"), begun("It is gre")]
    reply = rt.chat(messages, continue_final_message=True, processors=[saying("en.", rt.model)])
    assert (reply.text, reply.whole.content) == ("en.", "It is green.")
    prompt = rt.model.detokenize(
        rt.chat_format.prompt(
            [Message.parse(each) for each in messages], _options(continue_final_message=True)
        ).transcript.tokens,
        special=True,
    )
    assert prompt == "<|im_start|>user\nColour?<|im_end|>\n<|im_start|>assistant\nIt is gre"


def test_white_space_at_the_seam_is_kept(rt: Runtime) -> None:
    for start, rest in (("It is ", "green."), ("It is", " green."), ("Lines:\n", "\n one")):
        messages = [user("Colour?"), begun(start)]
        reply = rt.chat(messages, continue_final_message=True, processors=[saying(rest, rt.model)])
        assert reply.whole.content == start + rest


def test_the_whole_is_read_from_the_cache_in_the_next_turn(rt: Runtime) -> None:
    """C2: the tokens of the beginning and of the rest stand for the whole message."""
    messages = [user("Colour?"), begun("It is gre")]
    reply = rt.chat(messages, continue_final_message=True, processors=[saying("en.", rt.model)])
    later = rt.chat([messages[0], reply.whole, user("And?")], max_tokens=2)
    read = reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert later.usage.cached_tokens >= read - 1


def test_reasoning_goes_on_too(rt: Runtime) -> None:
    with toy(n_ctx=1024, template=Template(THINKS)) as thinking:
        for start in (begun(reasoning="I th"), begun("<think>\nI th")):
            reply = thinking.chat(
                [user("Colour?"), start],
                continue_final_message=True,
                processors=[saying("ink so.\n</think>\n\nGreen.", thinking.model)],
            )
            assert (reply.reasoning, reply.text) == ("ink so.", "Green.")
            assert (reply.whole.reasoning, reply.whole.content) == ("I think so.", "Green.")


def test_an_answer_that_was_begun_is_no_reasoning() -> None:
    """Though the template opens reasoning for a reply."""
    with toy(n_ctx=1024, template=Template(THINKS)) as rt:
        reply = rt.chat(
            [user("Colour?"), begun("Gre", reasoning="Hm.")],
            continue_final_message=True,
            processors=[saying("en.", rt.model)],
        )
        assert (reply.text, reply.reasoning) == ("en.", None)


def test_a_schema_holds_only_the_rest(rt: Runtime) -> None:
    reply = rt.chat([user("x"), begun("Answer: ")], continue_final_message=True, regex="(yes|no)", seed=1)
    assert reply.text in ("yes", "no")


def test_samples_and_log_probabilities(rt: Runtime) -> None:
    """`n` and `logprobs` with a beginning."""
    job = rt.submit_chat(
        [user("x"), begun("So ")], continue_final_message=True, n=3, logprobs=2, max_tokens=6, seed=2
    )
    replies = job.replies()
    assert len({reply.tokens for reply in replies}) > 1
    for reply in replies:
        assert reply.logprobs is not None
        assert len(reply.logprobs) == len(reply.tokens)
        assert (reply.whole.content or "").startswith("So ")


def test_a_session_keeps_the_whole(tmp_path: Path) -> None:
    with perdure.open(ToyModel(), n_ctx=1024, slots=1, store=tmp_path) as rt:
        session = rt.session("a")
        said = [user("Colour?"), begun("It is gre")]
        session.say(said, continue_final_message=True, processors=[saying("en.", rt.model)])
        assert [message.content for message in session.messages()] == ["Colour?", "It is green."]
        reply = session.say("And?", max_tokens=2)
        assert reply.usage.cached_tokens > 0
    with perdure.open(ToyModel(), n_ctx=1024, slots=1, store=tmp_path) as rt:
        assert rt.session("a").messages()[1].content == "It is green."


@pytest.mark.parametrize(
    ("messages", "settings", "words"),
    [
        ([user("x")], {"continue_final_message": True}, "the last one is of the user"),
        (
            [user("x"), begun(tool_calls=[{"id": "a", "function": {"name": "f", "arguments": "{}"}}])],
            {"continue_final_message": True},
            "at its end",
        ),
        (
            [user("x"), begun("y")],
            {"continue_final_message": True, "add_generation_prompt": True},
            "set one of them",
        ),
        ([user("x"), begun("y")], {"continue_final_message": "yes"}, "true or false"),
    ],
)
def test_what_cannot_go_on_is_refused(
    rt: Runtime, messages: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words):
        rt.chat(messages, max_tokens=1, **settings)


def test_a_prompt_without_the_opening_of_a_reply(rt: Runtime) -> None:
    """`add_generation_prompt=False`, as vLLM takes it."""
    prompt = rt.chat_format.prompt(
        [Message(role="user", content="Hi")], _options(add_generation_prompt=False)
    )
    assert prompt.transcript.text == "<|im_start|>user\nHi<|im_end|>\n"
    assert rt.chat([user("Hi")], add_generation_prompt=False, max_tokens=3).usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_every_template_can_go_on(path: Path) -> None:
    """The prompt ends with the words, in the turn of the assistant, and no end of a turn behind them."""
    template = Template(path.read_text(), bos="<s>", eos="</s>")
    family = detect(template.source)
    with perdure.open(ToyModel(), n_ctx=8192, slots=1, template=template) as rt:
        earlier = (Message(role="user", content="zquser"),)
        for start in (
            Message(role="assistant", content="zqanswer "),
            Message(role="assistant", content="zqanswer", reasoning="zqthought"),
        ):
            options = _options(continue_final_message=True)
            text = rt.chat_format.prompt([*earlier, start], options).transcript.text
            assert text.endswith(start.content or "")
            assert text.index("zquser") < text.index("zqanswer")
        if family.reasoning is not None:
            start = Message(role="assistant", reasoning="zqthought")
            prompt = rt.chat_format.prompt([*earlier, start], _options(continue_final_message=True))
            assert prompt.transcript.text.endswith("zqthought")
            assert prompt.thinking
            shown = prompt.transcript.text.rpartition("zquser")[2]
            # Where the opener is words of the reasoning, the reasoning has it.
            assert family.reasoning.opens_in_words or family.reasoning.open.strip() in shown


def test_the_beginning_of_a_message_is_found_by_its_content() -> None:
    messages = (Message(role="user", content="x"), Message(role="assistant", content="y", reasoning="z"))
    assert Prefill.of(messages, detect(THINKS)).part == "content"


def _options(**settings: Any) -> Any:
    return ChatOptions(**settings)
