"""What a toy model is, and how it becomes a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gguf import GGUFWriter

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
        """Write the model into `folder`. A reader never sees half a file, whoever else writes it too."""
        path = folder / f"{self.name}.gguf"
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            unfinished = Path(draft) / path.name
            self._write(unfinished)
            os.replace(unfinished, path)
        return path

    def _write(self, path: Path) -> None:
        writer = GGUFWriter(path, self.architecture)
        writer.add_name(f"toy {self.name}")
        writer.add_context_length(TRAINED_CONTEXT)
        writer.add_vocab_size(self.vocabulary)
        tokenizer.describe(writer, self.vocabulary)
        self.fill(Sheet(writer, self.name, self.architecture), self.vocabulary)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
