"""`perdure backup` and `perdure restore`: all sessions of a store in one file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure import system
from perdure.cli.options.shared import Json
from perdure.cli.output import terminal, words
from perdure.cli.output.facts import print_json
from perdure.cli.output.progress import working
from perdure.cli.runtime import session_folder

if TYPE_CHECKING:
    from perdure.sessions.store.registry import Backup


def backup(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="The folder of the sessions.")],
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="The backup, a new file. Keep it where only you can read it."),
    ],
    state: Annotated[
        bool,
        typer.Option(
            "--state", help="Computed state too: a larger file, and faster first turns after a restore."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Copy all sessions of a store into one file. The store may be in use meanwhile."""
    from perdure.sessions.store.registry import back_up

    with working(f"Writing {file.name}") as progress:
        made = back_up(session_folder(store), file, state=state, progress=progress)
    _tell(made, f"{made.path} has", as_json)


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `perdure backup` wrote.")],
    store: Annotated[Path, typer.Argument(metavar="STORE", help="A folder that is new or empty.")],
    as_json: Json = False,
) -> None:
    """Make a store from a backup. What cannot be proved is left out and named, and the exit code is 1."""
    from perdure.sessions.store.registry import restore as restore_store

    with working(f"Reading {file.name}") as progress:
        backup = restore_store(file, store, progress=progress)
    _tell(backup, f"{store} has", as_json)
    if system.is_root():
        terminal.note(
            f"{store} belongs to root, who ran this: a server that runs as somebody else cannot open it. "
            f"`chown -R USER: {store}` gives it to that user"
        )
    if backup.left_out:
        if not as_json:
            typer.echo(f"{file} holds what cannot be proved. Left out:", err=True)
            for what in backup.left_out:
                typer.echo(f"  {what}", err=True)
        raise typer.Exit(1)


def migrate(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A folder of sessions, or postgresql://…")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Where they go: a folder, or postgresql://…")],
    as_json: Json = False,
) -> None:
    """Bring all sessions of a store into another one, either way, while both are in use.

    Each session is read back and proved in the new store; nothing is changed in the old one. One that was
    interrupted is run again: it goes on where it was. State stays behind, and the first turn of a session
    computes it again. The exit code is 1 if anything was left out.
    """
    from perdure.sessions.store.registry import migrate as migrate_store
    from perdure.sessions.store.registry import store_folder

    with working("Copying") as progress:
        made = migrate_store(session_folder(store_folder(source)), store_folder(target), progress)
    if as_json:
        left_out = [{"what": what, "why": why} for what, why in made.left_out]
        print_json({**asdict(made), "left_out": left_out, "whole": made.whole})
    else:
        typer.echo(
            f"{words.count(made.sessions, 'session')} and {made.memories} memories are there and proved; "
            f"{words.count(made.turns, 'turn')} were written now"
        )
        for name in made.ahead:
            typer.echo(f"  {words.quoted(name)} was continued there already, and stays as it is there")
        for what, why in made.left_out:
            typer.echo(f"  {words.quoted(what)} was left out: {why}", err=True)
        for name in made.changing:
            typer.echo(f"  {words.quoted(name)} changes all the time: run this once more", err=True)
    if not made.whole:
        raise typer.Exit(1)


def _tell(made: Backup, what: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**asdict(made), "path": str(made.path)}))
        return
    counts = [words.count(made.sessions, "session"), words.count(made.turns, "turn")]
    if made.blocks:
        counts.append(words.count(made.blocks, "block") + " of state")
    typer.echo(f"{what} {', '.join(counts)} as of {words.moment(made.created)}")
