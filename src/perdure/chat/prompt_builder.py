"""Prompt builder: the messages of a conversation as the tokens that a model reads, the reasoning that went
before calls of tools among them."""

from __future__ import annotations

import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

from perdure.backend import Backend
from perdure.chat.difference import Difference, PastPrompt, PastPrompts, first_difference, tokens_at
from perdure.chat.message import Message, Tool, ToolCall
from perdure.chat.normaliser import MessageNormaliser, Normalised
from perdure.chat.options import ChatOptions
from perdure.chat.parsing.family import Family, Markers
from perdure.chat.reply import Prefill
from perdure.chat.template.template import Guard, Rendering, RenderingCache, Template, TemplateRenderer
from perdure.chat.transcript import ChatTokenizer, Transcript, TranscriptCache, shared_length
from perdure.chat.volatile import VolatileText
from perdure.decode.request import KeptPrefix, check_prompt_size
from perdure.errors import PerdureError

_Key = tuple[str, ...]
_LIMIT = 4 << 20
"""Characters of reasoning that are remembered."""
_SHORT = 1024
"""Characters of a text that is looked through once."""
_OURS = re.compile(r"call_[0-9a-f]{24}")
"""An id that was drawn here, and so is of one call only."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages as the model reads them, up to where its reply begins."""

    transcript: Transcript
    thinking: bool
    """Whether it has opened the model's reasoning."""
    checkpoint_at: tuple[int, ...] = ()
    pins: tuple[KeptPrefix, ...] = ()
    rendering: Rendering | None = None
    """What the next prompt of the same conversation may go on from."""
    prefill: Prefill | None = None
    """The beginning of the reply, where a caller wrote it."""
    notes: tuple[str, ...] = ()
    """What the template does not show as it was given, and what was written instead."""
    difference: Difference | None = None
    """Where it departs from the prompt before it in its conversation."""
    expected: int = 0
    """Tokens that were read or written in that prompt."""
    past: PastPrompt | None = None
    """That prompt."""
    conversation: str = ""
    """What tells its conversation from others, as far as can be told by the messages."""
    about: tuple[tuple[Message, ...], tuple[Tool, ...], Mapping[str, Any]] = ((), (), MappingProxyType({}))
    """Messages, tools and variables that it was made of."""

    def __len__(self) -> int:
        return len(self.transcript.tokens)


class PromptBuilder:
    """Makes the prompts of one template. Safe from any thread.

    Only what is new in a conversation is tokenised: a reply's own tokens stand for its text, and so does
    whatever else was read before, wherever the new text still agrees with it.
    """

    def __init__(
        self, backend: Backend, template: Template, family: Family, tokenizer: ChatTokenizer
    ) -> None:
        self._backend = backend
        self._family = family
        self._tokenizer = tokenizer
        self._transcript_cache = TranscriptCache(tokenizer)
        guard = Guard(_once(tokenizer.guard_field), tokenizer.guard_name)
        self._normaliser = MessageNormaliser(template, family.writer, guard)
        self._renderer = TemplateRenderer(template, guard)
        self._rendering_cache = RenderingCache()
        self._reasoning_cache = ReasoningCache()
        self._volatile = VolatileText()
        self._past = PastPrompts()
        self._needs_checkpoint = backend.model.memory.needs_checkpoint

    @cached_property
    def _markers(self) -> Markers | None:
        """The markers of reasoning, where they are marks of the model."""
        markers = self._family.reasoning
        return markers if markers is not None and markers.close in self._tokenizer.marks.values() else None

    def prompt(
        self,
        messages: Sequence[Message],
        options: ChatOptions | None = None,
        *,
        namespace: str = "",
        known: Transcript | None = None,
        before: Rendering | None = None,
        must_fit: bool = False,
    ) -> Prompt:
        """Messages as tokens. `known` is a transcript that they may go on from, besides those remembered;
        `before` is how their beginning was rendered. What `must_fit` and surely does not is refused before
        it is tokenised."""
        options = options or ChatOptions()
        moved: tuple[str, ...] = ()
        if options.stable_prefix and known is None and before is None:
            messages, about_text = self._volatile.stabilise(messages, namespace)
            tools, about_tools = self._volatile.ordered(options.tools, namespace)
            options = replace(options, tools=tools)
            moved = (*about_text, *about_tools)
        messages = self._reasoning_cache.put_back(messages, namespace)
        if self._markers is not None:
            messages = tuple(map(self._with_reasoning_apart, messages))
        prefill = Prefill.of(messages, self._family) if options.continue_final_message else None
        unchanged = len(before.messages) if before is not None and before.begins(messages) else 0
        normalised = self._normalised(messages, options, unchanged)
        if before is None and known is None:
            before = self._rendering_cache.lookup(normalised.messages, namespace)
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
        if rendering is not None and known is None:
            self._rendering_cache.store(rendering, namespace, instead_of=before)
        transcript = self._transcript(text, namespace, known)
        if prefill is not None:
            thinking = prefill.part == "reasoning"
        else:
            thinking = self._family.reasoning is not None and self._family.opens_reasoning(text)
        needs_checkpoint = self._needs_checkpoint and prefill is None and options.opens_reply
        pins = self._pins(messages, options, transcript)
        departures = self._departures(messages, options, transcript, rendering) if needs_checkpoint else ()
        past = self._past.closest(messages, text, namespace)
        difference, expected = None, 0
        if past is not None:
            shared = shared_length(text, past.text)
            expected = tokens_at(transcript.cuts, shared)
            difference = first_difference(
                past, messages, options.tools, normalised.variables, text, transcript.cuts, shared
            )
        return Prompt(
            transcript,
            thinking=thinking,
            checkpoint_at=tuple(sorted({*departures, *(pin.length for pin in pins)})),
            pins=pins,
            rendering=rendering,
            prefill=prefill,
            notes=(*moved, *normalised.notes),
            difference=difference,
            expected=expected,
            past=past,
            conversation=(
                past.conversation if past is not None and past.is_said_in(messages) else secrets.token_hex(8)
            ),
            about=(messages, options.tools, normalised.variables),
        )

    def stabilise(self, messages: Sequence[Message], namespace: str) -> tuple[Message, ...]:
        """The messages with volatile text in its place."""
        return self._volatile.stabilise(messages, namespace)[0]

    def remember(
        self, prompt: Prompt, whole: Transcript, history: Sequence[Message], reply: Message, namespace: str
    ) -> None:
        """Remember a prompt with the reply to it, for prompts that go on from both."""
        self._transcript_cache.store(whole, namespace)
        messages, tools, variables = prompt.about
        past = PastPrompt((*messages, reply), tools, variables, whole.text, prompt.conversation)
        goes_on = prompt.past is not None and prompt.difference is None
        self._past.store(past, namespace, prompt.past if goes_on else None)
        self._reasoning_cache.store(history, reply, namespace)

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
        calls = messages[-1].tool_calls if messages else ()
        texts = []
        for word in ("y", "z"):
            more = Message(role="user", content=word)
            if calls:
                more = Message(role="tool", content=word, tool_call_id=calls[0].id, name=calls[0].name)
            normalised = self._normalised((*messages, more), options)
            texts.append(self._rendered(normalised, options, before)[0])
        shared = shared_length(*texts)
        transcript = self._transcript(texts[0], namespace, known)
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

    def _transcript(self, text: str, namespace: str, known: Transcript | None) -> Transcript:
        """The tokens of a text. Only what is new of it is tokenised."""
        base = self._tokenizer.shared_prefix(text, known) if known is not None else None
        if base is None or base is not known:
            # What goes on from all of `known` needs no other.
            bases = [
                each for each in (base, self._transcript_cache.lookup(text, namespace)) if each is not None
            ]
            base = max(bases, key=lambda each: len(each.text), default=None)
        new = text[len(base.text) :] if base is not None else text
        return base if base is not None and not new else self._tokenizer.encode(new, base)

    # Reasoning.

    def _with_reasoning_apart(self, message: Message) -> Message:
        """A client may send reasoning back within the text. Its marks are guarded there, so that the template
        would no longer find them."""
        markers, content = self._markers, message.content
        if not content or markers is None or markers.close not in content:
            return message
        if message.role != "assistant" or message.reasoning:
            return message
        reasoning, _, answer = content.rpartition(markers.close)
        reasoning = reasoning.rpartition(markers.open)[2].strip("\n")
        return replace(message, reasoning=reasoning or None, content=answer.lstrip("\n"))

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


