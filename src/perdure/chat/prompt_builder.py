"""Prompt builder: the messages of a conversation as the tokens that a model reads, the reasoning that went
before calls of tools among them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from perdure.backend import Backend
from perdure.chat.message import Image, Message, Tool, ToolCall
from perdure.chat.normaliser import MessageNormaliser, Normalised
from perdure.chat.options import ChatOptions
from perdure.chat.parsing.family import Family, Markers
from perdure.chat.past_conversations import CallKeys, PastConversation, PastConversations, closest
from perdure.chat.reply import ChatDelta, ChatReply
from perdure.chat.template.template import Guard, Rendering, Template, TemplateRenderer
from perdure.chat.transcript import (
    MARK,
    ChatTokenizer,
    ImageTokens,
    Transcript,
    marked,
    shared_length,
    unguarded,
)
from perdure.config import checks_prompts
from perdure.decode.request import KeptPrefix, Reply, Request, check_prompt_size
from perdure.decode.stream import DeltaReader
from perdure.errors import PerdureError
from perdure.extension import part

if TYPE_CHECKING:
    from perdure.chat.difference import Difference
    from perdure.chat.parsing.prefill import Prefill
    from perdure.chat.prompt_rules import PromptRules


_SHORT = 1024
"""Characters of a text that is looked through once."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages as the model reads them, up to where its reply begins."""

    made: PastConversation
    """What it was made of, and what later prompts may go on from."""
    thinking: bool
    """Whether it has opened the model's reasoning."""
    checkpoint_at: tuple[int, ...] = ()
    pins: tuple[KeptPrefix, ...] = ()
    prefill: Prefill | None = None
    """The beginning of the reply, where a caller wrote it."""
    notes: tuple[str, ...] = ()
    """What the template does not show as it was given, and what was written instead."""
    difference: Difference | None = None
    """Where it departs from the prompt before it in its conversation."""
    expected: int = 0
    """Tokens that were read or written in that prompt."""

    @property
    def transcript(self) -> Transcript:
        return self.made.transcript

    @property
    def has_images(self) -> bool:
        return MARK in self.made.transcript.text and min(self.made.transcript.tokens) < 0

    def __len__(self) -> int:
        return len(self.made.transcript.tokens)


class Exchange(NamedTuple):
    """A prompt, the reply to it, and the transcript of both."""

    prompt: Prompt
    transcript: Transcript
    reply: ChatReply


ExchangePlan: TypeAlias = Generator[
    tuple[Request, DeltaReader[ChatDelta] | None], list[Reply], list[Exchange]
]


class PromptCheck(Protocol):
    """Checks where the words of prompts come from."""

    def check(
        self,
        text: str,
        messages: Sequence[Message],
        put_back: Mapping[str, str],
        tools: Sequence[Tool],
        variables: Mapping[str, Any] | None,
        now: datetime | None,
    ) -> object:
        """Raise for a word of a prompt that nobody said. `put_back` is what was remembered of calls."""
        ...


class ImageFiles(Protocol):
    """Where the files of images are that sessions name: their store."""

    def keep_file(self, namespace: str, digest: str, data: bytes) -> None: ...

    def file(self, namespace: str, digest: str) -> bytes | None: ...


class ImageReader(Protocol):
    """What turns images into tokens: an extension brings it."""

    def tokens(self, image: Image, namespace: str) -> Sequence[int]:
        """What stands for an image in a prompt, ids below zero among them. It may take seconds."""
        ...

    def keep(self, image: Image, namespace: str) -> None:
        """Have the file of an image that a session names."""
        ...

    def file(self, digest: str, namespace: str) -> bytes | None:
        """The file of an image that sessions name, as it was sent; None where it is gone or damaged."""
        ...

    def close(self) -> None: ...


