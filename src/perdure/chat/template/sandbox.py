"""Sandbox: Jinja as chat templates know it, within limits.

A template comes with a model file, so it is untrusted code. It runs in Jinja's immutable sandbox, as
Hugging Face's library has it. Besides, every loop, call and filter looks at the clock, and whatever makes a
value larger than what it is made of asks first. The hooks are put into the parsed template once; a rendering
pays for what it does, and there is no thread that watches. Kept by hand: Jinja's sandbox bounds what a
template reaches, not what it costs.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.nodes import EvalContext, Node
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace, _PassArg, pass_context, pass_eval_context

from perdure.chat.template.limits import (
    CHECKS,
    BoundedContext,
    CheckInserter,
    Paced,
    RenderLimits,
    finalized,
    limits_of,
)
from perdure.errors import TemplateError

_UNUSED = ("pprint", "random", "striptags", "urlize", "xmlattr")
"""Filters that no chat template has a use for, and whose cost is hard to foresee."""

_COMPARING = (
    "in",
    "eq",
    "equalto",
    "==",
    "ne",
    "!=",
    "lt",
    "lessthan",
    "<",
    "le",
    "<=",
    "gt",
    ">",
    "ge",
    ">=",
)
"""Tests that look through whole values."""

_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        (
            *("capitalize", "casefold", "center", "count", "encode", "endswith", "expandtabs", "find"),
            *("format", "format_map", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit"),
            *("isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper"),
            *("join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace"),
            *("rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines"),
            *("startswith", "strip", "swapcase", "title", "upper", "zfill"),
        )
    ),
    bytes: frozenset(("decode",)),
    list: frozenset(("append", "copy", "count", "index", "pop")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    int: frozenset(),
    bool: frozenset(),
    float: frozenset(("is_integer",)),
}
_DEEPEST = 60
_DICT_ATTRIBUTES = frozenset(dir(dict))


class Sandbox(ImmutableSandboxedEnvironment):
    """Where templates are compiled and run. It keeps nothing of a rendering, so threads can share it."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    context_class = BoundedContext

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            # Nothing of a template is worked out while it is compiled: there are no limits yet.
            optimized=False,
            finalize=finalized,
        )
        for name in _UNUSED:
            del self.filters[name]
        self.filters["tojson"] = _tojson
        self.filters = {name: _bounded_filter(name, each) for name, each in self.filters.items()}
        self.filters |= CHECKS
        self.tests |= {name: _bounded_test(self.tests[name]) for name in _COMPARING}  # type: ignore[arg-type]
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = Parser(self, source, name, filename).parse()
        bounded = CheckInserter().visit(tree)
        assert isinstance(bounded, jinja2.nodes.Template)
        bounded.set_environment(self)
        return bounded

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Most of what a template does, and the usual checks are slow; these three have nothing to hide.
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if type(obj) in (LoopContext, _Namespace) and hasattr(obj, attribute) and attribute[0] != "_":
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        allowed = _METHODS.get(type(obj))
        if allowed is None and isinstance(obj, str):
            allowed = _METHODS[str]
        return attr in allowed if allowed is not None else super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if not isinstance(value, BuiltinMethodType) or value.__name__ not in ("format", "format_map"):
            return None
        text = value.__self__
        if not isinstance(text, str):
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            return _Formatter(self).vformat(text, args, kwargs)

        def format_mapped(mapping: Any) -> str:
            return _Formatter(self).vformat(text, (), mapping)

        return formatted if value.__name__ == "format" else format_mapped

    # Any, here and below: a template gives what it likes to what it calls.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        limits = limits_of(__context)
        limits.tick()
        if type(__obj) is BuiltinMethodType:
            from perdure.chat.template.sizes import METHOD_SIZES

            owner = __obj.__self__
            if isinstance(owner, str) and __obj.__name__ in METHOD_SIZES:
                args = _sized(limits, args)
                limits.fits(METHOD_SIZES[__obj.__name__](limits, owner, *args, **kwargs))
            elif isinstance(owner, list) and __obj.__name__ in ("append", "pop"):
                if limits.given is None:
                    limits.given = frozenset(_lists(__context.parent))
                if id(owner) in limits.given:
                    raise TemplateError("the template changes what it was given")
                # What is taken out is not given back to the limits: they bound what was ever made.
                limits.added(owner, limits.weigh(owner) + sum(map(limits.weigh, args)))
        elif isinstance(__obj, LoopContext) and args:
            args = (Paced(args[0], limits, limits.largest >> 8), *args[1:])
        if not isinstance(__obj, (Macro, LoopContext)):
            made = super().call(__context, __obj, *args, **kwargs)
            limits.take(made)
            return made
        limits.enter()
        try:
            return super().call(__context, __obj, *args, **kwargs)
        finally:
            limits.depth -= 1

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        limits = limits_of(context)
        if operator == "+":
            if isinstance(left, str) and isinstance(right, str):
                limits.spend(len(left) + len(right))
                return left + right
            if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
                weight = limits.weigh(left) + limits.weigh(right)
                limits.fits(weight)
                made = left + right  # type: ignore[operator]
                limits.added(made, weight)
                return made
        elif operator == "%":
            if isinstance(left, (str, bytes)):
                from perdure.chat.template.sizes import formatted

                limits.fits(formatted(limits, left, right))
        else:
            from perdure.chat.template.sizes import check_product

            check_product(limits, operator, left, right)
        made = super().call_binop(context, operator, left, right)
        if operator != "+":
            limits.take(made)
        return made


