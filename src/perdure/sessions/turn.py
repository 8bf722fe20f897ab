"""A turn: what was said, what was answered, and the exact tokens of both."""

from __future__ import annotations

import bisect
import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from perdure.chat.message import Message
from perdure.chat.transcript import Transcript
from perdure.errors import CorruptStateError

TurnKind = Literal["start", "turn", "fold"]
FIRST = bytes(32)
"""What stands for the digest of the turn before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One step of a conversation. It never changes.

    Its transcript is that of the turn before it up to `keep` (a cut, by its number of characters and of
    tokens), and then `added`. A `start` holds what stands before the conversation; a `fold` starts it anew.
    """

    kind: TurnKind
    messages: tuple[Message, ...]
    reply: Message | None = None
    keep: tuple[int, int] = (0, 0)
    added: Transcript = field(default_factory=Transcript)
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    finish_reason: str = ""
    usage: Mapping[str, int] = field(default_factory=dict)
    dropped: int = 0
    """How many of the oldest messages were left out of its prompt."""
    model: str = ""
    """The digest of the identity under which its tokens were computed."""
    created: float = 0.0
    before: bytes = FIRST
    """The digest of the turn before it."""

    @property
    def digest(self) -> bytes:
        """Over everything in it and, through `before`, over all that led to it."""
        head = json.dumps(
            [
                self.kind,
                [message.to_dict() for message in self.messages],
                self.reply.to_dict() if self.reply is not None else None,
                self.keep,
                self.added.text,
                self.added.cuts,
                dict(self.settings),
                self.seed,
                self.finish_reason,
                dict(self.usage),
                self.dropped,
                self.model,
                self.created,
            ],
            sort_keys=True,
            separators=(",", ":"),
        ).encode()
        digest = hashlib.sha256(b"perdure/turn/1\0" + self.before)
        digest.update(len(head).to_bytes(8, "little") + head)
        digest.update(pack_tokens(self.added.tokens))
        return digest.digest()

    @property
    def text(self) -> str:
        """The reply's."""
        return (self.reply.content or "") if self.reply is not None else ""

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "messages": [message.to_dict() for message in self.messages],
            "reply": self.reply.to_dict() if self.reply is not None else None,
            "keep": list(self.keep),
            "text": self.added.text,
            "tokens": list(self.added.tokens),
            "cuts": [list(cut) for cut in self.added.cuts],
            "settings": dict(self.settings),
            "seed": self.seed,
            "finish_reason": self.finish_reason,
            "usage": dict(self.usage),
            "dropped": self.dropped,
            "model": self.model,
            "created": self.created,
            "digest": self.digest.hex(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], before: bytes) -> Turn:
        """The turn in `value`, which must follow the one with the digest `before`."""
        try:
            turn = cls(
                kind=value["kind"],
                messages=tuple(Message.parse(message) for message in value["messages"]),
                reply=Message.parse(value["reply"]) if value["reply"] is not None else None,
                keep=(int(value["keep"][0]), int(value["keep"][1])),
                added=Transcript(
                    str(value["text"]),
                    array("i", value["tokens"]),
                    tuple((int(chars), int(tokens)) for chars, tokens in value["cuts"]),
                ),
                settings=dict(value["settings"]),
                seed=int(value["seed"]),
                finish_reason=str(value["finish_reason"]),
                usage=dict(value["usage"]),
                dropped=int(value["dropped"]),
                model=str(value["model"]),
                created=float(value["created"]),
                before=before,
            )
            wanted = bytes.fromhex(value["digest"])
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise CorruptStateError(f"not a turn of a session: {error!r}") from error
        if turn.kind not in ("start", "turn", "fold") or turn.digest != wanted:
            raise CorruptStateError(
                "a turn is not what its digest says: it was damaged, or put in another's place"
            )
        return turn


def transcript(turns: Iterable[Turn]) -> Transcript:
    """The text and tokens that a chain of turns comes to."""
    whole = Transcript()
    for turn in turns:
        if turn.kind != "start":
            whole = _kept(whole, turn.keep) + turn.added
    return whole


def _kept(whole: Transcript, keep: tuple[int, int]) -> Transcript:
    chars, tokens = keep
    if chars > len(whole.text) or tokens > len(whole.tokens):
        raise CorruptStateError(
            f"a turn goes on from token {tokens}, but only {len(whole.tokens)} lead to it"
        )
    cuts = tuple(cut for cut in whole.cuts if cut[0] <= chars and cut[1] <= tokens)
    return Transcript(whole.text[:chars], whole.tokens[:tokens], cuts)


def added(base: Transcript, whole: Transcript) -> tuple[tuple[int, int], Transcript]:
    """What `whole` adds to `base`: where they part, and the rest."""
    if whole.cuts[: len(base.cuts)] == base.cuts and base.cuts and _begins(base, whole):
        keep = base.cuts[-1]
    else:
        keep = _parting(base, whole)
    chars, tokens = keep
    later = whole.cuts[bisect.bisect_right(whole.cuts, keep) :]
    cuts = tuple((at - chars, count - tokens) for at, count in later)
    return keep, Transcript(whole.text[chars:], whole.tokens[tokens:], cuts)


def _begins(base: Transcript, whole: Transcript) -> bool:
    chars, tokens = base.cuts[-1]
    return whole.tokens[:tokens] == base.tokens[:tokens] and whole.text.startswith(base.text[:chars])


def _parting(base: Transcript, whole: Transcript) -> tuple[int, int]:
    """The last cut up to which both are alike."""
    keep = (0, 0)
    for cut, other in zip(base.cuts, whole.cuts, strict=False):
        if cut != other or base.tokens[keep[1] : cut[1]] != whole.tokens[keep[1] : cut[1]]:
            break
        if base.text[keep[0] : cut[0]] != whole.text[keep[0] : cut[0]]:
            break
        keep = cut
    return keep


def context(turns: Sequence[Turn]) -> list[Message]:
    """The messages that the next prompt is made of: all since the conversation last started anew."""
    first = max((index for index, turn in enumerate(turns) if turn.kind == "fold"), default=0)
    found: list[Message] = []
    for turn in turns[first:]:
        found += turn.messages
        if turn.reply is not None:
            found.append(turn.reply)
    return found


def pack_tokens(tokens: array[int]) -> bytes:
    # Four bytes each, little-endian: as on every machine that this runs on.
    return tokens.tobytes()
