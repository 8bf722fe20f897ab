"""What a K/V type costs a model: measured against f16 on a text, once a model, and remembered.

    {"<digest of the model>": {"q8_0:q8_0": {"tokens": 256, "kl": 0.0004, "same_top": 0.996, …}}}

Most models lose next to nothing with K and V in q8_0; some lose a quarter of their likeliest tokens. Nobody
can see from a file which one it is, so it is measured before such a type is used.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perdure import Context, InvalidInputError
from perdure.spi.base import EXACT_TYPES, EngineConfig, KvType, read_table, settings, write_table
from perdure.spi.engine import ContextKeywords, EngineModel, Floats

log = logging.getLogger("perdure.engine")

REFERENCE = "f16"
TOKENS = 256
"""Of the text that a type is tried on before it is used."""
LEAST_SAME_TOP = 0.9
MOST_PERPLEXITY = 1.05
"""A type loses much where fewer of the likeliest tokens stay, or the perplexity grows by more."""
_CHUNK = 64
_GREEDY = 32
_PROMPT = 32
_lock = threading.Lock()

TEXT = """\
The harbour lay quiet before sunrise. Two men were mending a net on the quay, and the older one told \
how his father had crossed the bay in a rowing boat, in the winter of the great ice, to fetch a \
doctor for the village. "He left at four in the morning," he said, "and came back at noon, with \
frost in his beard and the doctor asleep under a sail." Nobody knew whether that was true. In 1926 \
the parish register lists three births and no deaths for that month, which proves nothing, but is at \
least consistent with the story.

A binary search looks for a value in a sorted list. It compares the middle element with the value, \
drops the half that cannot contain it, and repeats that until one element is left:

