"""The replies in the making of one request, each a sequence of tokens."""

from __future__ import annotations

import functools
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from perdure.decode.output_queue import Canceller, OutputQueue
from perdure.decode.request import (
    Delta,
    FinishReason,
    Reply,
    Request,
    ReuseReport,
    Timings,
    TokenLogprob,
    Usage,
)
from perdure.decode.sampling.sampler import CompiledChain, Sampler, Shown
from perdure.decode.sampling.stage import Breakers, Candidates
from perdure.decode.stops import RepetitionGuard, TextStream
from perdure.engine.adapters import AdapterSet, AdapterTable
from perdure.engine.context import Context
from perdure.engine.contract import Candidate, Floats, Step, token_array
from perdure.engine.model import EngineModel
from perdure.engine.row_kernels import NothingToDraw
from perdure.errors import ContextOverflow, GrammarError, InvalidInputError

if TYPE_CHECKING:
    from perdure.decode.sampling.grammar import Grammars
    from perdure.decode.sampling.matcher import LazyMatcher, Matcher
    from perdure.engine.inspection import StepLogits, Trace
    from perdure.engine.logits import LogitsView
    from perdure.engine.state import Checkpoint


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """A slot (a sequence of the engine) that starts with the first `cached` tokens of a prompt."""

    seq: int
    cached: int
    report: ReuseReport


@dataclass(frozen=True, slots=True)
class PendingPrefix:
    """There is room, but another request is about to compute what this one needs: the first `length` tokens
    of slot `seq`. `since` distinguishes that request from the next one in the same slot."""

    seq: int
    length: int
    since: int


