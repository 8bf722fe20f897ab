"""An analysis as one HTML page that needs nothing else: no network, no fonts, no libraries."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import importlib.resources
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from perdure.ext.inspection.analysis import Analysis
from perdure.spi.engine import Floats

_SHOWN = 96
"""The last tokens of a text whose attention a page has: every head is in it."""
_WEIGHTS = 16 << 20
"""Attention weights that a page has, a byte each."""
_WIDE = 920


def page_of(analysis: Analysis) -> str:
    """The page. Its own rules forbid it to load anything."""
    sections = [
        _section("Surprise along the text", _SURPRISE, _text(analysis) + _lines(analysis)),
        _section("Attention by head", _ATTENTION, _attention(analysis)),
        _section("Keys and values", _KV, _key_values(analysis)),
        _section("Logit lens", _LENS, _lens(analysis)),
        _section("Layers", _LAYERS, _coherence(analysis)),
        _section("Experts", _EXPERTS, _experts(analysis)),
        _section("Where the state came from, and the time", "", _times(analysis)),
    ]
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in analysis.notes)
    template = _template()
    count = len(analysis.pieces)
    about = f"{analysis.model} · {count} tokens, of which {count - analysis.prompt} are the reply"
    parts = {
        "TITLE": html.escape(analysis.title),
        "ABOUT": html.escape(about),
        "SECTIONS": "".join(sections) + (f"<ul class=notes>{notes}</ul>" if notes else ""),
        "DATA": _json(_data(analysis)),
    }
    for name, value in parts.items():
        template = template.replace(f"<!--{name}-->", value)
    return template


@functools.cache
def _template() -> str:
    page = importlib.resources.files("perdure.ext.inspection").joinpath("page.html")
    return page.read_text(encoding="utf-8")


def script_hash(script: str) -> str:
    """What a Content-Security-Policy calls a script that stands in a page."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def report_script_hash() -> str:
    """Of the one script that every page has."""
    return script_hash(_template().rpartition("<script>")[2].partition("</script>")[0])


_SURPRISE = "The darker a token, the less the model expected it. Point at one for what it expected instead."
_ATTENTION = (
    "Every head, those that differ most from others of their layer first. Search by name (L3H7), layer (L3) "
    "or the text of a token. Point at a token to see what it looks at."
)
_KV = "The length of keys (before RoPE) and values by layer and token, and in how many directions keys lie."
_LENS = "What each layer would say next, were it the last: behind the last tokens of the text."
_LAYERS = "How alike the changes are that two layers make to the hidden states: 1 for the same direction."
_EXPERTS = "How many tokens went to each expert, by layer."


def _section(title: str, about: str, body: str) -> str:
    if not body:
        return ""
    return f"<section><h2>{html.escape(title)}</h2><p>{html.escape(about)}</p>{body}</section>"


def _text(analysis: Analysis) -> str:
    spans = []
    rows = zip(analysis.pieces, analysis.measures, analysis.names, strict=True)
    for at, (piece, known, names) in enumerate(rows):
        kind = "token" if at < analysis.prompt else "token written"
        shown = html.escape(piece).replace("\n", "⏎<br>") or "∅"
        if known is None:
            spans.append(f'<span class="{kind}">{shown}</span>')
            continue
        best = ", ".join(
            f"{name!r} {share:.0%}" for name, share in zip(names, known.probabilities, strict=True)
        )
        hint = f"{-known.logprob:.2f} nats, rank {known.rank}, entropy {known.entropy:.2f}; expected {best}"
        dark = min(1.0, -known.logprob / 10)
        style = f"background:rgba(217,95,14,{dark:.2f})"
        spans.append(f'<span class="{kind}" style="{style}" title="{html.escape(hint)}">{shown}</span>')
    return f'<div class="text">{"".join(spans)}</div>'


def _lines(analysis: Analysis) -> str:
    known = [each for each in analysis.measures if each is not None]
    if not known:
        return ""
    lines = [("surprisal", [-each.logprob for each in known]), ("entropy", [each.entropy for each in known])]
    return _plot(lines, "token", "nats", mark=analysis.prompt - 1)


