"""Prompt size check: refuses a text that surely does not fit, before it is tokenised."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from perdure.engine.contract import Vocabulary
from perdure.errors import ContextOverflow

_USUAL = 32
"""Characters a token that no ordinary text has: shorter ones are tokenised to find out."""
_COVERING = ("gpt2", "llama", "toy")
"""Kinds of tokenizers whose tokens cover all of a text. Others collapse white space, or drop characters."""
_longest: WeakKeyDictionary[Vocabulary, int] = WeakKeyDictionary()
_measuring = threading.Lock()


def check_prompt_size(text: str, model: Vocabulary, n_ctx: int) -> None:
    """Raise ContextOverflow where even the longest tokens are too short for `text` to fit."""
    if len(text) <= _USUAL * n_ctx or model.metadata.get("tokenizer.ggml.model", "toy") not in _COVERING:
        return
    with _measuring:
        if (longest := _longest.get(model)) is None:
            pieces = (model.piece(token, special=True) for token in range(model.n_vocab))
            longest = _longest[model] = max(map(len, pieces))
    needed = -(-len(text) // longest)
    if needed > n_ctx:
        raise ContextOverflow(
            f"a text of {len(text)} characters has at least {needed} tokens; {n_ctx} fit",
            needed=needed,
            fits=n_ctx,
            at_least=True,
        )
