"""The settings of a draw, checked once."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from perdure.checks import is_number, is_whole
from perdure.errors import SamplingError, TokenError

SEED_LIMIT = 2**32 - 1
"""Seeds lie below this: the engine takes the largest for "choose one"."""


def draw_seed() -> int:
    """A new one, for who gives none."""
    return secrets.randbelow(SEED_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is drawn. Temperature 0 is greedy; a stage at its neutral value is left out.

    `seed` None draws a new one for each request; the reply says which it was.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_last_n: int = -1
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not is_number(value) or not low <= value <= high:
                raise SamplingError(f"{name} is a number from {low:g} to {high:g}, got {value!r}")
        for name, low in _WHOLE:
            value = getattr(self, name)
            if not is_whole(value) or not low <= value < 2**31:
                raise SamplingError(f"{name} is a whole number of at least {low}, got {value!r}")
        if self.mirostat not in (0, 1, 2):
            raise SamplingError(f"mirostat is 0 (off), 1 or 2, got {self.mirostat!r}")
        seed = self.seed
        if seed is not None and (not is_whole(seed) or not 0 <= seed < SEED_LIMIT):
            raise SamplingError(f"seed is None or a whole number from 0 to {SEED_LIMIT - 1}, got {seed!r}")
        if 0 < self.temperature < _COLDEST:
            raise SamplingError(f"temperature is 0 or at least {_COLDEST:g}, got {self.temperature!r}")
        if not isinstance(self.dry_breakers, tuple) or not all(map(_is_breaker, self.dry_breakers)):
            raise SamplingError("dry_breakers are a tuple of texts, none of them empty")
        if not isinstance(self.logit_bias, Mapping):
            raise SamplingError(f"logit_bias maps token ids to numbers, got {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            if not is_whole(token):
                raise SamplingError(f"logit_bias maps token ids to numbers, got the key {token!r}")
            if not isinstance(bias, (int, float)) or not (abs(bias) <= _STRONGEST or bias == -math.inf):
                raise SamplingError(
                    f"the bias of token {token} is -inf or a number from {-_STRONGEST:g} to {_STRONGEST:g}, "
                    f"got {bias!r}"
                )
        # What was checked is what is kept, whatever the caller does to theirs.
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def banned(self) -> list[int]:
        """The tokens that can never be drawn."""
        return [token for token, bias in self.logit_bias.items() if bias == -math.inf]

    def seeded(self, offset: int = 0) -> Sampling:
        """The same with its seed settled, `offset` on for a further sample of one prompt."""
        if self.seed is not None and not offset:
            return self
        seed = draw_seed() if self.seed is None else self.seed
        return dataclasses.replace(self, seed=(seed + offset) % SEED_LIMIT)

    def without(self, tokens: Iterable[int]) -> Sampling:
        """The same with `tokens` ruled out."""
        return dataclasses.replace(self, logit_bias={**self.logit_bias, **dict.fromkeys(tokens, -math.inf)})

    def check(self, n_vocab: int) -> None:
        """See that the tokens it names are in the vocabulary, and that one is left to draw."""
        for token in self.logit_bias:
            if not 0 <= token < n_vocab:
                raise TokenError(f"logit_bias names token {token}; ids run from 0 to {n_vocab - 1}")
        if len(self.banned) == n_vocab:
            raise SamplingError("logit_bias rules out every token")


# Beyond these a logit may leave the range of a float, and infinity less infinity is no number.
_COLDEST = 1e-6
_STRONGEST = 1e6

_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("typical_p", 0.0, 1.0),
    ("top_n_sigma", 0.0, 1e6),
    ("repeat_penalty", 1e-6, 1e6),
    ("frequency_penalty", -1e6, 1e6),
    ("presence_penalty", -1e6, 1e6),
    ("dry_multiplier", 0.0, 1e6),
    ("dry_base", 1.0, 1e6),
    ("xtc_probability", 0.0, 1.0),
    ("xtc_threshold", 0.0, 1.0),
    ("mirostat_tau", 1e-6, 1e6),
    ("mirostat_eta", 1e-6, 1e6),
)
_WHOLE = (("top_k", 0), ("penalty_last_n", -1), ("dry_allowed_length", 1), ("dry_last_n", -1))


def _is_breaker(text: object) -> bool:
    try:
        return isinstance(text, str) and b"\0" not in text.encode() and text != ""
    except UnicodeEncodeError:
        return False
