"""The sheet that a recipe fills: hyperparameters and drawn tensors, on their way into one GGUF file."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

Floats = npt.NDArray[np.float32]


class Sheet:
    """Every tensor depends on the model's name and its own alone.

    So the same recipe gives the same bytes in every process, and adding one tensor changes no other.
    """

    def __init__(self, writer: GGUFWriter, model: str, architecture: str) -> None:
        self._writer = writer
        self._model = model
        self._architecture = architecture

    def set(self, **keys: int | float | bool | Sequence[int]) -> None:
        """Hyperparameters of the architecture; `__` in a name stands for the dot in the key."""
        for name, value in keys.items():
            key = f"{self._architecture}.{name.replace('__', '.')}"
            if isinstance(value, bool):
                self._writer.add_bool(key, value)
            elif isinstance(value, int):
                self._writer.add_uint32(key, value)
            elif isinstance(value, float):
                self._writer.add_float32(key, value)
            else:
                self._writer.add_array(key, value)

    def text(self, key: str, value: str) -> None:
        self._writer.add_string(key, value)

    def token_types(self, count: int) -> None:
        """How many kinds of tokens an encoder tells apart."""
        self._writer.add_token_type_count(count)

    def matrix(self, name: str, *shape: int, gain: float = 1.0, half: bool = False) -> None:
        """A weight of shape (..., outputs, inputs) that maps unit variance to a variance of gain²."""
        values = self.noise(name, *shape) * np.float32(gain / math.sqrt(shape[-1]))
        self.put(name, values.astype(np.float16) if half else values)

    def vector(self, name: str, size: int, *, around: float = 1.0, spread: float = 0.1) -> None:
        self.put(name, np.float32(around) + np.float32(spread) * self.noise(name, size))

    def put(self, name: str, values: npt.NDArray[np.float16] | Floats) -> None:
        self._writer.add_tensor(name, values)

    def uniform(self, name: str, *shape: int) -> Floats:
        """Numbers in [0, 1). They come from a hash: NumPy's generators may change between releases."""
        stream = hashlib.shake_256(f"{self._model}/{name}".encode()).digest(4 * math.prod(shape))
        return (
            ((np.frombuffer(stream, dtype="<u4") >> 8) / np.float32(1 << 24))
            .astype(np.float32)
            .reshape(shape)
        )

    def noise(self, name: str, *shape: int) -> Floats:
        """Numbers of mean 0 and variance 1."""
        return (self.uniform(name, *shape) * 2 - 1) * np.float32(math.sqrt(3))
