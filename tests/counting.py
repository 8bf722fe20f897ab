"""Work that is counted instead of timed: calls, and rows that were read."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from perdure.store.index import Index


@dataclass
class Calls:
    count: int = 0


@contextmanager
def calls_of(patching: pytest.MonkeyPatch, *places: tuple[Any, str]) -> Iterator[Calls]:
    """How often functions are called, each given by where it is looked up and its name."""
    calls = Calls()
    with patching.context() as patched:
        for owner, name in places:
            patched.setattr(owner, name, _counting(getattr(owner, name), calls))
        yield calls


def _counting(function: Any, calls: Calls) -> Any:
    def counted(*args: Any, **keywords: Any) -> Any:
        calls.count += 1
        return function(*args, **keywords)

    return counted


def size_of(value: object) -> int:
    """Bytes of all that `value` leads to, wherever it keeps it: what grows for ever is seen here."""
    outside = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
    seen: dict[int, object] = {}
    left = [value]
    while left:
        each = left.pop()
        if id(each) not in seen and not isinstance(each, outside):
            seen[id(each)] = each
            left.extend(gc.get_referents(each))
    return sum(map(sys.getsizeof, seen.values()))


@dataclass
class Sql:
    statements: int = 0
    rows: int = 0


@contextmanager
def sql_of(patching: pytest.MonkeyPatch) -> Iterator[Sql]:
    """Statements that are run on any index, and rows that they gave."""
    sql = Sql()
    rows, run = Index.rows, Index.run

    def reading(self: Index, query: str, *values: Any) -> list[tuple[Any, ...]]:
        found = rows(self, query, *values)
        sql.statements += 1
        sql.rows += len(found)
        return found

    def running(self: Index, statement: str, *values: Any) -> None:
        sql.statements += 1
        run(self, statement, *values)

    with patching.context() as patched:
        patched.setattr(Index, "rows", reading)
        patched.setattr(Index, "run", running)
        yield sql
