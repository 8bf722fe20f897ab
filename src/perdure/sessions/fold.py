"""An exhausted conversation becomes a summary and its last turns."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from perdure.chat.chat_format import ChatFormat
from perdure.chat.job import ChatJob
from perdure.chat.message import Message
from perdure.chat.reply import ChatDelta, ChatReply
from perdure.errors import SessionError
from perdure.sessions.history import History
from perdure.sessions.turn import Turn, context

ASK = "Summarise our conversation so far: names, facts, decisions, open questions."
_SHORTER = "Summarise our conversation so far in one short sentence."
HEADING = "Summary of the conversation so far:"
SUMMARY_TRIES = ((ASK, 0.0), (ASK, 0.7), (_SHORTER, 1.0))
"""What is asked for, and at which temperature. A small model may have nothing to say at first, or not come to
an end."""

Steps = Generator[ChatJob, ChatReply, Turn]
"""What a fold waits for: it gives jobs, is sent their replies, and returns the turn."""


class TurnJob(Protocol):
    """The caller's end of a turn: iterate it for deltas, ask it for the reply, or cancel it."""

    cancelled: bool
    stopped: bool

    @property
    def done(self) -> bool: ...
    @property
    def prompt_tokens(self) -> int:
        """Of the prompt that is answered, or of the summary that is written first."""
        ...

    @property
    def prompt_read(self) -> int:
        """Tokens of that prompt whose state is there."""
        ...

    @property
    def written(self) -> int:
        """Tokens that have come so far, of that reply or summary."""
        ...

    def cancel(self) -> None: ...
    def stop(self) -> None:
        """Cancel it because no more is wanted: for whoever reads it, that is an end like any other."""
        ...

    def replies(self, timeout: float | None = None) -> list[ChatReply]: ...
    def reply(self, timeout: float | None = None) -> ChatReply: ...
    async def areplies(self) -> list[ChatReply]: ...
    async def areply(self) -> ChatReply: ...
    async def drain(self, take: Callable[[list[ChatDelta]], bool]) -> bool:
        """Have `take` called in the event loop with what is new, until it gives False or all was taken:
        whether it was."""
        ...

    def __iter__(self) -> Iterator[ChatDelta]: ...
    def __aiter__(self) -> AsyncIterator[ChatDelta]: ...


class SummaryCut(Exception):
    """A summary was cancelled, or its time was up. It never leaves this package."""

    def __init__(self, reply: ChatReply) -> None:
        super().__init__(reply)
        self.reply = reply


def foldable(start: Turn, history: History, keep: int) -> list[Turn]:
    """The start, and the last turns as far as a fold looks back: to the fold before it, and further only
    for the turns that it keeps."""
    folded, said, first = False, 0, 0
    for depth, turn in history.back():
        folded, said = folded or turn.kind == "fold", said + (turn.kind == "turn")
        if folded and said > keep:
            first = depth
            break
    return [start, *history.page(max(0, first - 1), None)]


def fold_turn(turns: Sequence[Turn], summary: str, keep: int) -> Turn:
    """The turn that goes on from a summary of `turns` and the last `keep` of them.

    It stands behind the turns that it sums up, so that they stay reachable.
    """
    said = _said(turns)
    # Without the summaries of earlier folds.
    head = list(turns[0].messages)
    text = f"{HEADING}\n{summary.strip()}"
    if head and head[0].role == "system":
        head = [replace(head[0], content=f"{head[0].content or ''}\n\n{text}"), *head[1:]]
    else:
        head = [Message(role="system", content=text), *head]
    tail = [message for turn in said[len(said) - keep :] for message in context([turn])]
    return Turn(kind="fold", messages=(*head, *tail), created=time.time(), before=turns[-1].digest)