def _lists(value: Any, depth: int = 0) -> Iterator[int]:
    """The lists that a rendering was given, which do not change; a template may add to its own."""
    if isinstance(value, list):
        yield id(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if depth < _DEEPEST:
        for each in inner:
            yield from _lists(each, depth + 1)


# Filters and methods.


def _sized(limits: RenderLimits, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments whose size is known."""
    return tuple(_listed(limits, each) if isinstance(each, Iterator) else each for each in args)


def _listed(limits: RenderLimits, items: Iterator[Any]) -> list[Any]:
    made = list(Paced(items, limits, 2))
    limits.weigh(made)
    return made


def _bounded_filter(name: str, made_by: Callable[..., Any]) -> Callable[..., Any]:
    takes = _PassArg.from_obj(made_by)

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        limits = limits_of(context)
        limits.tick()
        from perdure.chat.template.sizes import FILTER_SIZES

        if (grows := FILTER_SIZES.get(name)) is not None:
            if isinstance(value, Iterator):
                value = _listed(limits, value)
            limits.fits(grows(limits, value, *args, **kwargs))
        if takes is _PassArg.context:
            made = made_by(context, value, *args, **kwargs)
        elif takes is _PassArg.eval_context:
            made = made_by(context.eval_ctx, value, *args, **kwargs)
        elif takes is _PassArg.environment:
            made = made_by(context.environment, value, *args, **kwargs)
        else:
            made = made_by(value, *args, **kwargs)
        limits.take(made)
        return made

    return bounded


def _bounded_test(compares: Callable[..., bool]) -> Callable[..., bool]:
    @pass_context
    def bounded(context: Context, *values: Any) -> bool:
        limits_of(context).tick()
        return compares(*values)

    return bounded


class _Formatter(SandboxedFormatter):
    """`str.format`, field by field."""

    _most = 4 << 20

    def format_field(self, value: Any, format_spec: str) -> str:
        from perdure.chat.template.sizes import check_field

        check_field(format_spec)
        made: str = string.Formatter.format_field(self, value, format_spec)
        self._most -= len(made)
        if self._most < 0:
            raise TemplateError("the template formats more text than any conversation needs")
        return made


# What chat templates expect to find.


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` tells trainers what the model wrote; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A separate scope, as of a call block.
        return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _content(self, context: EvalContext, caller: Macro) -> str:
        content: str = caller()
        return content


class _Dict:
    """`dict(…)` without the type behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(Namespace):
    """Shown as a word: what it holds might hold it."""

    def __repr__(self) -> str:
        return "<namespace>"


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@pass_context
def _strftime_now(context: Context, format: str) -> str:  # noqa: A002
    now = context.now if isinstance(context, BoundedContext) else None
    return (now or datetime.now()).strftime(format)
