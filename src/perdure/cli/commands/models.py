"""`perdure ls`, `pull` and `rm`, which are also below `perdure models`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.commands.inspect import inspect
from perdure.cli.options.completion import model_names
from perdure.cli.options.shared import Json, Yes
from perdure.cli.output.facts import print_json

if TYPE_CHECKING:
    from perdure.models import Entry

app = typer.Typer(help="The models of this machine.", no_args_is_help=True)
app.command(name="show")(inspect)


@app.command(name="ls")
def list_(as_json: Json = False) -> None:
    """List the models that were fetched, and those with a short name."""
    from perdure import models

    entries = models.entries()
    if as_json:
        print_json([_plain(entry) for entry in entries])
    else:
        _table(entries)


@app.command()
def pull(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            show_default="the small default model",
            autocompletion=model_names,
            help="A name that `perdure ls` shows, owner/repo or owner/repo:Q4_K_M on the Hugging Face hub, "
            "hf:owner/repo/file.gguf, or a URL.",
        ),
    ] = None,
) -> None:
    """Fetch a model, unless it is here already, and print its path."""
    from perdure import models
    from perdure.cli.output.progress import fetching

    with fetching(name or "the default model") as progress:
        path = models.pull(name, progress)
    typer.echo(path)


@app.command()
def rm(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", autocompletion=model_names, help="A model, as `perdure ls` shows it."
        ),
    ],
    yes: Yes = False,
) -> None:
    """Delete a model that was fetched."""
    from rich.filesize import decimal

    from perdure.models.local_models import files_of, remove

    files = files_of(name)
    size = decimal(sum(file.stat().st_size for file in files if file.exists()))
    if not yes:
        typer.confirm(f"Delete {files[0]} ({size})?", abort=True)
    remove(name)
    typer.echo(f"Deleted {files[0]} ({size})")


def _plain(entry: Entry) -> dict[str, object]:
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "source": entry.source,
        "present": entry.present,
        "path": str(entry.path) if entry.path else None,
        "bytes": entry.size,
    }


def _table(entries: list[Entry]) -> None:
    from rich.filesize import decimal

    from perdure.cli.output.columns import write_columns

    rows = [("name", "size", "here", "where")]
    for entry in entries:
        name = entry.name + (f" ({', '.join(entry.aliases)})" if entry.aliases else "")
        size = decimal(entry.size) if entry.size is not None else ""
        rows.append((name, size, "yes" if entry.present else "no", str(entry.path or entry.source)))
    write_columns(rows, right=frozenset({1}))