def summarised(
    chat_format: ChatFormat,
    turns: Sequence[Turn],
    keep: int,
    namespace: str,
    settings: Mapping[str, Any],
    deadline: float | None,
) -> Steps:
    """A fold whose summary the model writes. Only a summary that came to its end is taken."""
    said = _said(turns)
    earlier = context(turns[: len(turns) - min(keep, len(said) - 1)])
    room = min(192, chat_format.n_ctx // 8)
    wanted = {"max_tokens": room, **settings, "overflow": "drop_oldest", "reasoning": "hide"}
    why = "empty"
    for words, temperature in SUMMARY_TRIES:
        job = chat_format.submit(
            [*earlier, Message(role="user", content=words)],
            namespace=namespace,
            deadline=deadline,
            **{"temperature": temperature, "seed": 1, **wanted},
        )
        try:
            reply = yield job
        finally:
            job.cancel()
        if reply.finish_reason == "cancelled":
            raise SummaryCut(reply)
        text = reply.text.strip()
        if text and reply.finish_reason == "stop":
            return fold_turn(turns, text, keep)
        why = f"not finished within {wanted['max_tokens']} tokens" if text else why
    raise SessionError(
        f"the model's summary was {why}: nothing was folded, and nothing is lost. Give a summary of your "
        f"own, more room for one (max_tokens) or a larger context than {chat_format.n_ctx} tokens; or have "
        "the oldest turns left out (drop_oldest) instead"
    )


def _said(turns: Sequence[Turn]) -> list[Turn]:
    said = [turn for turn in turns if turn.kind == "turn"]
    if not said:
        raise SessionError("there is nothing to fold: nothing was said yet")
    return said


def written(steps: Steps) -> Turn:
    """The turn of a fold, waited for in this thread."""
    try:
        job = next(steps)
        while True:
            job = steps.send(job.reply())
    except StopIteration as done:
        turn: Turn = done.value
        return turn
    except SummaryCut as cut:
        raise SessionError("the summary was cut short by its timeout: nothing was folded") from cut


class FoldingJob:
    """A turn before which a conversation is folded: summaries first, then the reply.

    A cancel reaches whatever is being written, also between two requests. Nobody waits for a summary but who
    reads this: no lock is held meanwhile.
    """

    def __init__(self, steps: Generator[ChatJob, ChatReply, ChatJob]) -> None:
        self._steps = steps
        self._advancing = threading.Lock()
        self._changing = threading.Lock()
        self._current: ChatJob | None = None
        self._answering = False
        """Whether the current job is that of the reply."""
        self._cut: ChatReply | None = None
        self._error: BaseException | None = None
        self.cancelled = False
        self.stopped = False
        self._advance(None)

    @property
    def done(self) -> bool:
        if self._cut is not None or self._error is not None:
            return True
        return self._answering and self._current is not None and self._current.done

    @property
    def prompt_tokens(self) -> int:
        return self._current.prompt_tokens if self._current is not None else 0

    @property
    def prompt_read(self) -> int:
        return self._current.prompt_read if self._current is not None else 0

    @property
    def written(self) -> int:
        return self._current.written if self._current is not None else 0

    def cancel(self) -> None:
        """End it within one step; its reply says `cancelled`."""
        with self._changing:
            self.cancelled = True
            if self._current is not None:
                self._current.cancel()

    def stop(self) -> None:
        self.stopped = True
        self.cancel()

    def replies(self, timeout: float | None = None) -> list[ChatReply]:
        end = None if timeout is None else time.monotonic() + timeout
        while (job := self._summary()) is not None:
            left = None if end is None else max(0.0, end - time.monotonic())
            self._go_on(job, self._replied(job, left))
        if self._cut is not None:
            return [self._cut]
        assert self._current is not None
        return self._current.replies(None if end is None else max(0.0, end - time.monotonic()))

    def reply(self, timeout: float | None = None) -> ChatReply:
        return self.replies(timeout)[0]

    async def areplies(self) -> list[ChatReply]:
        await self._fold()
        if self._cut is not None:
            return [self._cut]
        assert self._current is not None
        return await self._current.areplies()

    async def areply(self) -> ChatReply:
        return (await self.areplies())[0]

    async def drain(self, take: Callable[[list[ChatDelta]], bool]) -> bool:
        """Deltas of the reply, as of a job without summaries."""
        await self._fold()
        if self._cut is not None:
            take([ChatDelta(finish_reason="cancelled")])
            return True
        assert self._current is not None
        return await self._current.drain(take)

    def __iter__(self) -> Iterator[ChatDelta]:
        while (job := self._summary()) is not None:
            self._go_on(job, self._replied(job, None))
        if self._cut is not None:
            yield ChatDelta(finish_reason="cancelled")
            return
        assert self._current is not None
        yield from self._current

    async def __aiter__(self) -> AsyncIterator[ChatDelta]:
        await self._fold()
        if self._cut is not None:
            yield ChatDelta(finish_reason="cancelled")
            return
        assert self._current is not None
        async for delta in self._current:
            yield delta

    # Inside.

    async def _fold(self) -> None:
        while (job := self._summary()) is not None:
            try:
                reply = await job.areply()
            except asyncio.CancelledError:
                self.cancel()
                raise
            except Exception as error:
                self._error = error
                raise
            # In a thread: there is much to render and to tokenise.
            await asyncio.to_thread(self._go_on, job, reply)

    def _summary(self) -> ChatJob | None:
        """The summary to wait for next, if there is one."""
        if self._error is not None:
            raise self._error
        return None if self._answering or self._cut is not None else self._current

    def _replied(self, job: ChatJob, timeout: float | None) -> ChatReply:
        try:
            return job.reply(timeout)
        except TimeoutError:
            raise
        except Exception as error:
            self._error = error
            raise

    def _go_on(self, job: ChatJob, reply: ChatReply) -> None:
        """After the reply to `job`, unless another reader was faster."""
        with self._advancing:
            if self._current is job and not self.done:
                self._advance(reply)

    def _advance(self, reply: ChatReply | None) -> None:
        try:
            if reply is not None and self.cancelled:
                self._steps.close()
                raise SummaryCut(reply)
            job, answering = self._steps.send(reply) if reply is not None else next(self._steps), False
        except StopIteration as done:
            job, answering = done.value, True
        except SummaryCut as cut:
            self._cut = _empty(cut.reply)
            return
        except BaseException as error:
            self._error = error
            raise
        with self._changing:
            self._current, self._answering = job, answering
            if self.cancelled:
                job.cancel()


def _empty(summary: ChatReply) -> ChatReply:
    """What comes of a turn whose summary was cut short: nothing."""
    raw = replace(
        summary.raw, text="", tokens=(), end=None, stop=None, logprobs=None, finish_reason="cancelled"
    )
    return ChatReply(
        message=Message(role="assistant", content=""), raw=raw, not_kept="the turn ended by cancelled"
    )
