"""For extensions that guess the next tokens of replies, or say how they ended."""

from perdure.decode.drafter import Drafter, DrafterOpener
from perdure.decode.request import FinishReason
from perdure.decode.sampling.sampler import draw_together
from perdure.decode.scheduler import Budget, Chunk, Step
from perdure.decode.sequence import TokenSequence
from perdure.request_options import ADAPT, MAX_GUESSES

__all__ = [
    "ADAPT",
    "MAX_GUESSES",
    "Budget",
    "Chunk",
    "Drafter",
    "DrafterOpener",
    "FinishReason",
    "Step",
    "TokenSequence",
    "draw_together",
]
