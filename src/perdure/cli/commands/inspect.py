"""`perdure show`: what a model is, without loading it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.options.completion import model_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perdure.models import Card
    from perdure.models.header import Value

_SHOWN_ITEMS = 8
_SHOWN_CHARACTERS = 200


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=model_names,
            help="A .gguf file, or any name that `perdure pull` takes.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all metadata.")] = False,
    metadata: Annotated[bool, typer.Option("--metadata", help="Show all metadata too.")] = False,
) -> None:
    """Show what a model is. Architecture, size, context, types of its tensors and chat template."""
    from perdure.cli.output.progress import fetching
    from perdure.engine.registry import engine_for

    card, keys = engine_for(model).card(model, fetching)
    if as_json:
        typer.echo(json.dumps(_plain(card, keys), indent=2, ensure_ascii=False))
    else:
        _show(card, keys if metadata else {})


def _plain(card: Card, metadata: Mapping[str, Any]) -> dict[str, Any]:
    plain = dataclasses.asdict(card)
    plain["path"] = str(card.path)
    plain["memory"] = card.memory.name
    plain["metadata"] = {key: _json(value) for key, value in metadata.items()}
    return plain


def _json(value: Value) -> object:
    """A metadata value; long arrays as their length and first items, so that a vocabulary is no flood."""
    if isinstance(value, int | str):
        return value
    if isinstance(value, float):
        # JSON has no word for these.
        return value if value - value == 0 else str(value)
    items = [_json(item.item() if hasattr(item, "item") else item) for item in value[:_SHOWN_ITEMS]]
    return items if len(value) <= _SHOWN_ITEMS else {"length": len(value), "first": items}


def _show(card: Card, metadata: Mapping[str, Value]) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    from perdure.cli.output.terminal import harmless

    console = Console(highlight=False)
    figures = Table.grid(padding=(0, 2))
    figures.add_column(style="bold", no_wrap=True)
    figures.add_column(overflow="fold")
    for label, value in _figures(card).items():
        figures.add_row(label, Text(harmless(value)))
    console.print(figures)

    shares = Table(box=None, header_style="bold", title="Sizes by type", title_justify="left")
    for column in ("type", "tensors", "parameters", "size", "share"):
        shares.add_column(column, justify="left" if column == "type" else "right")
    weights = sum(share.bytes for share in card.types) or 1
    for share in card.types:
        shares.add_row(
            share.type,
            str(share.tensors),
            f"{share.elements:,}",
            decimal(share.bytes),
            f"{100 * share.bytes / weights:.1f}%",
        )
    console.print()
    console.print(shares)

    if metadata:
        console.print(Text("\nMetadata", style="italic"))
        for key, item in metadata.items():
            shown = json.dumps(_json(item), ensure_ascii=False)
            console.print(Text(harmless(f"{key} = {_short(shown)}")), soft_wrap=True)
    if card.chat_template:
        console.print(Text("\nChat template", style="italic"))
        console.print(Text(harmless(card.chat_template)), soft_wrap=True)


def _figures(card: Card) -> dict[str, str]:
    from rich.filesize import decimal

    memory = card.memory.name + (f", window of {card.window:,} tokens" if card.window else "")
    heads = f"{card.heads} ({card.kv_heads} for K/V)" if card.heads else ""
    per_token = card.kv_bytes_per_token
    given = {
        "file": str(card.path) + (f" and {card.files - 1} more" if card.files > 1 else ""),
        "size": f"{decimal(card.file_bytes)} ({card.file_bytes:,} bytes)",
        "name": card.name or "",
        "architecture": card.architecture or "",
        "quantisation": card.quantisation or "",
        "parameters": f"{card.parameters:,}",
        "context": f"{card.context_length:,} tokens" if card.context_length else "",
        "layers": str(card.layers or ""),
        "heads": heads,
        "experts": str(card.experts or ""),
        "vocabulary": f"{card.vocabulary:,} tokens ({card.tokenizer})" if card.vocabulary else "",
        "memory": memory,
        "K/V cache": f"{per_token:,} bytes a token (f16)" if per_token else "",
    }
    return {label: value for label, value in given.items() if value}


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + " …"
