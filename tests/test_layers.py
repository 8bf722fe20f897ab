"""Layers do not import upwards, files do not import each other in circles, folders stay small, and tests
look inside in few places."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path

import pytest

import perdure
from perdure.extension import extensions, imported

SOURCE = Path(perdure.__file__).parent

# From low to high: each may import itself and whatever stands before it.
LAYERS = (
    "errors",
    "extension",
    "checks",
    "closing",
    "restart_policy",
    "options",
    "request_options",
    "engine_config",
    "system",
    "atomic",
    "config",
    "memory",
    "identity",
    "events",
    "models",
    "libraries",
    "engine",
    "testing",
    "decode",
    "store",
    "cache",
    "backend",
    "chat",
    "sessions",
    "runtime",
    "opening",
    "server",
    "__init__",
    "cli",
    "spi",
    "ext",
)

INSIDE: dict[str, tuple[str, ...]] = {
    "server": ("pool", "core", "protocols", "api", "app", "direct_write", "tls", "http_server"),
    "cache": (
        "block",
        "sorted_keys",
        "prefix_search",
        "held_blocks",
        "eviction",
        "kept_prefixes",
        "drop_plan",
        "tiers",
        "block_cache",
        "transfer",
        "slots",
        "cache_view",
        "prefix_cache",
    ),
    "cache/tiers": (
        "base",
        "memory",
        "codec",
        "block_index",
        "shares",
        "block_folder",
        "disk",
        "archive",
        "opening",
        "write_behind",
        "tiered",
    ),
    "cache/slots": ("checkpoints", "checkpoint_store", "placement", "swap_slots", "cache"),
}
"""The order within a folder, from low to high, of its folders and modules."""


def layer_of(module: str) -> str:
    """The layer of a module such as `perdure.engine.contract`, or of `perdure` itself."""
    return module.split(".")[1] if "." in module else "__init__"


def import_statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports of a file, wherever they stand. Expressions, which have none, are not walked through."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, name, ()):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node
            else:
                yield from import_statements(node)


def imports(file: Path, tree: ast.AST) -> Iterator[str]:
    """The modules of this project that a file imports, wherever in it the import stands."""
    here = ["perdure", *file.relative_to(SOURCE).with_suffix("").parts]
    for node in import_statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "perdure")
        else:
            base = ".".join(here[: -node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            if module == "perdure":
                # Names out of the top are modules of it, or else the public names.
                yield from (f"perdure.{a.name}" if is_layer(a.name) else "perdure" for a in node.names)
            elif module.removeprefix("perdure.").replace(".", "/") in INSIDE:
                yield from (f"{module}.{alias.name}" for alias in node.names)
            elif module.split(".")[0] == "perdure":
                yield module


def is_layer(name: str) -> bool:
    return (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()


def upward(file: Path, tree: ast.AST) -> list[str]:
    """The imports of a file that reach a layer above its own, or what stands above it inside its folders."""
    path = file.relative_to(SOURCE).with_suffix("").parts
    modules = list(imports(file, tree))
    found = [module for module in modules if LAYERS.index(layer_of(module)) > LAYERS.index(path[0])]
    for folder, order in INSIDE.items():
        depth, package = folder.count("/") + 1, f"perdure.{folder.replace('/', '.')}."
        if "/".join(path[:depth]) == folder and path[depth] in order:
            targets = {each: each.removeprefix(package).split(".")[0] for each in modules if package in each}
            found += [
                each
                for each, target in targets.items()
                if target not in order or order.index(target) > order.index(path[depth])
            ]
    return found


def test_every_module_has_a_layer() -> None:
    there = {
        path.stem
        for path in SOURCE.iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))
    }
    assert there <= set(LAYERS), "place the new module in LAYERS"


@pytest.mark.parametrize("layer", INSIDE)
def test_every_module_of_a_layer_with_an_order_has_its_place(layer: str) -> None:
    there = {
        path.stem for path in (SOURCE / layer).iterdir() if path.suffix == ".py" or any(path.glob("*.py"))
    }
    assert there - {"__init__"} == set(INSIDE[layer])


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_module_imports_upwards(file: Path) -> None:
    assert upward(file, ast.parse(file.read_text())) == []


@pytest.mark.parametrize(
    "line",
    [
        "import perdure.cli",
        "import perdure",
        "from perdure import Model",
        "from perdure.cache.tiers.memory import Tier",
        "from perdure import decode",
        "def late():\n    from perdure.server import app",
        "from ...cache import tier",
        "from ...cli import main",
    ],
)
def test_the_check_sees_an_import_that_goes_up(line: str) -> None:
    """Planted: what an engine module must not say."""
    assert upward(SOURCE / "engine" / "llama" / "core.py", ast.parse(line))


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("server/core/follow.py", "from perdure.server.protocols.chat import PROTOCOL"),
        ("server/core/middleware.py", "from perdure.server.api import page"),
        ("server/protocols/chat.py", "import perdure.server.api.sessions"),
        ("server/api/page.py", "def late():\n    from perdure.server.app import build"),
        ("server/core/keys.py", "from ..app import build"),
        ("server/protocols/openai.py", "from perdure.server import app"),
        ("cache/tiers/disk.py", "from perdure.cache.slots.cache import SlotCache"),
        ("cache/tiers/disk.py", "if TYPE_CHECKING:\n    from perdure.cache.cache_view import CacheView"),
        ("cache/tiers/disk.py", "from perdure.cache.tiers.tiered import Tiers"),
        ("cache/tiers/base.py", "from perdure.cache.tiers import disk"),
        ("cache/block.py", "from perdure.cache import slots"),
    ],
)
def test_the_check_sees_an_import_that_goes_up_inside_of_a_folder(file: str, line: str) -> None:
    assert upward(SOURCE / file, ast.parse(line))


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "from perdure.errors import TokenError",
        "from perdure import models",
        "from . import batch",
    ],
)
def test_the_check_lets_other_imports_be(line: str) -> None:
    assert upward(SOURCE / "engine" / "context.py", ast.parse(line)) == []


# The wall.


def behind_the_wall(file: Path, tree: ast.AST, needs: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The imports of an extension's file besides public names, `perdure.spi`, its own folder and the
    extensions that its value needs."""
    own = file.relative_to(SOURCE / "ext").parts[0]
    allowed = ("perdure", "perdure.spi", *(f"perdure.ext.{name}" for name in (own, *needs.get(own, ()))))
    modules = [
        f"{module}.{name}" if module == "perdure" and name and is_layer(name) else module
        for node in import_statements(tree)
        for module, name in (
            ((alias.name, "") for alias in node.names)
            if isinstance(node, ast.Import)
            else ((node.module or "", alias.name) for alias in node.names)
        )
        if module.split(".")[0] == "perdure"
    ]
    return [
        each
        for each in modules
        if each not in allowed and not each.startswith(tuple(f"{prefix}." for prefix in allowed[1:]))
    ]