class TokensView(Sequence[int]):
    """The tokens so far, for a processor to read, without a copy."""

    def __init__(self, tokens: array[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        part = self._tokens[index]
        return part if isinstance(part, int) else part.tolist()


class TokenSequence:
    """The tokens of one sample (the prompt, then the reply), of which the first `cached` are in slot `seq`.

    Prefill and decode are one thing: compute the tokens that are not cached, and where those reach the end,
    draw the next one. If the cache is lost, `cached` is 0 and all are computed again.
    """

    def __init__(
        self,
        request: Request,
        *,
        adapters: AdapterSet | None,
        index: int,
        ends: frozenset[int],
        piece: Callable[..., bytes],
        sampler: Sampler,
        matcher: Matcher | LazyMatcher | None,
        limit: int,
        push: Callable[[Sequence[Delta]], bool],
        media: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.request = request
        self.adapters = adapters
        """What it is computed with; None for what the context has."""
        self.index = index
        self.tokens = array("i", request.prompt)
        self.prompt_length = len(self.tokens)
        self.checkpoint_at = frozenset({self.prompt_length - 1, *request.checkpoint_at})
        """Lengths that a later request may return to."""
        if adapters is not None and adapters.before is not None:
            # What the next prompt shares of the state may end there.
            self.checkpoint_at |= {int(adapters.start)}
        self.cached = 0
        self.media = media
        """Where images stand in the prompt: the first token of each, and the one behind its last."""
        self.alone_until = media[-1][1] if media else 0
        """Up to here it is computed in separate steps: it has images in these tokens, or a step of several
        sequences failed in them."""
        self.report = ReuseReport(computed=len(self.tokens), why="not started")
        self.seq: int | None = None
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.started: float | None = None
        self.first_token: float | None = None
        self.finished: float | None = None
        self.submitted = time.monotonic()
        self._piece = piece
        self._ends = ends
        self._sampling = sampler.sampling
        self.sampler = sampler
        self._matcher = matcher
        self._longest = self.prompt_length + limit
        # A request that ignores the model's end tokens has no repetition guard either.
        self._guard = RepetitionGuard(0 if request.ignore_eos else request.loop_guard, request.reply_prefix)
        self._check_at = min(self._longest, self.prompt_length + self._guard.due)
        """How many tokens there are when it is next asked whether the reply ends here."""
        self._push = push
        self._text = self._text_behind(request.reply_prefix[request.emitted :])
        self._has_stops = bool(request.stops)
        self.undelivered: list[tuple[int, tuple[TokenLogprob, ...]]] = []
        self._parts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self.end: int | None = None
        """The token with which the model ended it."""
        self.is_lazy = request.grammar is not None and request.grammar.openers is not None
        """Whether a draw may begin to steer the next."""
        is_steered = bool(request.processors) or (matcher is not None and not self.is_lazy)
        self._chain = None if is_steered else CompiledChain.of(sampler, request.logprobs)
        self.scoring = request.prompt_logprobs is not None and index == 0 and self.prompt_length > 1
        """Whether rows of the prompt are wanted of the next tokens."""
        self._forces = (
            request.speculate != 0
            and matcher is not None
            and request.logprobs is None
            and not request.processors
        )
        """Whether tokens that a grammar forces need no draw: nobody asks for their rows."""
        self.forced = 0
        """Tokens that were written without a draw."""
        self.watched = False
        """Whether a listener gets events of the tokens that it draws."""
        self.allowed: list[int] = []
        """How many tokens the grammar let it draw, of draws without an event yet, while it is watched."""
        self.drafted = 0
        """Tokens that were guessed for it, and of them those that were then drawn."""
        self.accepted = 0
        self.saved = 0.0
        """Seconds that this has saved, as far as is known."""
        self._view: LogitsView | None = None
        self._best: tuple[Candidate, ...] = ()

    @property
    def remaining(self) -> int:
        """Tokens of the sequence that are not in the cache yet."""
        return len(self.tokens) - self.cached

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def room(self) -> int:
        """Tokens that it may yet write."""
        return self._longest - len(self.tokens)

    @property
    def written(self) -> int:
        return len(self.tokens) - self.prompt_length

    def next_tokens(self, count: int) -> list[int] | NDArray[np.int32]:
        if count == 1:
            return [self.tokens[self.cached]]
        return np.array(self.tokens[self.cached : self.cached + count], np.int32)

    def step_within_media(self, count: int, most: int) -> int:
        """How many of its next `count` tokens a step takes where an image has a separate step."""
        from perdure.engine.media import step_within

        return step_within(self.media, self.cached, count, most)

    def score(self, context: Context, count: int) -> None:
        """Take the log probabilities of prompt tokens from the rows of a step that fed `count`."""
        top = self.request.prompt_logprobs
        assert top is not None
        for row in range(count):
            at = self.cached + row + 1
            if at >= self.prompt_length or at <= len(self._prompt_logprobs):
                continue
            view = context.logits(row, self.seq)
            best = view.top(min(top, view.size)) if top else ()
            token = self.tokens[at]
            self._prompt_logprobs.append(self._shown(token, float(view.logprobs([token])[0]), best))
        self.scoring = len(self._prompt_logprobs) < self.prompt_length - 1

    @property
    def compiled(self) -> CompiledChain | None:
        """Its chain, where the compiled path can run it now."""
        return None if self.is_lazy and self.steered else self._chain

    @property
    def steered(self) -> bool:
        """Whether processors or a grammar have a say in what is drawn next."""
        return bool(self.request.processors) or (self._matcher is not None and self._matcher.awake)

    def select(self, context: Context, row: int, seq: int) -> Candidates:
        """What can be drawn next from a row of logits."""
        request = self.request
        if request.logprobs is not None:
            # Of the model's own distribution, before anything changes the row.
            self._view = view = context.logits(row, seq)
            self._best = tuple(view.top(min(request.logprobs, view.size))) if request.logprobs else ()
        if not self.steered:
            if self.watched and self.is_lazy:
                self.allowed.append(context.n_vocab)
            return context.read_row(self.sampler.select, row, seq)
        try:
            if not request.processors:
                return context.read_row(self._allowed, row, seq)
            values = context.logits(row, seq).copy()
            for processor in request.processors:
                tracing = functools.partial(context.trace, seq, stop=len(self.tokens))
                live = functools.partial(context.step_trace, row, seq)
                with _view_of(values, tracing, live) as view:
                    values = _processed(processor(TokensView(self.tokens), view), context)
            return self._allowed(values)
        except NothingToDraw:
            if request.processors:
                message = "processors, grammar and logit_bias together rule out every token"
                raise InvalidInputError(message) from None
            message = "the grammar came to a dead end: logit_bias rules out all that may follow"
            raise GrammarError(message) from None

    def _allowed(self, row: Floats) -> Candidates:
        """What of a row the grammar allows."""
        matcher = self._matcher
        if matcher is None or not matcher.awake:
            return self.sampler.select(row)
        if self.watched:
            mask = np.unpackbits(matcher.mask(), count=len(row), bitorder="little")
            self.allowed.append(int(mask.sum()))
        if (
            self._sampling.greedy
            and not matcher.forced()
            and matcher.allows(int((candidates := self.sampler.select(row)).ids[0]))
        ):
            # The likeliest of all is the likeliest of what is allowed: no need to ask for the rest.
            return candidates
        return self.sampler.select(row, matcher.mask())

    def take(self, token: int, shown: Shown | None = None) -> None:
        """Go on with a token that was drawn, and end the reply where it ends. Its text, where that does not
        decide about the end, is for `deliver`: the next step need not wait for it."""
        new: tuple[TokenLogprob, ...] = ()
        if shown is not None:
            new = (self._shown(token, shown.logprob, shown.best),)
        elif (view := self._view) is not None:
            new = (self._shown(token, float(view[token]) - view.log_norm(), self._best),)
            self._view = None
        if self.first_token is None:
            self.first_token = time.monotonic()
        self._append(token, new)
        if self._forces and not self.watched:
            self._append_forced()

    def _shown(self, token: int, logprob: float, best: Sequence[Candidate]) -> TokenLogprob:
        def text(token: int) -> str:
            return self._piece(token, special=True).decode("utf-8", "replace")

        return TokenLogprob(
            token, logprob, tuple(each._replace(text=text(each.token)) for each in best), text(token)
        )

    def _append_forced(self) -> None:
        """Go on with the tokens that a grammar leaves no choice about. A draw could give nothing else: they
        need no rows, and one step computes them all."""
        assert self._matcher is not None
        while forced := self._matcher.forced():
            for token in forced:
                if self.finish_reason is not None:
                    return
                if token in self._ends or token in self._sampling.logit_bias:
                    # What a draw makes of it is for the draw to say.
                    return
                self.sampler.observe(1.0)
                self.sampler.accept(token)
                self.forced += 1
                self._append(token, ())

    def _append(self, token: int, new: tuple[TokenLogprob, ...]) -> None:
        request = self.request
        if self._matcher is not None:
            self._matcher.consume(token)
        if token in self._ends and not request.ignore_eos:
            self.end = token
            self.finish("stop")
            return
        self.tokens.append(token)
        self._logprobs.extend(new)
        matcher = self._matcher
        decides = self._has_stops or (matcher is not None and matcher.awake)
        if decides or len(self.tokens) >= self._check_at:
            self.deliver()
            self._decide(token, new)
        else:
            self.undelivered.append((token, new))

    def _decide(self, token: int, new: tuple[TokenLogprob, ...]) -> None:
        """Deliver a token whose text may end the reply, or that is its last."""
        text = self._text_of(token)
        if self._text.stopped is not None or (self._matcher is not None and self._matcher.complete):
            self.finish("stop", text, (token,), new)
        elif len(self.tokens) >= self._longest:
            self.finish("length", text, (token,), new)
        elif len(self.tokens) >= self._check_at and self._guard.repeats(self.tokens[self.prompt_length :]):
            self.finish("repetition", text, (token,), new)
        else:
            self._check_at = min(self._longest, self.prompt_length + self._guard.due)
            self._push([Delta(text, (token,), new, self.index)])

    def deliver(self) -> None:
        """Put what was taken since the last time into the output queue, as text."""
        undelivered, self.undelivered = self.undelivered, []
        for token, new in undelivered:
            self._push([Delta(self._text_of(token), (token,), new, self.index)])

    def _text_of(self, token: int) -> str:
        if token in self.request.visible_tokens:
            text = self._push_text(self._text, token)
        else:
            # At every token: the same without a call.
            text = self._text.push(self._piece(token, special=False))
        self._parts.append(text)
        return text

    def _push_text(self, text: TextStream, token: int) -> str:
        if token in self.request.visible_tokens:
            return text.push_mark(self._piece(token, special=True))
        return text.push(self._piece(token, special=False))

    def _text_behind(self, prefix: Sequence[int]) -> TextStream:
        """The text behind tokens of an earlier request, which emitted what was certain."""
        text = TextStream(self.request.stops)
        for token in prefix:
            self._push_text(text, token)
        # A stop that the earlier request did not stop at is none.
        return text if text.stopped is None else TextStream(self.request.stops)

    def finish(
        self,
        reason: FinishReason,
        text: str = "",
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        error: Exception | None = None,
    ) -> None:
        self.deliver()
        rest = "" if reason == "length" and self.request.continued else self._text.finish()
        self._parts.append(rest)
        self.finish_reason, self.error = reason, error
        self.finished = time.monotonic()
        self._push([Delta(text + rest, tokens, logprobs, self.index, reason)])

    def lost(self, error: Exception) -> Reply:
        """What there is of a reply that could not be put together: the error."""
        return Reply(
            text="",
            tokens=(),
            finish_reason="error",
            usage=Usage(prompt_tokens=self.prompt_length, completion_tokens=0),
            timings=Timings(queued=0.0, prefill=0.0, decode=0.0, prefilled_tokens=0, decoded_tokens=0),
            reuse=self.report,
            seed=self._sampling.seed or 0,
            index=self.index,
            error=error,
        )

    def reply(self) -> Reply:
        assert self.finish_reason is not None
        assert self.finished is not None
        started = self.started or self.finished
        first = self.first_token or self.finished
        return Reply(
            text="".join(self._parts),
            tokens=tuple(self.tokens[self.prompt_length :]),
            finish_reason=self.finish_reason,
            usage=Usage(
                prompt_tokens=self.prompt_length,
                completion_tokens=self.written,
                cached_tokens=self.report.reused,
                media_tokens=sum(end - start for start, end in self.media),
            ),
            timings=Timings(
                queued=started - self.submitted,
                prefill=first - started,
                decode=self.finished - first,
                prefilled_tokens=self.prompt_length - self.report.reused,
                decoded_tokens=self.written,
                forced_tokens=self.forced,
                drafted_tokens=self.drafted,
                accepted_tokens=self.accepted,
                saved=self.saved,
            ),
            reuse=self.report,
            seed=self._sampling.seed or 0,
            index=self.index,
            end=self.end,
            stop=self._text.stopped,
            logprobs=None if self.request.logprobs is None else tuple(self._logprobs),
            prompt_logprobs=None if self.request.prompt_logprobs is None else (None, *self._prompt_logprobs),
            error=self.error,
        )


@contextmanager
def _view_of(
    values: NDArray[np.float32], tracing: Callable[..., Trace], live: Callable[[], Trace]
) -> Iterator[StepLogits]:
    """A view for one call, over a copy: a view that a processor keeps pins no shared memory."""
    from perdure.engine.inspection import StepLogits

    step = Step(threading.RLock(), values)
    try:
        yield StepLogits(values, step, tracing, live)
    finally:
        step.end()


def _processed(values: object, context: Context) -> NDArray[np.float32]:
    logits = np.array(values, dtype=np.float32)
    if logits.shape != (context.n_vocab,):
        raise InvalidInputError(
            f"a processor must return {context.n_vocab} logits, got an array of shape {logits.shape}"
        )
    if not np.isfinite(logits.max()):
        raise InvalidInputError("a processor ruled out every token, or returned numbers that are none")
    return logits


class Rank(IntEnum):
    """Its priority: the lower, the earlier."""

    INTERACTIVE = 0
    BACKGROUND = 1
    IDLE = 2
    """Work that nobody waits for, done while there is no other."""


_RANKS = {"interactive": Rank.INTERACTIVE, "background": Rank.BACKGROUND}


class SequenceGroup(OutputQueue):
    """The samples of one request, and the output queue that they fill.

    The first sample computes the prompt; the others start where it ends, in slots of their own. A sample that
    finds no free slot waits for one of its siblings': none is left without a slot while a sibling has one, so
    the last to finish leaves nobody behind.
    """

    def __init__(self, prompt_tokens: int, canceller: Canceller | None, deadline: float | None) -> None:
        super().__init__(prompt_tokens, canceller)
        self.sequences: list[TokenSequence] = []
        self.deadline = deadline
        self.rank = Rank.INTERACTIVE
        """Its priority: the lower, the earlier."""
        self.pending_prefix: PendingPrefix | None = None
        """What it waits for though there is room, if it does."""
        self.checkpoint: Checkpoint | None = None
        self.event_id = ""
        """What its events name it by."""

    @property
    def done(self) -> bool:
        # At every step, for everybody: a generator would take four times as long.
        for sequence in self.sequences:  # noqa: SIM110
            if sequence.finish_reason is None:
                return False
        return True

    @property
    def waiting(self) -> list[TokenSequence]:
        return [each for each in self.sequences if each.seq is None and not each.done]

    @property
    def slots(self) -> int:
        """How many slots it has."""
        return sum(sequence.seq is not None for sequence in self.sequences)

    def overdue(self, now: float) -> bool:
        return self.cancelled or (self.deadline is not None and now >= self.deadline)

    def start(self, slot: SlotAssignment) -> None:
        """Give its first sample a slot: at the beginning, or again after it gave way to others."""
        first = self.sequences[0]
        first.seq, first.cached = slot.seq, slot.cached
        self.read = slot.cached
        if first.started is not None:
            return
        first.report = slot.report
        now = time.monotonic()
        for sequence in self.sequences:
            sequence.started = now

    @property
    def can_give_way(self) -> bool:
        """Whether it can go back to where it waits. Samples that share a prompt hold several slots."""
        return len(self.sequences) == 1

    def preempt(self) -> int:
        """Go back to where it waits, with what it has written: the slot that it had."""
        [sequence] = self.sequences
        assert sequence.seq is not None
        seq, sequence.seq, sequence.cached = sequence.seq, None, 0
        self.pending_prefix = None
        return seq

    def end_cancelled(self) -> None:
        for sequence in self.sequences:
            if not sequence.done:
                sequence.finish("cancelled")

    def fail(self, error: Exception, sequence: TokenSequence | None = None) -> None:
        """End `sequence` by an error. While its prompt is computed, that is the error of all samples."""
        for each in self.sequences if sequence is None or not sequence.written else [sequence]:
            if not each.done:
                each.finish("error", error=error)

    def complete(self) -> None:
        """Finish the queue with all replies. One that cannot be put together is an error of this request."""
        try:
            replies = [sequence.reply() for sequence in self.sequences]
        except Exception as error:
            replies = [sequence.lost(error) for sequence in self.sequences]
        self.sequences, self.checkpoint = [], None
        self.finish(replies)


def make_group(
    request: Request,
    *,
    model: EngineModel,
    piece: Callable[..., bytes],
    context: Context,
    grammars: Callable[[], Grammars],
    breakers: Callable[[tuple[str, ...]], Breakers],
    adapters: AdapterTable,
    deadline: float | None,
    canceller: Canceller | None = None,
) -> SequenceGroup:
    """The sequences of a request. Whatever is wrong with it is raised here, before any work."""
    ids = token_array(request.prompt, context.n_vocab, what="a prompt", media=context.media is not None)
    media: Sequence[tuple[int, int]] = ()
    if context.media is not None and ids.min() < 0:
        media = _media_in(ids, request)
        ends = [end for _, end in media] if context.memory.needs_checkpoint else []
        request = replace(request, checkpoint_at=(*request.checkpoint_at, *ends))
    # The last token that is written is never fed, so it needs no room.
    room = context.n_ctx - len(ids) + 1
    new = request.max_tokens or 1
    if new > room:
        raise ContextOverflow(
            f"the prompt has {len(ids)} tokens and {new} more are wanted; {context.n_ctx} fit in all. "
            "Send less, ask for less, or open the model with a larger n_ctx",
            needed=len(ids) + new,
            fits=context.n_ctx,
        )
    sampling = request.sampling.seeded()
    if request.ignore_eos:
        sampling = sampling.without(sorted(model.ends))
    sampling.check(context.n_vocab)
    chosen = None
    if request.adapters is not None or adapters.default is not None:
        chosen = adapters.choose(request.adapters, ids)
    group = SequenceGroup(len(ids), canceller, deadline)
    matchers: list[Matcher | LazyMatcher | None] = [None] * request.n
    if request.grammar is not None:
        from perdure.decode.sampling.grammar_checker import GrammarLate

        try:
            matchers = [_matcher(request, grammars(), deadline) for _ in matchers]
        except GrammarLate:
            # It ends before anything of it is computed: without its grammar it may say nothing.
            group.cancelled = True
    group.rank = Rank.IDLE if request.idle else _RANKS[request.priority]
    for index, matcher in enumerate(matchers):
        sampler = Sampler(sampling.seeded(index), n_ctx=context.n_ctx, breakers=breakers)
        sampler.prime(request.prompt)
        group.sequences.append(
            TokenSequence(
                request,
                adapters=chosen,
                index=index,
                ends=model.ends,
                piece=piece,
                sampler=sampler,
                matcher=matcher,
                limit=request.max_tokens or room,
                push=group.push,
                media=media,
            )
        )
    return group


def _media_in(ids: NDArray[np.int32], request: Request) -> list[tuple[int, int]]:
    """Where images stand in a prompt."""
    if ids[-1] < 0:
        raise InvalidInputError("a prompt ends with text: put some behind the image")
    if request.prompt_logprobs is not None:
        raise InvalidInputError("prompt_logprobs are of tokens, and this prompt has images")
    from perdure.engine.media import spans

    return spans(ids)


def _matcher(request: Request, grammars: Grammars, deadline: float | None) -> Matcher | LazyMatcher:
    assert request.grammar is not None
    grammar, namespace = request.grammar, request.namespace
    matcher: Matcher | LazyMatcher
    if grammar.openers is None:
        matcher = grammars.matcher(grammar, namespace, deadline)
    else:
        matcher = grammars.lazy_matcher(grammar, namespace, deadline, visible=request.visible_tokens)
    for token in request.reply_prefix:
        matcher.consume(token)
    return matcher