def _once(guard: Callable[[str], str]) -> Callable[[str], str]:
    """A guard that looks through a short text once: those of a history come again with every prompt."""
    known = lru_cache(maxsize=4096)(guard)
    return lambda text: known(text) if len(text) <= _SHORT else guard(text)


class ReasoningCache:
    """The latest reasoning of replies with calls, by namespace, up to a number of characters. Safe from any
    thread.

    Templates show it while the model works with tools, but clients of OpenAI's shape do not send it back.
    """

    def __init__(self, *, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._held: OrderedDict[_Key, str] = OrderedDict()
        self._chars = 0

    def store(self, messages: Sequence[Message], reply: Message, namespace: str) -> None:
        """Remember the reasoning of a reply to `messages`."""
        if not reply.reasoning or not reply.tool_calls:
            return
        key = _key(messages[-1] if messages else None, reply, namespace)
        size = _size(key, reply.reasoning)
        if size > self._limit:
            return
        with self._lock:
            if (gone := self._held.pop(key, None)) is not None:
                self._chars -= _size(key, gone)
            self._held[key] = reply.reasoning
            self._chars += size
            while self._chars > self._limit:
                self._chars -= _size(*self._held.popitem(last=False))

    def put_back(self, messages: Sequence[Message], namespace: str) -> tuple[Message, ...]:
        """The messages, with the reasoning of calls that came without it."""
        if not self._held:
            return tuple(messages)
        restored = []
        for index, message in enumerate(messages):
            if message.tool_calls and message.reasoning is None:
                key = _key(messages[index - 1] if index else None, message, namespace)
                with self._lock:
                    reasoning = self._held.get(key)
                    if reasoning is not None:
                        self._held.move_to_end(key)
                if reasoning is not None:
                    message = replace(message, reasoning=reasoning)
            restored.append(message)
        return tuple(restored)


def _key(before: Message | None, reply: Message, namespace: str) -> _Key:
    """The ids of the calls. Those that a model writes may come again in another conversation, so that the
    message before them counts too."""
    ids = tuple(call.id for call in reply.tool_calls)
    if all(_OURS.fullmatch(each) for each in ids):
        return (namespace, *ids)
    context = "" if before is None else f"{before.role} {before.tool_call_id or ''} {before.content or ''}"
    return (namespace, *ids, *(call.name for call in reply.tool_calls), context)


def _size(key: _Key, reasoning: str) -> int:
    return len(reasoning) + sum(map(len, key))
