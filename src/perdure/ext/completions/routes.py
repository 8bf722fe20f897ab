"""`/v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from perdure import Delta, Reply, TokenLogprob
from perdure.spi.decode import FinishReason
from perdure.spi.server import (
    SSE,
    AnswerHead,
    AppState,
    AppStateDep,
    BodyRoute,
    CallerDep,
    ChunkWriter,
    CompletionExtension,
    EventResponse,
    Events,
    Follower,
    Items,
    Protocol,
    ResponseSchema,
    ReuseAnswer,
    SamplingSchema,
    StreamOptions,
    TimingsAnswer,
    Token,
    UsageAnswer,
    event,
    fill_in,
    finish_word,
    finite,
    invalid,
    refuse_fields,
    streamed,
)

REFUSED = {"functions": "give them to /v1/chat/completions as tools"}


class CompletionRequest(SamplingSchema):
    model: str = ""
    prompt: str | Items[str] | Items[Token] | Items[Items[Token]]
    max_tokens: int | None = Field(16, ge=1, lt=2**31)
    """16, as OpenAI has it; null goes on until the model ends or the context is full."""
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    perdure: CompletionExtension | None = None


class CompletionLogprobs(ResponseSchema):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionExtensionAnswer(ResponseSchema):
    finish_reason: FinishReason
    """How it ended, in our words: `repetition`, `cancelled` and `error` are none of the protocol's."""
    reuse: ReuseAnswer
    timings: TimingsAnswer
    seed: int
    ignored: list[str]
    """Fields of the request that nobody knows, by their places."""


class CompletionChoice(ResponseSchema):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: CompletionLogprobs | None = None


class CompletionAnswer(ResponseSchema):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer
    system_fingerprint: str
    perdure: CompletionExtensionAnswer


router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)

_PROMPTS = 128
"""Of one request."""


@router.post("/v1/completions", responses=streamed(404), response_model=CompletionAnswer)
async def complete(
    body: CompletionRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> CompletionAnswer | Response:
    """What follows a prompt, as it is."""
    refuse_fields(body, strict=app_state.server.strict, refused=REFUSED, notes=caller.notes)
    app_state = await app_state.serving(body.model, caller.visit, sign=bool(body.stream))
    prompts = _prompts(body)
    _check(body, len(prompts))
    timeout = body.perdure.timeout if body.perdure else None
    options = {
        **app_state.server.defaults.sampling,
        **app_state.model_options(body.model),
        **_options(body),
        "timeout": app_state.server.seconds(timeout),
        "namespace": caller.namespace,
    }
    if app_state.server.log_text:
        caller.notes["prompt"] = body.prompt
    head = CompletionHead(app_state, body, caller.ignored)
    writer = CompletionWriter(head, body) if body.stream else None
    followers: list[Follower[Delta, Reply]] = []
    try:
        for prompt in prompts:
            if body.suffix and isinstance(prompt, str):
                prompt = await app_state.call(fill_in, app_state, prompt, body.suffix)
            stream = await app_state.call(app_state.runtime.submit, prompt, **options)
            listed = not followers
            followers.append(
                Follower(stream, app_state, caller, writer=writer, timeout=timeout, listed=listed)
            )
        # Behind those: what does not fit was refused by now, and is not tokenised for this either.
        if body.echo:
            head.echoed = [await app_state.call(_text, app_state, prompt) for prompt in prompts]
        if writer is not None:
            return EventResponse(followers.pop(), SSE, app_state.server.limits)
        groups = [list(await follower.whole(request)) for follower in followers]
    finally:
        # Nobody waits for those that were queued before one was refused.
        for follower in followers:
            follower.close()
    for follower, group in zip(followers, groups, strict=True):
        if (error := follower.cut(group)) is not None:
            raise error
    return await asyncio.to_thread(head.whole, groups)


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(part, int) for part in prompt):
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > _PROMPTS:
        raise invalid("prompt", f"{len(prompt)} prompts, {_PROMPTS} are allowed")
    if not prompt:
        raise invalid("prompt", "give at least one")
    return list(prompt)  # type: ignore[arg-type]


def _check(body: CompletionRequest, prompts: int) -> None:
    if body.suffix and (body.echo or not isinstance(body.prompt, str)):
        raise invalid(
            "suffix",
            "what is filled in goes between two texts; give one prompt as text, without echo",
            code="unsupported_parameter",
        )
    if body.best_of not in (None, body.n or 1):
        raise invalid("best_of", "samples are not ranked; leave it out", code="unsupported_parameter")
    if body.stream and prompts > 1:
        raise invalid("stream", "one prompt at a time", code="unsupported_parameter")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "only with stream")


