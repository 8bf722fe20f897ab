"""A reply on its way, read as a message."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from perdure.chat.message import Tool
from perdure.chat.parsing.arguments import check_arguments
from perdure.chat.parsing.reply_parser import Part, ReplyParser, gather
from perdure.chat.reply import CallDelta, ChatDelta, ChatReply
from perdure.decode.output_queue import Job
from perdure.decode.request import Delta, Reply, TokenLogprob
from perdure.errors import ContextOverflow

_MANY = 256
"""Deltas that are not read in one go while an event loop waits."""


@dataclass(slots=True)
class _Sample:
    """One sample as far as it has been read."""

    parser: ReplyParser
    tokens: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    calls: set[int] = field(default_factory=set)
    thought: int = 0
    """Tokens of reasoning so far."""
    raw: int = 0
    """Characters read so far."""
    finished: bool = False
    earlier: Reply | None = None
    """What other requests made of it, before the one at hand."""
    shifted: int = 0
    told: int = 0
    """Tokens whose text was told to the end, wherever the engine held some of it back."""
    closed: bool = False
    """Whether its reasoning was ended."""

    def take(self, parts: Sequence[Part]) -> tuple[str, str, tuple[CallDelta, ...]]:
        self.parts += parts
        if len(parts) == 1 and parts[0].kind == "text":
            return parts[0].text, "", ()
        calls = []
        for part in parts:
            if part.kind == "call":
                (self.calls.discard if part.dropped else self.calls.add)(part.call)
                calls.append(CallDelta(part.call, part.id, part.name, part.text, part.dropped))
        text = "".join(part.text for part in parts if part.kind == "text")
        reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
        return text, reasoning, tuple(calls)


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """How many tokens a model may reason for, and how it is made to answer after that."""

    tokens: int
    close: str
    """What ends the reasoning."""
    closing: tuple[int, ...]
    """The same, as tokens."""
    go_on: Callable[[Sequence[int]], Job]
    """The reply from where its reasoning was ended, given its tokens so far."""


@dataclass(frozen=True, slots=True)
class ContextShift:
    """How a reply goes on past the end of the context: without the oldest tokens, the rest computed anew."""

    limit: int
    """Tokens that the reply may have in all."""
    go_on: Callable[[Sequence[int], int], tuple[Job, int]]
    """The reply from where it was cut off, given its tokens so far and how many of them had their text told
    to the end; and how many tokens were left out for it."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request for one sample or several, and how one goes on past the ends of requests."""

    job: Job
    budget: ReasoningBudget | None = None
    shift: ContextShift | None = None


