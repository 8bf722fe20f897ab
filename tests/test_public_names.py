"""The public names are a promise: all there, all listed, and every error drawn in the tree."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import perdure
from perdure import errors
from perdure.extension import extensions


def error_classes() -> dict[str, type[BaseException]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == errors.__name__
    }


def drawn() -> list[tuple[int, str]]:
    """The tree at the top of errors.py: how deep each name stands, and the name."""
    assert errors.__doc__ is not None
    found = [re.match(r"^([│├└─ ]*)([A-Z]\w+)(?: |$)", line) for line in errors.__doc__.splitlines()]
    return [(len(match[1]) // 4, match[2]) for match in found if match and match[2] in error_classes()]


def test_all_names_are_sorted_once_and_can_be_imported() -> None:
    names = perdure.__all__
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(perdure, name) is not None


def is_here(module: str) -> bool:
    """Whether a module is there: that of an extension may be hidden."""
    return not module.startswith("perdure.ext.") or module.split(".")[2] in extensions()


def test_whatever_the_top_module_imports_is_public() -> None:
    tree = ast.parse(Path(perdure.__file__).with_name("__init__.pyi").read_text())
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and is_here(node.module or "")
        for alias in node.names
    }
    assert imported == set(perdure.__all__) - {"__version__"}


def test_names_are_imported_when_they_are_asked_for() -> None:
    """The command starts without the engine, and whoever asks for a name or for a module gets it."""
    code = """
import sys
import perdure
assert "perdure.engine" not in sys.modules
assert perdure.models.__name__ == "perdure.models"
assert "perdure.runtime" not in sys.modules
from perdure import Model, errors
assert perdure.errors is errors and perdure.Model is Model
try:
    perdure.nonsense
except AttributeError as error:
    assert "nonsense" in str(error)
from perdure import *
assert open is perdure.open
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_error_is_exported_and_has_one_root() -> None:
    for name, error in error_classes().items():
        assert getattr(perdure, name) is error
        assert name in perdure.__all__
        assert issubclass(error, perdure.PerdureError)
        assert error.__doc__


def test_every_error_is_drawn_in_the_tree_where_it_stands() -> None:
    tree = drawn()
    assert sorted(name for _, name in tree) == sorted(error_classes())
    path: list[str] = []
    for depth, name in tree:
        path = [*path[:depth], name]
        parents = [
            base.__name__ for base in error_classes()[name].__mro__[1:] if base.__name__ in error_classes()
        ]
        assert parents == path[:depth][::-1], name


def test_importing_the_package_imports_none_of_its_parts() -> None:
    """Half a second of numpy and templates is for who uses them; `perdure --help` does not."""
    code = "import sys, perdure; print(*(n for n in sys.modules if n.split('.')[0] in ('perdure', 'numpy')))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["perdure"]