class PromptBuilder:
    """Makes the prompts of one template. Safe from any thread.

    Only what is new in a conversation is tokenised: a reply's own tokens stand for its text, and so does
    whatever else was read before, wherever the new text still agrees with it.
    """

    def __init__(
        self,
        backend: Backend,
        template: Template,
        family: Family,
        tokenizer: ChatTokenizer,
        open_images: Callable[[], ImageReader],
    ) -> None:
        """`open_images` gives what reads images, or says why there is nothing."""
        self._backend = backend
        self._family = family
        self._tokenizer = tokenizer
        guard_field = _once(tokenizer.guard_field)
        guard = Guard(lambda text: unguarded(guard_field(text)), tokenizer.guard_name)
        self._open_images = open_images
        self._normaliser = MessageNormaliser(template, family.writer, guard)
        self._renderer = TemplateRenderer(template, guard)
        self._past = PastConversations(tokenizer)
        self._provenance: PromptCheck | None = None
        if checks_prompts():
            self._provenance = part("PERDURE_CHECK_PROMPTS", "inspection")(template, family.writer)
        self._needs_checkpoint = backend.model.memory.needs_checkpoint

    @cached_property
    def rules(self) -> PromptRules:
        """Loaded for prompts that no session wrote."""
        from perdure.chat.prompt_rules import PromptRules

        return PromptRules()

    @cached_property
    def _markers(self) -> Markers | None:
        return reasoning_markers(self._family, self._tokenizer)

    def prompt(
        self,
        messages: Sequence[Message],
        options: ChatOptions | None = None,
        *,
        namespace: str = "",
        known: Transcript | None = None,
        before: Rendering | None = None,
        must_fit: bool = False,
        anew: bool = False,
    ) -> Prompt:
        """Messages as tokens. `known` is a transcript that they may go on from, besides those remembered, of
        which `anew` uses none; `before` is how their beginning was rendered. What `must_fit` and surely does
        not is refused before it is tokenised."""
        options = options or ChatOptions()
        moved: tuple[str, ...] = ()
        images = self.image_tokens(messages, namespace)
        if images is not None:
            messages = with_marks(messages)
        sent = messages
        messages, put_back = self._past.with_reasoning(messages, namespace, options)
        if options.stable_prefix and known is None and before is None:
            messages, tools, moved = self.rules.apply(messages, options.tools, namespace)
            options = replace(options, tools=tools)
        messages = with_reasoning_apart(messages, self._markers)
        prefill: Prefill | None = None
        if options.continue_final_message:
            from perdure.chat.parsing.prefill import Prefill

            prefill = Prefill.of(messages, self._family)
        unchanged = len(before.messages) if before is not None and before.begins(messages) else 0
        normalised = self._normalised(messages, options, unchanged)
        if before is None and known is None:
            before = self._past.rendering(normalised.messages, namespace)
            if before is not None:
                # The very same messages are compared at once.
                same = before.messages + normalised.messages[len(before.messages) :]
                normalised = replace(normalised, messages=same)
        rendering = None
        if prefill is not None:
            text = self._continued(messages[:-1], prefill, options)
        elif not options.opens_reply:
            text = self._whole(normalised, options, reply_follows=False)
        else:
            text, rendering = self._rendered(normalised, options, before)
        if must_fit:
            check_prompt_size(text, self._backend.model, self._backend.n_ctx - 1)
        near = self._past.near(text, namespace)
        transcript = self._transcript(text, () if anew else near, known, images)
        if self._provenance is not None and images is None:
            model = self._backend.model
            read = b"".join(model.piece(token, special=True) for token in transcript.tokens)
            self._provenance.check(
                read.decode("utf-8", "replace"),
                sent,
                {key[-1]: thought for key, thought in put_back.items()},
                options.tools,
                options.variables,
                options.now,
            )
        if prefill is not None:
            thinking = prefill.part == "reasoning"
        else:
            thinking = self._family.reasoning is not None and self._family.opens_reasoning(text)
        needs_checkpoint = self._needs_checkpoint and prefill is None and options.opens_reply
        pins = self._pins(messages, options, transcript)
        departures = self._departures(messages, options, transcript, rendering) if needs_checkpoint else ()
        past = closest(near, messages, text)
        is_same = past is not None and past.is_said_in(messages)
        made = PastConversation(
            namespace,
            messages,
            options.tools,
            normalised.variables,
            transcript,
            rendering=rendering,
            reasoning=put_back,
            conversation=past.conversation if past is not None and is_same else secrets.token_hex(8),
            has_kept_images=known is not None and MARK in known.text,
        )
        difference, expected = None, 0
        if past is not None:
            from perdure.chat.difference import first_difference, tokens_at

            shared = shared_length(text, past.text)
            expected = tokens_at(transcript.cuts, shared)
            difference = first_difference(past, made, shared)
        return Prompt(
            made,
            thinking=thinking,
            checkpoint_at=tuple(sorted({*departures, *(pin.length for pin in pins)})),
            pins=pins,
            prefill=prefill,
            notes=(*moved, *normalised.notes),
            difference=difference,
            expected=expected,
        )

    def reads_alike(self, first: Sequence[Message], second: Sequence[Message], options: ChatOptions) -> bool:
        """Whether the template makes the same text of two histories."""

        def text(messages: Sequence[Message]) -> str:
            messages = with_reasoning_apart(with_marks(messages), self._markers)
            return self._whole(self._normalised(messages, options), options, reply_follows=True)

        try:
            return text(first) == text(second)
        except PerdureError:
            # What cannot be shown is refused where it is asked for.
            return False

    def remember(
        self,
        prompt: Prompt,
        whole: Transcript,
        history: Sequence[Message],
        options: ChatOptions,
        reply: Message,
    ) -> None:
        """Remember a prompt with the reply to it, for prompts that go on from both. `history` and `options`
        are what it was asked with."""
        made, reasoning = prompt.made, dict(prompt.made.reasoning)
        history = with_marks(history)
        if reply.reasoning and reply.tool_calls:
            reasoning[CallKeys(made.namespace, options, history).of(reply)] = reply.reasoning
        messages = (*made.messages, reply)
        self._past.store(replace(made, messages=messages, transcript=whole, reasoning=reasoning))

    def beginning(
        self,
        messages: Sequence[Message],
        options: ChatOptions,
        *,
        namespace: str,
        known: Transcript | None,
        before: Rendering | None = None,
    ) -> Sequence[int]:
        """The tokens that every prompt of these messages and one more begins with. They are as they were made
        for the template before; `known` is a transcript that they may go on from."""
        options = replace(options, continue_final_message=False, add_generation_prompt=None, cache_marks=())
        images = self.image_tokens(messages, namespace)
        messages = with_marks(messages)
        calls = messages[-1].tool_calls if messages else ()
        texts = []
        for word in ("y", "z"):
            more = Message(role="user", content=word)
            if calls:
                more = Message(role="tool", content=word, tool_call_id=calls[0].id, name=calls[0].name)
            normalised = self._normalised((*messages, more), options)
            texts.append(self._rendered(normalised, options, before)[0])
        shared = shared_length(*texts)
        transcript = self._transcript(texts[0], self._past.near(texts[0], namespace), known, images)
        length = max((tokens for chars, tokens in transcript.cuts if chars <= shared), default=0)
        return transcript.tokens[:length]

    # Text.

    def _normalised(
        self, messages: Sequence[Message], options: ChatOptions, unchanged: int = 0
    ) -> Normalised:
        """Messages and tools as the template takes them, and all variables."""
        normalised = self._normaliser.normalise(
            messages,
            options.tools,
            keep_reasoning=options.keep_reasoning,
            now=options.now,
            unchanged=unchanged,
        )
        if not options.variables:
            return normalised
        return replace(normalised, variables={**normalised.variables, **options.variables})

    def _whole(self, normalised: Normalised, options: ChatOptions, *, reply_follows: bool) -> str:
        return self._renderer.whole(
            normalised.messages,
            tools=normalised.tools,
            variables=normalised.variables,
            reply_follows=reply_follows,
            now=options.now,
        )

    def _rendered(
        self, normalised: Normalised, options: ChatOptions, before: Rendering | None
    ) -> tuple[str, Rendering | None]:
        return self._renderer.prompt(
            normalised.messages,
            tools=normalised.tools,
            variables=normalised.variables,
            before=before,
            now=options.now,
        )

    def _continued(self, earlier: tuple[Message, ...], prefill: Prefill, options: ChatOptions) -> str:
        def render(messages: tuple[Message, ...], reply_follows: bool) -> str:
            return self._whole(self._normalised(messages, options), options, reply_follows=reply_follows)

        return prefill.text(earlier, render, self._tokenizer.guard_field, self._family)

    def image_tokens(self, messages: Sequence[Message], namespace: str) -> ImageTokens | None:
        """What gives the tokens of the images in messages; None where there are none."""
        images = {image.name: image for message in messages for _, image in message.images}
        if not images:
            return None
        reader = self._open_images()
        return lambda name: reader.tokens(images[name], namespace)

    def _transcript(
        self,
        text: str,
        near: Sequence[PastConversation],
        known: Transcript | None,
        images: ImageTokens | None = None,
    ) -> Transcript:
        """The tokens of a text. Only what is new of it is tokenised."""
        base = self._tokenizer.shared_prefix(text, known) if known is not None else None
        if base is None or base is not known:
            # What goes on from all of `known` needs no other.
            near = [each for each in near if not each.has_kept_images]
            bases = [each for each in (base, self._past.transcript(text, near)) if each is not None]
            base = max(bases, key=lambda each: len(each.text), default=None)
        new = text[len(base.text) :] if base is not None else text
        return base if base is not None and not new else self._tokenizer.encode(new, base, images)

    # What is to be kept.

    def _pins(
        self, messages: tuple[Message, ...], options: ChatOptions, prompt: Transcript
    ) -> tuple[KeptPrefix, ...]:
        """The cache marks of a request, as lengths of its prompt."""
        pins = []
        for mark in options.cache_marks:
            first = messages[: max(0, len(messages) - (mark.after or 0))]
            if length := self._length_up_to(first, options, prompt):
                pins.append(replace(mark, length=length, after=None))
        return tuple(pins)

    def _length_up_to(self, first: tuple[Message, ...], options: ChatOptions, prompt: Transcript) -> int:
        """The tokens of a prompt that its `first` messages alone decide. Some templates insist that a user
        speaks, or speaks last: what all prompts of such a beginning share is then seen by another one."""
        for more in ((), (Message(role="user", content="z"),)):
            with suppress(PerdureError):
                text = self._whole(self._normalised((*first, *more), options), options, reply_follows=False)
                shared = shared_length(text, prompt.text)
                return max((tokens for chars, tokens in prompt.cuts if chars <= shared), default=0)
        return 0

    # Checkpoints.

    def _departures(
        self,
        messages: tuple[Message, ...],
        options: ChatOptions,
        prompt: Transcript,
        rendering: Rendering | None,
    ) -> tuple[int, ...]:
        """Where the next prompt of this conversation will differ from this one, if it does so before its end.

        Templates strip reasoning from earlier turns, or open it for the reply alone; while the model works
        with tools they may do neither.
        """
        thought = "y" if self._family.reasoning else None
        answer = Message(role="assistant", content="x", reasoning=thought)
        nexts = [(answer, Message(role="user", content="z"))]
        if options.tools:
            call = ToolCall(id="zq1234567", name=options.tools[0].name, arguments="{}")
            called = Message(role="assistant", reasoning=thought, tool_calls=(call,))
            result = Message(role="tool", content="z", tool_call_id=call.id, name=call.name)
            nexts.append((called, result))
        departures = set()
        for more in nexts:
            with suppress(PerdureError):
                later, _ = self._rendered(self._normalised((*messages, *more), options), options, rendering)
                shared = shared_length(later, prompt.text)
                if shared < len(prompt.text):
                    departures.update([tokens for chars, tokens in prompt.cuts if chars <= shared][-1:])
        return tuple(sorted(departures))


