"""Toy models of many architectures, written by the tests: real GGUF files with random weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from . import attention, recurrent
from .recipe import MemoryKind, Recipe

__all__ = ["ZOO", "MemoryKind", "Recipe", "digest", "names", "write"]

ZOO: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="llama", architecture="llama", memory="full", fill=attention.llama),
        Recipe(
            name="gemma3",
            architecture="gemma3",
            memory="sliding",
            window=attention.GEMMA3_WINDOW,
            fill=attention.gemma3,
        ),
        Recipe(name="mamba", architecture="mamba", memory="recurrent", fill=recurrent.mamba),
    )
}


def names() -> list[str]:
    """The models that stand for an architecture each, in a fixed order."""
    return list(ZOO)


def write(name: str, folder: Path) -> Path:
    """Write the model `name` into `folder`, which must exist, and give its path."""
    return ZOO[name].write(folder)


def digest() -> str:
    """Names the present state of the zoo: it changes whenever a file could come out differently."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
