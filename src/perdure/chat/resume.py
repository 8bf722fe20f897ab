"""Resume a reply that was interrupted: its plan runs again, and does not ask the engine for what is known.

known      [I1, love, the, s]                     tokens that were written before
plan       yields a request                       as it did the first time
resumed    reads the known tokens to the reader, then yields the request that goes on behind them
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import TypeVar

from perdure.chat.reply import ChatDelta, ReplyReader
from perdure.decode.request import Delta, Reply, Request, ReuseReport, Timings, Usage
from perdure.decode.stops import TextStream
from perdure.decode.stream import DeltaReader
from perdure.engine.contract import Tokenizer

T = TypeVar("T")
Steps = Generator[tuple[Request, DeltaReader[ChatDelta] | None], list[Reply], T]


def resumed(plan: Steps[T], known: Sequence[int], model: Tokenizer) -> Steps[T]:
    """A plan of one reply, whose first tokens are known. Its first delta shows them all."""
    request, reader = next(plan)
    try:
        while True:
            assert isinstance(reader, ReplyReader)
            before = len(reader.tokens)
            if list(known[:before]) != reader.tokens:
                # Tokens that came after the last one of its reasoning were never part of it.
                known = ()
            text, ended = _read(reader, request, known[before:], model)
            taken = tuple(reader.tokens[before:])
            if not ended:
                # What is left of the known tokens, if anything is, was held back by a stop.
                known = ()
                if not taken:
                    replies = yield request, reader
                else:
                    [rest] = yield _behind(request, taken), reader
                    replies = [_joined(text, taken, rest)]
            else:
                replies = [_known_reply(request, text, taken)]
            request, reader = plan.send(replies)
            if not known:
                # The rest is an ordinary plan, but for what was yielded last.
                while True:
                    request, reader = plan.send((yield request, reader))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _read(reader: ReplyReader, request: Request, known: Sequence[int], model: Tokenizer) -> tuple[str, bool]:
    """Read known tokens as if the engine wrote them: their text, and whether they are all of this request."""
    push = _pusher(request, model)
    for token in request.reply_prefix[request.emitted :]:
        push(token)
    text, shown = "", list[ChatDelta]()
    for number, token in enumerate(known, 1):
        if reader.spent:
            break
        piece = push(token)
        full = number == request.max_tokens and request.continued
        shown += reader.read(Delta(piece, (token,), finish_reason="length" if full else None))
        text += piece
        if full:
            break
    reader.hold(shown)
    return text, reader.spent or reader.is_full


def _pusher(request: Request, model: Tokenizer) -> Callable[[int], str]:
    text = TextStream(request.stops)

    def push(token: int) -> str:
        if token in request.visible_tokens:
            return text.push_mark(model.piece(token, special=True))
        return text.push(model.piece(token, special=False))

    return push


def _behind(request: Request, taken: tuple[int, ...]) -> Request:
    limit = request.max_tokens
    return replace(
        request,
        prompt=[*request.prompt, *taken],
        reply_prefix=(*request.reply_prefix, *taken),
        resumed=len(taken),
        max_tokens=None if limit is None else max(1, limit - len(taken)),
        prompt_logprobs=None,
    )


def _joined(text: str, taken: tuple[int, ...], rest: Reply) -> Reply:
    """The reply to a request of which some tokens were known, as if it had written them too."""
    usage, prompt = rest.usage, rest.usage.prompt_tokens - len(taken)
    return replace(
        rest,
        text=text + rest.text,
        tokens=taken + rest.tokens,
        usage=replace(
            usage,
            prompt_tokens=prompt,
            completion_tokens=usage.completion_tokens + len(taken),
            cached_tokens=min(usage.cached_tokens, prompt),
        ),
    )


def _known_reply(request: Request, text: str, taken: tuple[int, ...]) -> Reply:
    """The reply to a request that ended within the known tokens."""
    return Reply(
        text=text,
        tokens=taken,
        finish_reason="cancelled",
        usage=Usage(prompt_tokens=len(request.prompt), completion_tokens=len(taken)),
        timings=Timings(queued=0.0, prefill=0.0, decode=0.0, prefilled_tokens=0, decoded_tokens=len(taken)),
        reuse=ReuseReport(computed=0, why="it was written before"),
        seed=request.sampling.seed or 0,
        logprobs=None if request.logprobs is None else (),
    )
