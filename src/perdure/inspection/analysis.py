"""An analysis: everything that a report shows of one text, computed once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from perdure.checks import check_whole
from perdure.engine.context import Context
from perdure.engine.contract import Floats
from perdure.engine.llama.model import Model
from perdure.engine.row_kernels import Measure, measure
from perdure.engine.trace import Trace
from perdure.errors import ContextOverflow, InvalidInputError
from perdure.events.event import BlocksLoaded
from perdure.inspection.key_values import effective_rank, norms
from perdure.inspection.lens import Lens, logit_lens
from perdure.runtime import Runtime

MOST_TOKENS = 2048
"""Of a text that is analysed."""
ATTENTION_TOKENS = 384
"""Tokens up to which attention is traced: it grows with their square."""
_LENS_TOKENS = 12
_ALTERNATIVES = 3
_CHUNK = 64
_PATIENCE = 2.0
"""Seconds in which the events of a reply come, also from another process."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Analysis:
    """What is known of one text. Parts that the model has not, or that are too large, are None; `notes` say
    why."""

    title: str
    model: str
    pieces: tuple[str, ...]
    """The text, token by token."""
    prompt: int
    """How many of them are the prompt; the others were written now."""
    measures: tuple[Measure | None, ...]
    """For each token, what the model expected in its place; None for the first."""
    names: tuple[tuple[str, ...], ...]
    """The likeliest tokens in the place of each, as text."""
    tiers: tuple[tuple[str, int], ...]
    """Tokens of the prompt by where their state came from."""
    tier_seconds: Mapping[str, float]
    """How long it took to have them from there, where that is known."""
    seconds: tuple[tuple[str, float], ...]
    """What took how long."""
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
    if len(tokens) + max_tokens > MOST_TOKENS:
        raise ContextOverflow(
            f"an analysis takes at most {MOST_TOKENS} tokens, and this has {len(tokens)} and asks for "
            f"{max_tokens} more: give a shorter text",
            needed=len(tokens) + max_tokens,
            fits=MOST_TOKENS,
        )
    notes: list[str] = []
    written, tiers, tier_seconds, seconds = _answered(runtime, tokens, max_tokens)
    whole = [*tokens, *written]
    with model.context(n_ctx=len(whole) + 1, n_batch=_CHUNK) as ctx:
        measures: list[Measure | None] = [None]
        for at in range(0, len(whole), _CHUNK):
            part = whole[at : at + _CHUNK]
            ctx.decode(part, rows="all")
            for row in range(len(part)):
                if at + row + 1 < len(whole):
                    target = whole[at + row + 1]
                    measures.append(ctx.read_row(partial(measure, token=target, k=_ALTERNATIVES), row, 0))
        k_norms = v_norms = k_rank = None
        try:
            kv = ctx.kv(rope=False)
            if kv.start:
                notes.append(f"Keys and values from token {kv.start} on: a window has no earlier ones.")
            k_norms, v_norms = (norms(each).mean(axis=-1) for each in (kv.k, kv.v))
            k_rank = effective_rank(kv.k).mean(axis=-1)
        except InvalidInputError as error:
            notes.append(f"No keys and values: {error}.")
        began = time.perf_counter()
        trace = _traced(ctx, len(whole), notes)
        if trace is not None:
            seconds.append(("trace, computed again", time.perf_counter() - began))
    lens = None if trace is None else _lens(model, trace, notes)

    def name(token: int) -> str:
        return model.piece(token, special=True).decode("utf-8", "replace")

    return Analysis(
        title=title,
        model=model.info.name or model.path.name,
        pieces=tuple(map(name, whole)),
        prompt=len(tokens),
        measures=tuple(measures),
        names=tuple(() if each is None else tuple(map(name, each.ids)) for each in measures),
        tiers=tuple(tiers),
        tier_seconds=tier_seconds,
        seconds=tuple(seconds),
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


def _answered(
    runtime: Runtime, tokens: Sequence[int], max_tokens: int
) -> tuple[list[int], list[tuple[str, int]], dict[str, float], list[tuple[str, float]]]:
    """The tokens of the reply, where the prompt's state came from, and what took how long."""
    with runtime.events(["BlocksLoaded"]) as events:
        reply = runtime.generate(list(tokens), max_tokens=max(1, max_tokens), temperature=0)
        if set(reply.reuse.tiers) - {"slot"}:
            # Of an engine in another process they come a little later.
            events.wait(_PATIENCE)
        loaded = [event for event in events.poll() if isinstance(event, BlocksLoaded)]
    tiers = [*reply.reuse.tiers.items(), ("computed", reply.reuse.computed)]
    times = reply.timings
    by_tier = {"computed": times.prefill}
    for event in loaded:
        for tier, took in event.seconds.items():
            by_tier[tier] = by_tier.get(tier, 0.0) + took
    seconds = [
        ("waiting for a slot and its state", times.queued),
        ("reading the prompt", times.prefill),
        ("writing the reply", times.decode),
    ]
    return list(reply.tokens) if max_tokens else [], tiers, by_tier, seconds


def _traced(ctx: Context, count: int, notes: list[str]) -> Trace | None:
    """A trace of as much as there is room for."""
    if count > ATTENTION_TOKENS:
        notes.append(f"No attention: it is traced up to {ATTENTION_TOKENS} tokens, and this has {count}.")
    wanted = [("hidden", "attention", "router"), ("hidden", "router")]
    for what in wanted if count <= ATTENTION_TOKENS else wanted[1:]:
        try:
            return ctx.trace(what=what)
        except InvalidInputError as error:
            notes.append(f"No {' and '.join(what)}: {error}.")
    return None


def _lens(model: Model, trace: Trace, notes: list[str]) -> Lens | None:
    if trace.hidden is None:
        return None
    try:
        last = dataclasses.replace(trace, hidden=np.ascontiguousarray(trace.hidden[:, -_LENS_TOKENS:]))
        return logit_lens(model.path, last)
    except InvalidInputError as error:
        notes.append(f"No logit lens: {error}.")
        return None
