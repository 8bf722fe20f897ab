"""What a model is, in the figures that people ask for."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perdure.checks import is_whole
from perdure.errors import ModelFileError, ModelNotFoundError
from perdure.memory import FullAttention, Hybrid, MemorySpec, Recurrent, SlidingWindow
from perdure.models.header import FILE_TYPES, Header, Strings, read_header

# The engine's own lists (llm_arch_is_recurrent, llm_arch_is_hybrid, and the architectures that
# turn their window on), by the names that files carry.
RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
HYBRID = frozenset(
    {
        "bailingmoe3",
        "deepseek4",
        "falcon-h1",
        "glm5-next",
        "granitehybrid",
        "jamba",
        "kimi-k3",
        "kimi-linear",
        "lfm2",
        "lfm2moe",
        "minimax-01",
        "nemotron_h",
        "nemotron_h_moe",
        "plamo2",
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "qwen4exp",
    }
)
# A window in the metadata means nothing elsewhere: the engine reads it for phi3 and llama, say,
# and attends to everything. The number is the window where the metadata names none.
SLIDING: dict[str, int] = {
    "afmoe": 0,
    "cohere2": 0,
    "cohere2moe": 0,
    "dflash": 0,
    "dots3note": 0,
    "exaone-moe": 128,
    "exaone4": 0,
    "gemma-embedding": 0,
    "gemma2": 4096,
    "gemma3": 0,
    "gemma3n": 0,
    "gemma4": 0,
    "gemma4-assistant": 0,
    "gpt-oss": 0,
    "granite_swa": 0,
    "laguna": 0,
    "llama4": 8192,
    "maple": 0,
    "mellum": 0,
    "mimo2": 0,
    "modern-bert": 0,
    "muse-glimmer": 0,
    "olmo2": 0,
    "plamo3": 0,
    "smallthinker": 0,
    "spark2_5": 0,
    "step35": 0,
}
# Hybrids whose attention layers are every n-th one, where the metadata does not say.
_ATTENTION_INTERVAL = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4}
ASSISTANTS = {"gemma4-assistant": "gemma4"}
"""Drafters that read hidden states, keys and values of another model, and the architecture of that one."""
# Architectures whose later layers read the cells of the first ones.
_LAYERS_WITH_CELLS = {"gemma3n": 20}
_BYTES_F16 = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeShare:
    """How much of a model is stored in one tensor type."""

    type: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A model's figures, as it gives them. What it does not say is None."""

    path: Path
    files: int = 1
    file_bytes: int
    architecture: str | None = None
    name: str | None = None
    quantisation: str | None = None
    parameters: int = 0
    context_length: int | None = None
    embedding_length: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    experts: int | None = None
    vocabulary: int | None = None
    tokenizer: str | None = None
    memory: type[MemorySpec]
    window: int | None = None
    kv_bytes_per_token: int | None = None
    """Bytes that one token adds to the K/V cache in f16; 0 for a recurrent model."""
    chat_template: str | None = None
    types: tuple[TypeShare, ...] = ()


def read_card(path: str | os.PathLike[str]) -> Card:
    """Read the card of the model at `path`, all of its parts included."""
    return card_of(read_parts(Path(path)))


def card_of(headers: Sequence[Header]) -> Card:
    """The card of a model whose files have these headers."""
    first = headers[0]
    architecture = first.text("general.architecture")
    facts = Facts(first, architecture or "")
    types = _shares(headers)
    memory, window = facts.memory()
    return Card(
        path=first.path,
        files=len(headers),
        file_bytes=sum(header.size for header in headers),
        architecture=architecture,
        name=first.text("general.name"),
        quantisation=_quantisation(first, types),
        parameters=sum(share.elements for share in types),
        context_length=facts.integer("context_length"),
        embedding_length=facts.integer("embedding_length"),
        layers=facts.integer("block_count"),
        heads=facts.largest("attention.head_count"),
        kv_heads=facts.largest("attention.head_count_kv") or facts.largest("attention.head_count"),
        experts=facts.integer("expert_count"),
        vocabulary=facts.vocabulary(),
        tokenizer=first.text("tokenizer.ggml.model"),
        memory=memory,
        window=window,
        kv_bytes_per_token=facts.kv_bytes_per_token(memory),
        chat_template=first.text("tokenizer.chat_template"),
        types=types,
    )


