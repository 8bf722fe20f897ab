"""Limits on one rendering of a template, in time and memory, and the checks where a template meets them."""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from datetime import datetime
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.nodes import Const, Expr, Node
from jinja2.runtime import Context
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from perdure.errors import TemplateError

SECONDS = 1.5
_CHARACTERS = 32 << 20
_LARGEST = 4 << 20
_DEEPEST = 60
_CALLS = 100
_MOST_PARTS = 64
"""Of a sum that is checked as one."""


class RenderLimits:
    """Counts what a rendering makes, before it makes it.

    A value's weight is its characters and items, through all that it holds. No value weighs more than
    `largest`, so no single step of a template takes long; all that is made together has a limit, so memory
    has one too, even if nothing is ever let go of.
    """

    __slots__ = ("_deadline", "_left", "_started", "_weights", "depth", "given", "largest")

    def __init__(self, weight: int) -> None:
        """`weight` is how much the values that the template renders weigh together."""
        self._left = _CHARACTERS + 64 * weight
        self.largest = _LARGEST + 16 * weight
        self._deadline = time.monotonic() + SECONDS
        self._started = time.thread_time()
        self.depth = 0
        self.given: frozenset[int] | None = None
        """The lists that belong to the caller, once one is about to be changed."""
        # The values are kept with their weights, since an id is another's once its owner is gone.
        self._weights: dict[int, tuple[object, int]] = {}

    def tick(self) -> None:
        if time.monotonic() > self._deadline:
            self._late()

    def spend(self, size: int) -> None:
        """Account for a text of that size."""
        self._left -= size
        if self._left < 0 or size > self.largest:
            self.fits(size)
            raise TemplateError("the template makes more text than any conversation needs")

    def fits(self, size: int) -> None:
        """That a value of this weight may be made."""
        if size > self.largest:
            raise TemplateError(
                f"the template makes a value of {size} characters or items; {self.largest} fit"
            )

    def take(self, value: Any) -> None:
        """Account for a value that was made."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, (list, tuple, dict, bytes)):
            self.weigh(value)
            self.spend(2 * len(value))

    def weigh(self, value: Any, depth: int = 0) -> int:
        if isinstance(value, (str, bytes)):
            return len(value) + 1
        if value is None or isinstance(value, (int, float)):
            return 1
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, dict):
            items: Any = (part for pair in value.items() for part in pair)
        elif isinstance(value, (list, tuple, KeysView, ValuesView, ItemsView)):
            items = value
        else:
            return 1
        if depth == _DEEPEST:
            raise TemplateError(f"the template nests values deeper than {_DEEPEST}")
        total = 1
        for item in items:
            total += self.weigh(item, depth + 1)
            self.fits(total)
        self.know(value, total)
        return total

    def added(self, value: Any, weight: int) -> None:
        """Account for a list made of others, which weighs no more than `weight`."""
        self.fits(weight)
        self.spend(2 * len(value))
        self.know(value, weight)

    def know(self, value: Any, weight: int) -> None:
        self._weights[id(value)] = (value, weight)

    def enter(self) -> None:
        self.depth += 1
        if self.depth > _CALLS:
            raise TemplateError(f"the template's macros call each other more than {_CALLS} deep")

    def _late(self) -> None:
        used = time.thread_time() - self._started
        if used >= SECONDS:
            raise TemplateError(f"the template takes longer than {SECONDS} seconds to render")
        # Others had the processor: that time is given back.
        self._deadline = time.monotonic() + SECONDS - used


class BoundedContext(Context):
    """The variables of one rendering, and its limits."""

    limits: RenderLimits
    now: datetime | None = None
    """The date that a template reads; None for the clock's."""

    def derived(self, locals: dict[str, Any] | None = None) -> Context:  # noqa: A002
        made = super().derived(locals)
        assert isinstance(made, BoundedContext)
        made.limits, made.now = self.limits, self.now
        return made


def limits_of(context: Context) -> RenderLimits:
    return context.limits  # type: ignore[attr-defined, no-any-return]


