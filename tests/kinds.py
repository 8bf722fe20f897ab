"""What a test starts, which says when it runs: every test has one of these kinds as its marker.

    unit      nothing: plain Python and the toy engine
    engine    llama.cpp or MLX in this process
    live      a server in a thread, with sockets
    process   child processes: workers, commands, terminals
    service   servers of others: PostgreSQL, Redis, HAProxy, Ray
    browser   Chromium

The kind is that of the dearest thing that the test's file, the helpers that it imports or its fixtures name.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

import pytest

KINDS = ("unit", "engine", "live", "process", "service", "browser")
TESTS = Path(__file__).parent

_BY_MODULE = {
    "playwright": "browser",
    "ext.cluster.servers": "service",
    "ext.cluster.proxy": "service",
    "ray": "service",
    "subprocess": "process",
    "multiprocessing": "process",
    "cli.pty_user": "process",
    "server.live_server": "live",
    "uvicorn": "live",
}
_BY_WORD = {"isolated": "process", "RemoteBackend": "process", "supervisor": "process"}
"""Names in a file that start a worker."""
_BY_FIXTURE = {
    "browser": "browser",
    "postgres": "service",
    "here": "live",
    "server": "live",
    "zoo_path": "engine",
    "find_subject": "engine",
    "subject": "engine",
}


LATER = ("service", "browser")
"""Kinds that run in `make test-all`, but for some of them."""
SMOKE = ("ext/cluster/test_store_contract.py", "page/test_talk.py")


def is_smoke(item: pytest.Item) -> bool:
    """Whether it runs in `make test` although its kind does not."""
    return item.path.relative_to(TESTS).as_posix() in SMOKE


def kind_of(item: pytest.Item) -> str:
    """The kind of a test."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    fixtures: Iterable[str] = getattr(item, "fixturenames", ())
    if any(str(value).startswith("toy") for value in parameters.values()):
        fixtures = set(fixtures) - {"subject", "find_subject", "zoo_path"}
    kinds = {_BY_FIXTURE[name] for name in fixtures if name in _BY_FIXTURE} | of_file(item.path)
    return max(kinds, key=KINDS.index, default="unit")


@functools.cache
def of_file(path: Path) -> frozenset[str]:
    """What a file starts by what it imports, and by what the helpers start that it imports."""
    tree = ast.parse(path.read_text("utf-8"))
    modules: set[str] = set()
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.keyword) and node.arg:
            words.add(node.arg)
    kinds = {kind for word, kind in _BY_WORD.items() if word in words}
    for module in modules:
        parts = module.split(".")
        names = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        kinds |= {_BY_MODULE[name] for name in names if name in _BY_MODULE}
        helper = TESTS.joinpath(*parts).with_suffix(".py")
        if helper.is_file() and not helper.name.startswith(("conftest", "test_")) and helper != path:
            kinds |= of_file(helper)
    return frozenset(kinds)
