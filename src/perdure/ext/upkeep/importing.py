"""What is taken of an exported session, and what is left out.

The messages of a session are imported unchanged, and everybody can read them. Tokens are taken only if they
stand for those words in the vocabulary at hand; state only if this store wrote it, or if the caller vouches
for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from perdure import CorruptStateError, Image, ImportResult, InvalidInputError, PerdureError, TemplateError
from perdure.ext.upkeep.export import Export, Progress, read_export
from perdure.spi.chat import ChatTokenizer, Transcript
from perdure.spi.engine import Tokenizer
from perdure.spi.runtime import Backend
from perdure.spi.sessions import (
    FIRST,
    Sessions,
    Turn,
    check_session_name,
    check_settings,
    is_record,
    portable_settings,
    transcript,
)


def import_session(
    sessions: Sessions,
    path: Path,
    name: str | None,
    *,
    namespace: str,
    trust_state: bool,
    progress: Progress | None,
) -> ImportResult:
    """A session out of a file, all of it verified first: what `Sessions.import_` does."""
    export = read_export(path, progress=progress)
    check_session_name(export.name if name is None else name)
    # The author of the file must not name files of this machine.
    settings = portable_settings(export.settings)
    check_settings(settings)
    own = export.signed_by(sessions.store.key)
    turns: Sequence[Turn] = export.turns
    left_out: dict[str, str] = {}
    why = "" if own else _why_not_tokens(sessions, turns)
    if why:
        turns = without_tokens(turns)
        if any(turn.added.tokens for turn in export.turns):
            left_out["tokens"] = why
    tokens = transcript(turns).tokens
    if any(turn.files for turn in turns):
        missing = take_files(export, sessions, namespace)
        if missing:
            left_out["files"] = f"{len(missing)} images are not in the file, or cannot be kept here"
    info = sessions.store.create(
        namespace,
        export.name if name is None else name,
        turns,
        # A session that came in is listed, whatever it says to be.
        kind=export.kind if not is_record(export.kind) else "session",
        settings=settings,
        origin={"how": "import", "session": export.name, "turn": len(turns) - 1},
    )
    session = sessions.get(info.name, namespace)
    state = 0
    if export.has_state:
        if not sessions.has_model:
            left_out["state"] = "no model was loaded to take it"
        elif why:
            left_out["state"] = f"its tokens were not taken: {why}"
        elif not own and not trust_state:
            left_out["state"] = "another store wrote it, and trust_state was not given"
        else:
            with sessions.moving_state:
                state, why = take_state(export, sessions.backend, turns, namespace, settings.get("adapters"))
            if why:
                left_out["state"] = why
    return ImportResult(
        session=session, turns=session.turns, tokens=len(tokens), state_tokens=state, left_out=left_out
    )


def take_files(export: Export, sessions: Sessions, namespace: str) -> set[str]:
    """Keep the files that turns name; those that are missing. What no turn names is not taken."""
    missing = {digest for turn in export.turns for digest in turn.files}
    # Without a model, or images, nothing could say whether they are to be encrypted.
    with suppress(InvalidInputError):
        for digest, data in export.files() if sessions.has_model else ():
            if digest in missing:
                sessions.chat_format.image_reader().keep(Image(data), namespace)
                missing.discard(digest)
    return missing


def _why_not_tokens(sessions: Sessions, turns: Sequence[Turn]) -> str:
    if not sessions.has_model:
        return why_not_tokens(turns, None, None)
    try:
        return why_not_tokens(turns, sessions.chat_format.tokenizer, sessions.backend.model)
    except TemplateError as error:
        return f"the model has no chat template to compare them with ({error})"


def without_tokens(turns: Sequence[Turn]) -> list[Turn]:
    """The same conversation as text alone: its tokens are made anew from the messages."""
    stripped: list[Turn] = []
    for turn in turns:
        before = stripped[-1].digest if stripped else FIRST
        stripped.append(replace(turn, keep=(0, 0), added=Transcript(), model="", before=before))
    return stripped


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
    if export.identity is None:
        return 0, "another version of perdure computed it"
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
