"""Text to tokens and back, from a folder's tokenizer.json."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from perdure import InvalidInputError, ModelFileError
from perdure.ext.mlx.folder import TOKENIZER, Folder
from perdure.spi.base import read_text
from perdure.spi.engine import check_token

_TEXT_LIMIT = 1 << 28
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"
# Models end their turns with one of these, also where their files name another one alone.
_ENDS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<turn|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|eot|>",
        "</s>",
        "<eos>",
        "<EOT>",
    }
)


_LARGEST = 256 << 20


class MlxTokenizer:
    """The tokens of a model. Pieces are bytes, since a token can be part of a character."""

    def __init__(self, folder: Folder, n_vocab: int) -> None:
        import tokenizers

        path = folder.path / TOKENIZER
        try:
            text = read_text(path, _LARGEST)
            config = json.loads(text)
            self._reading = tokenizers.Tokenizer.from_str(text)
            # Marks in it are text to this one.
            self._plain = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # The library raises Exception itself.
            raise ModelFileError(f"{path} is no usable tokenizer: {str(error)[:300]}") from None
        self._plain.encode_special_tokens = True
        for each in (self._reading, self._plain):
            each.no_truncation()
            each.no_padding()
        self.size = n_vocab
        known = self._reading.get_vocab_size(with_added_tokens=True)
        highest = max(self._reading.get_vocab(with_added_tokens=True).values(), default=-1)
        if highest >= n_vocab:
            raise ModelFileError(
                f"{path} has tokens up to {highest} ({known} in all), the model has {n_vocab}: they are of "
                "different models"
            )
        self._folder = folder
        self._bytes = _byte_alphabet() if _is_byte_level(config) else None
        self._strips_space = self._bytes is None and _prepends_space(config)
        self.covers_text = self._bytes is not None or _keeps_text(config)
        added = self._reading.get_added_tokens_decoder()
        self._added = {token: each.content for token, each in added.items()}
        self.controls = frozenset(token for token, each in added.items() if each.special)
        self.ends = self._ends(folder)
        self.bos, self.eos = self._named("bos_token"), self._named("eos_token")

    def tokenize(self, text: str, *, special: bool, bos: bool) -> list[int]:
        try:
            size = len(text.encode())
        except (UnicodeEncodeError, AttributeError) as error:
            raise InvalidInputError(f"text to tokenize must be valid Unicode text: {error}") from None
        if size > _TEXT_LIMIT:
            raise InvalidInputError(f"text of {size} bytes is over the limit of {_TEXT_LIMIT}")
        chosen = self._reading if special else self._plain
        ids: list[int] = chosen.encode(text, add_special_tokens=bos).ids
        return ids

    def detokenize(self, tokens: Iterable[int], *, special: bool) -> str:
        ids = [self.check(token) for token in tokens]
        text = b"".join(self.piece(token, special=special) for token in ids).decode("utf-8", "replace")
        shown = next((token for token in ids if special or token not in self.controls), None)
        if self._strips_space and shown is not None and shown not in self.controls:
            return text.removeprefix(" ")
        return text

    @functools.lru_cache(maxsize=1 << 18)  # noqa: B019 - one a model, for as long as it lives
    def _piece(self, token: int) -> bytes:
        if (added := self._added.get(token)) is not None:
            return added.encode()
        text = self._reading.id_to_token(token)
        if text is None:
            return b""
        if self._bytes is not None:
            known = self._bytes
            return b"".join(bytes([known[letter]]) if letter in known else letter.encode() for letter in text)
        if match := _BYTE.fullmatch(text):
            return bytes([int(match[1], 16)])
        return str(text).replace(_SPACE, " ").encode()

    def piece(self, token: int, *, special: bool) -> bytes:
        self.check(token)
        return b"" if token in self.controls and not special else self._piece(token)

    def check(self, token: int) -> int:
        return check_token(token, self.size)

    def text_of(self, token: int | None) -> str:
        return "" if token is None else self._piece(token).decode("utf-8", "replace")

    def _ends(self, folder: Folder) -> frozenset[int]:
        ends: set[int] = set()
        for ids in (folder.generation.get("eos_token_id"), folder.text.get("eos_token_id")):
            for token in ids if isinstance(ids, list) else [ids]:
                if type(token) is int and 0 <= token < self.size:
                    ends.add(token)
        if (eos := self._named("eos_token")) is not None:
            ends.add(eos)
        ends |= {token for token in self.controls if self._added[token] in _ENDS}
        return frozenset(ends)

    def _named(self, name: str) -> int | None:
        entry = self._folder.tokenizer.get(name)
        text = entry.get("content") if isinstance(entry, dict) else entry
        if not isinstance(text, str):
            return None
        token: int | None = self._reading.token_to_id(text)
        return token


def _parts(config: Mapping[str, Any], name: str, several: str) -> list[Mapping[str, Any]]:
    """A step of a tokenizer, or the steps of a sequence."""
    part = config.get(name)
    if not isinstance(part, dict):
        return []
    if part.get("type") == "Sequence":
        return [each for each in part.get(several) or () if isinstance(each, dict)]
    return [part]


def _is_byte_level(config: Mapping[str, Any]) -> bool:
    return any(part.get("type") == "ByteLevel" for part in _parts(config, "decoder", "decoders"))


def _prepends_space(config: Mapping[str, Any]) -> bool:
    parts = _parts(config, "normalizer", "normalizers") + _parts(config, "pre_tokenizer", "pretokenizers")
    return any(
        part.get("type") == "Prepend"
        or (
            part.get("type") == "Metaspace"
            and part.get("prepend_scheme", "always") != "never"
            and part.get("add_prefix_space", True)
        )
        for part in parts
    )


def _keeps_text(config: Mapping[str, Any]) -> bool:
    """Whether no step before the tokens changes a text but for its spaces."""
    return all(
        part.get("type") in ("Prepend", "Replace") for part in _parts(config, "normalizer", "normalizers")
    )


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The letters that stand for bytes: those that can be printed stand for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in plain]
    letters.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return letters
