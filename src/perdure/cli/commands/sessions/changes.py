"""`perdure sessions fork`, `rewind`, `label` and `rm`: changes that need no model."""

from __future__ import annotations

from typing import Annotated

import typer

from perdure.cli.commands import memories
from perdure.cli.commands.sessions.facts import figures
from perdure.cli.options.completion import session_names
from perdure.cli.options.shared import Json, Namespace, SessionName, StoreFolder, Yes
from perdure.cli.output.facts import tell


def fork(
    name: SessionName,
    new: Annotated[str, typer.Argument(metavar="NEW", help="Name of the copy.")],
    turn: Annotated[
        int | None,
        typer.Option(
            "--turn", min=0, metavar="N", show_default="the last", help="The last turn that is copied."
        ),
    ] = None,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Copy a session under a new name.

    As it is, or as it was after an earlier turn. What the two have in common is stored once.
    """
    from perdure.cli.output import words
    from perdure.cli.store import sessions_in

    with sessions_in(store, readonly=False) as sessions:
        made = sessions.get(name, namespace).fork(new, turn=turn)
        turns = words.count(made.turns, "turn")
        tell(as_json, f"{words.quoted(new)} starts with {turns} of {words.quoted(name)}", figures(made))


def rewind(
    name: SessionName,
    turns: Annotated[int, typer.Argument(min=0, metavar="TURNS", help="How many turns to take back.")] = 1,
    to: Annotated[
        int | None, typer.Option("--to", min=0, metavar="N", help="Keep the first N turns instead.")
    ] = None,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Take back the last turns. They are deleted, unless a fork or a memory has them."""
    from perdure.cli.output import words
    from perdure.cli.store import sessions_in

    with sessions_in(store, readonly=False) as sessions:
        session = sessions.get(name, namespace)
        session.rewind(turns, to=to)
        tell(
            as_json,
            f"{words.quoted(name)} has {words.count(session.turns, 'turn')} now",
            figures(session),
        )


def label(
    name: SessionName,
    label: Annotated[str, typer.Argument(metavar="LABEL", help="What to call this point.")],
    turn: Annotated[
        int | None,
        typer.Option("--turn", min=0, metavar="N", show_default="the last", help="After which turn."),
    ] = None,
    kind: Annotated[
        str, typer.Option("--kind", metavar="TEXT", help="Kind of the memory, to search by.")
    ] = "memory",
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="A text to find it by.")] = "",
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Label a point of a session, and print its address.

    `perdure sessions memories wake` starts a new session there.
    """
    from perdure.cli.store import sessions_in

    with sessions_in(store, readonly=False) as sessions:
        memory = sessions.get(name, namespace).label(label, kind=kind, turn=turn, note=note)
    tell(as_json, memory.address, memories.plain(memory))


def rm(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            autocompletion=session_names,
            help="Sessions, as `perdure sessions ls` shows them.",
        ),
    ],
    yes: Yes = False,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Delete sessions. Forks and memories of them stay."""
    from perdure.cli.output import words
    from perdure.cli.store import sessions_in

    with sessions_in(store, readonly=False) as sessions:
        # All are looked up first: a wrong name deletes none.
        found = [sessions.store.find(namespace, name).name for name in dict.fromkeys(names)]
        shown = ", ".join(map(words.quoted, found))
        if not yes:
            typer.confirm(f"Forget {shown}?", abort=True, err=True)
        for name in found:
            sessions.delete(name, namespace)
    tell(as_json, f"forgot {shown}", {"removed": found})
