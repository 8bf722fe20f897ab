"""Writes docs/internals/source_tree.md, the tree of the sources: `python tools/source_tree.py`.

Each line is the first sentence of a module's docstring. `make api` runs it; a test compares the page with
what it would write.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "perdure"
PAGE = ROOT / "docs" / "internals" / "source_tree.md"
HEAD = """# The tree of the sources

`src/perdure/`, two levels deep. `tools/source_tree.py` writes this page from the first sentence of each
docstring; a test holds it to them. [../architecture.md](../architecture.md) has the layers in their order,
[tour.md](tour.md) leads through the code.

| path | what it is |
|---|---|
"""
BUILT = {"server/page": "The built page, out of `web/`."}
"""Folders without a Python module."""


def text() -> str:
    return HEAD + "".join(f"| `{name}` | {sentence} |\n" for name, sentence in rows())


def rows() -> Iterator[tuple[str, str]]:
    for top in _parts(SOURCE):
        yield _row(top)
        if top.is_dir():
            for part in _parts(top):
                yield _row(part)


def _parts(folder: Path) -> list[Path]:
    """Modules and folders, without what every folder has."""
    return sorted(
        part
        for part in folder.iterdir()
        if not part.name.startswith("__")
        and (part.suffix == ".py" or (part / "__init__.py").exists() or _name(part) in BUILT)
    )


def _name(part: Path) -> str:
    return part.relative_to(SOURCE).as_posix()


def _row(part: Path) -> tuple[str, str]:
    name = _name(part)
    if name in BUILT:
        return f"{name}/", BUILT[name]
    file = part / "__init__.py" if part.is_dir() else part
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0].replace("|", r"\|")
    return f"{name}/" if part.is_dir() else name, sentence


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
