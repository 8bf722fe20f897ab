"""Kept prefixes and their blocks as resources."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from perdure.server.schemas.base import Items, Label, RequestSchema, ResponseSchema


class WarmRequest(RequestSchema):
    prompt: str | Annotated[Items[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
    labels: list[Label] = Field(default_factory=list, max_length=64)


class RecordAnswer(ResponseSchema):
    """A prefix that was warmed."""

    id: str
    tokens: int
    kept: int
    labels: list[str]


class RunAnswer(ResponseSchema):
    """Tokens that are kept in one run, up to where several prefixes part or none goes on."""

    id: str
    start: int
    """How many tokens come before it."""
    tokens: int
    text: str
    """The first of it."""
    blocks: int
    nbytes: dict[str, int]
    """By tier."""
    labels: list[str]
    """Of the warmed prefixes that end in it."""
    follows: bool
    """Whether more is kept behind it: ask with `parent`, its id."""


class RunList(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[RunAnswer]
    has_more: bool
    """Whether there are more beside these: ask with `after`, how many were given so far."""


class TotalsAnswer(ResponseSchema):
    """Of the whole cache, whoever it serves."""

    blocks: int
    nbytes: int
    budget: int
    disk_bytes: int | None
    """None where nothing is kept on a disk."""
    evicted: int
    reused_tokens: dict[str, int]
    computed_tokens: int


class BlockAnswer(ResponseSchema):
    """A run of tokens whose state is kept."""

    id: str
    parent: str
    """The block that it follows; empty for the first of a chain."""
    start: int
    tokens: int
    nbytes: int
    tier: str


class BlockList(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[BlockAnswer]
    has_more: bool
    """Whether there are more behind these: ask with `after`, the id of the last one."""


class CacheAnswer(ResponseSchema):
    records: list[RecordAnswer]
    has_more: bool
    """Whether there are more records behind these: ask with `after`, the id of the last one."""
    totals: TotalsAnswer | None
    """Only on a server without keys: where there are several callers, it is nobody's business."""
