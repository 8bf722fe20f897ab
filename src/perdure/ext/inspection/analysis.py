"""An analysis: everything that a report shows of one text, computed once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np

from perdure import (
    Context,
    ContextOverflow,
    InvalidInputError,
    KeyValues,
    Model,
    OutOfMemoryError,
    Reply,
    Runtime,
    Trace,
)
from perdure.ext.inspection.key_values import effective_rank, norms
from perdure.ext.inspection.lens import Lens, logit_lens
from perdure.spi.base import check_whole, system
from perdure.spi.engine import PLAIN, AdapterSet, Floats, Measure, measure
from perdure.spi.models import ModelPlacement, Sizes, judge

MOST_TOKENS = 4096
"""Of a text that is analysed."""
_TRACED = 384
"""The last tokens that are traced, at most. Each looks at all tokens before it."""
_FEWEST = 8
"""Tokens whose attention is worth a plot."""
_ATTENTION_BYTES = 256 << 20
"""Of all attention weights that are traced."""
_KV_TOKENS = 1024
"""The last tokens whose keys and values are read."""
_LENS_TOKENS = 12
_LENS_BYTES = 128 << 20
"""Of the logits of the lens, a row for each layer and token."""
_PYTHON = 256 << 20
"""What a process takes besides the model and the numbers of an analysis, about."""
_ALTERNATIVES = 3
_CHUNK = 64
_STEP = 256
"""Tokens of a step of the trace."""

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with the current part, how much of it is done, and how much there is; 0 where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFigures:
    """How a reply came about."""

    tiers: tuple[tuple[str, int], ...] = ()
    """Tokens of the prompt by where their state came from."""
    tier_seconds: Mapping[str, float] = field(default_factory=dict)
    """How long it took to have them from there, where that is known."""
    seconds: tuple[tuple[str, float], ...] = ()
    """What took how long."""

    @classmethod
    def of_reply(cls, reply: Reply) -> ReplyFigures:
        times = reply.timings
        return cls(
            tiers=(*reply.reuse.tiers.items(), ("computed", reply.reuse.computed)),
            tier_seconds={"computed": times.prefill, **reply.reuse.seconds},
            seconds=(
                ("waiting for a slot and its state", times.queued),
                ("reading the prompt", times.prefill),
                ("writing the reply", times.decode),
            ),
        )

    @classmethod
    def of_usage(cls, usage: Mapping[str, int]) -> ReplyFigures:
        """From what a turn has kept of it. Turns of older versions have no times of tiers."""
        counts = {"prompt", "completion", "cached", "reasoning"}
        tiers = {
            name.removesuffix("_tokens"): count
            for name, count in usage.items()
            if name.endswith("_tokens") and name.removesuffix("_tokens") not in counts
        }
        tiers["computed"] = max(0, usage.get("prompt_tokens", 0) - sum(tiers.values()))
        took = {name.removesuffix("_us"): us / 1e6 for name, us in usage.items() if name.endswith("_us")}
        first, prefill = usage.get("first_token_ms", 0) / 1e3, took.get("computed")
        reading = [("to the first token", first)]
        if prefill is not None:
            waiting = max(0.0, first - prefill)
            reading = [("waiting for a slot and its state", waiting), ("reading the prompt", prefill)]
        return cls(
            tiers=tuple(tiers.items()),
            tier_seconds=took,
            seconds=(*reading, ("writing the reply", usage.get("decode_ms", 0) / 1e3)),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Analysis:
    """What is known of one text. Parts that the model has not, or that are too large, are None; `notes` say
    why."""

    title: str
    model: str
    pieces: tuple[str, ...]
    """The text, token by token."""
    prompt: int
    """How many of them are the prompt; the others are the reply."""
    measures: tuple[Measure | None, ...]
    """For each token, what the model expected in its place; None for the first."""
    names: tuple[tuple[str, ...], ...]
    """The likeliest tokens in the place of each, as text."""
    figures: ReplyFigures
    k_norms: Floats | None = None
    """Lengths of keys by (layer, token), in the middle over heads."""
    v_norms: Floats | None = None
    k_rank: Floats | None = None
    """In how many directions the keys of a layer lie."""
    trace: Trace | None = None
    lens: Lens | None = None
    lens_names: tuple[tuple[tuple[str, ...], ...], ...] = ()
    """The tokens of the lens as text, by (layer, token, place)."""
    notes: tuple[str, ...] = field(default=())


def analyse(
    runtime: Runtime, model: Model, tokens: Sequence[int], *, title: str, max_tokens: int = 32
) -> Analysis:
    """Have a prompt answered by `runtime`, and look at all of it in contexts of `model`, the same one."""
    check_whole("max_tokens", max_tokens, 0, MOST_TOKENS)
    check_length(len(tokens) + max_tokens)
    reply = runtime.generate(list(tokens), max_tokens=max(1, max_tokens), temperature=0)
    written = list(reply.tokens) if max_tokens else []
    figures = ReplyFigures.of_reply(reply)
    return examine(model, [*tokens, *written], prompt=len(tokens), title=title, figures=figures)


def check_length(count: int) -> None:
    """Refuse a text of so many tokens if it is too long."""
    if count > MOST_TOKENS:
        raise ContextOverflow(
            f"an analysis takes at most {MOST_TOKENS} tokens, and this would be {count}: take a shorter text",
            needed=count,
            fits=MOST_TOKENS,
        )


def needed_bytes(sizes: Sizes, count: int) -> int:
    """What a process takes that loads a model to look at so many tokens, about."""
    setup = ModelPlacement(n_ctx=count + 1, n_batch=_STEP, flash=False)
    need, rows = sizes.machine(setup), _attention_rows(sizes, count)
    layers = len(sizes.layers)
    # What steps gave, and the same as one array.
    attention = 2 * 4 * layers * sizes.heads * rows * count
    hidden = 2 * 4 * layers * (rows or min(count, _TRACED)) * sizes.width
    # Rows as they are captured, as floats, and as the doubles that ranks are computed with.
    values = sum(k + v for k, v in sizes.cache) * (4 * count + 12 * min(count, _KV_TOKENS))
    # One context of the text, and one of the trace.
    return need.total + need.cache + attention + hidden + values + 3 * _LENS_BYTES + _PYTHON


def check_memory(sizes: Sizes, count: int) -> None:
    """Refuse what would push others out of memory, before a model is loaded for it."""
    needed, free = needed_bytes(sizes, count), system.available_memory()
    if free is not None and judge(needed, free) != "fits":
        raise OutOfMemoryError(
            f"to look inside {count} tokens takes about {needed >> 20} MiB, since the model is loaded a "
            f"second time, and {free >> 20} MiB are free: free some memory, or take a shorter conversation"
        )


def examine(
    model: Model,
    tokens: Sequence[int],
    *,
    prompt: int,
    title: str,
    figures: ReplyFigures,
    adapters: AdapterSet = PLAIN,
    rope: tuple[float, float] = (0.0, 0.0),
    threads: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Analysis:
    """Look at tokens, of which the first `prompt` were read and the others written, in contexts of `model`:
    with these adapters, base and scale of RoPE."""
    check_length(len(tokens))
    notes: list[str] = []
    whole, count = list(tokens), len(tokens)
    base, scale = rope
    with model.context(
        n_ctx=count + 1, n_batch=_CHUNK, rope_freq_base=base, rope_freq_scale=scale, threads=threads
    ) as ctx:
        if adapters != PLAIN:
            ctx.adapt(adapters)
        measures: list[Measure | None] = [None]
        for at in range(0, count, _CHUNK):
            progress("reading", at, count)
            part = whole[at : at + _CHUNK]
            ctx.decode(part, rows="all")
            for row in range(len(part)):
                if at + row + 1 < count:
                    target = whole[at + row + 1]
                    measures.append(ctx.read_row(partial(measure, token=target, k=_ALTERNATIVES), row, 0))
        k_norms = v_norms = k_rank = None
        progress("keys and values", 0, 0)
        try:
            kv = _key_values(ctx, count)
            if kv.start and kv.start == count - _KV_TOKENS:
                notes.append(f"Keys and values of the last {_KV_TOKENS} tokens.")
            elif kv.start:
                notes.append(f"Keys and values from token {kv.start} on: a window has no earlier ones.")
            k_norms, v_norms = (norms(each).mean(axis=-1) for each in (kv.k, kv.v))
            k_rank = effective_rank(kv.k).mean(axis=-1)
        except InvalidInputError as error:
            notes.append(f"No keys and values: {error}.")
        progress("layers", 0, 0)
        began = time.perf_counter()
        trace = _traced(ctx, model.sizes, count, notes)
        if trace is not None:
            took = ("trace, computed again", time.perf_counter() - began)
            figures = dataclasses.replace(figures, seconds=(*figures.seconds, took))
    progress("logit lens", 0, 0)
    lens = None if trace is None else _lens(model, trace, notes)

    def name(token: int) -> str:
        return model.piece(token, special=True).decode("utf-8", "replace")

    return Analysis(
        title=title,
        model=model.info.name or model.path.name,
        pieces=tuple(map(name, whole)),
        prompt=prompt,
        measures=tuple(measures),
        names=tuple(() if each is None else tuple(map(name, each.ids)) for each in measures),
        figures=figures,
        k_norms=k_norms,
        v_norms=v_norms,
        k_rank=k_rank,
        trace=trace,
        lens=lens,
        lens_names=()
        if lens is None
        else tuple(tuple(tuple(map(name, row)) for row in layer) for layer in lens.tokens.tolist()),
        notes=tuple(notes),
    )


def _key_values(ctx: Context, count: int) -> KeyValues:
    """Of the last tokens; where a window has fewer, of those."""
    if count > _KV_TOKENS:
        try:
            return ctx.kv(start=count - _KV_TOKENS, rope=False)
        except InvalidInputError:
            pass
    return ctx.kv(rope=False)


def _attention_rows(sizes: Sizes, count: int) -> int:
    """The last tokens whose attention is traced; 0 where there is room for too few."""
    each = 4 * max(1, len(sizes.layers) * sizes.heads) * count
    rows = min(count, _TRACED, _ATTENTION_BYTES // each)
    return rows if rows >= min(count, _FEWEST) else 0


def _traced(ctx: Context, sizes: Sizes, count: int, notes: list[str]) -> Trace | None:
    """A trace of as much as there is room for."""
    rows = _attention_rows(sizes, count)
    if not rows:
        notes.append(f"No attention: the weights of {count} tokens in all heads take too much memory.")
    kinds = [("hidden", "attention", "router"), ("hidden", "router")]
    for what in kinds if rows else kinds[1:]:
        try:
            trace = ctx.trace(what=what, start=max(0, count - (rows or _TRACED)))
        except InvalidInputError as error:
            notes.append(f"No {' and '.join(what)}: {error}.")
            continue
        if rows and "attention" in what and trace.attention is None:
            notes.append("No attention: no layer of this model has attention weights.")
        if trace.start:
            notes.append(f"Attention, layers and experts of the last {count - trace.start} tokens.")
        return trace
    return None


def _lens(model: Model, trace: Trace, notes: list[str]) -> Lens | None:
    if trace.hidden is None:
        return None
    try:
        rows = max(1, _LENS_BYTES // (4 * len(trace.layers) * max(1, model.n_vocab)))
        hidden = np.ascontiguousarray(trace.hidden[:, -min(rows, _LENS_TOKENS) :])
        return logit_lens(model.path, dataclasses.replace(trace, hidden=hidden))
    except InvalidInputError as error:
        notes.append(f"No logit lens: {error}.")
        return None
