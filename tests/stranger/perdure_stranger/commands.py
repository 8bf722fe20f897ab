"""`perdure hello`, and what `perdure doctor` says of this package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from perdure.spi.cli import write
from perdure.spi.engine import Finding


def hello(name: Annotated[str, typer.Argument(help="Whom to greet.")] = "world") -> None:
    """Greet somebody."""
    write(f"hello {name}\n")


def findings(folder: Path, blocks: Sequence[str]) -> Iterator[Finding]:
    yield Finding("stranger", "ok", "was here")