EXTENSIONS = sorted(path.name for path in (SOURCE / "ext").iterdir() if (path / "__init__.py").exists())


@pytest.mark.parametrize("name", EXTENSIONS)
def test_an_extension_imports_public_names_and_the_spi_alone(name: str) -> None:
    needs = {each.name: each.needs for each in extensions().values()}
    for file in sorted((SOURCE / "ext" / name).rglob("*.py")):
        assert behind_the_wall(file, ast.parse(file.read_text()), needs) == [], file


def test_the_check_sees_an_import_through_the_wall() -> None:
    """Planted: what an extension must not say, and what it may."""
    file = SOURCE / "ext" / "evaluation" / "tasks.py"
    needs = {"evaluation": ("weights",)}
    for line in (
        "from perdure.chat.message import Message",
        "import perdure.errors",
        "from perdure import config",
        "from perdure.ext.mlx import engine",
        "def late():\n    from perdure.cli.output import terminal",
    ):
        assert behind_the_wall(file, ast.parse(line), needs), line
    for line in (
        "from perdure import Message, PerdureError",
        "from perdure.spi.base import system",
        "from perdure.ext.weights.quantize import quantize",
        "import json",
    ):
        assert behind_the_wall(file, ast.parse(line), needs) == [], line


@pytest.mark.parametrize("name", EXTENSIONS)
def test_every_extension_of_ours_registers_as_a_strangers_would(name: str) -> None:
    """By an entry point, and its folder is named after it."""
    assert extensions()[name].name == name