class ChatJob:
    """The caller's end of a chat request: iterate it for deltas, ask it for the reply, or cancel it.

    `then` is called once with each finished reply, before anybody gets it, and may change it. If it `waits`,
    such as for the disk, no event loop waits with it. A job that `hides` gives no reasoning out: `then` takes
    it out of the reply. `later` makes the requests of further samples: where each may go on in requests of
    its own, they are made one after the other.
    """

    def __init__(
        self,
        first: SampleRequest,
        parser: Callable[[], ReplyParser],
        *,
        n: int,
        later: Callable[[int], SampleRequest] | None = None,
        prompt_tokens: int,
        tools: Sequence[Tool],
        dropped: int,
        then: Callable[[ChatReply], ChatReply],
        hides: bool = False,
        waits: bool = False,
    ) -> None:
        self._job, self._budget, self._shift = first.job, first.budget, first.shift
        self._samples = [_Sample(parser()) for _ in range(n)]
        self._later = later
        self._current = 0
        """The sample that the job at hand is for, where there is a job for each."""
        self._ended: list[Reply] = []
        """The samples before it."""
        self.prompt_tokens = prompt_tokens
        self._written_before = 0
        """Tokens of the jobs before the one at hand."""
        self._tools = tools
        self._dropped = dropped
        self._shifting = False
        self._then = then
        self._hides = hides
        self._waits = waits
        self._finishing = threading.Lock()
        self._replacing = threading.Lock()
        self.cancelled = False
        self.stopped = False
        """Whether its reader had it end, and wants what there is."""
        self._replies: list[ChatReply] | None = None

    @property
    def done(self) -> bool:
        return self._job.done and not self._has_later

    @property
    def prompt_read(self) -> int:
        """Tokens of the prompt whose state is there."""
        return self._job.prompt_read

    @property
    def written(self) -> int:
        """Tokens that have come so far, of all samples."""
        return self._written_before + self._job.written

    def cancel(self) -> None:
        """End the request within one step; its reply says `cancelled`."""
        with self._replacing:
            self.cancelled = True
            job = self._job
        job.cancel()

    def stop(self) -> None:
        """Cancel it because no more is wanted: for whoever reads it, that is an end like any other."""
        self.stopped = True
        self.cancel()

    def replies(self, timeout: float | None = None) -> list[ChatReply]:
        """All samples, once all are finished."""
        if self._budget is not None or self._shift is not None:
            for _ in self:
                pass
        return self._finish(self._job.replies(timeout))

    def reply(self, timeout: float | None = None) -> ChatReply:
        """The only, or first, sample."""
        return self.replies(timeout)[0]

    async def areplies(self) -> list[ChatReply]:
        if self._budget is not None or self._shift is not None:
            async for _ in self:
                pass
        return await self._afinish(await self._job.areplies())

    async def areply(self) -> ChatReply:
        return (await self.areplies())[0]

    async def drain(self, take: Callable[[list[ChatDelta]], bool]) -> bool:
        """Have `take` called in the event loop with what is new, whenever there is something, until it gives
        False or all deltas were taken: whether they were. No task is woken for a token."""
        taking = True

        def read(deltas: Sequence[Delta]) -> bool:
            nonlocal taking
            found: list[ChatDelta] = []
            for delta in deltas:
                found += self._read(delta)
                # At every token: nothing is called that need not be.
                if self._budget is not None and self._spent():
                    break
            taking = not found or take(found)
            return taking and not (self._shifting or (self._budget is not None and self._goes_on()))

        while True:
            if not self._goes_on():
                await self._job.drain(read)
            if not taking:
                return False
            if self._goes_on():
                self._job.cancel()
                so_far = await self._job.areply()
                # In a thread: to queue a request may take its time.
                more = await asyncio.to_thread(self._go_on, so_far)
                if more and not take(more):
                    return False
            elif self._has_later:
                await asyncio.to_thread(self._next_sample, await self._job.areply())
            else:
                break
        await self._afinish(await self._job.areplies())
        return True

    def __iter__(self) -> Iterator[ChatDelta]:
        going_on = True
        while going_on:
            for delta in self._job:
                yield from self._read(delta)
                if self._spent():
                    break
            going_on = self._goes_on()
            if going_on:
                self._job.cancel()
                yield from self._go_on(self._job.reply())
            elif self._has_later:
                going_on = True
                self._next_sample(self._job.reply())
        self._finish(self._job.replies())

    async def __aiter__(self) -> AsyncIterator[ChatDelta]:
        found: list[ChatDelta] = []

        def take(deltas: list[ChatDelta]) -> bool:
            found.extend(deltas)
            return False

        ended = False
        while not ended:
            ended = await self.drain(take)
            for delta in found:
                yield delta
            found.clear()

    def _read(self, delta: Delta) -> list[ChatDelta]:
        index = self._current + delta.index
        sample = self._samples[index]
        sample.tokens += delta.tokens
        sample.raw += len(delta.text)
        parts = sample.parser.push(delta.text)
        reason = delta.finish_reason
        if reason == "length" and self._shift is not None and len(sample.tokens) < self._shift.limit:
            # Only the context is full.
            self._shifting, reason = True, None
        elif reason is not None:
            parts += sample.parser.finish()
            sample.finished = True
        sample.thought += len(delta.tokens) if sample.parser.thinking else 0
        text, reasoning, calls = sample.take(parts)
        if self._hides:
            reasoning = ""
        if reason == "stop" and sample.calls:
            reason = "tool_calls"
        elif not (text or reasoning or calls or delta.tokens or reason):
            return []
        return [
            ChatDelta(
                text=text,
                reasoning=reasoning,
                tool_calls=calls,
                tokens=delta.tokens,
                logprobs=delta.logprobs,
                index=index,
                finish_reason=reason,
            )
        ]

    # Going on where the engine stopped.

    def _spent(self) -> bool:
        """Whether the model has reasoned for as long as it may."""
        sample, budget = self._samples[self._current], self._budget
        if budget is None or sample.closed:
            return False
        return sample.parser.thinking and sample.thought >= budget.tokens

    def _goes_on(self) -> bool:
        return self._shifting or (self._spent() and not self._samples[self._current].finished)

    def _go_on(self, so_far: Reply) -> list[ChatDelta]:
        """Have the reply go on in another request, from what was read of this one."""
        sample = self._samples[self._current]
        # Tokens that came after the last delta was read are not part of it.
        start = len(sample.earlier.tokens) if sample.earlier is not None else 0
        tokens = tuple(sample.tokens[start:])
        logprobs = None if so_far.logprobs is None else so_far.logprobs[: len(tokens)]
        so_far = replace(so_far, tokens=tokens, text=so_far.text[: sample.raw], logprobs=logprobs)
        sample.raw = 0
        if self._shifting:
            self._shifting = False
            sample.earlier = _joined(sample.earlier, so_far)
            self._shift_on(sample.earlier)
            return []
        budget, sample.closed = self._budget, True
        assert budget is not None
        sample.tokens += budget.closing
        sample.told = len(sample.tokens)
        # They were not drawn: nothing else could have come.
        certain = tuple(TokenLogprob(token, 0.0) for token in budget.closing) if logprobs is not None else ()
        so_far = replace(
            so_far,
            tokens=tokens + budget.closing,
            text=so_far.text + budget.close,
            logprobs=None if logprobs is None else logprobs + certain,
        )
        sample.earlier = _joined(sample.earlier, so_far)
        text, reasoning, calls = sample.take(sample.parser.push(budget.close))
        try:
            self._replace(budget.go_on(sample.earlier.tokens))
        except ContextOverflow:
            if self._shift is None:
                raise
            self._shift_on(sample.earlier)
        return [
            ChatDelta(
                text=text,
                reasoning="" if self._hides else reasoning,
                tool_calls=calls,
                tokens=budget.closing,
                logprobs=certain,
                index=self._current,
            )
        ]

    def _shift_on(self, so_far: Reply) -> None:
        assert self._shift is not None
        sample = self._samples[self._current]
        job, gone = self._shift.go_on(so_far.tokens, sample.told)
        sample.shifted += gone
        self._replace(job)

    @property
    def _has_later(self) -> bool:
        return self._later is not None and self._current + 1 < len(self._samples)

    def _next_sample(self, ended: Reply) -> None:
        assert self._later is not None
        self._ended.append(ended)
        self._current += 1
        request = self._later(self._current)
        self._budget, self._shift = request.budget, request.shift
        self._replace(request.job)

    def _replace(self, job: Job) -> None:
        """Go on in `job`. A cancel that came between the two requests was meant for both."""
        with self._replacing:
            self._written_before += self._job.written
            self._job, cancelled = job, self.cancelled
        if cancelled:
            job.cancel()

    # The end.

    def _finish(self, raw: Sequence[Reply]) -> list[ChatReply]:
        with self._finishing:
            if self._replies is None:
                # Whoever asked for the reply alone has read nothing yet.
                for delta in self._job.unread():
                    self._read(delta)
                together = [*self._ended, *raw]
                self._replies = [self._then(self._made(at, reply)) for at, reply in enumerate(together)]
            return self._replies

    async def _afinish(self, raw: Sequence[Reply]) -> list[ChatReply]:
        # Arguments are checked by schemas that clients write: in a thread too.
        off_loop = self._waits or bool(self._tools) or len(self._job.output.deltas) > _MANY
        return await asyncio.to_thread(self._finish, raw) if off_loop else self._finish(raw)

    def _made(self, index: int, raw: Reply) -> ChatReply:
        sample = self._samples[index]
        # Where the engine died, its last text came without a delta.
        if not sample.finished:
            sample.take([*sample.parser.push(raw.text[sample.raw :]), *sample.parser.finish()])
        message = gather(sample.parts)
        raw = replace(_joined(sample.earlier, raw), index=index)
        raw = replace(raw, usage=replace(raw.usage, reasoning_tokens=sample.thought))
        problems = [check_arguments(call, self._tools) for call in message.tool_calls]
        return ChatReply(
            message=message,
            raw=raw,
            dropped=self._dropped,
            shifted=sample.shifted,
            problems=tuple(problem for problem in problems if problem is not None),
        )


def _joined(first: Reply | None, rest: Reply) -> Reply:
    """One reply out of two, of which the second went on from the first."""
    if first is None:
        return rest
    written = len(first.tokens) + len(rest.tokens)
    return replace(
        rest,
        text=first.text + rest.text,
        tokens=first.tokens + rest.tokens,
        usage=replace(first.usage, completion_tokens=written),
        reuse=first.reuse,
        timings=replace(
            first.timings,
            decode=first.timings.decode + rest.timings.queued + rest.timings.prefill + rest.timings.decode,
            decoded_tokens=written,
        ),
        logprobs=None if rest.logprobs is None else (first.logprobs or ()) + rest.logprobs,
        prompt_logprobs=first.prompt_logprobs,
    )
