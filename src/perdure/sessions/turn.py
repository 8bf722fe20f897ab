"""A turn: what was said, what was answered, and the exact tokens of both."""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, Literal

from perdure.chat.message import Message
from perdure.chat.transcript import Transcript
from perdure.checks import is_number
from perdure.errors import CorruptStateError, InvalidInputError

Said = str | Message | Mapping[str, Any] | Sequence[Message | Mapping[str, Any]]
"""What a caller says in a turn."""
TurnKind = Literal["start", "turn", "fold"]
FIRST = bytes(32)
"""What stands for the digest of the turn before the first."""
_ENDINGS = ("", "stop", "length", "tool_calls", "repetition", "cancelled", "error")
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
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
_SCALARS = (str, int, float, bool, NoneType)
_LARGEST = 2**63 - 1
"""The largest number that a column holds."""


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
    usage: Mapping[str, int | str] = field(default_factory=dict)
    """How its reply came about: figures, and `why` not more of its prompt was reused."""
    dropped: int = 0
    """How many of the oldest messages were left out of its prompt."""
    model: str = ""
    """The digest of the identity under which its tokens were computed."""
    created: float = 0.0
    before: bytes = FIRST
    """The digest of the turn before it."""

    _digest: bytes | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def digest(self) -> bytes:
        """Over everything in it and, through `before`, over all that led to it. It is computed once."""
        if self._digest is None:
            object.__setattr__(self, "_digest", digest_of(self))
        assert self._digest is not None
        return self._digest

    @property
    def text(self) -> str:
        """The reply's."""
        return (self.reply.content or "") if self.reply is not None else ""

    @property
    def files(self) -> list[str]:
        """The SHA-256 of each file that its messages name, in hex."""
        return list({image.digest: None for message in self.messages for _, image in message.images})

    @property
    def counts(self) -> dict[str, int]:
        """The figures of its usage."""
        return {name: count for name, count in self.usage.items() if isinstance(count, int)}

    @property
    def nbytes(self) -> int:
        """Of memory that it takes, about."""
        added = self.added
        size = 2000 + len(added.text) + 4 * len(added.tokens) + 120 * len(added.cuts)
        for each in self.messages if self.reply is None else (*self.messages, self.reply):
            size += 200 + len(each.content or "") + len(each.reasoning or "")
            for call in each.tool_calls:
                size += len(call.arguments)
        return size

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
        turn = cls.parse(value, before)
        try:
            digest = bytes.fromhex(value["digest"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptStateError(f"not a turn of a session: {error!r}") from error
        if turn.digest != digest:
            raise CorruptStateError(
                "a turn is not what its digest says: it was damaged, or put in another's place"
            )
        return turn

    @classmethod
    def parse(cls, value: Mapping[str, Any], before: bytes) -> Turn:
        """What `value` says, proved by nothing yet."""
        try:
            turn = cls(
                kind=value["kind"],
                messages=tuple(Message.parse(message) for message in value["messages"]),
                reply=Message.parse(value["reply"]) if value["reply"] is not None else None,
                keep=_pair(value["keep"]),
                added=Transcript(
                    value["text"], array("i", value["tokens"]), tuple(map(_pair, value["cuts"]))
                ),
                settings=value["settings"],
                seed=value["seed"],
                finish_reason=value["finish_reason"],
                usage=value["usage"],
                dropped=value["dropped"],
                model=value["model"],
                created=_moment(value["created"]),
                before=before,
            )
            turn._check_fields()
        except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise CorruptStateError(f"not a turn of a session: {why}") from error
        return turn

    def _check_fields(self) -> None:
        """Raise unless each field but the messages is of its type, and in its range."""
        if self.kind not in ("start", "turn", "fold") or self.finish_reason not in _ENDINGS:
            raise ValueError("of no known kind or end")
        added = self.added
        for figures in (self.keep, *added.cuts):
            _pair(figures)
        if not isinstance(added.tokens, array) or added.tokens.typecode != "i":
            raise TypeError("tokens are an array of numbers of four bytes")
        for text in (added.text, self.model, "".join(self.usage)):
            _check_text(text)
        for number in (self.seed, self.dropped):
            _check_whole(number)
        for name, value in self.usage.items():
            if name in ("why", "model"):
                _check_text(value)
            else:
                _check_whole(value)
        _moment(self.created)
        if not isinstance(self.settings, Mapping):
            raise TypeError("settings are a mapping")

    def check_readable(self) -> None:
        """Raise `InvalidInputError` unless it reads as the same again. A store writes no other turn: what is
        refused when it is read would take its whole session with it."""
        try:
            self._check_fields()
            # Of what was checked, text and whole numbers read as themselves.
            messages = self.messages if self.reply is None else (*self.messages, self.reply)
            settings = dict(self.settings)
            same = all(Message.parse(each.to_dict()) == each for each in messages)
            same = same and json.loads(json.dumps(settings)) == settings
        except (CorruptStateError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise InvalidInputError(
                f"this turn could not be read again, so it was not stored: {error}"
            ) from error
        if not same:
            raise InvalidInputError("this turn would read as another one, so it was not stored")


def said_messages(said: Said) -> list[Message]:
    """What is said, as messages that can be stored and read again."""
    if isinstance(said, str):
        said = {"role": "user", "content": said}
    messages = [said] if isinstance(said, (Message, Mapping)) else said
    # Nothing has looked at a Message that a caller made himself.
    parsed = [_parsed(each) for each in messages]
    if not parsed:
        raise InvalidInputError("a turn needs at least one message")
    for message in parsed:
        if message.role == "user" and not message.images and not (message.content or "").strip():
            raise InvalidInputError("a message needs some text")
    return parsed


def _parsed(value: Message | Mapping[str, Any]) -> Message:
    if not isinstance(value, Message):
        return Message.parse(value)
    # What is said brings the files of its images.
    return replace(Message.parse(value.to_dict()), images=value.images)


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that can be written down, as every JSON parser reads them: an infinite bias is written as
    100, which is what people write for one, and half a surrogate pair as a question mark."""
    plain = {}
    for name, value in settings.items():
        with suppress(TypeError, ValueError, RecursionError):
            scalar = type(value) in _SCALARS
            plain[name] = _plain(value if scalar else json.loads(json.dumps(value, default=_written)))
    return plain


def _written(value: Any) -> Any:
    """What a class that a reply is held to, or a function that is a tool, is written down as."""
    from perdure.chat.message import Tool
    from perdure.decode.sampling.grammar import written_schema

    schema = written_schema(value)
    return Tool.parse(value).to_dict() if schema is value else schema


def portable_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without adapters that are files, which are paths of one machine. Names stay."""
    adapters = settings.get("adapters")
    if not isinstance(adapters, Mapping):
        return dict(settings)
    # Here: commands that list sessions start without NumPy.
    from perdure.engine.adapters import is_name, split_layers

    if all(is_name(split_layers(str(each))[0]) for each in adapters):
        return dict(settings)
    return {name: value for name, value in settings.items() if name != "adapters"}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else math.copysign(100.0, value)
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def digest_of(turn: Turn) -> bytes:
    head = _encode(
        [
            turn.kind,
            [message.to_dict() for message in turn.messages],
            turn.reply.to_dict() if turn.reply is not None else None,
            turn.keep,
            turn.added.text,
            turn.added.cuts,
            dict(turn.settings),
            turn.seed,
            turn.finish_reason,
            dict(turn.usage),
            turn.dropped,
            turn.model,
            turn.created,
        ]
    ).encode()
    digest = hashlib.sha256(b"perdure/turn/1\0" + turn.before)
    digest.update(len(head).to_bytes(8, "little") + head)
    digest.update(pack_tokens(turn.added.tokens))
    return digest.digest()


def transcript(turns: Iterable[Turn]) -> Transcript:
    """The text and tokens that a chain of turns comes to, in one pass over them."""
    texts: list[str] = []
    tokens: list[array[int]] = []
    cuts: list[tuple[int, int]] = []
    chars = count = 0
    for turn in turns:
        if turn.kind == "start":
            continue
        keep_chars, keep_tokens = turn.keep
        if not 0 <= keep_chars <= chars or not 0 <= keep_tokens <= count:
            raise CorruptStateError(f"a turn goes on from token {keep_tokens}, but only {count} lead to it")
        shorten(texts, chars - keep_chars)
        shorten(tokens, count - keep_tokens)
        chars, count = keep_chars, keep_tokens
        while cuts and (cuts[-1][0] > chars or cuts[-1][1] > count):
            cuts.pop()
        texts.append(turn.added.text)
        tokens.append(turn.added.tokens)
        cuts += [(chars + at, count + token) for at, token in turn.added.cuts]
        chars += len(turn.added.text)
        count += len(turn.added.tokens)
    whole = array("i")
    for part in tokens:
        whole.extend(part)
    return Transcript("".join(texts), whole, tuple(cuts))


def shorten(parts: list[Any], by: int) -> None:
    """Drop the last `by` characters or tokens of `parts`."""
    while by:
        last = parts.pop()
        if len(last) > by:
            parts.append(last[: len(last) - by])
            return
        by -= len(last)


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
    first = next((at for at in range(len(turns) - 1, 0, -1) if turns[at].kind == "fold"), 0)
    messages: list[Message] = []
    for turn in turns[first:]:
        messages += turn.messages
        if turn.reply is not None:
            messages.append(turn.reply)
    return messages


def pack_tokens(tokens: array[int]) -> bytes:
    # Four bytes each, little-endian: as on every machine that this runs on.
    return tokens.tobytes()


def _check_text(value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"not a text: {value!r}")
    value.encode()


def _check_whole(value: object) -> None:
    # Not `is_whole`: there are some twenty in a turn, and each turn that is written is checked.
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"not a number from 0 to {_LARGEST}")


def _moment(value: object) -> float:
    if not is_number(value) or not 0 <= value < 1e12:
        raise ValueError(f"not a time: {value!r}")
    return float(value)


def _pair(value: Any) -> tuple[int, int]:
    first, second = value
    _check_whole(first)
    _check_whole(second)
    return first, second


def written_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a session as they can be kept: a class in `schema` and functions in `tools` as JSON."""
    written = dict(settings)
    if written.get("schema") is not None:
        from perdure.decode.sampling.grammar import written_schema

        written["schema"] = written_schema(written["schema"])
    if isinstance(tools := written.get("tools"), Sequence) and not isinstance(tools, str):
        from perdure.chat.message import Tool

        written["tools"] = [Tool.parse(tool).to_dict() for tool in tools]
    return written


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise unless a session with these settings can answer."""
    # Not where turns are only listed: NumPy comes with them.
    from perdure.chat.options import ChatOptions
    from perdure.decode.request import Request

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
