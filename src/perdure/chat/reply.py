"""What comes back from a conversation."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.chat.message import Message, ToolCall
from perdure.chat.prefill import Prefill
from perdure.decode.request import FinishReason, Reply, Timings, TokenLogprob, Usage
from perdure.decode.slots import ReuseReport


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
    prefill: Prefill | None = None
    """The beginning that it goes on from, where a caller wrote one; `message` is only what was added."""
    kept: bool = False
    """Whether it is now a durable part of a session."""
    not_kept: str = ""
    """Why it should have been and is not."""

    @property
    def text(self) -> str:
        return self.message.content or ""

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
