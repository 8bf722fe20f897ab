"""Layers do not import upwards."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import perdure

SOURCE = Path(perdure.__file__).parent

# From low to high: each may import itself and whatever stands before it.
LAYERS = (
    "errors",
    "checks",
    "option_names",
    "system",
    "config",
    "memory",
    "identity",
    "models",
    "libraries",
    "engine",
    "decode",
    "cache",
    "store",
    "backend",
    "worker",
    "chat",
    "sessions",
    "runtime",
    "server",
    "public",
    "__init__",
    "cli",
)


def layer_of(module: str) -> str:
    """The layer of a module such as `perdure.engine.batch`, or of `perdure` itself."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(file: Path, tree: ast.AST) -> Iterator[str]:
    """The modules of this project that a file imports, wherever in it the import stands."""
    here = ["perdure", *file.relative_to(SOURCE).with_suffix("").parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "perdure")
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: -node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            if module == "perdure":
                # Names out of the top are modules of it, or else the public names.
                yield from (f"perdure.{a.name}" if is_layer(a.name) else "perdure" for a in node.names)
            elif module.split(".")[0] == "perdure":
                yield module


def is_layer(name: str) -> bool:
    return (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()


def upward(file: Path, tree: ast.AST) -> list[str]:
    """The imports of a file that reach a layer above its own."""
    own = LAYERS.index(file.relative_to(SOURCE).with_suffix("").parts[0])
    return [module for module in imports(file, tree) if LAYERS.index(layer_of(module)) > own]


def test_every_module_has_a_layer() -> None:
    there = {
        path.stem
        for path in SOURCE.iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))
    }
    assert there <= set(LAYERS), "place the new module in LAYERS"


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_module_imports_upwards(file: Path) -> None:
    assert upward(file, ast.parse(file.read_text())) == []


@pytest.mark.parametrize(
    "line",
    [
        "import perdure.cli",
        "import perdure",
        "from perdure import Model",
        "from perdure.cache.memory_tier import Tier",
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
