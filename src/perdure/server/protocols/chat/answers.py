"""Whole chat answers in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from perdure.chat.reply import ChatReply
from perdure.decode.request import TokenLogprob
from perdure.server.core.app_state import AppState
from perdure.server.core.schemas import ResponseSchema, ReuseAnswer, TimingsAnswer, UsageAnswer
from perdure.server.protocols.answer_head import AnswerHead, finite


class TopLogprob(ResponseSchema):
    token: str
    logprob: float
    bytes: list[int]


class TokenAnswer(TopLogprob):
    top_logprobs: list[TopLogprob]


class LogprobsAnswer(ResponseSchema):
    content: list[TokenAnswer]
    refusal: None = None


class FunctionAnswer(ResponseSchema):
    name: str
    arguments: str


class CallAnswer(ResponseSchema):
    id: str
    type: Literal["function"] = "function"
    function: FunctionAnswer


class MessageAnswer(ResponseSchema):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[CallAnswer] | None = None
    refusal: None = None


class Choice(ResponseSchema):
    index: int
    message: MessageAnswer
    finish_reason: Literal["stop", "length", "tool_calls", "cancelled", "error"]
    logprobs: LogprobsAnswer | None = None


class ExtensionAnswer(ResponseSchema):
    """How a reply came about."""

    reuse: ReuseAnswer
    timings: TimingsAnswer
    seed: int
    dropped: int = 0
    """Of the oldest messages, left out because an overflow policy was chosen."""
    problems: list[str] = Field(default_factory=list)
    """What is wrong with the arguments of tool calls, by their schemas."""
    notes: list[str] = Field(default_factory=list)
    """What the model's template does not show as it was given, and what the model read instead."""
    session: str | None = None
    kept: bool = False
    """Whether it is now a durable part of the session."""
    not_kept: str | None = None
    """Why it should have been and is not."""


class ChatAnswer(ResponseSchema):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: UsageAnswer
    service_tier: str | None = None
    system_fingerprint: str
    perdure: ExtensionAnswer


def extension(reply: ChatReply, session: str | None = None) -> ExtensionAnswer:
    """How a reply came about, as every protocol tells it."""
    return ExtensionAnswer(
        reuse=ReuseAnswer.model_validate(reply.reuse),
        timings=TimingsAnswer.model_validate(reply.timings),
        seed=reply.seed,
        dropped=reply.dropped,
        problems=list(reply.problems),
        notes=list(reply.notes),
        session=session,
        kept=reply.kept,
        not_kept=reply.not_kept or None,
    )


class ChatHead(AnswerHead):
    """The head of chat answers, and what they say of a reply."""

    prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"

    def __init__(self, app_state: AppState, session: str | None, *, with_logprobs: bool) -> None:
        super().__init__(app_state)
        self._session = session
        self._with_logprobs = with_logprobs

    def whole(self, replies: Sequence[ChatReply]) -> ChatAnswer:
        return ChatAnswer(
            **self.common,
            choices=[self._choice(reply) for reply in replies],
            usage=UsageAnswer.of([reply.usage for reply in replies]),
            perdure=self.extension(replies[0]),
        )

    def extension(self, reply: ChatReply) -> ExtensionAnswer:
        return extension(reply, self._session)

    def logprobs(self, entries: Sequence[TokenLogprob] | None) -> LogprobsAnswer | None:
        if not self._with_logprobs:
            return None
        return LogprobsAnswer(
            content=[
                TokenAnswer(
                    **self._token(entry.token, entry.logprob),
                    top_logprobs=[TopLogprob(**self._token(top.token, top.logprob)) for top in entry.top],
                )
                for entry in entries or ()
            ]
        )

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.piece(token)
        return {
            "token": piece.decode("utf-8", "replace"),
            "logprob": finite(logprob),
            "bytes": list(piece),
        }

    def _choice(self, reply: ChatReply) -> Choice:
        calls = [
            CallAnswer(id=call.id, function=FunctionAnswer(name=call.name, arguments=call.arguments))
            for call in reply.tool_calls
        ]
        return Choice(
            index=reply.index,
            message=MessageAnswer(
                content=reply.text or (None if calls else ""),
                reasoning_content=reply.reasoning,
                tool_calls=calls or None,
            ),
            finish_reason=reply.finish_reason,
            logprobs=self.logprobs(reply.logprobs),
        )
