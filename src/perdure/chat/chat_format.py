"""Chat format of one model: messages to tokens, and replies back to messages."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar, Unpack

from perdure.backend import Backend
from perdure.chat import plans
from perdure.chat.beginnings import Beginnings
from perdure.chat.formats.registry import detect
from perdure.chat.message import Message, Tool, parse_messages
from perdure.chat.options import ChatKeywords, ChatOptions, TurnKeywords
from perdure.chat.parsing.family import Family, Thought, reasoned
from perdure.chat.parsing.learned import CallForm, learn
from perdure.chat.parsing.reply_parser import ReplyParser
from perdure.chat.plans import ContextWindow, Exchange, ExchangePlan
from perdure.chat.prompt_builder import Prompt, PromptBuilder
from perdure.chat.reply import ChatDelta, ChatReply, ReplyReader, SeveralReaders, argument_problems
from perdure.chat.settling import Settler
from perdure.chat.side_requests import side_request
from perdure.chat.template.template import Rendering, Template
from perdure.chat.transcript import ChatTokenizer, Transcript
from perdure.config import ReasoningMode
from perdure.decode.request import Reply, Request, take_deadline
from perdure.decode.stream import Stream, StreamPlan
from perdure.errors import ContextOverflow, InvalidInputError


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
        self.settler = Settler(backend)
        self.beginnings: Beginnings | None = None
        """Where what prompts begin with is remembered over a restart; None: nowhere."""
        self._builder = PromptBuilder(backend, template, family, self.tokenizer)
        if tool_use is not None:
            tool_use.tokenizer = self.tokenizer
            tool_use._builder = PromptBuilder(backend, tool_use.template, tool_use.family, self.tokenizer)

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

    def stabilise(self, messages: Sequence[Message], namespace: str = "") -> tuple[Message, ...]:
        """The messages with volatile text in its place, as a prompt with `stable_prefix` has them."""
        return self._builder.stabilise(messages, namespace)

    def remember_beginnings(self, beginnings: Beginnings) -> None:
        """Have what prompts begin with remembered from now on."""
        self.beginnings = beginnings
        if self._tool_use is not None:
            self._tool_use.beginnings = beginnings

    def _use_beginning(
        self, prompt: Prompt, options: ChatOptions, namespace: str, adapters: Mapping[str, float] | None
    ) -> None:
        """Remember what comes before the first turn of a prompt: its system prompt and tools."""
        messages, tools, variables = prompt.about
        head = tuple(takewhile(lambda each: each.role in ("system", "developer"), messages))
        if (beginnings := self.beginnings) is None or not (head or tools):
            return
        about = (self.template.source, head, tools, sorted(variables.items(), key=str))
        made = replace(options, tools=tools)

        def tokens() -> Sequence[int]:
            return self._builder.beginning(head, made, namespace=namespace, known=prompt.transcript)

        self.settler.then(lambda: beginnings.use(about, tokens, namespace=namespace, adapters=adapters))

    def settle_next(
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
        chosen = self._for(options)
        chosen.settler.settle(
            lambda: chosen._builder.beginning(messages, options, namespace=namespace, known=known),
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
    ) -> Prompt:
        """Messages as tokens, as `PromptBuilder.prompt` makes them."""
        chosen = self._for(options) if options is not None else self
        return chosen._builder.prompt(
            messages, options, namespace=namespace, known=known, before=before, must_fit=must_fit
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
        rendered. Of a `silent` reply the stream's caller gets no deltas. `conversation` tells it from others;
        empty: by the messages that it has in common with earlier ones. What the ids of calls are made of is
        in `call_ids`; empty: they are drawn.
        """
        options, settings = ChatOptions.split(keywords)
        return self._for(options)._plan(
            messages, options, settings, namespace, known, before, silent, conversation, call_ids
        )

    def _plan(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        options: ChatOptions,
        settings: dict[str, Any],
        namespace: str,
        known: Transcript | None,
        before: Rendering | None,
        silent: bool,
        conversation: str,
        call_ids: str,
    ) -> ExchangePlan:
        # From here on: what goes on from this request, if anything does, ends at the same instant.
        deadline = take_deadline(settings)
        # The prompt has all tools, whichever may be called: it is then the same for every choice.
        tools, grammar = self._tools(options, settings)
        parsed = parse_messages(messages)
        if "side" not in settings and known is None and side_request(parsed) is not None:
            settings["side"] = True
        prompt, dropped = self._fitting(parsed, options, settings, namespace, known, before)
        # Its own limits are checked before anything is queued.
        request = Request.of(
            prompt.transcript.tokens,
            namespace=namespace,
            conversation=conversation or prompt.conversation,
            checkpoint_at=prompt.checkpoint_at,
            pins=prompt.pins,
            visible_tokens=self._visible_tokens,
            deadline=deadline,
            **({"grammar": grammar} if grammar is not None else {}),
            **settings,
        )
        if options.tool_choice == "none":
            request = replace(request, sampling=request.sampling.without(self._call_tokens))
        window = self._window(options, request, prompt)
        if options.limit_to_context and request.max_tokens is not None and window is None:
            room = self._backend.n_ctx - len(request.prompt)
            request = replace(
                request, max_tokens=min(request.max_tokens, room), continued=room < request.max_tokens
            )
        has_budget = options.reasoning_budget is not None and self.family.reasoning is not None
        goes_on = has_budget or window is not None
        readers = [
            ReplyReader(
                self._parser(options, prompt, tools, f"{call_ids} {index}" if call_ids else ""),
                index=index,
                hides=options.reasoning == "hide",
                silent=silent,
                is_last=not silent and (not goes_on or index == request.n - 1),
                waits=goes_on or bool(tools),
                budget=options.reasoning_budget if has_budget else None,
                limit=window.limit if window is not None else None,
            )
            for index in range(request.n)
        ]
        is_call = grammar is not None

        def sample(request: Request, reader: ReplyReader) -> plans.ReplyPlan:
            first = self._reasoned(request, prompt, is_call=is_call)
            if has_budget:
                return self._with_budget(first, request, reader, window, is_call=is_call)
            assert window is not None
            return plans.context_shift(first, reader, window)

        if goes_on:
            replies = yield from plans.samples_in_turn(request, readers, sample)
        else:
            request = self._reasoned(request, prompt, is_call=is_call)
            replies = yield request, readers[0] if len(readers) == 1 else SeveralReaders(readers)
            for reader, raw in zip(readers, replies, strict=True):
                reader.finish(raw)
        exchanges = []
        for reader, raw in zip(readers, replies, strict=True):
            message = reader.message
            whole = self._transcript(prompt, raw)
            # Hidden reasoning is remembered all the same: templates show it while the model works with tools.
            self._builder.remember(prompt, whole, parsed, message, namespace)
            if options.reasoning == "hide":
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
            )
            exchanges.append(Exchange(prompt, whole, reply))
        if not request.side and prompt.prefill is None:
            self._use_beginning(prompt, options, namespace, request.adapters)
        if (
            options.settle
            and request.n == 1
            and not request.side
            and prompt.prefill is None
            and reply.finish_reason in ("stop", "tool_calls")
        ):
            rendered, tools, _ = prompt.about
            self.settle_next(
                (*rendered, exchanges[0].reply.whole),
                replace(options, tools=tools),
                namespace=namespace,
                known=exchanges[0].transcript,
                adapters=request.adapters,
                conversation=request.conversation,
            )
        return exchanges

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

    def _transcript(self, prompt: Prompt, reply: Reply) -> Transcript:
        """A prompt with the reply to it."""
        end = () if reply.end is None else (reply.end,)
        return prompt.transcript + self.tokenizer.decode([*reply.tokens, *end])

    # Submitting.

    @cached_property
    def _visible_tokens(self) -> frozenset[int]:
        marks = self.family.marks
        return frozenset(token for token, text in self.tokenizer.control.items() if text in marks)

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

    def _fitting(
        self,
        messages: tuple[Message, ...],
        options: ChatOptions,
        settings: Mapping[str, Any],
        namespace: str,
        known: Transcript | None,
        before: Rendering | None,
    ) -> tuple[Prompt, int]:
        limit = self._backend.n_ctx - 1

        def prompt(remaining: Sequence[Message]) -> Prompt | ContextOverflow:
            """What surely does not fit is never tokenised, whichever turns are left out next."""
            try:
                return self.prompt(
                    remaining, options, namespace=namespace, known=known, before=before, must_fit=True
                )
            except ContextOverflow as error:
                return error

        dropped = 0
        if options.overflow not in ("drop_oldest", "shift"):
            fitting = prompt(messages)
        else:
            room = reply_room(settings, self._backend.n_ctx) if options.overflow != "shift" else limit // 4

            def fits(each: Prompt | ContextOverflow) -> bool:
                return isinstance(each, Prompt) and len(each) + room <= limit

            fitting, dropped = drop_oldest(messages, prompt, fits=fits, limit=limit - room)
        if isinstance(fitting, ContextOverflow):
            raise fitting
        if len(fitting) > limit:
            raise overflow(len(fitting), limit)
        return fitting, dropped

    def _tools(self, options: ChatOptions, settings: Mapping[str, Any]) -> tuple[tuple[Tool, ...], Any]:
        """The tools that may be called, and what holds the reply to them where it must be a call."""
        choice = options.tool_choice
        if isinstance(choice, Mapping):
            function = choice.get("function")
            named = function.get("name") if isinstance(function, Mapping) else choice.get("name")
            if not isinstance(named, str):
                raise InvalidInputError('tool_choice names a function: {"function": {"name": …}}')
            choice = named
        if choice in ("none", "auto"):
            return (options.tools if choice == "auto" else ()), None
        tools = options.tools if choice == "required" else tuple(t for t in options.tools if t.name == choice)
        if not tools:
            names = ", ".join(tool.name for tool in options.tools) or "none was given"
            raise InvalidInputError(f"tool_choice is {choice!r}, but the tools are: {names}")
        if any(settings.get(name) is not None for name in ("grammar", "schema", "regex")):
            raise InvalidInputError("a reply cannot be held to a tool call and to a schema at once")
        form = self.call_form
        # Two calls are not asked for where the template would not write them back.
        parallel = options.parallel_tool_calls and (form.parallel or not form.exact)
        return tools, form.writer.grammar(tools, parallel=parallel, control=self._control)

    @cached_property
    def call_form(self) -> CallForm:
        """How this template writes calls."""
        return learn(self.template, self.family)

    @cached_property
    def _control(self) -> dict[str, int]:
        """The marks of the family that are control tokens."""
        return {self.tokenizer.control[token]: token for token in self._visible_tokens}

    def _reasoned(self, request: Request, prompt: Prompt, *, is_call: bool) -> Request:
        """A request whose grammar lets the model think first, where the prompt has it think."""
        if request.grammar is None or (prompt.prefill is not None and prompt.prefill.part == "content"):
            return request
        thought: Thought = "opened" if prompt.thinking else "none"
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
        markers = self.family.reasoning
        assert markers is not None
        if answer.grammar is not None:
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