class CheckInserter(NodeTransformer):
    """Puts the checks into a parsed template, where Jinja itself has no hook for them."""

    def visit_For(self, node: jinja2.nodes.For) -> Node:  # noqa: N802
        self.generic_visit(node)
        written = sum(len(each.data) for each in node.find_all(jinja2.nodes.TemplateData))
        assert isinstance(node.iter, Expr)
        node.iter = _filter(node.iter, "_paced", Const(written))
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(jinja2.nodes.Tuple(node.nodes, "load", lineno=node.lineno), "_joined")

    def visit_Add(self, node: jinja2.nodes.Add) -> Node:  # noqa: N802
        # A sum of several texts, as most messages are written, is checked once.
        parts: list[Expr] = [node.right]
        first = node.left
        while isinstance(first, jinja2.nodes.Add) and len(parts) < _MOST_PARTS:
            parts.append(first.right)
            first = first.left
        if len(parts) == 1 or isinstance(first, jinja2.nodes.Add):
            self.generic_visit(node)
            return node
        every = jinja2.nodes.Tuple([first, *reversed(parts)], "load", lineno=node.lineno)
        self.generic_visit(every)
        return _filter(every, "_added")

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> Node:  # noqa: N802
        self.generic_visit(node)
        sliced = node.ctx == "load" and isinstance(node.arg, jinja2.nodes.Slice)
        return _filter(node, "_ticked") if sliced else node

    def visit_Compare(self, node: jinja2.nodes.Compare) -> Node:  # noqa: N802
        self.generic_visit(node)
        for operand in node.ops:
            # What is compared with a constant is compared at once.
            constant = isinstance(node.expr, Const) or isinstance(operand.expr, Const)
            if operand.op in ("in", "notin") or not constant:
                operand.expr = _filter(operand.expr, "_ticked")
        return node

    def visit_List(self, node: jinja2.nodes.List) -> Node:  # noqa: N802
        self.generic_visit(node)
        return node if all(isinstance(each, Const) for each in node.items) else _filter(node, "_weighed")

    def visit_Dict(self, node: jinja2.nodes.Dict) -> Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, "_weighed")

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> Node:  # noqa: N802
        self.generic_visit(node)
        constant = node.ctx != "load" or all(isinstance(each, Const) for each in node.items)
        return node if constant else _filter(node, "_weighed")

    def visit_Name(self, node: jinja2.nodes.Name) -> Node:  # noqa: N802
        made_by_calls = node.ctx == "load" and node.name in ("varargs", "kwargs")
        return _filter(node, "_weighed") if made_by_calls else node


def _filter(node: Expr, name: str, *args: Expr) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


class Paced:
    """Something to loop over, one look at the clock and `written` characters an item."""

    __slots__ = ("_items", "_limits", "_written")

    def __init__(self, items: Iterable[Any], limits: RenderLimits, written: int) -> None:
        self._items = items
        self._limits = limits
        self._written = written

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        limits, written = self._limits, self._written
        for item in self._items:
            limits.tick()
            if written:
                limits.spend(written)
            yield item


@pass_context
def _paced(context: Context, items: Iterable[Any], written: int) -> Paced:
    return Paced(items, limits_of(context), written)


@pass_context
def _joined(context: Context, parts: tuple[Any, ...]) -> str:
    texts = [finalized(context, part) for part in parts]
    limits_of(context).fits(sum(map(len, texts)))
    return "".join(texts)


@pass_context
def _added(context: Context, parts: tuple[Any, ...]) -> Any:
    if set(map(type, parts)) == {str}:
        limits_of(context).spend(sum(map(len, parts)))
        return "".join(parts)
    made = parts[0]
    for part in parts[1:]:
        made = context.environment.call_binop(context, "+", made, part)  # type: ignore[attr-defined]
    return made


@pass_context
def _ticked(context: Context, value: Any) -> Any:
    limits_of(context).tick()
    return value


@pass_context
def _weighed(context: Context, value: Any) -> Any:
    limits_of(context).take(value)
    return value


@pass_context
def finalized(context: Context, value: Any) -> str:
    """What is written out, as text."""
    text = value if type(value) is str else str(value)
    limits_of(context).spend(len(text))
    return text


CHECKS = {
    "_added": _added,
    "_paced": _paced,
    "_joined": _joined,
    "_ticked": _ticked,
    "_weighed": _weighed,
}
"""The filters that they are, by the names under which they are put in."""
