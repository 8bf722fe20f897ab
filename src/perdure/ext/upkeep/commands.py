"""`perdure backup`, `restore`, `sessions verify`, `sessions migrate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from perdure.spi.base import system
from perdure.spi.cli import Json, StoreFolder, print_json, session_folder, terminal, words, working

if TYPE_CHECKING:
    from perdure.ext.upkeep.backup import Backup
    from perdure.ext.upkeep.repair import Verification

_IN_USE = 3
"""The exit code of a check that found nothing wrong and could not look at all, since the store is in use."""


def backup(
    store: str = typer.Argument(..., metavar="STORE", help="The folder of the sessions."),
    file: Path = typer.Argument(
        ..., metavar="FILE", help="The backup, a new file. Keep it where only you can read it."
    ),
    state: bool = typer.Option(
        False, "--state", help="Computed state too: a larger file, and faster first turns after a restore."
    ),
    as_json: Json = False,
) -> None:
    """Copy all sessions of a store into one file. The store may be in use meanwhile."""
    from perdure.ext.upkeep.store import back_up
    from perdure.spi.sessions import store_folder

    with terminal.leaving_in_order(), working(f"Writing {file.name}") as progress:
        made = back_up(session_folder(store_folder(store)), file, state=state, progress=progress)
    _tell(made, f"{made.path} has", as_json)


def restore(
    file: Path = typer.Argument(..., metavar="FILE", help="A file that `perdure backup` wrote."),
    store: str = typer.Argument(..., metavar="STORE", help="A folder that is new or empty."),
    as_json: Json = False,
) -> None:
    """Make a store from a backup. What cannot be proved is left out and named, and the exit code is 1."""
    from perdure.ext.upkeep.store import restore as restore_store
    from perdure.spi.sessions import store_folder

    with terminal.leaving_in_order(), working(f"Reading {file.name}") as progress:
        backup = restore_store(file, store_folder(store), progress=progress)
    _tell(backup, f"{store} has", as_json)
    if system.is_root():
        terminal.note(
            f"{store} belongs to root, who ran this: a server that runs as somebody else cannot open it. "
            f"`chown -R USER: {store}` gives it to that user"
        )
    if backup.left_out:
        if not as_json:
            typer.echo(f"{file} has rows that cannot be verified. Left out:", err=True)
            for what in backup.left_out:
                typer.echo(f"  {what}", err=True)
        raise typer.Exit(1)


def migrate(
    source: str = typer.Argument(..., metavar="SRC", help="A folder of sessions, or postgresql://…"),
    target: str = typer.Argument(..., metavar="DST", help="Where they go: a folder, or postgresql://…"),
    as_json: Json = False,
) -> None:
    """Bring all sessions of a store into another one.

    Both may be in use, and either may be a database. Each session is read back and proved in the new
    store; nothing is changed in the old one. One that was interrupted is run again: it goes on where it
    was. State stays behind, and the first turn of a session computes it again. The exit code is 1 if
    anything was left out.
    """
    from perdure.ext.upkeep.store import migrate as migrate_store
    from perdure.spi.sessions import store_folder

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


def verify(store: StoreFolder = None, as_json: Json = False) -> None:
    """Check all sessions and all state. Damaged files are moved aside.

    The exit code is 0 when all is well, 1 if anything was wrong, and 3 if nothing was, but blocks of state
    could not be looked at since a server or a chat has the store open.
    """
    from perdure.ext.upkeep.store import verify as verify_store

    folder = session_folder(store)
    with working("Reading") as progress:
        verification = verify_store(folder, progress)
    if as_json:
        print_json(verification.plain())
    else:
        for line in _lines(verification):
            terminal.write_line(line)
    if not verification.sound:
        # All that could be checked was all right: a process that has the store open is no damage.
        raise typer.Exit(_IN_USE if verification.unread and replace(verification, unread="").sound else 1)


def _lines(verification: Verification) -> Iterator[str]:
    """What was found in a store, for a terminal."""
    from perdure.ext.upkeep.repair import FOUND

    yield (
        f"{words.count(verification.sessions, 'session')}, {words.count(verification.turns, 'turn')}, "
        f"{verification.memories} memories: {len(verification.damaged)} damaged"
    )
    yield from (f"  {what}: {why}" for what, why in verification.damaged)
    if verification.database:
        yield f"the database of sessions is damaged: {verification.database}"
    if verification.repair is not None:
        repair = verification.repair
        yield (
            f"kept {words.count(repair.sessions, 'session')}, {words.count(repair.turns, 'turn')} and "
            f"{repair.memories} memories; the damaged database is {repair.aside.name} now"
        )
        yield from (f"  {what}" for what in repair.cut)
        if repair.found:
            yield f"  turns whose session is not known are in the namespace {FOUND!r}"
    if verification.not_repaired:
        yield f"nothing was done about it: {verification.not_repaired}"
    blocks = verification.blocks
    if blocks is not None:
        yield (
            f"{words.count(blocks.blocks, 'block')}, {blocks.nbytes} bytes: {blocks.missing} missing, "
            f"{blocks.adopted} adopted, {blocks.mended} entries mended, {blocks.quarantined} damaged and "
            f"moved aside, {blocks.leftovers} leftovers deleted"
        )
        if blocks.rebuilt:
            yield "the index of blocks was damaged and has been rebuilt; labels were lost with it"
    if verification.unread:
        yield f"blocks were not looked at: {verification.unread}"
    if verification.sound:
        yield "all is well"
    elif not verification.damaged and not verification.database and not verification.unread:
        yield "sessions are whole; state that is gone is computed anew when it is needed"