class Facts:
    """The metadata of one architecture; its keys without the architecture in front."""

    def __init__(self, header: Header, architecture: str) -> None:
        self._header = header
        self._architecture = architecture

    def integer(self, key: str) -> int | None:
        return self._header.integer(f"{self._architecture}.{key}")

    def per_layer(self, key: str, layers: int) -> list[int] | None:
        """A value that files give once for all layers, or as an array with one for each."""
        value = self._header.metadata.get(f"{self._architecture}.{key}")
        if is_whole(value):
            return [value] * layers
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value) >= layers:
            return [int(v) for v in value[:layers]]
        return None

    def largest(self, key: str) -> int | None:
        value = self._header.metadata.get(f"{self._architecture}.{key}")
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value):
            return int(value.max())
        return self.integer(key)

    def vocabulary(self) -> int | None:
        tokens = self._header.metadata.get("tokenizer.ggml.tokens")
        return len(tokens) if isinstance(tokens, Strings) else self.integer("vocab_size")

    def memory(self) -> tuple[type[MemorySpec], int | None]:
        window = self.largest("attention.sliding_window")
        if self._architecture in RECURRENT:
            return Recurrent, None
        if self._architecture in HYBRID:
            return Hybrid, window or None
        if self._architecture in SLIDING:
            effective = SLIDING[self._architecture] if window is None else window
            if effective > 0:
                return SlidingWindow, effective
        return FullAttention, None

    def kv_bytes_per_token(self, memory: type[MemorySpec]) -> int | None:
        if not memory.has_rows:
            return 0
        layers = self.integer("block_count")
        if layers is None or not 0 <= layers <= len(self._header.tensors) or self.key_length() is None:
            return None
        return _BYTES_F16 * sum(k + v for k, v in self.cache_widths(layers))

    def cache_widths(self, layers: int) -> list[tuple[int, int]]:
        """Values of K and of V that a token adds to each layer; nothing where the file does not say."""
        kv_heads = self.per_layer("attention.head_count_kv", layers)
        kv_heads = kv_heads or self.per_layer("attention.head_count", layers)
        key = self.key_length()
        if kv_heads is None or key is None:
            return [(0, 0)] * layers
        value = self.integer("attention.value_length") or self._head_length() or 0
        if self.integer("attention.key_length_mla"):
            # The latent of each token is kept once, and its values are a part of the keys.
            value = 0
        return [(count * key, count * value) for count in self._attending(kv_heads)]

    def key_length(self) -> int | None:
        """Values of a key of one head."""
        if (head := self._head_length()) is None:
            return None
        return self.integer("attention.key_length") or head

    def state_bytes(self) -> int:
        """Bytes of the state that a sequence has in a recurrent layer."""
        inner, state = self.integer("ssm.inner_size") or 0, self.integer("ssm.state_size") or 0
        width = self.integer("embedding_length") or 0
        if inner:
            taps = max(0, (self.integer("ssm.conv_kernel") or 1) - 1)
            groups = self.integer("ssm.group_count") or 0
            return 4 * (taps * (inner + 2 * groups * state) + inner * state)
        if head := self.integer("wkv.head_size"):
            return 4 * width * (2 + head)
        return 4 * width * max(0, (self.integer("shortconv.l_cache") or 1) - 1)

    def _head_length(self) -> int | None:
        most, width = self.largest("attention.head_count"), self.integer("embedding_length")
        return width // most if most and width is not None else None

    def _attending(self, kv_heads: list[int]) -> list[int]:
        """The K/V heads of each layer that stores K/V cells; 0 for the others."""
        every = self.integer("full_attention_interval") or _ATTENTION_INTERVAL.get(self._architecture)
        if every:
            return [count if (layer + 1) % every == 0 else 0 for layer, count in enumerate(kv_heads)]
        shared = self.integer("attention.shared_kv_layers") or 0
        layers_with_cells = max(0, _LAYERS_WITH_CELLS.get(self._architecture, len(kv_heads) - shared))
        return [count if layer < layers_with_cells else 0 for layer, count in enumerate(kv_heads)]


def _shares(headers: Sequence[Header]) -> tuple[TypeShare, ...]:
    figures: dict[str, list[int]] = {}
    for header in headers:
        for tensor in header.tensors:
            figure = figures.setdefault(tensor.type.name, [0, 0, 0])
            figure[0] += 1
            figure[1] += tensor.elements
            figure[2] += tensor.size
    shares = (
        TypeShare(type=name, tensors=count, elements=elements, bytes=size)
        for name, (count, elements, size) in figures.items()
    )
    return tuple(sorted(shares, key=lambda share: (-share.bytes, share.type)))


def _quantisation(header: Header, types: tuple[TypeShare, ...]) -> str | None:
    """The file's own word for it, or else the type that holds most of its bytes."""
    file_type = FILE_TYPES.get(header.integer("general.file_type") or -1)
    if file_type is None and header.integer("general.file_type") == 0:
        file_type = FILE_TYPES[0]
    return file_type or (types[0].type if types else None)


# Models that come in several files: `name-00001-of-00003.gguf` and so on.

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def is_projector(name: str) -> bool:
    """Whether a GGUF file is by its name a projector, which encodes images for the model beside it."""
    return "mmproj" in name.lower()


def part_names(name: str) -> tuple[str, ...]:
    """The names of all files of the model that `name` belongs to, in order; mostly just itself."""
    match = _PART.fullmatch(name)
    if match is None:
        return (name,)
    stem, number, count = match["stem"], int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise ModelFileError(f"{name} is not a part of a model: part {number} of {count}")
    return tuple(f"{stem}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1))


def read_parts(path: Path) -> tuple[Header, ...]:
    """The checked headers of all files of the model at `path`, first part first.

    All parts must be there, be whole, and agree on how many they are.
    """
    names = part_names(path.name)
    missing = [name for name in names if not (path.parent / name).exists()]
    if len(names) > 1 and missing:
        raise ModelNotFoundError(
            f"{path} is one of {len(names)} parts, and {len(missing)} are missing: {', '.join(missing[:3])}"
            f"{' …' if len(missing) > 3 else ''}. Put all parts into one folder"
        )
    headers = tuple(read_header(path.parent / name) for name in names)
    for number, header in enumerate(headers):
        _agrees(header, number, len(headers))
    _all_tensors(headers)
    return headers


def _agrees(header: Header, number: int, count: int) -> None:
    parts = header.integer("split.count") or 1
    if parts != count:
        raise ModelFileError(
            f"{header.path} says that its model has {parts} parts, its name says {count}. "
            "Parts must keep the names that they were published with"
        )
    at = header.integer("split.no") or 0
    if at != number:
        raise ModelFileError(f"{header.path} holds part {at + 1} of {count}, its name says {number + 1}")


def _all_tensors(headers: tuple[Header, ...]) -> None:
    needed = headers[0].integer("split.tensors.count")
    there = sum(len(header.tensors) for header in headers)
    if needed is not None and needed != there:
        raise ModelFileError(
            f"{headers[0].path} needs {needed} tensors, its {len(headers)} parts have {there}: "
            "they are parts of different models"
        )