def test_what_an_extension_names_is_there() -> None:
    for extension in extensions().values():
        kinds = (extension.engines, extension.protocols, extension.routes, extension.page_routes)
        commands = (command.target for command in extension.commands)
        for reference in (*chain(*kinds), *commands, *extension.checks, *extension.tiers.values()):
            assert imported(reference) is not None


# Circles.


def module_of(file: Path) -> str:
    parts = ["perdure", *file.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.AST, known: Collection[str]) -> set[str]:
    """The modules that a file imports, wherever in it, also for its types alone."""
    found = set()
    for node in import_statements(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module:
            # A name out of a package is a module of it, or else something that the package defines.
            names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {module if module in known else node.module for module in names.values()}
    return found & set(known)


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Modules that lead back to themselves, as far as there are any."""
    left = {module: set(there) - {module} for module, there in graph.items()}
    while True:
        # Whoever imports nothing that is left, or is imported by nobody that is, is in no circle.
        wanted = {there for each in left.values() for there in each if there in left}
        free = {module for module, there in left.items() if module not in wanted or not there & left.keys()}
        if not free:
            return [sorted(left)] if left else []
        left = {module: there & (left.keys() - free) for module, there in left.items() if module not in free}


def test_no_two_files_import_each_other_however_long_the_way() -> None:
    files = {module_of(file): ast.parse(file.read_text()) for file in SOURCE.rglob("*.py")}
    assert circles({name: imported_modules(tree, files) for name, tree in files.items()}) == []


def test_the_check_sees_a_circle() -> None:
    """Planted: three files of which the last imports the first, for its types."""
    known = ("perdure.a", "perdure.b", "perdure.c", "perdure.d")
    line = "if TYPE_CHECKING:\n    from perdure import a"
    graph = {
        "perdure.a": imported_modules(ast.parse("from perdure.b import x"), known),
        "perdure.b": imported_modules(ast.parse("def late():\n    import perdure.c"), known),
        "perdure.c": imported_modules(ast.parse(line), known),
        "perdure.d": imported_modules(ast.parse("from perdure import a"), known),
    }
    assert circles(graph) == [["perdure.a", "perdure.b", "perdure.c"]]


# Names.


def test_a_class_name_stands_once() -> None:
    """Nested classes apart: a search for a class finds one."""
    places: dict[str, list[str]] = {}
    for file in SOURCE.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(file.relative_to(SOURCE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


# Folders.

MANY = 14
"""Modules that a reader can still take in at a glance."""
A_FILE_A_KIND = ("ext/families",)
"""Folders with one file for each of many kinds: nobody reads them through."""


@pytest.mark.parametrize("folder", ["src/perdure", "bench"])
def test_no_folder_has_more_modules_side_by_side_than_can_be_taken_in(folder: str) -> None:
    root = Path(__file__).parents[1] / folder
    for each in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        if each.as_posix().endswith(A_FILE_A_KIND):
            continue
        modules = [file.name for file in each.glob("*.py") if not file.name.startswith("__")]
        assert len(modules) <= MANY, f"{each}: make a package of those that belong together"


# What is written like a private part, and is documented for everybody.
_DOCUMENTED = {"_exit", "_fields_", "_replace", "_request_id"}


def private_reads(source: str) -> list[str]:
    """Reads of private attributes of something else than `self`."""
    if not re.search(r"(?<!\bself)(?<!\bcls)\._(?!_)", source):
        return []
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in _DOCUMENTED
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def test_tests_look_inside_in_few_places() -> None:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    found = [f"{file.name}: {each}" for file in files for each in private_reads(file.read_text("utf-8"))]
    assert len(found) <= 40, found
    assert private_reads("self._a, rt._b, cls._c, os._exit") == ["rt._b"]
