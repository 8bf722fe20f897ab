"""`perdure sessions memories`: labelled points of sessions."""

from __future__ import annotations

from typing import Annotated

import typer

from perdure import AmbiguousError
from perdure.spi.cli import (
    AfterAddress,
    Json,
    Limit,
    Namespace,
    StoreFolder,
    memory_facts,
    print_json,
    session_names,
    sessions_in,
    tell,
    terminal,
    words,
)

app = typer.Typer(help="Labelled points of sessions.", no_args_is_help=True)

Address = Annotated[
    str, typer.Argument(help="As `perdure sessions label` printed it: perdure://session/turn#label.")
]


@app.command()
def search(
    text: str | None = typer.Argument(None, help="Text to find in notes and in what was said."),
    label: str | None = typer.Option(None, "--label", help="Only with this label."),
    kind: str | None = typer.Option(None, "--kind", help="Only of this kind."),
    session: str | None = typer.Option(
        None, "--session", metavar="NAME", autocompletion=session_names, help="Only of this session."
    ),
    limit: Limit = None,
    after: AfterAddress = None,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """List memories: all, or those that match every option given."""
    with sessions_in(store, readonly=True) as sessions:
        memories = sessions.memories.search(
            label=label, kind=kind, text=text, session=session, namespace=namespace, limit=limit, after=after
        )
    if as_json:
        print_json([memory_facts(memory) for memory in memories])
        return
    for memory in memories:
        terminal.write(f"{memory.address}{f'  {memory.note}' if memory.note else ''}\n")
    if not memories:
        terminal.tell("Nothing fits.")


@app.command()
def wake(
    address: str | None = typer.Argument(
        None, help="As `perdure sessions label` printed it; may be left out if there is only one memory."
    ),
    name: str = typer.Option(..., "--as", metavar="NAME", help="The name of the new session."),
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Start a new session from a memory. It is checked first."""
    with sessions_in(store, readonly=False) as sessions:
        try:
            made = sessions.memories.wake(address, name, namespace=namespace)
        except AmbiguousError as error:
            for each in error.found:
                terminal.tell(each)
            raise
    facts = {"name": made.name, "namespace": made.namespace, "turns": made.turns, "origin": dict(made.origin)}
    tell(as_json, f"{words.quoted(name)} starts there with {words.count(made.turns, 'turn')}", facts)


@app.command()
def forget(
    address: Address, namespace: Namespace = "", store: StoreFolder = None, as_json: Json = False
) -> None:
    """Delete a memory. Its session stays."""
    with sessions_in(store, readonly=False) as sessions:
        sessions.memories.forget(address, namespace)
    tell(as_json, f"forgot {address}", {"forgotten": address})