def reasoning_markers(family: Family, tokenizer: ChatTokenizer) -> Markers | None:
    """The markers of reasoning, where they are marks of the model."""
    markers = family.reasoning
    return markers if markers is not None and markers.close in tokenizer.marks.values() else None


def with_reasoning_apart(messages: Sequence[Message], markers: Markers | None) -> tuple[Message, ...]:
    """A client may send reasoning back within the text. Its marks are guarded there, so that the template
    would no longer find them."""
    if markers is None:
        return tuple(messages)
    apart = []
    for message in messages:
        content = message.content
        if message.role == "assistant" and content and markers.close in content and not message.reasoning:
            reasoning, _, answer = content.rpartition(markers.close)
            reasoning = reasoning.rpartition(markers.open)[2].strip("\n")
            message = replace(message, reasoning=reasoning or None, content=answer.lstrip("\n"))
        apart.append(message)
    return tuple(apart)


def with_marks(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Messages with marks in their text in place of images."""
    return tuple(
        replace(message, content=marked(message.content or "", message.images), images=())
        if message.images
        else message
        for message in messages
    )


def _once(guard: Callable[[str], str]) -> Callable[[str], str]:
    """A guard that looks through a short text once: those of a history come again with every prompt."""
    known = lru_cache(maxsize=4096)(guard)
    return lambda text: known(text) if len(text) <= _SHORT else guard(text)
