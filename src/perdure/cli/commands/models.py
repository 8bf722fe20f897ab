"""`perdure models`: the catalogue. `perdure ls`, `pull` and `rm`, which are also below it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.filesize import decimal

from perdure.cli.options.shared import Json, Yes, model_names
from perdure.cli.output import terminal, words
from perdure.cli.output.facts import print_json
from perdure.cli.output.progress import fetching
from perdure.cli.output.terminal import harmless, write_columns
from perdure.cli.server_client import Key, Url, ask
from perdure.errors import PerdureError
from perdure.extension import optional_part, part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perdure.models import Card, LocalModel
    from perdure.models.adapter_file import AdapterFile
    from perdure.models.header import Value


# `perdure show`: what a model is, without loading it; with `--kv`, what K/V types cost it.

_SHOWN_ITEMS = 8
_SHOWN_CHARACTERS = 200


def inspect(
    model: str = typer.Argument(
        ...,
        metavar="MODEL",
        autocompletion=model_names,
        help="A .gguf file, or any name that `perdure pull` takes.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON, with all metadata."),
    metadata: bool = typer.Option(False, "--metadata", help="Show all metadata too."),
    kv: bool = typer.Option(
        False,
        "--kv",
        help="Measure what K/V types cost the model, on a text, against f16; it is loaded for that.",
    ),
) -> None:
    """Show what a model is. Architecture, size, context, types of its tensors and chat template.

    Of a LoRA or a control vector: what it changes, and of which architecture.
    """
    from perdure.engine.registry import engine_for
    from perdure.models.adapter_file import adapter_of, is_adapter
    from perdure.models.header import read_header

    if kv:
        part("show --kv", "fit")(model, as_json)
        return
    if Path(model).is_file() and is_adapter(header := read_header(model)):
        _show_adapter(adapter_of(header), as_json=as_json, metadata=metadata)
        return
    card, keys = engine_for(model).card(model, fetching)
    find_projector = optional_part("projector beside a model")
    projector = ""
    try:
        beside = find_projector(card.path) if find_projector is not None else None
        projector = str(beside) if beside is not None else ""
    except PerdureError as error:
        projector = f"cannot be used: {error}"
    if as_json:
        facts = {**_card_json(card, keys), "projector": projector or None}
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        _show(card, keys if metadata else {}, projector)


def _show_adapter(adapter: AdapterFile, *, as_json: bool, metadata: bool) -> None:
    size = adapter.header.size
    facts: dict[str, Any] = {
        "file": str(adapter.path),
        "size": size if as_json else f"{decimal(size)} ({size:,} bytes)",
        "kind": adapter.kind,
        "architecture": adapter.architecture,
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "invocation": list(adapter.invocation),
        "weights": len(adapter.pairs),
        "layers": sorted(adapter.directions),
    }
    if as_json:
        facts["metadata"] = {key: _json(value) for key, value in adapter.header.metadata.items()}
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    for label, value in facts.items():
        if value:
            typer.echo(harmless(f"{label:<13} {value}"))
    for key, item in adapter.header.metadata.items() if metadata else ():
        typer.echo(harmless(f"{key} = {_short(json.dumps(_json(item), ensure_ascii=False))}"))


def _card_json(card: Card, metadata: Mapping[str, Any]) -> dict[str, Any]:
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


def _show(card: Card, metadata: Mapping[str, Value], projector: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    figures = Table.grid(padding=(0, 2))
    figures.add_column(style="bold", no_wrap=True)
    figures.add_column(overflow="fold")
    more = {"projector": projector} if projector else {}
    for label, value in {**_figures(card), **more}.items():
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
    memory = card.memory.name + (f", window of {card.window:,} tokens" if card.window else "")
    heads = f"{card.heads} ({card.kv_heads} for K/V)" if card.heads else ""
    per_token = card.kv_bytes_per_token
    figures = {
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
    return {label: value for label, value in figures.items() if value}


def _purpose(row: Mapping[str, Any]) -> str:
    return f"{row['purpose']}; reads images" if row["sees"] else str(row["purpose"])


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + " …"


# `perdure models loaded`, `load` and `unload`: the models of a server.

_PATIENCE = 900.0
"""Seconds that loading may take."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="A model of the server, or an alias of one.")]


def loaded(url: Url = None, key: Key = None, as_json: Json = False) -> None:
    """Show the models of the server, and which of them are loaded."""
    models = ask("/v1/models", url, key)["data"]
    if as_json:
        print_json(models)
        return
    for model in models:
        terminal.write_line(words.served_model(model))


