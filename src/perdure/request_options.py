"""What can be asked of a reply, each option said once: the settings of a draw, and those of a request.

`perdure.decode.sampling` has a stage for each setting of a draw; `perdure.decode.request` adds a prompt.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from perdure.checks import is_number, is_whole
from perdure.errors import InvalidInputError, SamplingError, TokenError
from perdure.options import Option, check_options, option, options_of

ADAPT = -1
"""Guess as far ahead as has paid off."""
MAX_GUESSES = 32
"""Tokens that are guessed ahead in one step, at most."""
MAX_SAMPLES = 1024
"""Of one prompt. Each takes memory from the start."""
SEED_LIMIT = 2**32 - 1
"""Seeds lie below this: the engine takes the largest for "choose one"."""

_BREAKERS = ("\n", ":", '"', "*")
Priority = Literal["interactive", "background"]
LOOP_GUARD = 1024
"""Tokens of one phrase after which a reply is taken for endless: few texts that were asked for are so."""


def draw_seed() -> int:
    """A new one, for requests without a seed."""
    return secrets.randbelow(SEED_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is drawn. Temperature 0 is greedy; a stage at its neutral value is left out.

    `seed` None draws a new one for each request; the reply says which it was.
    """

    temperature: float = option(
        0.8,
        low=0.0,
        high=100.0,
        help="divides the logits; 0 always takes the likeliest token",
        common=True,
        flags=("-t",),
    )
    top_k: int = option(40, low=0, help="keep the K likeliest tokens; 0: all", common=True)
    top_p: float = option(
        0.95,
        low=0.0,
        high=1.0,
        help="nucleus sampling: keep the smallest set of tokens whose probabilities sum to P",
        common=True,
    )
    min_p: float = option(
        0.05,
        low=0.0,
        high=1.0,
        help="keep tokens with at least this share of the likeliest one's probability",
        common=True,
    )
    typical_p: float = option(
        1.0,
        low=0.0,
        high=1.0,
        help="locally typical sampling: keep tokens about as surprising as the average; 1: all",
    )
    top_n_sigma: float = option(
        0.0, low=0.0, high=1e6, help="keep logits within N standard deviations of the largest; 0: all"
    )
    repeat_penalty: float = option(
        1.0,
        low=1e-6,
        high=1e6,
        help="divides the logits of tokens that occurred before; above 1: fewer repetitions",
        common=True,
    )
    frequency_penalty: float = option(
        0.0,
        low=-1e6,
        high=1e6,
        help="lowers the logit of a token for each time that it occurred before",
        common=True,
    )
    presence_penalty: float = option(
        0.0, low=-1e6, high=1e6, help="lowers the logit of every token that occurred before", common=True
    )
    penalty_last_n: int = option(
        64, low=-1, help="how many of the last tokens the penalties count; -1: all", ollama="repeat_last_n"
    )
    dry_multiplier: float = option(
        0.0, low=0.0, high=1e6, help="DRY: penalty on tokens that would continue a repeated phrase; 0: none"
    )
    dry_base: float = option(1.75, low=1.0, high=1e6, help="DRY: growth of the penalty with each token")
    dry_allowed_length: int = option(2, low=1, help="DRY: tokens that a phrase may repeat for free")
    dry_last_n: int = option(-1, low=-1, help="DRY: how many of the last tokens count; -1: all")
    dry_breakers: tuple[str, ...] = option(
        _BREAKERS, help="DRY: texts that end a phrase", items=16, characters=1024
    )
    xtc_probability: float = option(
        0.0,
        low=0.0,
        high=1.0,
        help="XTC: with this probability, drop the top tokens above xtc_threshold; 0: never",
    )
    xtc_threshold: float = option(
        0.1, low=0.0, high=1.0, help="XTC: the probability from which on a token is a top token"
    )
    mirostat: int = option(0, low=0, high=2, help="mirostat 1 or 2, in place of the cuts; 0: none")
    mirostat_tau: float = option(5.0, low=1e-6, high=1e6, help="mirostat: the surprise to aim at, in bits")
    mirostat_eta: float = option(0.1, low=1e-6, high=1e6, help="mirostat: how fast it adapts")
    seed: int | None = option(
        None,
        low=0,
        high=SEED_LIMIT - 1,
        help="the same seed gives the same reply",
        unset="a new one each time",
        common=True,
    )
    logit_bias: Mapping[int, float] = option(
        factory=dict, help="added to the logits of tokens, by their ids; -100 rules one out", items=1024
    )

    def __post_init__(self) -> None:
        try:
            check_options(self)
        except InvalidInputError as error:
            raise SamplingError(str(error)) from None
        if 0 < self.temperature < _COLDEST:
            raise SamplingError(f"temperature is 0 or at least {_COLDEST:g}, got {self.temperature!r}")
        if self.dry_breakers is not _BREAKERS and not (
            isinstance(self.dry_breakers, tuple) and all(map(_is_breaker, self.dry_breakers))
        ):
            raise SamplingError("dry_breakers are a tuple of texts, none of them empty")
        for token, bias in self.logit_bias.items():
            if not is_whole(token):
                raise SamplingError(f"logit_bias maps token ids to numbers, got the key {token!r}")
            if not is_number(bias) or not (abs(bias) <= _STRONGEST or bias == -math.inf):
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
        """The same with a seed, `offset` on for a further sample of one prompt."""
        if self.seed is not None and not offset:
            return self
        seed = draw_seed() if self.seed is None else self.seed
        # Not `replace`: it would check everything again, which takes as long as making the request.
        made = object.__new__(Sampling)
        for name in self.__dataclass_fields__:
            object.__setattr__(made, name, getattr(self, name))
        object.__setattr__(made, "seed", (seed + offset) % SEED_LIMIT)
        return made

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How a reply is made, whatever its prompt is."""

    max_tokens: int | None = option(
        None,
        low=1,
        help="most tokens of a reply",
        unset="until the model stops",
        common=True,
        flags=("-n",),
        ollama="num_predict",
    )
    """None: until the model stops or the context is full."""
    sampling: Sampling = field(default_factory=Sampling)
    stops: Sequence[str] = option(
        (),
        name="stop",
        items=64,
        characters=1024,
        help="end the reply before any of these texts",
        common=True,
    )
    n: int = option(1, low=1, high=MAX_SAMPLES, help="replies to one prompt, which is read once")
    logprobs: int | None = option(
        None, low=0, help="log probabilities of the reply, with the K likeliest tokens beside each"
    )
    """None: none; 0: of the tokens drawn; k: with the k likeliest beside each."""
    prompt_logprobs: int | None = option(
        None, low=0, help="log probabilities of the prompt, with the K likeliest tokens beside each"
    )
    ignore_eos: bool = option(False, help="never end a reply at the model's own end")
    priority: Priority = option(
        "interactive",
        help="which request goes first: interactive ones before background ones",
    )
    side: bool = option(
        False,
        help="a request beside a conversation, such as a title: its state is evicted first",
    )
    loop_guard: int = option(
        LOOP_GUARD,
        low=0,
        high=65536,
        help="end a reply whose last N tokens say one phrase again and again, at least 4 times; 0: never",
    )
    speculate: int = option(
        0,
        low=ADAPT,
        high=MAX_GUESSES,
        help="tokens guessed ahead in a step, which changes no reply; 0: none, -1: as many as pay off",
    )
    adapters: Mapping[str, float] | None = option(
        None,
        items=64,
        low=-1e6,
        high=1e6,
        help="LoRAs and control vectors by name or file, each with its scale",
        unset="those that the model was opened with",
    )
    """None: those of the runtime; an empty mapping: none."""


def options_of_replies() -> dict[str, Option]:
    """What can be said of a reply on every surface, and has a default in the config file and of a server."""
    own = options_of(RequestOptions)
    return {
        **{name: own[name] for name in ("max_tokens", "priority", "loop_guard", "speculate")},
        **options_of(Sampling),
    }


# Beyond these a logit may leave the range of a float, and infinity less infinity is no number.
_COLDEST = 1e-6
_STRONGEST = 1e6


def _is_breaker(text: object) -> bool:
    try:
        return isinstance(text, str) and b"\0" not in text.encode() and text != ""
    except UnicodeEncodeError:
        return False
