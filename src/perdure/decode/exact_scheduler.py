"""The scheduler of `exact`: steps whose shapes no other request changes."""

from __future__ import annotations

from collections.abc import Iterable

from perdure.decode.scheduler import Budget, Chunk, QueueOrder, Slots, Step, ready, set_of
from perdure.decode.sequence import SequenceGroup, TokenSequence


class ExactScheduler:
    """Every step is of one sequence and cut at fixed places, so that a reply has the bits it has alone."""

    order = QueueOrder()

    def next_steps(
        self, groups: Iterable[SequenceGroup], slots: Slots, budget: Budget, *, turn: int
    ) -> list[Step]:
        # No step has more than one sequence: what is computed by itself elsewhere is a prompt here.
        chunks, prefills, suspects = ready(groups)
        prefills += suspects
        context = slots.context
        for chunk in chunks:
            # Also those that a grammar forced: alone each has the bits that it has where nothing is forced.
            chunk.count = 1
        for group, sequence in self.order.prompts(prefills, turn)[:1]:
            assert sequence.seq is not None
            count = context.same_adapters(sequence.seq, sequence.cached, self._count(sequence, budget))
            if sequence.media:
                count = sequence.step_within_media(count, context.n_batch)
            chunks.append(Chunk(group, sequence, sequence.cached, count))
        if context.mixed:
            # Those of one set one after the other; the order of steps changes no reply.
            sets = {set_of(chunk.sequence, context): None for chunk in chunks}
            order = {each: at for at, each in enumerate(sets)}
            chunks.sort(key=lambda chunk: order[set_of(chunk.sequence, context)])
        return [[chunk] for chunk in chunks]

    def _count(self, sequence: TokenSequence, budget: Budget) -> int:
        """Prompts are cut at multiples of the chunk, replies at every token, with any other requests."""
        length = sequence.prompt_length - sequence.request.resumed
        if sequence.cached >= length:
            return 1
        size = min(budget.chunk, budget.rows) if sequence.scoring else budget.chunk
        end = min((sequence.cached // size + 1) * size, length)
        return end - sequence.cached
