"""Size estimates: what a call of a template may make out of little, before it does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

from perdure.chat.template.limits import RenderLimits
from perdure.errors import TemplateError

_WIDEST = 999
_WIDE_FIELD = re.compile(r"[0-9]{4,}")
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:[0-9]*\.)?(?:\*|[0-9]{4,})")
_LARGEST_INDENT = 16
_MOST_BITS = 4096

SizeEstimate = Callable[..., int]
"""Of what a template calls, with the arguments that it gives: those are the template's, so they are of any
type and number. Where they do not fit, the call itself is refused."""


def formatted(limits: RenderLimits, text: str | bytes, *args: Any, **kwargs: Any) -> int:
    written = str(text, "latin-1") if isinstance(text, bytes) else text
    if _WIDE_PERCENT.search(written):
        _too_wide()
    most = sum(limits.weigh(each) for each in (*args, *kwargs.values()))
    return len(written) + written.count("%") * (_WIDEST + most)


def _replace(limits: RenderLimits, text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    whole = str(text)
    return len(whole) + whole.count(str(old)) * len(str(new))


def check_field(spec: str) -> None:
    """That a field of `str.format` is no wider than anybody needs."""
    if _WIDE_FIELD.search(spec):
        _too_wide()


def _too_wide() -> NoReturn:
    raise TemplateError(f"the template formats with a width of more than {_WIDEST}, or one it does not say")


def _width(limits: RenderLimits, text: Any, *args: Any, **kwargs: Any) -> int:
    return max((each for each in (*args, *kwargs.values()) if isinstance(each, int)), default=0)


def _indent(limits: RenderLimits, text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    text = str(text)
    size = width if isinstance(width, int) else len(width)
    return len(text) + (len(text.splitlines()) + 1) * size


def _tabs(limits: RenderLimits, text: str, tabsize: int = 8) -> int:
    return len(text) + text.count("\t") * tabsize


def _wrap(
    limits: RenderLimits,
    text: Any,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    *_: Any,
    **__: Any,
) -> int:
    return len(str(text)) * (1 + len(wrapstring or ""))


def _join(limits: RenderLimits, text: Any, items: Any) -> int:
    return limits.weigh(items) + len(items) * len(text)


def _filter_join(limits: RenderLimits, items: Any, d: Any = "", *_: Any, **__: Any) -> int:
    return limits.weigh(items) + len(items) * len(str(d))


def _split(limits: RenderLimits, text: str, sep: Any = None, *_: Any, **__: Any) -> int:
    return len(text) + 8 * text.count(sep) if isinstance(sep, str) and sep else 4 * len(text)


def _sum(limits: RenderLimits, items: Any, attribute: Any = None, start: Any = 0) -> int:
    # Lists are added up one by one, each time into a new one.
    return 0 if isinstance(start, (int, float)) else limits.weigh(items) * len(items) // 8


def _round(limits: RenderLimits, value: Any, precision: int = 0, *_: Any, **__: Any) -> int:
    return 0 if abs(precision) <= 300 else limits.largest + abs(precision)


def _json(limits: RenderLimits, value: Any, *args: Any, indent: Any = None, **__: Any) -> int:
    indent = args[1] if len(args) > 1 else indent
    if (indent if isinstance(indent, int) else len(indent or "")) > _LARGEST_INDENT:
        raise TemplateError(f"the template indents JSON by more than {_LARGEST_INDENT}")
    return limits.weigh(value)


def check_product(limits: RenderLimits, operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MOST_BITS:
            raise TemplateError("the template works with numbers of more than a thousand digits")
    elif operator == "*":
        many, times = (left, right) if isinstance(right, int) else (right, left)
        if isinstance(times, int) and isinstance(many, (str, bytes, list, tuple)):
            limits.fits(limits.weigh(many) * times)


METHOD_SIZES: dict[str, SizeEstimate] = {
    "center": _width,
    "expandtabs": _tabs,
    "join": _join,
    "ljust": _width,
    "replace": _replace,
    "rjust": _width,
    "rsplit": _split,
    "split": _split,
    "zfill": _width,
}
FILTER_SIZES: dict[str, SizeEstimate] = {
    "batch": _width,
    "center": _width,
    "format": formatted,
    "indent": _indent,
    "join": _filter_join,
    "replace": _replace,
    "round": _round,
    "slice": _width,
    "sum": _sum,
    "tojson": _json,
    "wordwrap": _wrap,
}
