"""`perdure sessions memories`: labelled points of sessions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from perdure import SessionMemory

app = typer.Typer(help="Labelled points of sessions.", no_args_is_help=True)

Address = Annotated[str, typer.Argument(help="As `label` printed it: perdure://session/turn#label.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Store = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="The folder of the store; else the one under PERDURE_HOME."),
]
Namespace = Annotated[str, typer.Option("--namespace", help="Whose memories.")]


@app.command()
def search(
    text: Annotated[str | None, typer.Argument(help="Looked for in notes and in what was said.")] = None,
    label: Annotated[str | None, typer.Option("--label", help="Only with this label.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="Only of this kind.")] = None,
    session: Annotated[str | None, typer.Option("--session", help="Only of this session.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="How many at most.")] = None,
    after: Annotated[str | None, typer.Option("--after", help="Those behind that address.")] = None,
    namespace: Namespace = "",
    store: Store = None,
    as_json: Json = False,
) -> None:
    """List the memories that fit everything given; without anything, all of them."""
    from perdure.cli.output import terminal
    from perdure.cli.store import sessions_in

    with sessions_in(store, readonly=True) as sessions:
        found = sessions.memories.search(
            label=label,
            kind=kind,
            text=text,
            session=session,
            namespace=namespace,
            limit=limit,
            after=after,
        )
    if as_json:
        typer.echo(json.dumps([plain(memory) for memory in found], indent=2))
        return
    for memory in found:
        terminal.write(f"{memory.address}{f'  {memory.note}' if memory.note else ''}\n")
    if not found:
        terminal.tell("Nothing fits.")


@app.command()
def wake(
    address: Annotated[
        str | None,
        typer.Argument(help="As `label` printed it; without one there must be exactly one memory."),
    ] = None,
    name: Annotated[str, typer.Option("--as", help="The name of the new session.")] = ...,  # type: ignore[assignment]
    namespace: Namespace = "",
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Start a new session at a memory, after proving that it is what was remembered."""
    from perdure.cli.output import terminal, words
    from perdure.cli.store import sessions_in
    from perdure.errors import AmbiguousError

    with sessions_in(store, readonly=False) as sessions:
        try:
            made = sessions.memories.wake(address, name, namespace=namespace)
        except AmbiguousError as error:
            for each in error.found:
                terminal.tell(each)
            raise
    if as_json:
        facts = {"name": made.name, "namespace": made.namespace, "turns": made.turns}
        typer.echo(json.dumps({**facts, "origin": dict(made.origin)}, indent=2))
    else:
        terminal.write(f"{words.quoted(name)} starts there with {words.count(made.turns, 'turn')}\n")


@app.command()
def forget(address: Address, namespace: Namespace = "", store: Store = None, as_json: Json = False) -> None:
    """Drop a memory. The session that it is of stays."""
    from perdure.cli.output import terminal
    from perdure.cli.store import sessions_in

    with sessions_in(store, readonly=False) as sessions:
        sessions.memories.forget(address, namespace)
    if as_json:
        typer.echo(json.dumps({"forgotten": address}, indent=2))
    else:
        terminal.write(f"forgot {address}\n")


def plain(memory: SessionMemory) -> dict[str, Any]:
    return {
        "address": memory.address,
        "session": memory.session,
        "namespace": memory.namespace,
        "turn": memory.turn,
        "label": memory.label,
        "kind": memory.kind,
        "note": memory.note,
        "digest": memory.digest.hex(),
        "created": memory.created,
    }