def _plot(lines: Sequence[tuple[str, Sequence[float]]], x: str, y: str, mark: int | None = None) -> str:
    """Lines over one another as SVG."""
    height, left, bottom = 180, 44, 24
    top = max(max(map(float, values)) for _, values in lines) or 1.0
    count = max(len(values) for _, values in lines)
    parts = []
    for share in (0.0, 0.5, 1.0):
        at = 10 + (1 - share) * (height - 10 - bottom)
        parts.append(f'<line class="grid" x1="{left}" x2="{_WIDE}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{top * share:.3g}</text>')
    step = (_WIDE - left - 4) / max(1, count - 1)
    if mark is not None and 0 < mark < count:
        at = left + mark * step
        parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="6" y2="{height - bottom}"/>')
    for number, (name, values) in enumerate(lines):
        points = " ".join(
            f"{left + at * step:.1f},{10 + (1 - float(value) / top) * (height - 10 - bottom):.1f}"
            for at, value in enumerate(values)
        )
        parts.append(f'<polyline class="line{number}" points="{points}"/>')
        parts.append(f'<text class="name{number}" x="{left + 8 + 110 * number}" y="18">{name}</text>')
    parts.append(f'<text x="{_WIDE}" y="{height - 6}" text-anchor="end">{x}</text>')
    parts.append(f'<text x="{left}" y="{height - 6}">{y}</text>')
    return f'<svg viewBox="0 0 {_WIDE} {height}" role="img" aria-label="{y} by {x}">{"".join(parts)}</svg>'


