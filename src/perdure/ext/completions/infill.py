"""Fill-in-the-middle: the prompt that has a model write what stands between two texts.

<|fim_prefix|>def add(a, b):
    return <|fim_suffix|>

print(add(1, 2))<|fim_middle|>          → a + b
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure import InvalidInputError
from perdure.spi.engine import Tokenizer

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ""),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ""),
    ("▁<PRE>", "▁<SUF>", "▁<MID>", ""),
)
"""By model family: before the text, between it and what follows, where the model writes, between files."""


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The control tokens with which a model was trained to fill in."""

    prefix: int
    suffix: int
    middle: int
    separator: int | None
    """Between files that are shown before; None where the model has none."""

    @classmethod
    def of(cls, model: Tokenizer) -> InfillTokens | None:
        for marks in _MARKS:
            before, between, behind, separator = (_token(model, mark) for mark in marks)
            if before is not None and between is not None and behind is not None:
                return cls(before, between, behind, separator)
        return None

    def prompt(
        self, model: Tokenizer, before: str, after: str, files: Sequence[tuple[str, str]] = ()
    ) -> list[int]:
        """The prompt that fills in between two texts. `files` are shown first, each by name and text. What
        they say is text, also where it reads like a control token."""
        tokens = model.tokenize("", bos=True)
        for name, text in files:
            if self.separator is not None:
                tokens.append(self.separator)
            tokens += model.tokenize(f"{name}\n{text}\n", bos=False)
        if files and self.separator is not None:
            tokens.append(self.separator)
        return [
            *tokens,
            self.prefix,
            *model.tokenize(before, bos=False),
            self.suffix,
            *model.tokenize(after, bos=False),
            self.middle,
        ]


def infill_prompt(
    model: Tokenizer, before: str, after: str, files: Sequence[tuple[str, str]]
) -> Sequence[int]:
    """What `Runtime.infill_prompt` returns."""
    tokens = InfillTokens.of(model)
    if tokens is None:
        raise InvalidInputError(
            "this model has no tokens for filling in the middle of a text (fim_prefix and the like): take "
            "one that was trained for that, such as Qwen2.5-Coder, or leave the suffix out"
        )
    return tokens.prompt(model, before, after, files)


def _token(model: Tokenizer, mark: str) -> int | None:
    if not mark:
        return None
    tokens = model.tokenize(mark, special=True, bos=False)
    return tokens[0] if len(tokens) == 1 and model.is_control(tokens[0]) else None
