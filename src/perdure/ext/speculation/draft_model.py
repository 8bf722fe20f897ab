"""A draft model: a smaller model of the same vocabulary that writes ahead.

    perdure.open("large.gguf", draft="small.gguf")

It draws with the random numbers that the large model will draw with, so that both take the same token
wherever they agree about the likely ones, at any temperature. So do next-token layers of the model itself.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack
from weakref import ReferenceType, ref

import numpy as np

from perdure import CannotRewindError, Context, InvalidInputError
from perdure.ext.speculation.guess_source import Guess, draw_guess
from perdure.spi.decode import TokenSequence
from perdure.spi.engine import EngineModel, LoadingKeywords, Tokenizer, registry
from perdure.spi.models import ASSISTANTS, models

GUESSES = 8
"""Tokens that it writes ahead, at most: each takes a step."""
NEXT_GUESSES = 5
"""Tokens that next-token layers write ahead, at most: each takes a small step."""
_CATCH_UP = 256
"""Tokens of a prompt that it reads between two steps: others wait meanwhile."""


def check_vocabulary(model: Tokenizer, draft: Tokenizer) -> None:
    """Refuse a draft model whose tokens mean something else."""
    advice = "a draft model needs the same vocabulary: take a smaller one of the same family"
    if draft.n_vocab != model.n_vocab:
        raise InvalidInputError(
            f"the draft model has {draft.n_vocab} tokens and the model {model.n_vocab}; {advice}"
        )
    for token in range(model.n_vocab):
        ours, theirs = model.piece(token, special=True), draft.piece(token, special=True)
        if ours != theirs:
            raise InvalidInputError(
                f"token {token} is {theirs[:40]!r} for the draft model, {ours[:40]!r} for the model; {advice}"
            )


class DraftModel:
    """Guesses by a smaller model.

    Always holds: a sequence of the draft context has a beginning of the tokens of the reply that it was given
    to, or is brought back to one before it computes. Where there are more replies than sequences, the reply
    that guessed least lately loses its own.
    """

    name = "model"
    computes = True

    def __init__(self, model: EngineModel, context: Context, *, own_model: bool) -> None:
        self._model = model
        self._context = context
        self._own_model = own_model
        self._free = list(range(context.n_seq))
        self._seqs: OrderedDict[ReferenceType[TokenSequence], int] = OrderedDict()
        """By reply, the one that guessed last comes last."""

    def guess(self, sequence: TokenSequence, count: int) -> Guess | None:
        count = min(count, GUESSES, self._context.n_ctx - len(sequence.tokens))
        if count < 1 or sequence.media:
            # It reads no images.
            return None
        seq = self._seq_of(sequence)
        if not self._catch_up(sequence, seq):
            return None
        tokens: list[int] = []
        while True:
            tokens.append(self._draw(sequence, seq, len(sequence.tokens) + len(tokens)))
            if len(tokens) == count:
                return Guess(tokens, 0.7, self.name)
            self._context.decode([tokens[-1]], seq)

    def forget(self, sequence: TokenSequence) -> None:
        seq = self._seqs.pop(ref(sequence), None)
        if seq is not None:
            self._free.append(seq)

    def close(self) -> None:
        self._context.close()
        if self._own_model:
            self._model.close()

    def _seq_of(self, sequence: TokenSequence) -> int:
        key = ref(sequence)
        seq = self._seqs.pop(key, None)
        if seq is None:
            seq = self._free.pop() if self._free else self._seqs.popitem(last=False)[1]
        self._seqs[key] = seq
        return seq

    def _catch_up(self, sequence: TokenSequence, seq: int) -> bool:
        """Compute the tokens of a reply that are not there yet. False: some are left for the next time."""
        context = self._context
        tokens = np.array(sequence.tokens, np.int32)
        # The last one is always computed: its row is drawn from.
        same = min(context.common_prefix(tokens, seq), len(tokens) - 1)
        if same < context.length(seq):
            try:
                context.truncate(same, seq)
            except CannotRewindError:
                context.clear(seq)
                same = 0
        end = min(len(tokens), same + _CATCH_UP)
        context.decode(tokens[same:end], seq)
        return end == len(tokens)

    def _draw(self, sequence: TokenSequence, seq: int, position: int) -> int:
        return self._context.read_row(lambda row: draw_guess(sequence, row, position), -1, seq)


class NextTokenLayers:
    """Guesses by the model's own next-token layers, which read along: `perdure.open(…, draft="mtp")`.

    What they hold is a part of each sequence's state, so that they go on where a session wakes, forks or goes
    back. They draw with the random numbers that the model will draw with, as a draft model does.
    """

    name = "mtp"
    computes = True

    def __init__(self, context: Context) -> None:
        self._context = context

    def guess(self, sequence: TokenSequence, count: int) -> Guess | None:
        seq, end = sequence.seq, len(sequence.tokens)
        if seq is None or sequence.cached != end - 1:
            return None
        tokens = self._context.guess(
            sequence.tokens[-1],
            lambda row, position: draw_guess(sequence, row, position),
            seq,
            count=min(count, NEXT_GUESSES),
        )
        return Guess(tokens, 0.7, self.name) if tokens else None

    def forget(self, sequence: TokenSequence) -> None:
        """Nothing is kept here."""

    def close(self) -> None:
        """The context is closed by its owner."""


def assistant_of(draft: str | EngineModel, model: EngineModel) -> EngineModel | None:
    """The model that is to guess for `model`, if it reads the hidden states of that one."""
    if not isinstance(draft, str):
        if draft.info.architecture not in ASSISTANTS:
            return None
        assistant = draft
    else:
        engine = registry.engine_for(draft)
        file = engine.fetch(draft)
        if not registry.is_gguf(file) or (
            models.read_header(file).text("general.architecture") not in ASSISTANTS
        ):
            return None
        # It reads the caches of the model, and is where these are. It has none: it needs room for no token.
        place: LoadingKeywords = {} if model.gpu_layers else {"gpu_layers": 0}
        assistant = engine.open(file, cells=0, **place)
    with ExitStack() as undo:
        if assistant is not draft:
            undo.callback(assistant.close)
        check_vocabulary(model, assistant)
        undo.pop_all()
    return assistant


def open_draft_model(
    draft: str | EngineModel, beside: EngineModel, context: Context, threads: int | None
) -> DraftModel:
    """Guesses by a smaller model, which is opened unless it is, for a context of the same size."""
    n_ctx, n_seq = context.n_ctx, context.n_seq
    model = registry.open_model(draft, {}, cells=n_ctx * n_seq) if isinstance(draft, str) else draft
    with ExitStack() as undo:
        if isinstance(draft, str):
            undo.callback(model.close)
        check_vocabulary(beside, model)
        own = model.context(n_ctx=n_ctx, n_seq=n_seq, threads=threads)
        undo.pop_all()
    return DraftModel(model, own, own_model=isinstance(draft, str))
