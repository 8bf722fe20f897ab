"""What comes back from a conversation, and how it is read out of what the engine writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from perdure.chat.message import Message, Tool, ToolCall
from perdure.chat.parsing.reply_parser import Part, ReplyParser, gather
from perdure.decode.request import (
    Delta,
    FinishReason,
    Reply,
    ReuseReport,
    Timings,
    TokenLogprob,
    Usage,
    read_json,
)
from perdure.extension import optional_part

if TYPE_CHECKING:
    from perdure.chat.difference import Difference, Miss
    from perdure.chat.parsing.prefill import Prefill


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of a tool call. Its id and name come first, then its arguments, bit by bit.

    One that is `dropped` turned out to be none: its text comes as text.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    dropped: bool = False


@dataclass(slots=True, kw_only=True)
class ChatDelta:
    """What is new in a reply. Not frozen, as `Delta` is not."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[CallDelta, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """A finished reply: the model's message, and how it came about."""

    message: Message
    raw: Reply
    """As it was decoded, reasoning and markers included."""
    dropped: int = 0
    """How many of the oldest messages an overflow policy left out."""
    shifted: int = 0
    """How many of the oldest tokens were left out while it was written."""
    problems: tuple[str, ...] = ()
    """What is wrong with the arguments of tool calls, by their schemas."""
    notes: tuple[str, ...] = ()
    """What the template does not show as it was given, and what the model read instead."""
    difference: Difference | None = None
    """Where its prompt first differs from the one before it in the conversation."""
    expected: int = 0
    """Tokens of its prompt that were read or written in that one."""
    prefill: Prefill | None = None
    """The beginning that it goes on from, where a caller wrote one; `message` is only what was added."""
    kept: bool = False
    """Whether it is now a durable part of a session."""
    not_kept: str = ""
    """Why it should have been and is not."""
    could_not_be_kept: bool = False
    """Whether the store refused the turn: the disk is full, or cannot be written."""

    schema: Any = None
    """What its text was held to, where that was asked for as a schema."""

    @property
    def text(self) -> str:
        return self.message.content or ""

    @property
    def parsed(self) -> Any:
        """Its JSON under a `schema`: an object of the class that was given as one, else as Python has it.
        None for a reply without one."""
        return read_json(self.schema, self.text, self.finish_reason)

    @property
    def whole(self) -> Message:
        """The message with the beginning that a caller wrote."""
        return self.message if self.prefill is None else self.prefill.joined(self.message)

    @property
    def reasoning(self) -> str | None:
        return self.message.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.message.tool_calls

    @property
    def finish_reason(self) -> FinishReason:
        if self.raw.finish_reason == "stop" and self.message.tool_calls:
            return "tool_calls"
        return self.raw.finish_reason

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.raw.tokens

    @property
    def usage(self) -> Usage:
        return self.raw.usage

    @property
    def reuse(self) -> ReuseReport:
        return self.raw.reuse

    @property
    def miss(self) -> Miss | None:
        """What of its prompt was computed again, and why; None where it had only new tokens to compute."""
        # Loaded for those who ask: most replies come from state that was there.
        from perdure.chat.difference import Miss

        return Miss.of(self.difference, self.expected, self.reuse, self.timings)

    @property
    def timings(self) -> Timings:
        return self.raw.timings

    @property
    def seed(self) -> int:
        return self.raw.seed

    @property
    def index(self) -> int:
        return self.raw.index

    @property
    def stop(self) -> str | None:
        return self.raw.stop

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.raw.logprobs


