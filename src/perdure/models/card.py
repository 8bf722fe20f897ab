"""What a model is, in the figures that people ask for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perdure.memory import MemorySpec
from perdure.models.header import FILE_TYPES, Header
from perdure.models.parts import read_parts
from perdure.models.placement import Facts


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