def _heat(values: Floats, rows: Sequence[str], name: str, *, low: float | None = None) -> str:
    """A table of numbers as SVG, a cell each, a row a label."""
    count, width = values.shape
    left, cell_height = 52, max(4, min(14, 420 // max(1, count)))
    cell = (_WIDE - left) / max(1, width)
    smallest = float(values.min()) if low is None else low
    span = (float(values.max()) - smallest) or 1.0
    parts = []
    every = max(1, math.ceil(14 / cell_height))
    for row in range(count):
        y = row * cell_height
        if row % every == 0:
            parts.append(f'<text x="{left - 6}" y="{y + cell_height}" text-anchor="end">{rows[row]}</text>')
        for at in range(width):
            dark = (float(values[row, at]) - smallest) / span
            parts.append(
                f'<rect x="{left + at * cell:.1f}" y="{y}" width="{cell + 0.3:.1f}" '
                f'height="{cell_height + 0.3:.1f}" fill-opacity="{max(0.0, min(1.0, dark)):.2f}">'
                f"<title>{rows[row]}, {at}: {float(values[row, at]):.3g}</title></rect>"
            )
    height = count * cell_height + 4
    return (
        f"<h3>{html.escape(name)} <small>{smallest:.3g} to {smallest + span:.3g}</small></h3>"
        f'<svg class="heat" viewBox="0 0 {_WIDE} {height}" role="img" '
        f'aria-label="{html.escape(name)}">{"".join(parts)}</svg>'
    )


def _names(layers: Iterable[int]) -> list[str]:
    return [f"L{layer}" for layer in layers]


def _narrow(values: Floats) -> Floats:
    """Neighbours put together where a page has no room for each."""
    most = 160
    if values.shape[1] <= most:
        return values
    return np.stack([part.mean(axis=1) for part in np.array_split(values, most, axis=1)], axis=1)


def _key_values(analysis: Analysis) -> str:
    if analysis.k_norms is None or analysis.v_norms is None or analysis.k_rank is None:
        return ""
    rows = _names(range(len(analysis.k_norms)))
    return (
        _heat(_narrow(analysis.k_norms), rows, "Length of keys, by layer and token")
        + _heat(_narrow(analysis.v_norms), rows, "Length of values, by layer and token")
        + "<h3>Effective rank of keys, by layer</h3>"
        + _plot([("directions", analysis.k_rank.tolist())], "layer", "")
    )


def _lens(analysis: Analysis) -> str:
    lens = analysis.lens
    if lens is None:
        return ""
    columns = lens.tokens.shape[1]
    head = "".join(f"<th>{html.escape(piece)}</th>" for piece in analysis.pieces[-columns:])
    lines = []
    for at, layer in reversed(list(enumerate(lens.layers))):
        cells = []
        for column in range(columns):
            share = float(lens.probabilities[at, column, 0])
            hint = ", ".join(
                f"{name!r} {chance:.0%}"
                for name, chance in zip(
                    analysis.lens_names[at][column], lens.probabilities[at, column].tolist(), strict=True
                )
            )
            shown = html.escape(analysis.lens_names[at][column][0])
            style = f"background:rgba(49,130,189,{share:.2f})"
            cells.append(f'<td style="{style}" title="{html.escape(hint)}">{shown}</td>')
        lines.append(f"<tr><th>L{layer}</th>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table class="lens"><tr><th></th>{head}</tr>{"".join(lines)}</table></div>'


def _coherence(analysis: Analysis) -> str:
    trace = analysis.trace
    if trace is None or trace.hidden is None or len(trace.layers) < 2:
        return ""
    return _heat(trace.layer_coherence(), _names(trace.layers[1:]), "Coherence of layers", low=-1.0)


def _experts(analysis: Analysis) -> str:
    trace = analysis.trace
    if trace is None or trace.router is None:
        return ""
    counts = trace.expert_counts().astype(np.float32)
    return _heat(counts, _names(trace.layers), "Tokens by expert", low=0.0)


def _attention(analysis: Analysis) -> str:
    if analysis.trace is None or analysis.trace.attention is None:
        return ""
    return (
        '<div class="attention"><div><input id="search" type="search" placeholder="L3H7, L3, or a text" '
        'aria-label="Search heads and tokens"><div id="heads" role="listbox" aria-label="Heads"></div></div>'
        '<div><div id="looks" class="text"></div><canvas id="matrix" width="480" height="480" role="img" '
        'aria-label="Attention of the chosen head"></canvas><p id="chosen"></p></div></div>'
    )


def _times(analysis: Analysis) -> str:
    tiers = []
    for name, count in analysis.figures.tiers:
        if count:
            took = analysis.figures.tier_seconds.get(name)
            known = "" if took is None else f" in {took:.4f} s"
            tiers.append((name, float(count), f"{count} tokens{known}"))
    seconds = [(name, value, f"{value:.3f} s") for name, value in analysis.figures.seconds]
    return _bars(tiers) + _bars(seconds)


def _bars(rows: Sequence[tuple[str, float, str]]) -> str:
    most = max((value for _, value, _ in rows), default=0.0) or 1.0
    parts = []
    for at, (name, value, text) in enumerate(rows):
        y = at * 24
        width = max(1.0, value / most * (_WIDE - 340))
        parts.append(f'<text x="230" y="{y + 15}" text-anchor="end">{html.escape(name)}</text>')
        parts.append(f'<rect class="bar" x="240" y="{y + 3}" width="{width:.1f}" height="16"/>')
        parts.append(f'<text x="{248 + width:.1f}" y="{y + 15}">{html.escape(text)}</text>')
    return f'<svg viewBox="0 0 {_WIDE} {max(1, len(rows)) * 24}" role="img">{"".join(parts)}</svg>'


def _data(analysis: Analysis) -> dict[str, Any]:
    """What the script of the page draws attention from: a byte a weight."""
    trace = analysis.trace
    if trace is None or trace.attention is None:
        return {}
    layers, heads_of_layer, rows, count = trace.attention.shape
    size = min(_SHOWN, rows, math.isqrt(_WEIGHTS // (layers * heads_of_layer)))
    first = count - size
    shown = trace.attention[:, :, -size:, first:]
    # Their roots: most weights are small, and a byte has 255 steps.
    packed = np.round(255 * np.sqrt(np.clip(shown, 0, 1))).astype(np.uint8)
    heads = trace.selected_heads(layers * heads_of_layer)
    place = {layer: at for at, layer in enumerate(trace.layers)}
    return {
        "tokens": list(analysis.pieces[first:]),
        "first": first,
        "size": size,
        "perLayer": heads_of_layer,
        "heads": [[each.name, place[each.layer], each.head, round(each.distance, 4)] for each in heads],
        "weights": base64.b64encode(packed.tobytes()).decode("ascii"),
    }


def _json(data: dict[str, Any]) -> str:
    """JSON that can stand in a script, whatever its texts are."""
    text = json.dumps(data, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