class ReplyReader:
    """Reads one sample as it is written, in as many requests as that takes: deltas of a message, and in the
    end the message.

    A reader that `hides` gives no reasoning out; a `silent` one gives out nothing but that it was cut short.
    `budget` is how many tokens of reasoning there may be, and `limit` how many tokens in all, where a reply
    goes on past the end of the context.
    """

    def __init__(
        self,
        parser: ReplyParser,
        *,
        index: int = 0,
        hides: bool = False,
        silent: bool = False,
        is_last: bool = True,
        waits: bool = False,
        budget: int | None = None,
        limit: int | None = None,
    ) -> None:
        self._parser = parser
        self._index = index
        self._hides = hides
        self._silent = silent
        self.is_last = is_last
        self.waits = waits
        self.may_interrupt = budget is not None
        self._budget = budget
        self._limit = limit
        self.tokens: list[int] = []
        self.emitted = 0
        """Tokens whose text was read to the end; of later ones the engine may hold some back."""
        self.shifted = 0
        """Tokens of the conversation that were left out on the way."""
        self.is_full = False
        """Whether only the end of the context ended the request."""
        self._parts: list[Part] = []
        self._calls: set[int] = set()
        self._reasoning_tokens = 0
        self._start = 0
        """Tokens of earlier requests."""
        self._characters = 0
        """Of this request, as far as it was read."""
        self._finished = False
        self._unshown: list[ChatDelta] = []
        self.spent = budget is not None and budget <= 0 and parser.thinking
        """Whether the model has reasoned for as long as it may, and has not ended."""

    def read(self, delta: Delta) -> list[ChatDelta]:
        """What is new, as a message's deltas. Every token comes here."""
        tokens, reason = delta.tokens, delta.finish_reason
        self.tokens += tokens
        self._characters += len(delta.text)
        parser = self._parser
        parts = parser.push(delta.text)
        if reason is not None:
            if reason == "length" and self._limit is not None and len(self.tokens) < self._limit:
                self.is_full, reason = True, None
            else:
                parts += parser.finish()
                self._finished = True
        if parser.thinking:
            self._reasoning_tokens += len(tokens)
            if self._budget is not None and not self._finished:
                self.spent = self._reasoning_tokens >= self._budget
        text, reasoning, calls = self._take(parts)
        if self._silent:
            return [ChatDelta(finish_reason=reason)] if reason == "cancelled" else []
        if self._hides:
            reasoning = ""
        if reason == "stop" and self._calls:
            reason = "tool_calls"
        elif not (text or reasoning or calls or tokens or reason):
            return []
        new = ChatDelta(
            text=text,
            reasoning=reasoning,
            tool_calls=calls,
            tokens=tokens,
            logprobs=delta.logprobs,
            index=self._index,
            finish_reason=reason,
        )
        if not self._unshown:
            return [new]
        unshown, self._unshown = self._unshown, []
        return [*unshown, new]

    def _take(self, parts: Sequence[Part]) -> tuple[str, str, tuple[CallDelta, ...]]:
        self._parts += parts
        if len(parts) == 1 and parts[0].kind == "text":
            return parts[0].text, "", ()
        calls = []
        for part in parts:
            if part.kind == "call":
                (self._calls.discard if part.dropped else self._calls.add)(part.call)
                calls.append(CallDelta(part.call, part.id, part.name, part.text, part.dropped))
        text = "".join(part.text for part in parts if part.kind == "text")
        reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
        return text, reasoning, tuple(calls)

    # Going on in another request.

    def begin(self) -> None:
        """Another request follows."""
        self._start, self._characters, self.is_full = len(self.tokens), 0, False

    def so_far(self, reply: Reply) -> Reply:
        """The reply of a request that another one goes on from, as far as it was read: tokens that came after
        the last delta are not part of it."""
        tokens = tuple(self.tokens[self._start :])
        logprobs = None if reply.logprobs is None else reply.logprobs[: len(tokens)]
        return replace(reply, tokens=tokens, text=reply.text[: self._characters], logprobs=logprobs)

    def end_reasoning(self, text: str, tokens: Sequence[int], reply: Reply) -> Reply:
        """Have the reasoning end here, by these tokens; and the reply so far with them."""
        self._budget, self.spent, self.may_interrupt = None, False, False
        self.tokens += tokens
        self.emitted = len(self.tokens)
        # They were not drawn: nothing else could have come.
        certain = tuple(TokenLogprob(token, 0.0) for token in tokens) if reply.logprobs is not None else ()
        visible, reasoning, calls = self._take(self._parser.push(text))
        self._unshown.append(
            ChatDelta(
                text=visible,
                reasoning="" if self._hides else reasoning,
                tool_calls=calls,
                tokens=tuple(tokens),
                logprobs=certain,
                index=self._index,
            )
        )
        return replace(
            reply,
            tokens=reply.tokens + tuple(tokens),
            text=reply.text + text,
            logprobs=None if reply.logprobs is None else reply.logprobs + certain,
        )

    def hold(self, deltas: Sequence[ChatDelta]) -> None:
        """Have deltas shown with the next one."""
        self._unshown += deltas

    # The end.

    def finish(self, reply: Reply) -> None:
        """Read what is left of the last request's reply: where the engine died, text came without a delta."""
        if not self._finished:
            self._take([*self._parser.push(reply.text[self._characters :]), *self._parser.finish()])
            self._finished = True

    @property
    def message(self) -> Message:
        """The message that was read, reasoning included."""
        return gather(self._parts)

    def counted(self, raw: Reply) -> Reply:
        """All that was written, in whatever requests, as this sample with its tokens of reasoning."""
        if not self._reasoning_tokens and raw.index == self._index:
            return raw
        usage = replace(raw.usage, reasoning_tokens=self._reasoning_tokens)
        return replace(raw, index=self._index, usage=usage)


class SeveralReaders:
    """Reads the samples of one request."""

    spent = may_interrupt = False
    is_last = True

    def __init__(self, readers: Sequence[ReplyReader]) -> None:
        self._readers = readers
        self.waits = readers[0].waits

    def read(self, delta: Delta) -> list[ChatDelta]:
        return self._readers[delta.index].read(delta)


def argument_problems(calls: Sequence[ToolCall], tools: Sequence[Tool]) -> tuple[str, ...]:
    """What is wrong with the arguments of calls, by the schemas of their tools; nothing where no extension
    looks."""
    check = optional_part("problem of a call") if calls else None
    return () if check is None else tuple(filter(None, (check(call, tools) for call in calls)))