def _options(body: CompletionRequest) -> dict[str, Any]:
    options = {**body.sampling, "max_tokens": body.max_tokens}
    if body.n is not None:
        options["n"] = body.n
    if body.logprobs is not None:
        options["logprobs"] = body.logprobs
        if body.echo:
            options["prompt_logprobs"] = body.logprobs
    if body.perdure is not None:
        options |= body.perdure.options
    return options


def _text(app_state: AppState, prompt: str | list[int]) -> tuple[str, list[int]]:
    """A prompt as text and as tokens."""
    model = app_state.runtime.model
    if isinstance(prompt, str):
        return prompt, model.tokenize(prompt)
    return model.detokenize(prompt, special=True), prompt


class CompletionHead(AnswerHead[Reply]):
    """The head of completions, and what they say of a reply."""

    prefix = "cmpl"
    chunk_object = "text_completion"

    def __init__(self, app_state: AppState, body: CompletionRequest, ignored: Sequence[str] = ()) -> None:
        super().__init__(app_state)
        self._ignored = list(ignored)
        self._logprobs = body.logprobs
        self._n = body.n or 1
        self.echoed: Sequence[tuple[str, list[int]]] = ()
        """The prompts, as text and as tokens, where they stand before their replies."""

    def whole(self, groups: Sequence[Sequence[Reply]]) -> CompletionAnswer:
        return CompletionAnswer(
            **self.common,
            choices=[self._choice(at, reply) for at, group in enumerate(groups) for reply in group],
            usage=UsageAnswer.of(*([reply.usage for reply in group] for group in groups)),
            perdure=self.extension(groups[0][0]),
        )

    def extension(self, reply: Reply) -> CompletionExtensionAnswer:
        return CompletionExtensionAnswer.copy_of(reply, ignored=self._ignored)

    def logprobs(
        self, entries: Sequence[TokenLogprob], *, offset: int, first: int | None = None
    ) -> CompletionLogprobs | None:
        """Of tokens from a place in the text on. `first` is a token before them that has no probability."""
        if self._logprobs is None:
            return None
        tokens = [] if first is None else [self._text(first)]
        token_logprobs: list[float | None] = [] if first is None else [None]
        top: list[dict[str, float] | None] = [] if first is None else [None]
        for entry in entries:
            tokens.append(self._text(entry.token))
            token_logprobs.append(finite(entry.logprob))
            top.append({self._text(each.token): finite(each.logprob) for each in entry.top})
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return CompletionLogprobs(
            tokens=tokens, token_logprobs=token_logprobs, top_logprobs=top, text_offset=offsets
        )

    def _choice(self, at: int, reply: Reply) -> CompletionChoice:
        text, first, entries = reply.text, None, tuple(reply.logprobs or ())
        if self.echoed:
            prompt, tokens = self.echoed[at]
            text, first = prompt + text, tokens[0]
            known = [entry for entry in reply.prompt_logprobs or () if entry is not None]
            entries = (*known, *entries)
        return CompletionChoice(
            index=at * self._n + reply.index,
            text=text,
            finish_reason=finish_word(reply),  # type: ignore[arg-type]
            logprobs=self.logprobs(entries, offset=0, first=first),
        )

    def _text(self, token: int) -> str:
        return self.piece(token).decode("utf-8", "replace")


class CompletionWriter(ChunkWriter[Reply]):
    """Chunks in OpenAI's older shape."""

    new = "text"
    nothing = ""
    _head: CompletionHead

    def __init__(self, head: CompletionHead, body: CompletionRequest) -> None:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        super().__init__(head, body.n or 1, include_usage=include_usage)
        self._offsets = dict.fromkeys(self._open, 0)

    def start(self) -> Events:
        events = []
        for text, _ in self._head.echoed:
            for index in sorted(self._open):
                self._offsets[index] = len(text)
                events.append(event(self._chunk(index, text)))
        return events

    def delta(self, delta: Delta) -> Events:
        logprobs = None
        if delta.logprobs:
            logprobs = self._head.logprobs(delta.logprobs, offset=self._offsets[delta.index])
        if logprobs is None:
            return (self._templates[delta.index](delta.text),) if delta.text else ()
        self._offsets[delta.index] += sum(map(len, logprobs.tokens))
        return [event(self._chunk(delta.index, delta.text, logprobs=logprobs.model_dump()))]


PROTOCOL = Protocol(
    name="OpenAI completions", prefix="/v1/completions", routers=(router,), writer=CompletionWriter
)
