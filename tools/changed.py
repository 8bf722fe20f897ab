"""Prints the tests of what has changed and of what stands above it: `python -m tools.changed [BASE]`.

A changed module leads to the test folders of every package that imports it, however long the way; a changed
test file leads to itself; a helper of tests, or a file that all tests read, to all of them. BASE is what the
working tree is compared with, the last commit unless it is named.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "perdure"
ALWAYS = ("tests/test_layers.py", "tests/test_public_names.py")


def changed_files(base: str) -> list[str]:
    """What differs from a commit, with files that git does not know yet."""
    commands = (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"])
    return sorted(
        {
            line
            for command in commands
            for line in subprocess.run(
                ["git", *command], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.splitlines()
        }
    )


def module_of(file: Path) -> str:
    parts = ["perdure", *file.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def importers() -> dict[str, set[str]]:
    """By module: those that import it, wherever in them."""
    files = {module_of(file): file for file in SOURCE.rglob("*.py")}
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, file in files.items():
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for target in targets:
                if target in found:
                    found[target].add(name)
    return found


def above(modules: Iterable[str]) -> set[str]:
    """The modules, and all that import them, however long the way."""
    known, reached, left = importers(), set[str](), list(modules)
    while left:
        module = left.pop()
        if module not in reached:
            reached.add(module)
            left += known.get(module, ())
    return reached


def tests_of(files: Iterable[str]) -> list[str]:
    """The tests to run for changed files: paths for pytest."""
    modules: set[str] = set()
    paths: set[str] = set()
    for name in files:
        file = ROOT / name
        if name.startswith("src/perdure/") and name.endswith(".py"):
            modules.add(module_of(file))
        elif name.startswith("tests/") and file.name.startswith("test_"):
            paths.add(name)
        elif name.startswith("tests/") or name in ("pyproject.toml", "Makefile"):
            return ["tests"]
    for module in above(modules):
        parts = module.split(".")[1:]
        folder = "/".join(parts[:2]) if parts[:1] == ["ext"] else (parts or ["."])[0]
        paths |= {
            f"tests/{each}" for each in (folder, f"test_{folder}.py") if (ROOT / "tests" / each).exists()
        }
    paths.discard("tests/.")
    return sorted(path for path in {*paths, *ALWAYS} if (ROOT / path).exists())


if __name__ == "__main__":
    print(*tests_of(changed_files(sys.argv[1] if len(sys.argv) > 1 else "HEAD")))
