"""`/v1/completions`."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from perdure.decode.request import Delta, Reply, TokenLogprob
from perdure.server import stream
from perdure.server.desk import ACaller, ADesk, Desk
from perdure.server.refusal import Refused
from perdure.server.routes.documented import streamed
from perdure.server.shapes.base import ReuseAnswer, TimingsAnswer, UsageAnswer, refuse_fields
from perdure.server.shapes.completion import (
    REFUSED,
    CompletionAnswer,
    CompletionChoice,
    CompletionExtensionAnswer,
    CompletionLogprobs,
    CompletionRequest,
)
from perdure.server.visit import Visit

router = APIRouter(tags=["OpenAI"])

_PROMPTS = 128
"""Of one request."""


@router.post("/v1/completions", responses=streamed(404), response_model=CompletionAnswer)
async def complete(
    asked: CompletionRequest, request: Request, desk: ADesk, caller: ACaller
) -> CompletionAnswer | Response:
    """What follows a prompt, as it is."""
    refuse_fields(asked, strict=desk.strict, refused=REFUSED)
    desk.check_model(asked.model)
    prompts = _prompts(asked)
    _check(asked, len(prompts))
    timeout = asked.perdure.timeout if asked.perdure else None
    wishes = {**_wishes(asked), "timeout": desk.seconds(timeout), "namespace": caller.namespace}
    echoed = [await desk.call(_text, desk, prompt) for prompt in prompts if asked.echo]
    head = Head(desk, asked, echoed)
    visits: list[Visit[Delta, Reply]] = []
    try:
        for prompt in prompts:
            job = await desk.call(desk.runtime.submit, prompt, **wishes)
            visits.append(desk.visit(job, request, timeout))
    except BaseException:
        # Nobody waits for those that were queued before one was refused.
        for visit in visits:
            visit.cancel()
        raise

    def settle(replies: Sequence[Reply]) -> None:
        desk.settle(replies, caller)
        if desk.log_text:
            caller.notes["prompt"] = asked.prompt
            caller.notes["replies"] = [reply.text for reply in replies]

    if asked.stream:
        await visits[0].begin()
        writer = CompletionWriter(head, asked)
        return stream.response(visits[0], writer, limits=desk.limits, notes=caller.notes, settle=settle)
    try:
        groups = [list(await visit.replies()) for visit in visits]
    finally:
        for visit in visits:
            visit.cancel()
    settle([reply for group in groups for reply in group])
    for visit, group in zip(visits, groups, strict=True):
        if (refused := visit.cut(group)) is not None:
            raise refused
    return await asyncio.to_thread(head.whole, groups)


def _prompts(asked: CompletionRequest) -> list[str | list[int]]:
    prompt = asked.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(part, int) for part in prompt):
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > _PROMPTS:
        raise Refused(
            400,
            f"prompt: {len(prompt)} prompts, {_PROMPTS} are allowed",
            param="prompt",
            code="invalid_value",
        )
    if not prompt:
        raise Refused(400, "prompt: give at least one", param="prompt", code="invalid_value")
    return list(prompt)  # type: ignore[arg-type]


def _check(asked: CompletionRequest, prompts: int) -> None:
    if asked.suffix:
        raise Refused(
            400, "suffix: text is only ever added at the end", param="suffix", code="unsupported_parameter"
        )
    if asked.best_of not in (None, asked.n or 1):
        raise Refused(
            400,
            "best_of: samples are not ranked; leave it out",
            param="best_of",
            code="unsupported_parameter",
        )
    if asked.stream and prompts > 1:
        raise Refused(400, "stream: one prompt at a time", param="stream", code="unsupported_parameter")
    if asked.stream_options is not None and not asked.stream:
        raise Refused(400, "stream_options: only with stream", param="stream_options", code="invalid_value")


def _wishes(asked: CompletionRequest) -> dict[str, Any]:
    wishes = {**asked.sampling, "max_tokens": asked.max_tokens}
    if asked.n is not None:
        wishes["n"] = asked.n
    if asked.logprobs is not None:
        wishes["logprobs"] = asked.logprobs
        if asked.echo:
            wishes["prompt_logprobs"] = asked.logprobs
    if asked.perdure is not None and asked.perdure.regex is not None:
        wishes["regex"] = asked.perdure.regex
    return wishes


def _text(desk: Desk, prompt: str | list[int]) -> tuple[str, list[int]]:
    """A prompt as text and as tokens."""
    model = desk.runtime.model
    if isinstance(prompt, str):
        return prompt, model.tokenize(prompt)
    return model.detokenize(prompt, special=True), prompt


class Head:
    """What all chunks and answers of one request say alike."""

    def __init__(self, desk: Desk, asked: CompletionRequest, echoed: Sequence[tuple[str, list[int]]]) -> None:
        self._desk = desk
        self._logprobs = asked.logprobs
        self._n = asked.n or 1
        self.echoed = echoed
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, groups: Sequence[Sequence[Reply]]) -> CompletionAnswer:
        return CompletionAnswer(
            id=self._id,
            created=self._created,
            model=self._desk.name,
            choices=[self._choice(at, reply) for at, group in enumerate(groups) for reply in group],
            usage=UsageAnswer.of(*([reply.usage for reply in group] for group in groups)),
            system_fingerprint=self._desk.fingerprint,
            perdure=self.extension(groups[0][0]),
        )

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._desk.name,
            "system_fingerprint": self._desk.fingerprint,
            "choices": choices,
            **more,
        }

    def extension(self, reply: Reply) -> CompletionExtensionAnswer:
        return CompletionExtensionAnswer(
            reuse=ReuseAnswer.of(reply.reuse), timings=TimingsAnswer.of(reply.timings), seed=reply.seed
        )

    def logprobs(
        self, entries: Sequence[TokenLogprob], *, offset: int, first: int | None = None
    ) -> CompletionLogprobs | None:
        """Of tokens from a place in the text on. `first` is a token before them that has no probability."""
        if self._logprobs is None:
            return None
        tokens = [] if first is None else [self._piece(first)]
        found: list[float | None] = [] if first is None else [None]
        top: list[dict[str, float] | None] = [] if first is None else [None]
        for entry in entries:
            tokens.append(self._piece(entry.token))
            found.append(_finite(entry.logprob))
            top.append({self._piece(each.token): _finite(each.logprob) for each in entry.top})
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return CompletionLogprobs(tokens=tokens, token_logprobs=found, top_logprobs=top, text_offset=offsets)

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
            finish_reason=reply.finish_reason,  # type: ignore[arg-type]
            logprobs=self.logprobs(entries, offset=0, first=first),
        )

    def _piece(self, token: int) -> str:
        return self._desk.runtime.model.piece(token, special=True).decode("utf-8", "replace")


class CompletionWriter:
    """Chunks in OpenAI's older shape. Every sample ends once."""

    def __init__(self, head: Head, asked: CompletionRequest) -> None:
        self._head = head
        self._open = set(range(asked.n or 1))
        self._offsets = dict.fromkeys(self._open, 0)
        include_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        self._usage: dict[str, Any] = {"usage": None} if include_usage else {}
        self._frames = [stream.Frame(functools.partial(self._piece, index)) for index in sorted(self._open)]

    def opening(self) -> Iterable[dict[str, Any]]:
        for text, _ in self._head.echoed:
            for index in sorted(self._open):
                self._offsets[index] = len(text)
                yield self._piece(index, text)

    def piece(self, delta: Delta) -> bytes:
        logprobs = None
        if delta.logprobs:
            logprobs = self._head.logprobs(delta.logprobs, offset=self._offsets[delta.index])
        if logprobs is None:
            return self._frames[delta.index](delta.text) if delta.text else b""
        self._offsets[delta.index] += sum(map(len, logprobs.tokens))
        return stream.events([self._piece(delta.index, delta.text, logprobs=logprobs.model_dump())])

    def ending(self, replies: Sequence[Reply]) -> Iterable[dict[str, Any]]:
        for reply in replies:
            self._open.discard(reply.index)
            extension = self._head.extension(reply).model_dump()
            yield self._piece(reply.index, "", reply.finish_reason, perdure=extension)
        if self._usage:
            usage = UsageAnswer.of([reply.usage for reply in replies])
            yield self._head.chunk([], usage=usage.model_dump())

    def broken(self) -> Iterable[dict[str, Any]]:
        for index in sorted(self._open):
            yield self._piece(index, "", "error")

    def _piece(
        self, index: int, text: str, finish_reason: str | None = None, *, logprobs: Any = None, **more: Any
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._head.chunk([choice], **self._usage, **more)


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)
