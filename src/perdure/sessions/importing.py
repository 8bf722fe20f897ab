"""What is taken of an exported session, and what is left out.

The words of a session come over as they are, and everybody can read them. Tokens are taken only if they stand
for those words in the vocabulary at hand; state only if this store wrote it, or if the caller vouches for it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.backend import Backend
from perdure.chat.options import ChatOptions
from perdure.chat.transcript import ChatTokenizer
from perdure.decode.request import Request
from perdure.engine.contract import Tokenizer
from perdure.errors import CorruptStateError, InvalidInputError, PerdureError
from perdure.sessions.export import Export
from perdure.sessions.session import Session
from perdure.sessions.turn import Turn, transcript

_INTERNAL = frozenset(
    {
        "prompt",
        "namespace",
        "known",
        "before",
        "then",
        "checkpoint_at",
        "pins",
        "cache_marks",
        "visible_tokens",
        "processors",
        "sampling",
    }
    | {"grammar", "keep_partial", "deadline"}
)
"""What a turn can be asked for, but no session can keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """A session that was imported: what was taken, and why not more."""

    session: Session
    turns: int
    tokens: int
    """Taken as they were; the next turn computes others from the text."""
    state_tokens: int
    """Whose state was taken."""
    left_out: Mapping[str, str]
    """`tokens` and `state`, each with the reason, where the file had some that were not taken."""


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise unless a session with these settings can answer."""
    if unknown := _INTERNAL & set(settings):
        raise InvalidInputError(f"these cannot be settings of a session: {', '.join(sorted(unknown))}")
    try:
        json.dumps(dict(settings), allow_nan=False).encode()
        _, others = ChatOptions.split(settings)
        if Request.of([0], **others).n != 1:
            raise InvalidInputError("a turn has one reply; leave n at 1")
    except InvalidInputError:
        raise
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidInputError(f"these cannot be settings of a session: {error}") from error


def why_not_tokens(
    turns: Sequence[Turn], tokenizer: ChatTokenizer | None, vocabulary: Tokenizer | None
) -> str:
    """Why the tokens of turns cannot be taken; empty where each stands for the text that people read."""
    if tokenizer is None or vocabulary is None:
        return "no model was loaded to compare them with the text"
    if any(turn.added.tokens and turn.model != vocabulary.digest for turn in turns):
        return "they are of another model"
    ends: set[tuple[int, int]] = {(0, 0)}
    for turn in turns:
        # A cut that is none would let a beginning of the text stand for tokens behind it.
        if turn.keep not in ends or not _alike(tokenizer, vocabulary, turn):
            return "they are not those of the text"
        chars, tokens = turn.keep
        ends = {end for end in ends if end <= turn.keep}
        ends |= {(chars + at, tokens + token) for at, token in turn.added.cuts}
    return ""


def _alike(tokenizer: ChatTokenizer, vocabulary: Tokenizer, turn: Turn) -> bool:
    """Whether each piece of a turn's tokens, from cut to cut, is the piece of text there."""
    text, tokens = turn.added.text, turn.added.tokens
    if any(not 0 <= token < vocabulary.n_vocab for token in tokens):
        return False
    at = token = 0
    for chars, count in turn.added.cuts:
        if chars < at or count < token or chars > len(text) or count > len(tokens):
            return False
        opens = turn.keep == (0, 0) and not token
        if not _stands_for(tokenizer, vocabulary, tokens[token:count], text[at:chars], first=opens):
            return False
        at, token = chars, count
    return at == len(text) and token == len(tokens)


def _stands_for(
    tokenizer: ChatTokenizer, vocabulary: Tokenizer, tokens: array[int], text: str, *, first: bool
) -> bool:
    opening = tokenizer.start.tokens
    if first and opening and tokens[: len(opening)] == opening:
        # What every prompt starts with may have no words.
        rest = tokens[len(opening) :]
        if (not rest and not text) or (rest and _stands_for(tokenizer, vocabulary, rest, text, first=False)):
            return True
    if any(token not in tokenizer.control and not vocabulary.piece(token) for token in tokens):
        # The model would read something that nobody sees.
        return False
    decoded = tokenizer.decode(tokens).text
    # Some vocabularies put a space before a text.
    return decoded == text or (decoded[:1] == " " and decoded[1:] == text)


def take_state(
    export: Export,
    backend: Backend,
    turns: Sequence[Turn],
    namespace: str,
    adapters: Mapping[str, float] | None = None,
) -> tuple[int, str]:
    """How many tokens of state were taken, and why not more."""
    assert export.identity is not None
    try:
        blocks = list(export.blocks())
        state_tokens = [token for block in blocks for token in block.tokens.tolist()]
        if state_tokens != list(transcript(turns).tokens[: len(state_tokens)]):
            raise CorruptStateError("it is of other tokens")
        taken = backend.cache.unpack(export.identity, blocks, namespace=namespace, adapters=adapters)
        return taken, ""
    except PerdureError as error:
        # The words have come over: state that does not fit here is computed.
        return 0, str(error)