# What happens when a conversation no longer fits.

T = TypeVar("T")

_USUAL, _MOST = 4, 8
"""Characters of a token, as texts usually have them, and as hardly any has."""


def overflow(needed: int, fits: int) -> ContextOverflow:
    return ContextOverflow(
        f"the conversation needs {needed} tokens, {fits} fit (one is left for the reply). Nothing was done. "
        "Send less, open the model with a larger n_ctx, or choose an overflow policy: drop_oldest leaves out "
        "the oldest turns",
        needed=needed,
        fits=fits,
    )


def drop_oldest(
    messages: Sequence[Message],
    prompt: Callable[[Sequence[Message]], T],
    *,
    fits: Callable[[T], bool],
    limit: int,
) -> tuple[T, int]:
    """The prompt without as many of the oldest turns as must go, and how many messages those were. `limit` is
    how many tokens fit, from which a first guess is made.

    What stands before the first turn, and the last turn, always stay. Where turns must go, a few more are
    left out, so that the next prompts start alike and what is kept of them can be used. How many those are
    goes by how many fit, not by how many there are, and so does the work.
    """
    starts = _starts(messages)
    sizes = [len(message.content or "") for message in messages]
    head = messages[: starts[0]]
    made: dict[int, T] = {}

    def make(first: int) -> T:
        """The prompt from turn `first` on."""
        if first not in made:
            made[first] = prompt([*head, *messages[starts[first] :]])
        return made[first]

    def fit(first: int) -> bool:
        return fits(make(first))

    # What is far too long is not even rendered as a whole.
    if sum(sizes) <= _MOST * limit and fit(0):
        return make(0), 0
    count, last = len(starts), len(starts) - 1
    # A power of two: of the last so many turns not all fit, of half as many they do. It is looked for from
    # well below the guess, since what is too long costs most.
    size = 2 << max(0, _guess(starts, sizes, _USUAL * limit).bit_length() - 4)
    while size > 2 and not fit(max(0, count - size // 2)):
        size //= 2
    while size < count and fit(count - size):
        size *= 2
    few = max(1, size // 8)
    lowest = ((count - size) // few + 1) * few if size < count else 0
    firsts = [*range(lowest, last, few), last]
    sure = min(bisect_left(firsts, count - size // 2), len(firsts) - 1)
    first = firsts[bisect_left(firsts, True, hi=sure, key=fit)]
    return make(first), starts[first] - len(head)


def _starts(messages: Sequence[Message]) -> list[int]:
    """Where turns start: at messages of a user that follow none. At least one, which may be the end."""
    roles = [message.role for message in messages]
    starts = [at for at, role in enumerate(roles) if role == "user" and (not at or roles[at - 1] != "user")]
    return starts or [len(messages)]


def _guess(starts: Sequence[int], sizes: Sequence[int], characters: int) -> int:
    """How many of the last turns have so many characters; at least one."""
    end = len(sizes)
    for count, start in enumerate(reversed(starts)):
        characters -= sum(sizes[start:end])
        if characters < 0:
            return max(1, count)
        end = start
    return len(starts)
