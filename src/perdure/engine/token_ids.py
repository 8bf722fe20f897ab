"""Checks of token ids: one of them, and a list of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perdure.checks import is_integer
from perdure.errors import TokenError


def check_token(token: object, n_vocab: int) -> int:
    """`token`, if it is an id of a vocabulary of `n_vocab`."""
    if not is_integer(token):
        raise TokenError(f"a token id is an integer, got {token!r}")
    if not 0 <= token < n_vocab:
        raise TokenError(f"token ids run from 0 to {n_vocab - 1}, got {token}")
    return int(token)


def token_array(tokens: object, n_vocab: int, *, what: str = "a list of tokens") -> NDArray[np.int32]:
    """`tokens` as an array of their own, if they are a flat list of at least one id; `what` they are is said
    where they are not."""
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as error:
        raise TokenError(f"{what} is a flat list of token ids: {error}") from None
    if not ids.size:
        raise TokenError(f"{what} is empty; give at least one token")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TokenError(f"{what} is a flat list of token ids, which are integers; got {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= n_vocab:
        raise TokenError(f"{what}: token ids run from 0 to {n_vocab - 1}, got {low if low < 0 else high}")
    return ids.astype(np.int32)
