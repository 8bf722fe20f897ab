"""For extensions that guess the next tokens of replies, say how they ended, or check patterns of clients."""

from perdure.decode.drafter import Drafter as Drafter, DrafterOpener as DrafterOpener
from perdure.decode.request import FinishReason as FinishReason
from perdure.decode.sampling.grammar_checker import Vocabulary as Vocabulary, checker as checker
from perdure.decode.sampling.sampler import draw_together as draw_together
from perdure.decode.scheduler import Budget as Budget, Chunk as Chunk, QueueOrder as QueueOrder, Step as Step
from perdure.decode.sequence import (
    Rank as Rank,
    SequenceGroup as SequenceGroup,
    TokenSequence as TokenSequence,
)
from perdure.request_options import ADAPT as ADAPT, MAX_GUESSES as MAX_GUESSES
