"""What a test starts, which says when it runs: every test has one of these kinds as its marker.

    unit      nothing: plain Python and the toy engine
    engine    llama.cpp or MLX in this process
    live      a server in a thread, with sockets
    process   child processes: workers, commands, terminals
    service   servers of others: PostgreSQL, Redis, HAProxy, Ray
    browser   Chromium

The kind is that of the dearest thing that the test's file, the helpers that it imports or its fixtures name.
It and the number of a test's cases say whether `make test` runs it, or `make test-rest` (the marker `full`).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Sequence
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
    "cli.forked": "process",
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


LATER = ("process", "service", "browser")
"""Kinds that run in `make test-rest`, but for some of them."""
SMOKE = (
    "cache/",
    "chat/",
    "cli/test_config.py",
    "ext/cluster/test_store_contract.py",
    "ext/builds/",
    "page/test_talk.py",
    "sessions/",
    "store/test_index.py",
    "test_kinds.py",
    "test_loading.py",
    "test_option_names.py",
    "test_options.py",
    "test_public_names.py",
    "test_system.py",
    "test_typing.py",
    "ext/workers/",
)
"""Files and folders that run in `make test` although their kind does not."""
MANY, EVERY = 12, 5
"""Of a test with more than so many cases `make test` runs each fifth, and `make test-rest` the others. Five
divides no number of models or kinds of memory, so that none of them is left out of such a test as a whole."""


def is_smoke(item: pytest.Item) -> bool:
    """Whether it runs in `make test` although its kind does not."""
    return item.path.relative_to(TESTS).as_posix().startswith(SMOKE)


def later(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """What runs in `make test-rest` by its kind, or as one of many cases of a test."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if kind_of(item) in LATER and not is_smoke(item):
            yield item
        elif not any(item.iter_markers("full")) and not any(item.iter_markers("soak")):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in cases.values():
        if len(each) > MANY:
            yield from (item for index, item in enumerate(each) if index % EVERY)


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
    modules: set[str] = set()
    words: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.keyword):
            words.add(node.arg or "")
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    of_words = (kind for word, kind in _BY_WORD.items() if word in words)
    of_helpers = (of_file(each) for each in map(_helper, modules) if each and each != path)
    return frozenset(of_words).union(*map(_of_module, modules), *of_helpers)


@functools.cache
def _of_module(module: str) -> frozenset[str]:
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return frozenset(_BY_MODULE[name] for name in names if name in _BY_MODULE)


@functools.cache
def _helper(module: str) -> Path | None:
    """The file of a module that tests share."""
    helper = TESTS.joinpath(*module.split(".")).with_suffix(".py")
    return helper if helper.is_file() and not helper.name.startswith(("conftest", "test_")) else None
