"""What a toy model is, and how it becomes a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gguf import GGUFType, GGUFValueType, GGUFWriter

from . import tokenizer
from .sheet import Sheet

MemoryKind = Literal["full", "sliding", "recurrent", "hybrid"]

TRAINED_CONTEXT = 4096


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One toy model. The same recipe always gives the same bytes."""

    name: str
    architecture: str
    memory: MemoryKind
    fill: Callable[[Sheet, int], None]
    window: int | None = None
    vocabulary: int = len(tokenizer.vocabulary())

    def write(self, folder: Path) -> Path:
        return _write(folder, self.name, self.architecture, self._describe)

    def _describe(self, writer: GGUFWriter) -> None:
        writer.add_context_length(TRAINED_CONTEXT)
        writer.add_vocab_size(self.vocabulary)
        tokenizer.describe(writer, self.vocabulary)
        self.fill(Sheet(writer, self.name, self.architecture), self.vocabulary)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA for one of the models. The same adapter always gives the same bytes."""

    name: str
    base: Recipe
    alpha: float
    fill: Callable[[Sheet], None]
    invocation: tuple[int, ...] = ()
    """Tokens that switch it on: an activated LoRA."""

    def write(self, folder: Path) -> Path:
        return _write(folder, self.name, self.base.architecture, self._describe)

    def _describe(self, writer: GGUFWriter) -> None:
        writer.add_type(GGUFType.ADAPTER)
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", self.alpha)
        if self.invocation:
            # As the converter of llama.cpp writes them.
            writer.add_key_value(
                "adapter.alora.invocation_tokens",
                list(self.invocation),
                GGUFValueType.ARRAY,
                GGUFValueType.UINT32,
            )
        self.fill(Sheet(writer, self.name, self.base.architecture))


@dataclass(frozen=True, kw_only=True)
class ControlVector:
    """A control vector for one of the models."""

    name: str
    base: Recipe
    fill: Callable[[Sheet], None]

    def write(self, folder: Path) -> Path:
        return _write(folder, self.name, "controlvector", self._describe)

    def _describe(self, writer: GGUFWriter) -> None:
        writer.add_string("controlvector.model_hint", self.base.architecture)
        self.fill(Sheet(writer, self.name, self.base.architecture))


def _write(folder: Path, name: str, architecture: str, describe: Callable[[GGUFWriter], None]) -> Path:
    """A reader never sees half a file, whoever else writes the same one at the same time."""
    path = folder / f"{name}.gguf"
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        unfinished = Path(draft) / path.name
        writer = GGUFWriter(unfinished, architecture)
        writer.add_name(f"toy {name}")
        describe(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(unfinished, path)
    return path
