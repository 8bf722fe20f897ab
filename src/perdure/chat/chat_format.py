"""Chat format of one model: messages to tokens, and replies back to messages."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack

from perdure.backend import Backend
from perdure.chat.formats.registry import detect
from perdure.chat.message import Message, Tool, parse_messages
from perdure.chat.options import ChatKeywords, ChatOptions, TurnKeywords
from perdure.chat.parsing.call_writer import CallForm
from perdure.chat.parsing.family import Family
from perdure.chat.parsing.reply_parser import ReplyParser
from perdure.chat.past_conversations import PastConversation
from perdure.chat.prompt_builder import (
    Exchange,
    ExchangePlan,
    ImageFiles,
    ImageReader,
    Prompt,
    PromptBuilder,
    with_reasoning_apart,
)
from perdure.chat.reply import ChatDelta, ChatReply, ReplyReader, SeveralReaders, argument_problems
from perdure.chat.template.capabilities import capabilities
from perdure.chat.template.template import Rendering, Template
from perdure.chat.transcript import ChatTokenizer, Transcript
from perdure.config import ReasoningMode
from perdure.decode.request import Reply, Request, take_deadline
from perdure.decode.stream import Stream, StreamPlan
from perdure.errors import ContextOverflow, CorruptStateError, InvalidInputError
from perdure.extension import by_name, imported

if TYPE_CHECKING:
    from perdure.chat import plans
    from perdure.chat.plans import ContextWindow
    from perdure.chat.prefetch import Prefetcher
    from perdure.decode.sampling.grammar import Grammar


ReplyListener: TypeAlias = Callable[
    ["ChatFormat", PastConversation, ChatOptions, Mapping[str, float] | None], None
]
"""Called with the prompt of a reply, its options and its adapters, in the prefetcher's thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a reply is asked for with: the arguments of `ChatFormat.plan`."""

    messages: tuple[Message, ...]
    options: ChatOptions
    settings: dict[str, Any]
    """Of decoding."""
    namespace: str
    known: Transcript | None
    before: Rendering | None
    silent: bool
    conversation: str
    call_ids: str
    anew: bool = False


