"""A llama and a gemma3 in NumPy, over the weights of toys: what the engine's numbers are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Pass:
    """What one pass over a text computes, by layer."""

    keys: list[Array] = field(default_factory=list)
    """Before their rotation, by (token, head, number)."""
    rotated_keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)
    attention: list[Array] = field(default_factory=list)
    """Weights by (head, token that looks, token that is looked at)."""
    hidden: list[Array] = field(default_factory=list)
    """What each layer gives to the next, by (token, number)."""
    logits: Array = field(default_factory=lambda: np.empty(0))


class Llama:
    """The architecture `llama`, without quantised tensors."""

    architecture = "llama"

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self._tensors = {each.name: np.asarray(each.data, np.float64) for each in reader.tensors}

        def known(name: str) -> Any:
            return reader.fields[f"{self.architecture}.{name}"].contents()

        self.layers = int(known("block_count"))
        self.heads = int(known("attention.head_count"))
        self.kv_heads = int(known("attention.head_count_kv"))
        self.size = int(known("attention.key_length"))
        self._base = float(known("rope.freq_base"))
        self._epsilon = float(known("attention.layer_norm_rms_epsilon"))

    def __call__(self, tokens: list[int]) -> Pass:
        found, count = Pass(), len(tokens)
        stream = self._tensors["token_embd.weight"][tokens]
        later = np.triu(np.full((count, count), -np.inf), 1)
        for layer in range(self.layers):
            block = f"blk.{layer}"
            inner = self._norm(stream, f"{block}.attn_norm.weight")
            q = self._by_head(inner, f"{block}.attn_q.weight", self.heads)
            k = self._by_head(inner, f"{block}.attn_k.weight", self.kv_heads)
            v = self._by_head(inner, f"{block}.attn_v.weight", self.kv_heads)
            found.keys.append(k)
            found.values.append(v)
            q, k = self._rotate(q), self._rotate(k)
            found.rotated_keys.append(k)
            share = self.heads // self.kv_heads
            k, v = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
            scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(self.size) + later
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            found.attention.append(weights)
            mixed = np.einsum("hts,shd->thd", weights, v).reshape(count, -1)
            stream = stream + mixed @ self._tensors[f"{block}.attn_output.weight"].T
            inner = self._norm(stream, f"{block}.ffn_norm.weight")
            gate = inner @ self._tensors[f"{block}.ffn_gate.weight"].T
            up = inner @ self._tensors[f"{block}.ffn_up.weight"].T
            stream = stream + (gate / (1 + np.exp(-gate)) * up) @ self._tensors[f"{block}.ffn_down.weight"].T
            found.hidden.append(stream)
        found.logits = self._norm(stream, "output_norm.weight") @ self._tensors["output.weight"].T
        return found

    def _norm(self, x: Array, weight: str) -> Array:
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self._epsilon)
        found: Array = x / scale * self._tensors[weight]
        return found

    def _by_head(self, x: Array, weight: str, heads: int) -> Array:
        found: Array = (x @ self._tensors[weight].T).reshape(len(x), heads, self.size)
        return found

    def _rotate(self, x: Array) -> Array:
        """Neighbours are a pair, as this architecture has it."""
        steps = self._base ** (-np.arange(0, self.size, 2) / self.size)
        angles = np.arange(len(x))[:, None, None] * steps
        turned = np.empty_like(x)
        a, b = x[..., 0::2], x[..., 1::2]
        turned[..., 0::2] = a * np.cos(angles) - b * np.sin(angles)
        turned[..., 1::2] = a * np.sin(angles) + b * np.cos(angles)
        return turned


class Gemma3(Llama):
    """The architecture `gemma3`: all layers but every sixth look back a window."""

    architecture = "gemma3"

    def __init__(self, path: Path, window: int) -> None:
        super().__init__(path)
        self._window = window

    @staticmethod
    def slides(layer: int) -> bool:
        return layer % 6 < 5

    def __call__(self, tokens: list[int]) -> Pass:
        found, count = Pass(), len(tokens)
        table = self._tensors["token_embd.weight"]
        stream = table[tokens] * np.sqrt(table.shape[1])
        behind = np.arange(count)[:, None] - np.arange(count)
        for layer in range(self.layers):
            block, slides = f"blk.{layer}", self.slides(layer)
            seen = (behind >= 0) & (behind < self._window if slides else True)
            inner = self._norm(stream, f"{block}.attn_norm.weight")
            q = self._by_head(inner, f"{block}.attn_q.weight", self.heads)
            k = self._by_head(inner, f"{block}.attn_k.weight", self.kv_heads)
            v = self._by_head(inner, f"{block}.attn_v.weight", self.kv_heads)
            q, k = self._norm(q, f"{block}.attn_q_norm.weight"), self._norm(k, f"{block}.attn_k_norm.weight")
            found.keys.append(k)
            found.values.append(v)
            base = 10000.0 if slides else self._base
            q, k = self._turned(q, base), self._turned(k, base)
            found.rotated_keys.append(k)
            share = self.heads // self.kv_heads
            k, v = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
            scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(self.size) + np.where(seen, 0.0, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            found.attention.append(weights)
            mixed = np.einsum("hts,shd->thd", weights, v).reshape(count, -1)
            mixed = mixed @ self._tensors[f"{block}.attn_output.weight"].T
            stream = stream + self._norm(mixed, f"{block}.post_attention_norm.weight")
            inner = self._norm(stream, f"{block}.ffn_norm.weight")
            gate = inner @ self._tensors[f"{block}.ffn_gate.weight"].T
            up = inner @ self._tensors[f"{block}.ffn_up.weight"].T
            smooth = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
            added = (smooth * up) @ self._tensors[f"{block}.ffn_down.weight"].T
            stream = stream + self._norm(added, f"{block}.post_ffw_norm.weight")
            found.hidden.append(stream)
        return found

    def _turned(self, x: Array, base: float) -> Array:
        """Numbers of the two halves are a pair, as this architecture has it."""
        half = self.size // 2
        angles = np.arange(len(x))[:, None, None] * base ** (-np.arange(half) * 2 / self.size)
        a, b = x[..., :half], x[..., half:]
        found: Array = np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], axis=-1
        )
        return found
