"""A model's way of talking: messages to tokens, and replies back to messages."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from perdure.backend import Backend
from perdure.chat.family import Family, Reader, detect
from perdure.chat.job import Budget, ChatJob, Shift
from perdure.chat.message import Message, Tool, parse_messages
from perdure.chat.overflow import Overflow, check_policy, drop_oldest, overflow
from perdure.chat.recall import Recall
from perdure.chat.rendering import Renderer, Rendering
from perdure.chat.renderings import Renderings
from perdure.chat.reply import ChatReply
from perdure.chat.template import Template
from perdure.chat.transcript import Scribe, Transcript, common
from perdure.decode.job import Job
from perdure.decode.request import Request
from perdure.engine.contract import MemoryKind
from perdure.errors import ContextOverflow, InvalidInputError, PerdureError

ReasoningMode = Literal["show", "hide", "capture"]
ToolChoice = str | Mapping[str, Any]
"""none, auto, required, or which one: its name, or `{"type": "function", "function": {"name": …}}`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages as the model reads them, up to where its reply begins."""

    transcript: Transcript
    new: str
    """The text that had to be tokenised."""
    thinking: bool
    """Whether it has opened the model's reasoning."""
    keep_at: tuple[int, ...] = ()
    rendering: Rendering | None = None
    """What the next prompt of the same conversation may go on from."""

    def __len__(self) -> int:
        return len(self.transcript.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked of a conversation besides its messages."""

    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningMode = "capture"
    reasoning_budget: int | None = None
    overflow: Overflow = "error"
    variables: Mapping[str, Any] | None = None
    """For the template."""

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """What the template is told of."""
        return () if self.tool_choice == "none" else self.tools

    def __post_init__(self) -> None:
        check_policy(self.overflow)
        if self.reasoning not in ("show", "hide", "capture"):
            raise InvalidInputError(f"reasoning is one of show, hide, capture, got {self.reasoning!r}")
        budget = self.reasoning_budget
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise InvalidInputError(f"reasoning_budget is None or a number of tokens from 0, got {budget!r}")

    @classmethod
    def take(cls, settings: dict[str, Any]) -> Wish:
        """The wish among a caller's keywords, which are taken out of `settings`."""
        found = {name: settings.pop(name) for name in list(settings) if name in cls.__dataclass_fields__}
        tools = found.pop("tools", None)
        return cls(tools=tuple(Tool.parse(tool) for tool in tools or ()), **found)


class Speaker:
    """Talks to one model in its own format. Safe from any thread.

    Only what is new in a conversation is tokenised: a reply's own tokens stand for its text, and so does
    whatever else was read before, wherever the new text still agrees with it.
    """

    def __init__(self, backend: Backend, template: Template, family: Family) -> None:
        self.template = template
        self.family = family
        self._backend = backend
        self.scribe = Scribe(backend.model)
        self._recall = Recall(self.scribe)
        self._renderer = Renderer(template, self._guarded)
        self._renderings = Renderings()
        self._returns = backend.model.memory.kind is not MemoryKind.FULL

    @classmethod
    def of(cls, backend: Backend, chosen: str | os.PathLike[str] | Template | None = None) -> Speaker:
        """For the model's own template, or for another: one that is named, or in a file."""
        template = _template(backend, chosen)
        architecture = backend.model.metadata.get("general.architecture", "")
        return cls(backend, template, detect(template.source, architecture))

    @property
    def n_ctx(self) -> int:
        return self._backend.n_ctx

    def prompt(
        self,
        messages: Sequence[Message],
        wish: Wish | None = None,
        *,
        namespace: str = "",
        known: Transcript | None = None,
        before: Rendering | None = None,
    ) -> Prompt:
        """Messages as tokens. `known` is a transcript that they may go on from, besides those remembered;
        `before` is how their beginning was rendered."""
        wish = wish or Wish()
        messages = tuple(messages)
        if before is None and known is None:
            before = self._renderings.find(messages, namespace)
            if before is not None:
                # The very same messages are compared at once.
                messages = before.messages + messages[len(before.messages) :]
        text, rendering = self._renderer.prompt(
            messages, tools=wish.shown_tools, variables=wish.variables, before=before
        )
        if rendering is not None and known is None:
            self._renderings.add(rendering, namespace, instead_of=before)
        base = self.scribe.common(text, known) if known is not None else None
        if base is None or base is not known:
            # What goes on from all of `known` needs no other.
            found = [each for each in (base, self._recall.find(text, namespace)) if each is not None]
            base = max(found, key=lambda each: len(each.text), default=None)
        new = text[len(base.text) :] if base is not None else text
        transcript = base if base is not None and not new else self.scribe.write(new, base)
        return Prompt(
            transcript,
            new,
            thinking=self.family.opens_reasoning(text),
            keep_at=self._departures(messages, wish, transcript, rendering) if self._returns else (),
            rendering=rendering,
        )

    def ask(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        namespace: str = "",
        known: Transcript | None = None,
        before: Rendering | None = None,
        then: Callable[[Prompt, Transcript, ChatReply], ChatReply] | None = None,
        **settings: Any,
    ) -> ChatJob:
        """A reply to messages. The keywords are those of `Wish` and of `Request.of`; `then` is given the
        prompt, the prompt with the reply to it, and the reply, and may wait for the disk."""
        wish = Wish.take(settings)
        tools, grammar = self._tools(wish, settings)
        wish = replace(wish, tools=tools)
        prompt, dropped = self._fitting(parse_messages(messages), wish, settings, namespace, known, before)
        # Its own limits are checked before anything is queued.
        request = Request.of(
            prompt.transcript.tokens,
            namespace=namespace,
            keep_at=prompt.keep_at,
            shown=self._shown,
            **({"grammar": grammar} if grammar is not None else {}),
            **settings,
        )
        if request.n > 1 and (wish.reasoning_budget is not None or wish.overflow == "shift"):
            raise InvalidInputError("a reasoning budget and shifting are for one sample; leave n at 1")

        def ended(reply: ChatReply) -> ChatReply:
            whole = self._transcript(prompt, reply)
            self._recall.add(whole, namespace)
            return then(prompt, whole, reply) if then is not None else reply

        return ChatJob(
            self._backend.submit(self._first(wish, request)),
            lambda: Reader(self.family, reasoning=wish.reasoning, tools=tools, thinking=prompt.thinking),
            n=request.n,
            tools=tools,
            dropped=dropped,
            budget=self._budget(wish, request),
            shift=self._shift(wish, request, prompt),
            then=ended,
            waits=then is not None,
        )

    def _transcript(self, prompt: Prompt, reply: ChatReply) -> Transcript:
        """A prompt with the reply to it."""
        end = () if reply.raw.end is None else (reply.raw.end,)
        return prompt.transcript + self.scribe.read([*reply.raw.tokens, *end])

    # Rendering.

    def _guarded(self, message: Message) -> Message:
        """Nothing that somebody wrote becomes a control token."""
        content, reasoning = message.content, message.reasoning
        changed: dict[str, Any] = {}
        if content and (guarded := self.scribe.guard(content)) != content:
            changed["content"] = guarded
        if reasoning and (guarded := self.scribe.guard(reasoning)) != reasoning:
            changed["reasoning"] = guarded
        if message.tool_calls:
            guarded_calls = tuple(
                replace(call, name=self.scribe.guard(call.name), arguments=self.scribe.guard(call.arguments))
                for call in message.tool_calls
            )
            if guarded_calls != message.tool_calls:
                changed["tool_calls"] = guarded_calls
        return replace(message, **changed) if changed else message

    def _departures(
        self, messages: tuple[Message, ...], wish: Wish, prompt: Transcript, rendering: Rendering | None
    ) -> tuple[int, ...]:
        """Where the next turn's prompt will differ from this one, if it does so before its end.

        Templates strip reasoning from earlier turns, or open it for the reply alone.
        """
        answer = Message(role="assistant", content="x", reasoning="y" if self.family.reasoning else None)
        try:
            later, _ = self._renderer.prompt(
                (*messages, answer, Message(role="user", content="z")),
                tools=wish.shown_tools,
                variables=wish.variables,
                before=rendering,
            )
        except PerdureError:
            return ()
        shared = common(later, prompt.text)
        if shared == len(prompt.text):
            return ()
        return tuple(tokens for chars, tokens in prompt.cuts if chars <= shared)[-1:]

    # Asking.

    @cached_property
    def _shown(self) -> frozenset[int]:
        marks = self.family.marks
        return frozenset(token for token, text in self.scribe.control.items() if text in marks)

    def _fitting(
        self,
        messages: tuple[Message, ...],
        wish: Wish,
        settings: Mapping[str, Any],
        namespace: str,
        known: Transcript | None,
        before: Rendering | None,
    ) -> tuple[Prompt, int]:
        limit = self._backend.n_ctx - 1

        def prompt(kept: Sequence[Message]) -> Prompt:
            return self.prompt(kept, wish, namespace=namespace, known=known, before=before)

        whole = prompt(messages)
        if wish.overflow == "error" or wish.overflow == "fold":
            if len(whole) > limit:
                raise overflow(len(whole), limit)
            return whole, 0
        room = reply_room(settings, self._backend.n_ctx) if wish.overflow != "shift" else limit // 4
        if len(whole) + room <= limit:
            return whole, 0
        fitting, dropped = drop_oldest(messages, prompt, fits=lambda each: len(each) + room <= limit)
        if len(fitting) > limit:
            raise overflow(len(fitting), limit)
        return fitting, dropped

    def _first(self, wish: Wish, request: Request) -> Request:
        """What is asked of the engine first: where a reply may shift, as much of it as fits."""
        if wish.overflow != "shift" or request.max_tokens is None:
            return request
        return self._as_fits(request, request.max_tokens)

    def _as_fits(self, request: Request, wanted: int) -> Request:
        return replace(request, max_tokens=min(wanted, self._backend.n_ctx - len(request.prompt)))

    def _tools(self, wish: Wish, settings: Mapping[str, Any]) -> tuple[tuple[Tool, ...], Any]:
        """The tools that may be called, and what holds the reply to them where it must be a call."""
        choice = wish.tool_choice
        if isinstance(choice, Mapping):
            function = choice.get("function")
            named = function.get("name") if isinstance(function, Mapping) else choice.get("name")
            if not isinstance(named, str):
                raise InvalidInputError('tool_choice names a function: {"function": {"name": …}}')
            choice = named
        if choice in ("none", "auto"):
            return (wish.tools if choice == "auto" else ()), None
        tools = wish.tools if choice == "required" else tuple(t for t in wish.tools if t.name == choice)
        if not tools:
            names = ", ".join(tool.name for tool in wish.tools) or "none was given"
            raise InvalidInputError(f"tool_choice is {choice!r}, but the tools are: {names}")
        if any(settings.get(name) is not None for name in ("grammar", "schema", "regex")):
            raise InvalidInputError("a reply cannot be held to a tool call and to a schema at once")
        control = {self.scribe.control[token]: token for token in self._shown}
        return tools, self.family.grammar(tools, parallel=wish.parallel_tool_calls, control=control)

    def _budget(self, wish: Wish, request: Request) -> Budget | None:
        markers = self.family.reasoning
        if wish.reasoning_budget is None or markers is None:
            return None
        closing = tuple(self._backend.model.tokenize(markers.close, special=True, bos=False))

        def go_on(tokens: Sequence[int]) -> Job:
            used = len(tokens)
            left = None if request.max_tokens is None else max(1, request.max_tokens - used)
            prompt = [*request.prompt, *tokens]
            if len(prompt) >= self._backend.n_ctx:
                raise ContextOverflow(
                    f"no room for an answer after {used} tokens of reasoning: {self._backend.n_ctx} fit",
                    needed=len(prompt) + 1,
                    fits=self._backend.n_ctx,
                )
            return self._backend.submit(
                replace(request, prompt=prompt, max_tokens=left, prompt_logprobs=None)
            )

        return Budget(wish.reasoning_budget, markers.close, closing, go_on)

    def _shift(self, wish: Wish, request: Request, prompt: Prompt) -> Shift | None:
        """Half of what may go goes: what is left is computed anew, for a state is only ever of its tokens."""
        if wish.overflow != "shift":
            return None
        limit = request.max_tokens
        if limit is None:
            raise InvalidInputError("with overflow shift a reply could go on for ever: give max_tokens")
        head = self._head(prompt.transcript)
        room = (self._backend.n_ctx - head) // 2

        def go_on(tokens: Sequence[int]) -> tuple[Job, int]:
            whole = [*request.prompt, *tokens]
            kept = [*whole[:head], *whole[max(head, len(whole) - room) :]]
            again = replace(request, prompt=kept, keep_at=(), prompt_logprobs=None)
            return self._backend.submit(self._as_fits(again, limit - len(tokens))), len(whole) - len(kept)

        return Shift(limit, go_on)

    def _head(self, transcript: Transcript) -> int:
        """The tokens before the first turn, which always stay: a system message, or the first mark alone."""
        marks = [tokens for _, tokens in transcript.cuts[:-1]]
        return min(marks[1] if len(marks) > 1 else 1, self._backend.n_ctx // 4)


def reply_room(settings: Mapping[str, Any], n_ctx: int) -> int:
    """Tokens to leave for a reply: what it may have, or a quarter of the context."""
    wanted = settings.get("max_tokens")
    return wanted - 1 if isinstance(wanted, int) and wanted > 0 else (n_ctx - 1) // 4


def _template(backend: Backend, chosen: str | os.PathLike[str] | Template | None) -> Template:
    if isinstance(chosen, Template):
        return chosen
    bos, eos = (_special(backend, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    if chosen is None:
        return Template.of_model(backend.model.metadata.get("tokenizer.chat_template"), bos, eos)
    if isinstance(chosen, str) and chosen in Template.names():
        return Template.named(chosen, bos=bos, eos=eos)
    return Template.from_file(Path(chosen), bos=bos, eos=eos)


def _special(backend: Backend, field: str) -> str:
    token = backend.model.metadata.get(field, "")
    if not token.isdigit() or int(token) >= backend.model.n_vocab:
        return ""
    return backend.model.piece(int(token), special=True).decode("utf-8", "replace")
