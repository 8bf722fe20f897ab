"""The samples of one request."""

from __future__ import annotations

import time
from collections.abc import Callable

from perdure.decode.output_queue import OutputQueue
from perdure.decode.request import Request
from perdure.decode.sampling.grammar import Grammars, Matcher
from perdure.decode.sampling.sampler import Sampler
from perdure.decode.sampling.steering import BreakerTable
from perdure.decode.sequence import TokenSequence
from perdure.decode.slots import PendingPrefix, SlotAssignment
from perdure.engine.context import Context
from perdure.engine.model import Model
from perdure.engine.state import Checkpoint
from perdure.engine.token_ids import token_array
from perdure.errors import ContextOverflow


class SequenceGroup(OutputQueue):
    """The samples of one request, and the output queue that they fill.

    The first sample computes the prompt; the others start where it ends, in slots of their own. A sample that
    finds no free slot waits for one of its siblings': none is left without a slot while a sibling has one, so
    the last to finish leaves nobody behind.
    """

    def __init__(self, deadline: float | None) -> None:
        super().__init__()
        self.sequences: list[TokenSequence] = []
        self.deadline = deadline
        self.cancelled = False
        self.pending_prefix: PendingPrefix | None = None
        """What it waits for though there is room, if it does."""
        self.checkpoint: Checkpoint | None = None

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
        """Give its first sample a slot."""
        first = self.sequences[0]
        first.seq, first.cached, first.report = slot.seq, slot.cached, slot.report
        self.read = slot.cached
        now = time.monotonic()
        for sequence in self.sequences:
            sequence.started = now

    def cancel(self) -> None:
        for sequence in self.sequences:
            if not sequence.done:
                sequence.finish("cancelled")

    def fail(self, error: Exception, sequence: TokenSequence | None = None) -> None:
        """End `sequence` by an error. While its prompt is computed, that is the error of all samples."""
        for each in self.sequences if sequence is None or not sequence.written else [sequence]:
            if not each.done:
                each.finish("error", error=error)

    def deliver(self) -> None:
        """Hand all replies over. One that cannot be put together is an error of this request alone."""
        try:
            replies = [sequence.reply() for sequence in self.sequences]
        except Exception as error:
            replies = [sequence.lost(error) for sequence in self.sequences]
        # Whoever keeps the job keeps its output, and not what it was made with.
        self.sequences, self.checkpoint = [], None
        self.finish(replies)


def make_group(
    request: Request,
    *,
    model: Model,
    piece: Callable[..., bytes],
    context: Context,
    grammars: Grammars,
    breakers: BreakerTable,
    deadline: float | None,
) -> SequenceGroup:
    """The sequences of a request. Whatever is wrong with it is raised here, before any work."""
    ids = token_array(request.prompt, context.n_vocab, what="a prompt")
    # The last token that is written is never fed, so it needs no room.
    room = context.n_ctx - len(ids) + 1
    wanted = request.max_tokens or 1
    if wanted > room:
        raise ContextOverflow(
            f"the prompt has {len(ids)} tokens and {wanted} more are wanted; {context.n_ctx} fit in all",
            needed=len(ids) + wanted,
            fits=context.n_ctx,
        )
    settled = request.sampling.seeded()
    if request.ignore_eos:
        settled = settled.without(sorted(model.ends))
    settled.check(context.n_vocab)
    group = SequenceGroup(deadline)
    for index in range(request.n):
        sampler = Sampler(settled.seeded(index), n_ctx=context.n_ctx, breakers=breakers.find)
        sampler.prime(request.prompt)
        group.sequences.append(
            TokenSequence(
                request,
                index=index,
                ends=model.ends,
                piece=piece,
                sampler=sampler,
                matcher=_matcher(request, grammars),
                limit=request.max_tokens or room,
                put=group.put,
            )
        )
    return group


def _matcher(request: Request, grammars: Grammars) -> Matcher | None:
    if request.grammar is None:
        return None
    matcher = grammars.matcher(request.grammar)
    for token in request.reply_prefix:
        matcher.consume(token)
    return matcher