def load(
    name: Name,
    keep_alive: str | None = typer.Option(
        None, "--keep-alive", metavar="SECONDS", help="Unload it after so long without a request."
    ),
    url: Url = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Have the server load a model now. It returns when it is loaded."""
    body = {} if keep_alive is None else {"keep_alive": keep_alive}
    _print_model(ask(f"/v1/models/{quote(name)}/load", url, key, body=body, seconds=_PATIENCE), as_json)


def unload(name: Name, url: Url = None, key: Key = None, as_json: Json = False) -> None:
    """Have the server unload a model that is not in use. Its state stays."""
    _print_model(ask(f"/v1/models/{quote(name)}/unload", url, key, body={}, seconds=_PATIENCE), as_json)


def _print_model(model: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(model)
    else:
        terminal.write_line(words.served_model(model))


app = typer.Typer(invoke_without_command=True)
app.command(name="show")(inspect)
app.command()(loaded)
app.command()(load)
app.command()(unload)


@app.callback()
def models(context: typer.Context, as_json: Json = False) -> None:
    """List models by their short names, and what fits here.

    The best one for this machine is first; "tight" is what just fits into the memory that is free.
    `perdure pull NAME` fetches one.
    """
    if context.invoked_subcommand is not None:
        return
    from perdure.models.finder import finder
    from perdure.models.local_models import locate, resolve

    best = finder().recommended()
    rows = [
        {
            "name": model.name,
            "aliases": list(model.aliases),
            "fit": fit,
            "recommended": model is best,
            "here": locate(resolve(model.name)) is not None,
            "bytes": model.size,
            "memory_bytes": model.memory,
            "context": model.context,
            "purpose": model.purpose,
            "sees": model.sees,
            "licence": model.licence,
            "source": f"hf:{model.repo}/{model.file}",
        }
        for model, fit in finder().ranked()
    ]
    if as_json:
        print_json(rows)
        return
    _catalogue_table(rows)
    if best is not None:
        typer.echo(f"\nThe best here: `perdure run -m {best.name} PROMPT` or `perdure chat {best.name}`")
    else:
        typer.echo("\nNone of them fits the memory that is free here: close other programs")


@app.command(name="ls")
def list_(as_json: Json = False) -> None:
    """List the models of this machine.

    Those that were fetched, and those that Ollama and LM Studio have here.
    """
    from perdure import models

    entries = models.entries()
    if as_json:
        print_json([_plain(entry) for entry in entries])
    else:
        _table(entries)


@app.command()
def pull(
    name: str | None = typer.Argument(
        None,
        metavar="MODEL",
        show_default="the small default model",
        autocompletion=model_names,
        help="A name that `perdure models` shows, owner/repo or owner/repo:Q4_K_M on the Hugging Face "
        "hub, hf:owner/repo/file.gguf, or a URL.",
    ),
) -> None:
    """Fetch a model, unless it is here already, and print its path."""
    from perdure import models

    with fetching(name or "the default model") as progress:
        path = models.pull(name, progress)
    typer.echo(path)


@app.command()
def rm(
    name: str = typer.Argument(
        ..., metavar="MODEL", autocompletion=model_names, help="A model, as `perdure ls` shows it."
    ),
    yes: Yes = False,
) -> None:
    """Delete a model that was fetched."""
    from perdure.models.finder import finder

    files = finder().files_of(name)
    size = decimal(sum(file.stat().st_size for file in files if file.exists()))
    if not yes:
        typer.confirm(f"Delete {files[0]} ({size})?", abort=True)
    finder().remove(name)
    typer.echo(f"Deleted {files[0]} ({size})")


def _plain(entry: LocalModel) -> dict[str, object]:
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "source": entry.source,
        "present": entry.present,
        "path": str(entry.path) if entry.path else None,
        "bytes": entry.size,
    }


def _catalogue_table(rows: list[dict[str, Any]]) -> None:
    shown = [("name", "fits", "here", "size", "memory", "context", "good for", "licence")]
    for row in rows:
        name = row["name"] + (f" ({', '.join(row['aliases'])})" if row["aliases"] else "")
        here = "yes" if row["here"] else "no"
        size, memory = decimal(row["bytes"]), decimal(row["memory_bytes"])
        context = f"{row['context'] >> 10}k"
        shown.append((name, row["fit"], here, size, memory, context, _purpose(row), row["licence"]))
    write_columns(shown, right=frozenset({3, 4, 5}))


def _table(entries: list[LocalModel]) -> None:
    rows = [("name", "size", "here", "where")]
    for entry in entries:
        name = entry.name + (f" ({', '.join(entry.aliases)})" if entry.aliases else "")
        size = decimal(entry.size) if entry.size is not None else ""
        rows.append((name, size, "yes" if entry.present else "no", str(entry.path or entry.source)))
    write_columns(rows, right=frozenset({1}))