class ChatFormat:
    """Chats with one model in its own format. Safe from any thread.

    Only what is new in a conversation is tokenised: a reply's own tokens stand for its text, and so does
    whatever else was read before, wherever the new text still agrees with it.
    """

    def __init__(
        self, backend: Backend, template: Template, family: Family, *, tool_use: ChatFormat | None = None
    ) -> None:
        self.template = template
        self.family = family
        self._backend = backend
        self._tool_use = tool_use
        marks = template.mark_texts | family.marks
        erased = template.erased_texts
        if tool_use is not None:
            # One tokenizer for both, so that a conversation may go on under the other.
            marks |= tool_use.template.mark_texts | tool_use.family.marks
            erased = tuple(sorted({*erased, *tool_use.template.erased_texts}))
        self.tokenizer = ChatTokenizer(backend.model, marks, erased=erased)
        self._prefetcher: Prefetcher | None = None
        self._prefetcher_lock = threading.Lock()
        self.listeners: list[ReplyListener] = []
        """Called behind each reply that its conversation may continue from."""
        self.files: ImageFiles | None = None
        """Where files are that sessions name."""
        self._images: ImageReader | None = None
        self._images_lock = threading.Lock()
        opener = self.image_reader
        self._builder = PromptBuilder(backend, template, family, self.tokenizer, opener)
        if tool_use is not None:
            tool_use.tokenizer, tool_use.listeners = self.tokenizer, self.listeners
            tool_use._builder = PromptBuilder(
                backend, tool_use.template, tool_use.family, self.tokenizer, opener
            )

    def close(self) -> None:
        """End what reads images, if that was started."""
        with self._images_lock:
            if self._images is not None:
                self._images.close()

    def image_reader(self) -> ImageReader:
        """What turns images into tokens here; it is opened for the first."""
        with self._images_lock:
            if self._images is None:
                if self._backend.storage.folder is None:
                    raise InvalidInputError(
                        "images cannot be read here: they are kept in a store, and there is none"
                    )
                from perdure.extension import part

                self._images = part("images in messages", "images")(self._backend, self.files)
            assert self._images is not None
            return self._images

    @classmethod
    def of(cls, backend: Backend, chosen: str | os.PathLike[str] | Template | None = None) -> ChatFormat:
        """For the model's own template, or for another: one that is named, or in a file. A file may bring a
        second one for conversations with tools."""
        template = _template(backend, chosen)
        info = backend.model.info
        tool_use = None
        if chosen is None and (source := info.tool_template).strip():
            with_tools = Template(
                source, bos=template.bos, eos=template.eos, name="the model's tool_use template"
            )
            tool_use = cls(backend, with_tools, detect(source, info.architecture))
        return cls(backend, template, detect(template.source, info.architecture), tool_use=tool_use)

    def _for(self, options: ChatOptions) -> ChatFormat:
        """The chat format of a request: the file's own for tools, where there are some."""
        return self._tool_use if self._tool_use is not None and options.tools else self

    @property
    def n_ctx(self) -> int:
        return self._backend.n_ctx

    @property
    def asks_date(self) -> bool:
        """Whether a template of this model asks for the date."""
        own = "strftime_now" in self.template.source
        return own or (self._tool_use is not None and self._tool_use.asks_date)

    def ruled(self, messages: Sequence[Message], namespace: str = "") -> tuple[Message, ...]:
        """The messages as a prompt with `stable_prefix` has them."""
        return self._builder.rules.apply(messages, (), namespace).messages

    def is_side_request(self, messages: Sequence[Message]) -> bool:
        """Whether messages ask for something beside a conversation, such as its title."""
        return self._builder.rules.is_side_request(messages)

    def reads_alike(
        self, keywords: Mapping[str, Any]
    ) -> Callable[[Sequence[Message], Sequence[Message]], bool]:
        """Whether the model reads two histories as the same text, for requests with such keywords."""

        def alike(first: Sequence[Message], second: Sequence[Message]) -> bool:
            options, _ = ChatOptions.split(keywords)
            return self._for(options)._builder.reads_alike(first, second, options)

        return alike

    def shared_beginning(
        self,
        messages: Sequence[Message],
        options: ChatOptions,
        *,
        namespace: str,
        known: Transcript | None = None,
    ) -> Sequence[int]:
        """The tokens that every prompt of these messages and one more begins with; `known` is as in
        `prompt`."""
        return self._for(options)._builder.beginning(messages, options, namespace=namespace, known=known)

    def prefetch_next(
        self,
        messages: Sequence[Message],
        options: ChatOptions,
        *,
        namespace: str,
        known: Transcript | None,
        adapters: Mapping[str, float] | None,
        conversation: str = "",
    ) -> None:
        """Have what a prompt of these messages and one more begins with read while the engine is idle."""
        self._for(options).prefetcher.prefetch(
            lambda: self.shared_beginning(messages, options, namespace=namespace, known=known),
            known.tokens if known is not None and known.tokens else None,
            budget=options.settle,
            namespace=namespace,
            adapters=adapters,
            conversation=conversation,
        )

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
        """Messages as tokens, as `PromptBuilder.prompt` makes them."""
        chosen = self._for(options) if options is not None else self
        return chosen._builder.prompt(
            messages, options, namespace=namespace, known=known, before=before, must_fit=must_fit, anew=anew
        )

    def fits(self, messages: Sequence[Message], **keywords: Unpack[ChatKeywords]) -> bool:
        """Whether messages fit into the context with the reply that these settings ask for."""
        settings: dict[str, Any] = {**keywords}
        namespace = settings.pop("namespace", "")
        options, _ = ChatOptions.split(settings)
        try:
            prompt = self.prompt(messages, options, namespace=namespace, must_fit=True)
        except ContextOverflow:
            return False
        return len(prompt) + reply_room(settings, self.n_ctx) <= self.n_ctx

    def submit(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        call_ids: str = "",
        **keywords: Unpack[ChatKeywords],
    ) -> Stream[ChatDelta, ChatReply]:
        """A reply to messages. The keywords are those of `ChatOptions` and of `Request.of`; `call_ids` is as
        in `plan`."""
        if keywords.get("overflow") == "fold":
            raise InvalidInputError("only a session can be folded: use rt.session(name), or drop_oldest")
        return Stream(self._replies(messages, call_ids, keywords), self._backend.submit)

    def _replies(
        self, messages: Sequence[Message | Mapping[str, Any]], call_ids: str, keywords: Mapping[str, Any]
    ) -> StreamPlan[ChatDelta, ChatReply]:
        exchanges = yield from self.plan(messages, call_ids=call_ids, **keywords)
        return [exchange.reply for exchange in exchanges]

    def plan(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        namespace: str = "",
        known: Transcript | None = None,
        before: Rendering | None = None,
        silent: bool = False,
        conversation: str = "",
        call_ids: str = "",
        **keywords: Unpack[TurnKeywords],
    ) -> ExchangePlan:
        """The plan of a reply to messages, or of several: for a `Stream` on the backend of this format.

        `known` is a transcript that the messages may go on from, and `before` how their beginning was
        rendered. Of a `silent` reply the stream's caller gets no deltas. `conversation` is its id;
        empty: by the messages that it has in common with earlier ones. What the ids of calls are made of is
        in `call_ids`; empty: they are drawn.
        """
        options, settings = ChatOptions.split(keywords)
        asked = _Asked(
            messages=parse_messages(messages),
            options=options,
            settings=settings,
            namespace=namespace,
            known=known,
            before=before,
            silent=silent,
            conversation=conversation,
            call_ids=call_ids,
        )
        return self._for(options)._plan(asked)

    def _plan(self, asked: _Asked) -> ExchangePlan:
        # From here on: what goes on from this request, if anything does, ends at the same instant.
        deadline = take_deadline(asked.settings)
        # The prompt has all tools, whichever may be called: it is then the same for every choice.
        tools, grammar = self._tools(asked.options, asked.settings)
        is_alone = asked.known is None and not asked.conversation
        if is_alone and "side" not in asked.settings and self.is_side_request(asked.messages):
            asked.settings["side"] = True
        prompt, dropped = self._fitting(asked)
        request, window = self._request(asked, prompt, grammar, deadline)
        readers = self._readers(asked, prompt, request, tools, window)
        is_call = grammar is not None
        try:
            replies = yield from self._replies_to(prompt, request, readers, window, is_call=is_call)
        except CorruptStateError:
            if not prompt.has_images or any(reader.tokens for reader in readers):
                raise
            from perdure.chat.media.marks import are_restored

            read = self._builder.image_tokens
            if not are_restored(prompt.transcript, asked.messages, asked.namespace, read):
                # Another encoder makes other rows: what was read with the old ones is read with these.
                asked = replace(asked, known=None, anew=True)
                prompt, dropped = self._fitting(asked)
                request, window = self._request(asked, prompt, grammar, deadline)
            replies = yield from self._replies_to(prompt, request, readers, window, is_call=is_call)
        exchanges = [
            self._exchange(asked, prompt, reader, raw, tools, dropped)
            for reader, raw in zip(readers, replies, strict=True)
        ]
        if not request.side and prompt.prefill is None:
            self._idle_work(asked.options, prompt, request, exchanges)
        return exchanges

    def part(self, tokens: Sequence[int]) -> Message:
        """The beginning of a reply as a message to show: calls stand in it as text, and control tokens that
        mean nothing to the family not at all, as in the reply itself."""
        text = self.tokenizer.decode([each for each in tokens if each not in self._hidden_tokens]).text
        markers = self.family.reasoning
        message = Message(role="assistant", content=text)
        if markers is None:
            return message
        opened, closed = markers.open in text, markers.close in text
        if opened and not closed:
            before, _, reasoning = text.partition(markers.open)
            return replace(message, content=before.strip(), reasoning=reasoning.lstrip("\n"))
        return with_reasoning_apart([message], markers)[0]

    # The stages of a reply.

    def _fitting(self, asked: _Asked) -> tuple[Prompt, int]:
        """The prompt, and how many of the oldest messages an overflow policy left out of it."""
        limit, options = self._backend.n_ctx - 1, asked.options

        def prompt(remaining: Sequence[Message]) -> Prompt | ContextOverflow:
            """What surely does not fit is never tokenised, whichever turns are left out next."""
            try:
                return self.prompt(
                    remaining,
                    options,
                    namespace=asked.namespace,
                    known=asked.known,
                    before=asked.before,
                    must_fit=True,
                    anew=asked.anew,
                )
            except ContextOverflow as error:
                return error

        dropped = 0
        if options.overflow not in ("drop_oldest", "shift"):
            fitting = prompt(asked.messages)
        else:
            room = limit // 4
            if options.overflow != "shift":
                room = reply_room(asked.settings, self._backend.n_ctx)

            def fits(each: Prompt | ContextOverflow) -> bool:
                return isinstance(each, Prompt) and len(each) + room <= limit

            from perdure.chat.plans import drop_oldest

            fitting, dropped = drop_oldest(asked.messages, prompt, fits=fits, limit=limit - room)
        if isinstance(fitting, ContextOverflow):
            raise fitting
        if len(fitting) > limit:
            from perdure.chat.plans import overflow

            raise overflow(len(fitting), limit)
        return fitting, dropped

    def _request(
        self, asked: _Asked, prompt: Prompt, grammar: Any, deadline: float | None
    ) -> tuple[Request, ContextWindow | None]:
        """The prompt with what is asked of decoding, and what the reply keeps where the context is full.
        Limits are checked before anything is queued."""
        request = Request.of(
            prompt.transcript.tokens,
            namespace=asked.namespace,
            conversation=asked.conversation or prompt.made.conversation,
            checkpoint_at=prompt.checkpoint_at,
            pins=prompt.pins,
            visible_tokens=self._visible_tokens,
            deadline=deadline,
            **({"grammar": grammar} if grammar is not None else {}),
            **asked.settings,
        )
        if asked.options.tool_choice == "none":
            request = replace(request, sampling=request.sampling.without(self._call_tokens))
        window = self._window(asked.options, request, prompt)
        return (self._limited(asked.options, request) if window is None else request), window

    def _limited(self, options: ChatOptions, request: Request) -> Request:
        """A request whose reply may end where the context does, if that was asked for."""
        if not options.limit_to_context or request.max_tokens is None:
            return request
        room = self._backend.n_ctx - len(request.prompt)
        return replace(request, max_tokens=min(request.max_tokens, room), continued=room < request.max_tokens)

    def _readers(
        self,
        asked: _Asked,
        prompt: Prompt,
        request: Request,
        tools: Sequence[Tool],
        window: ContextWindow | None,
    ) -> list[ReplyReader]:
        """A reader for each sample."""
        options, call_ids = asked.options, asked.call_ids
        budget = options.reasoning_budget if self.family.reasoning is not None else None
        goes_on = budget is not None or window is not None
        return [
            ReplyReader(
                self._parser(options, prompt, tools, f"{call_ids} {index}" if call_ids else ""),
                index=index,
                hides=options.reasoning == "hide",
                silent=asked.silent,
                is_last=not asked.silent and (not goes_on or index == request.n - 1),
                waits=goes_on or bool(tools) or prompt.has_images,
                budget=budget,
                limit=window.limit if window is not None else None,
            )
            for index in range(request.n)
        ]

    def _replies_to(
        self,
        prompt: Prompt,
        request: Request,
        readers: Sequence[ReplyReader],
        window: ContextWindow | None,
        *,
        is_call: bool,
    ) -> plans.RepliesPlan:
        """The samples: in one request, or one after the other where each may need further requests."""
        has_budget = readers[0].may_interrupt

        def sample(request: Request, reader: ReplyReader) -> plans.ReplyPlan:
            from perdure.chat import plans

            first = self._reasoned(request, prompt, is_call=is_call)
            if has_budget:
                return self._with_budget(first, request, reader, window, is_call=is_call)
            assert window is not None
            return plans.context_shift(first, reader, window)

        if has_budget or window is not None:
            from perdure.chat import plans

            return (yield from plans.samples_in_turn(request, readers, sample))
        request = self._reasoned(request, prompt, is_call=is_call)
        replies = yield request, readers[0] if len(readers) == 1 else SeveralReaders(readers)
        for reader, raw in zip(readers, replies, strict=True):
            reader.finish(raw)
        return replies

    def _exchange(
        self,
        asked: _Asked,
        prompt: Prompt,
        reader: ReplyReader,
        raw: Reply,
        tools: Sequence[Tool],
        dropped: int,
    ) -> Exchange:
        """A sample as a message, with its prompt; both are remembered."""
        message = reader.message
        end = () if raw.end is None else (raw.end,)
        whole = prompt.transcript + self.tokenizer.decode([*raw.tokens, *end])
        # Hidden reasoning is remembered all the same: templates show it while the model works with tools.
        self._builder.remember(prompt, whole, asked.messages, asked.options, message)
        if asked.options.reasoning == "hide":
            message = replace(message, reasoning=None)
        reply = ChatReply(
            message=message,
            raw=reader.counted(raw),
            dropped=dropped,
            shifted=reader.shifted,
            problems=argument_problems(message.tool_calls, tools) if message.tool_calls else (),
            notes=prompt.notes,
            difference=prompt.difference,
            expected=prompt.expected,
            prefill=prompt.prefill,
            schema=asked.settings.get("schema"),
        )
        return Exchange(prompt, whole, reply)

    def _idle_work(
        self, options: ChatOptions, prompt: Prompt, request: Request, exchanges: Sequence[Exchange]
    ) -> None:
        """Idle work behind a reply: listeners are called, and the next prompt is prefetched."""
        made, last = prompt.made, exchanges[-1]
        options = replace(options, tools=made.tools)
        for listen in self.listeners:
            self.prefetcher.then(partial(listen, self, made, options, request.adapters))
        if options.settle and len(exchanges) == 1 and last.reply.finish_reason in ("stop", "tool_calls"):
            self.prefetch_next(
                (*made.messages, last.reply.whole),
                options,
                namespace=made.namespace,
                known=last.transcript,
                adapters=request.adapters,
                conversation=request.conversation,
            )

    # Their parts.

    def _parser(
        self, options: ChatOptions, prompt: Prompt, tools: Sequence[Tool], call_ids: str
    ) -> ReplyParser:
        mode: ReasoningMode = "capture" if options.reasoning == "hide" else options.reasoning
        return ReplyParser(
            self.family,
            reasoning=mode,
            tools=tools,
            thinking=prompt.thinking,
            goes_on=prompt.prefill is not None,
            makes_calls=options.tool_choice != "none",
            call_ids=call_ids,
            prompt=prompt.transcript.text if prompt.prefill is None else "",
        )

    @cached_property
    def _visible_tokens(self) -> frozenset[int]:
        marks = self.family.marks
        return frozenset(token for token, text in self.tokenizer.control.items() if text in marks)

    @cached_property
    def _hidden_tokens(self) -> frozenset[int]:
        """Control tokens that mean nothing to the family."""
        meanings = self.family.scanner.meanings
        return frozenset(
            token
            for token, mark in self.tokenizer.control.items()
            if meanings.get(mark, "nothing") == "nothing"
        )

    @cached_property
    def _call_tokens(self) -> frozenset[int]:
        """The tokens that stand in calls and nowhere else."""
        if not self.family.calls_stand_apart:
            return frozenset()
        meanings = self.family.scanner.meanings
        tokens = (
            token
            for token, text in self.tokenizer.marks.items()
            if meanings.get(text) in ("call", "call mark")
        )
        return frozenset(tokens) - self._backend.model.ends

    def _tools(self, options: ChatOptions, settings: Mapping[str, Any]) -> tuple[tuple[Tool, ...], Any]:
        """The tools that may be called, and what holds the reply to them: all of it where it must be a call,
        else its calls."""
        choice = options.tool_choice
        if isinstance(choice, Mapping):
            function = choice.get("function")
            named = function.get("name") if isinstance(function, Mapping) else choice.get("name")
            if not isinstance(named, str):
                raise InvalidInputError('tool_choice names a function: {"function": {"name": …}}')
            choice = named
        if choice == "none":
            return (), None
        if choice == "auto":
            return options.tools, self._lazy_calls(options, settings)
        tools = options.tools if choice == "required" else tuple(t for t in options.tools if t.name == choice)
        if not tools:
            names = ", ".join(tool.name for tool in options.tools) or "none was given"
            raise InvalidInputError(f"tool_choice is {choice!r}, but the tools are: {names}")
        if any(settings.get(name) is not None for name in ("grammar", "schema", "regex")):
            raise InvalidInputError("a reply cannot be held to a tool call and to a schema at once")
        form = self.call_form
        # Who names a function asks for one call. Two are not asked for either where the template would not
        # write them back.
        parallel = options.parallel_tool_calls and choice == "required" and (form.parallel or not form.exact)
        return tools, form.writer.grammar(tools, parallel=parallel, control=self._control)

    def _lazy_calls(self, options: ChatOptions, settings: Mapping[str, Any]) -> Grammar | None:
        if not options.tools or options.unchecked_calls:
            return None
        # A grammar holds all of the reply, and processors are the caller's own way to steer it.
        if any(settings.get(name) for name in ("grammar", "schema", "regex", "processors")):
            return None
        from perdure.chat.parsing.lazy_calls import lazy_calls

        parallel, writer = options.parallel_tool_calls, self.call_form.writer
        return lazy_calls(self.family, writer, options.tools, parallel=parallel, control=self._control)

    @property
    def prefetcher(self) -> Prefetcher:
        """Made for the first conversation that has something to be read ahead."""
        with self._prefetcher_lock:
            if self._prefetcher is None:
                from perdure.chat.prefetch import Prefetcher

                self._prefetcher = Prefetcher(self._backend)
            return self._prefetcher

    @cached_property
    def call_form(self) -> CallForm:
        """How this template writes calls: learned from it by an extension, or else as the family does."""
        learn = by_name("parts").get("call form")
        if learn is not None:
            learned: CallForm = imported(learn)(self.template, self.family)
            return learned
        return CallForm(self.family.writer, shown=capabilities(self.template, with_tools=True).calls)

    @cached_property
    def _control(self) -> dict[str, int]:
        """The marks of the family that are control tokens."""
        return {self.tokenizer.control[token]: token for token in self._visible_tokens}

    def _reasoned(self, request: Request, prompt: Prompt, *, is_call: bool) -> Request:
        """A request whose grammar lets the model think first, where the prompt has it think."""
        if request.grammar is None or (prompt.prefill is not None and prompt.prefill.part == "content"):
            return request
        if (openers := request.grammar.openers) is not None:
            openers = replace(openers, quoted=prompt.thinking)
            return replace(request, grammar=replace(request.grammar, openers=openers))
        from perdure.chat.parsing.reasoned import reasoned

        thought: Literal["opened", "none"] = "opened" if prompt.thinking else "none"
        grammar = reasoned(request.grammar, self.family, thought, is_call=is_call, control=self._control)
        return replace(request, grammar=grammar)

    def _with_budget(
        self,
        request: Request,
        answer: Request,
        reader: ReplyReader,
        window: ContextWindow | None,
        *,
        is_call: bool,
    ) -> plans.ReplyPlan:
        from perdure.chat import plans

        markers = self.family.reasoning
        assert markers is not None
        if answer.grammar is not None and answer.grammar.openers is None:
            from perdure.chat.parsing.reasoned import reasoned

            grammar = reasoned(answer.grammar, self.family, "closed", is_call=is_call, control=self._control)
            answer = replace(answer, grammar=grammar)
        return plans.reasoning_budget(
            request,
            reader,
            answer=answer,
            close=markers.close,
            closing=self._backend.model.tokenize(markers.close, special=True, bos=False),
            n_ctx=self._backend.n_ctx,
            window=window,
        )

    def _window(self, options: ChatOptions, request: Request, prompt: Prompt) -> ContextWindow | None:
        """Half of what may go goes."""
        if options.overflow != "shift":
            return None
        from perdure.chat.plans import ContextWindow

        if request.max_tokens is None:
            raise InvalidInputError("with overflow shift a reply could go on for ever: give max_tokens")
        n_ctx, head = self._backend.n_ctx, self._head(prompt.transcript)
        return ContextWindow(head=head, room=(n_ctx - head) // 2, n_ctx=n_ctx, limit=request.max_tokens)

    def _head(self, transcript: Transcript) -> int:
        """The tokens before the first turn, which always stay: a system message, or the first mark alone."""
        marks = [tokens for _, tokens in transcript.cuts[:-1]]
        return min(marks[1] if len(marks) > 1 else 1, self._backend.n_ctx // 4)


def reply_room(settings: Mapping[str, Any], n_ctx: int) -> int:
    """Tokens to leave for a reply: what it may have, or a quarter of the context."""
    limit = settings.get("max_tokens")
    return limit - 1 if isinstance(limit, int) and limit > 0 else (n_ctx - 1) // 4


def _template(backend: Backend, chosen: str | os.PathLike[str] | Template | None) -> Template:
    if isinstance(chosen, Template):
        return chosen
    info = backend.model.info
    bos, eos = info.bos, info.eos
    if chosen is None:
        return Template.of_model(info.template, bos, eos)
    if isinstance(chosen, str) and chosen in Template.names():
        return Template.named(chosen, bos=bos, eos=eos)
    return Template.from_file(Path(chosen), bos=bos, eos=eos)
