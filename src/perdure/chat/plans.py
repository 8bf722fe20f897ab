"""Plans: how one reply is made out of several requests.

A plan is a generator that yields a request with its reader, receives the replies to it, and returns what came
of all. `Stream` runs it:

    reply = yield from reasoning_budget(request, reader, ...)

asks for reasoning until its budget is spent, and in a second request for the answer behind it.

A plan starts no thread and waits for nothing itself. It is thrown the error of a request that failed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from perdure.chat.message import Message
from perdure.chat.prompt_builder import ExchangePlan
from perdure.chat.reply import ChatDelta, ChatReply, ReplyReader
from perdure.decode.request import Reply, Request
from perdure.decode.stream import DeltaReader
from perdure.errors import ContextOverflow, SessionError

ReplyPlan: TypeAlias = Generator[tuple[Request, DeltaReader[ChatDelta] | None], list[Reply], Reply]
"""The plan of one sample."""
RepliesPlan: TypeAlias = Generator[tuple[Request, DeltaReader[ChatDelta] | None], list[Reply], list[Reply]]
"""The plan of several."""
SUMMARY_REQUEST = "Summarise our conversation so far: names, facts, decisions, open questions."
_SHORTER = "Summarise our conversation so far in one short sentence."
SUMMARY_TRIES = ((SUMMARY_REQUEST, 0.0), (SUMMARY_REQUEST, 0.7), (_SHORTER, 1.0))
"""What is asked for, and at which temperature. A small model may have nothing to say at first, or not come to
an end."""


def once(request: Request, reader: ReplyReader) -> ReplyPlan:
    """A sample in one request. Where its reader ends that, the caller goes on."""
    reader.begin()
    [reply] = yield request, reader
    if reader.spent or reader.is_full:
        return reader.so_far(reply)
    reader.finish(reply)
    return reply


def samples_in_turn(
    request: Request, readers: Sequence[ReplyReader], sample: Callable[[Request, ReplyReader], ReplyPlan]
) -> RepliesPlan:
    """One sample after the other: each may need further requests."""
    # Seeded here: what goes on in another request draws with the same seed.
    sampling = request.sampling.seeded()
    replies = []
    for index, reader in enumerate(readers):
        scored = request.prompt_logprobs if index == 0 else None
        alone = replace(request, n=1, sampling=sampling.seeded(index), prompt_logprobs=scored)
        replies.append((yield from sample(alone, reader)))
    return replies


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """What a reply keeps when the context is full: the first `head` tokens, and the last `room` of all."""

    head: int
    room: int
    n_ctx: int
    limit: int
    """Tokens that the reply may have in all."""

    def fitted(self, request: Request, count: int) -> Request:
        """A request for `count` tokens, or for as many as fit, to be continued then."""
        room = self.n_ctx - len(request.prompt)
        return replace(request, max_tokens=min(count, room), continued=room < count)

    def fits(self, request: Request) -> bool:
        """Whether a request fits with all that it may write. The last token that is written needs no room."""
        room = self.n_ctx - len(request.prompt)
        return room > 0 and (request.max_tokens or 1) <= room + 1

    def shifted(self, request: Request, reader: ReplyReader) -> Request:
        """The request that goes on from the reply to `request` so far, without the oldest tokens."""
        whole = [*request.prompt, *reader.tokens]
        from perdure.engine.media import is_inside

        start = max(self.head, len(whole) - self.room)
        while is_inside(whole[start]):
            # An image goes as a whole.
            start += 1
        remaining = [*whole[: self.head], *whole[start:]]
        reader.shifted += len(whole) - len(remaining)
        again = replace(
            request,
            prompt=remaining,
            checkpoint_at=(),
            pins=(),
            prompt_logprobs=None,
            reply_prefix=tuple(reader.tokens),
            emitted=reader.emitted,
        )
        return self.fitted(again, self.limit - len(reader.tokens))


def context_shift(
    request: Request, reader: ReplyReader, window: ContextWindow, *, first: Request | None = None
) -> ReplyPlan:
    """A sample that goes on past the end of the context: without the oldest tokens, the rest computed anew,
    for a state is only ever of its tokens. It begins with `first`, or with as much of `request` as fits."""
    reply: Reply | None = None
    current = first or window.fitted(request, window.limit)
    while True:
        reply = joined(reply, (yield from once(current, reader)))
        if reader.spent or not reader.is_full:
            return reply
        current = window.shifted(request, reader)


def reasoning_budget(
    request: Request,
    reader: ReplyReader,
    *,
    answer: Request,
    close: str,
    closing: Sequence[int],
    n_ctx: int,
    window: ContextWindow | None,
) -> ReplyPlan:
    """A sample whose reasoning ends with the tokens `closing` when its budget is spent. `answer` is the
    request from there on, but for its prompt."""
    if window is None:
        reply = yield from once(request, reader)
    else:
        reply = yield from context_shift(request, reader, window)
    if not reader.spent:
        return reply
    reply = reader.end_reasoning(close, closing, reply)
    used = len(reply.tokens)
    left = None if answer.max_tokens is None else max(1, answer.max_tokens - used)
    rest = replace(answer, prompt=[*answer.prompt, *reply.tokens], max_tokens=left, prompt_logprobs=None)
    if window is not None:
        first = rest if window.fits(rest) else window.shifted(request, reader)
        return joined(reply, (yield from context_shift(request, reader, window, first=first)))
    if len(rest.prompt) >= n_ctx:
        raise ContextOverflow(
            f"no room for an answer after {used} tokens of reasoning: {n_ctx} fit",
            needed=len(rest.prompt) + 1,
            fits=n_ctx,
        )
    return joined(reply, (yield from once(rest, reader)))


_BEFORE = "Summary of the conversation so far:"
_GOES_ON = "The conversation goes on:"


class SummaryInterrupted(Exception):
    """A summary was cancelled, or its time was up."""

    def __init__(self, reply: ChatReply) -> None:
        super().__init__(reply)
        self.reply = reply


class SummaryPasses:
    """Messages in the parts in which they are summed up: all at once where they fit, else the oldest part
    first, and each with the summary of those before it. So the last summary is of everything.

    The first part is a beginning of the conversation as it was said, whose state may be kept. Later ones are
    shown as text: a template could refuse messages that begin in the middle.
    """

    def __init__(self, messages: Sequence[Message], fits: Callable[[Sequence[Message]], bool]) -> None:
        """`fits` says whether messages fit with the request for a summary, and with the summary."""
        self._fits = fits
        self._text = ""
        """What is left, as text."""
        self._size = 0
        """Characters of it that are tried next."""
        self.summary = ""
        """Of all parts so far."""
        self._part: Sequence[Message] | None = self._first(messages)

    @property
    def part(self) -> Sequence[Message] | None:
        """What is to be summed up next; None when everything is."""
        return self._part

    def add(self, summary: str) -> None:
        """Take the summary of the part, and choose the next one."""
        self.summary = summary
        self._part = self._next() if self._text else None

    def _first(self, messages: Sequence[Message]) -> Sequence[Message]:
        if self._fits(messages):
            return messages
        ends = [
            at
            for at, message in enumerate(messages, 1)
            if message.role == "assistant" and not message.tool_calls
        ]
        low, high = 0, len(ends)
        while low < high:
            middle = (low + high) // 2
            if self._fits(messages[: ends[middle]]):
                low = middle + 1
            else:
                high = middle
        count = ends[low - 1] if low else 0
        self._text = "\n\n".join(map(_shown, messages[count:]))
        self._size = len(self._text)
        return messages[:count] if count else self._next()

    def _next(self) -> Sequence[Message]:
        """As much of the rest as fits."""
        while self._size:
            end = _boundary(self._text, self._size)
            part, rest = self._text[:end], self._text[end:]
            before = f"{_BEFORE}\n{self.summary}\n\n" if self.summary else ""
            messages = [Message(role="user", content=f"{before}{_GOES_ON}\n{part}")]
            if self._fits(messages):
                self._text = rest
                return messages
            self._size //= 2
        raise SessionError(
            "the context is too small for a summary: not even a part of the conversation fits with the "
            "summary of what came before; nothing was folded, and nothing is lost"
        )


def _boundary(text: str, size: int) -> int:
    """Where to cut a text that is to have up to `size` characters: between two messages or words, if it
    can."""
    if size >= len(text):
        return len(text)
    for mark in ("\n\n", "\n", " "):
        if (end := text.rfind(mark, size // 2, size)) > 0:
            return end
    return size


def _shown(message: Message) -> str:
    calls = "".join(f"\n{call.name}({call.arguments})" for call in message.tool_calls)
    return f"{message.role}: {message.content or ''}{calls}"


def summary(
    ask: Callable[..., ExchangePlan],
    messages: Sequence[Message],
    *,
    fits: Callable[[Sequence[Message], Mapping[str, Any]], bool],
    n_ctx: int,
    settings: Mapping[str, Any],
) -> Generator[tuple[Request, DeltaReader[ChatDelta] | None], list[Reply], str]:
    """A summary of messages, written by the model, in as many passes as it takes. Only summaries that came to
    their ends are taken. `ask` is `ChatFormat.plan`, and `fits` says whether a prompt fits with its reply."""
    options = {
        "max_tokens": min(192, n_ctx // 8),
        **settings,
        "overflow": "error",
        "reasoning": "hide",
        "side": True,
    }
    request = Message(role="user", content=SUMMARY_REQUEST)
    passes = SummaryPasses(messages, lambda part: fits([*part, request], options))
    while (part := passes.part) is not None:
        passes.add((yield from _pass_summary(ask, part, n_ctx, options)))
    return passes.summary


def _pass_summary(
    ask: Callable[..., ExchangePlan], messages: Sequence[Message], n_ctx: int, options: Mapping[str, Any]
) -> Generator[tuple[Request, DeltaReader[ChatDelta] | None], list[Reply], str]:
    why = "empty"
    for words, temperature in SUMMARY_TRIES:
        [exchange] = yield from ask(
            [*messages, Message(role="user", content=words)],
            silent=True,
            **{"temperature": temperature, "seed": 1, **options},
        )
        reply = exchange.reply
        if reply.finish_reason == "cancelled":
            raise SummaryInterrupted(reply)
        text = reply.text.strip()
        if text and reply.finish_reason == "stop":
            return text
        why = f"not finished within {options['max_tokens']} tokens" if text else why
    raise SessionError(
        f"the model's summary was {why}: nothing was folded, and nothing is lost. Give a summary of your "
        f"own, more room for one (max_tokens) or a larger context than {n_ctx} tokens; or have "
        "the oldest turns left out (drop_oldest) instead"
    )


def joined(first: Reply | None, rest: Reply) -> Reply:
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
            forced_tokens=first.timings.forced_tokens + rest.timings.forced_tokens,
            drafted_tokens=first.timings.drafted_tokens + rest.timings.drafted_tokens,
            accepted_tokens=first.timings.accepted_tokens + rest.timings.accepted_tokens,
            saved=first.timings.saved + rest.timings.saved,
        ),
        logprobs=None if rest.logprobs is None else (first.logprobs or ()) + rest.logprobs,
        prompt_logprobs=first.prompt_logprobs,
    )


# A conversation that no longer fits: the error that says so, and which turns are left out.

T = TypeVar("T")

_USUAL, _MOST = 4, 8
"""Characters of a token, as texts usually have them, and as hardly any has."""


def overflow(needed: int, fits: int) -> ContextOverflow:
    return ContextOverflow(
        f"the conversation needs {needed} tokens, {fits} fit (one is left for the reply). Nothing was done. "
        "Send less, open the model with a larger n_ctx, or choose an overflow policy: drop_oldest leaves out "
        "the oldest turns, shift the oldest tokens while the reply is written, and in a session fold goes on "
        "from a summary",
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