def search(items, wanted):
    low, high = 0, len(items)
    while low < high:
        middle = (low + high) // 2
        if items[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low

For a list of 1,000,000 elements it needs at most 20 comparisons, since 2 to the power of 20 is \
1,048,576. Water boils at 100 degrees at sea level and at about 90 degrees at an altitude of 3,000 \
metres, because the air pressure is lower there. Dear Ms. Alvarez, thank you for your letter of 14 \
March. We have checked your order and found that two of the five items were sent to the wrong \
address. The missing items will leave our warehouse tomorrow; you do not need to return anything. \
Please accept our apologies. Question: which planet has the shortest year? Answer: Mercury, which \
goes once around the sun in 88 days. The committee met on Tuesday to discuss the budget. Three \
members voted in favour, two against, and one abstained; the proposal was therefore adopted, with \
the condition that the costs be reviewed after six months.
"""
"""What a type is tried on, unless another text is given: prose, code, figures, a letter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLoss:
    """What a K/V type costs one model, against f16 at the same steps."""

    k_type: str
    v_type: str
    tokens: int
    """Of the text that it was measured on."""
    bytes_per_token: int
    kl: float
    """Mean divergence of the next token's distribution from that with f16, in nats."""
    same_top: float
    """Share of tokens whose likeliest successor is the same."""
    perplexity: float
    reference: float
    """The perplexity with f16."""
    greedy: float
    """Share of a reply at temperature 0 before the first token that differs."""

    @property
    def name(self) -> str:
        return str(KvType(self.k_type, self.v_type))

    @property
    def large(self) -> bool:
        """Whether it is too much for a type that is chosen to save memory."""
        return self.same_top < LEAST_SAME_TOP or self.perplexity > MOST_PERPLEXITY * self.reference

    def __str__(self) -> str:
        return (
            f"{self.same_top:.1%} of the likeliest tokens stay, KL {self.kl:.4f}, perplexity "
            f"{self.perplexity:.2f} instead of {self.reference:.2f}"
        )


def measure(
    model: EngineModel,
    k_type: str,
    v_type: str,
    *,
    text: str = TEXT,
    tokens: int = TOKENS,
    threads: int | None = None,
) -> KvLoss:
    """Decode a text with these types and with f16, step by step, and compare the rows of logits."""
    ids = model.tokenize(text)[:tokens]
    if len(ids) < 2:
        raise InvalidInputError(f"a text of {len(ids)} tokens is too short to measure with")
    n_ctx = max(len(ids), _PROMPT + _GREEDY) + 1
    kl, same, ours, theirs = 0.0, 0, 0.0, 0.0
    with ExitStack() as stack:
        reference, typed = (
            stack.enter_context(
                model.context(n_ctx=n_ctx, n_seq=1, n_batch=_CHUNK, threads=threads, k_type=k, v_type=v)
            )
            for k, v in ((REFERENCE, REFERENCE), (k_type, v_type))
        )
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            for context in (reference, typed):
                context.decode(chunk, rows="all")
            for at in range(len(chunk)):
                right, wrong = (_logprobs(context, at) for context in (reference, typed))
                kl += max(0.0, float(np.dot(np.exp(right), right - wrong)))
                same += int(right.argmax() == wrong.argmax())
                if (following := start + at + 1) < len(ids):
                    theirs -= float(right[ids[following]])
                    ours -= float(wrong[ids[following]])
        size = len(typed.save(0)) // len(ids)
        replies = [_greedy(context, ids[:_PROMPT]) for context in (reference, typed)]
    agreed = next((at for at, (a, b) in enumerate(zip(*replies, strict=True)) if a != b), _GREEDY)
    counted = len(ids) - 1
    return KvLoss(
        k_type=k_type,
        v_type=v_type,
        tokens=len(ids),
        bytes_per_token=size,
        kl=kl / len(ids),
        same_top=same / len(ids),
        perplexity=math.exp(min(ours / counted, 700.0)),
        reference=math.exp(min(theirs / counted, 700.0)),
        greedy=agreed / _GREEDY,
    )


def speed(
    model: EngineModel, k_type: str, v_type: str, length: int, *, steps: int = 16, threads: int | None = None
) -> float:
    """Tokens a second of a reply behind so many tokens."""
    ids = model.tokenize(TEXT)
    ids = (ids * (length // len(ids) + 1))[:length]
    settings: ContextKeywords = {"threads": threads, "k_type": k_type, "v_type": v_type}
    with model.context(n_ctx=length + steps + 2, n_seq=1, **settings) as context:
        context.decode(ids)
        context.decode([ids[0]])
        context.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            context.decode([int(context.logits().argmax())])
        context.synchronize()
        return steps / (time.perf_counter() - started)


def recall(model: EngineModel, k_type: str, v_type: str) -> KvLoss | None:
    """What was measured before for this model."""
    entry: Any = read_table(_file()).get(model.digest, {}).get(str(KvType(k_type, v_type)))
    with suppress(TypeError):
        return KvLoss(**entry)
    return None


def remember(model: EngineModel, loss: KvLoss) -> None:
    with _lock:
        known = read_table(_file())
        known.setdefault(model.digest, {})[loss.name] = dataclasses.asdict(loss)
        write_table(_file(), known)


def check_kv_type(model: EngineModel, config: EngineConfig) -> None:
    """Refuse K/V types that cost this model much, unless they are forced. The first time takes a moment."""
    k_type, v_type = config.kv
    if config.force_kv or {k_type, v_type} <= EXACT_TYPES:
        return
    loss = recall(model, k_type, v_type)
    if loss is None:
        log.info("measuring what K/V in %s costs this model; that is done once", KvType(k_type, v_type))
        loss = measure(model, k_type, v_type, threads=config.threads)
        remember(model, loss)
    if loss.large:
        raise InvalidInputError(
            f"K/V in {loss.name} costs this model too much: {loss}. Choose another type (`perdure show --kv` "
            "compares them), or insist with force_kv=True (--force-kv)"
        )


def _logprobs(context: Context, row: int) -> Floats:
    logits = context.logits(row).copy()
    logits -= logits.max()
    logits -= np.log(np.exp(logits, dtype=np.float64).sum()).astype(np.float32)
    return logits


def _greedy(context: Context, prompt: list[int]) -> list[int]:
    context.clear()
    context.decode(prompt)
    reply = []
    for _ in range(_GREEDY):
        reply.append(int(context.logits().argmax()))
        context.decode([reply[-1]])
    return reply


def _file() -> Path:
    return settings().home / "kv_loss.json"
