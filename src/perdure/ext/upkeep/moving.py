"""`perdure sessions export` and `import`: sessions as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perdure import InvalidInputError
from perdure.ext.upkeep.export import manifest_of
from perdure.spi.base import EngineConfig, open_private
from perdure.spi.cli import (
    Json,
    StoreFolder,
    awake,
    figures,
    opened,
    session_folder,
    sessions_in,
    shared,
    tell,
    words,
    working,
)
from perdure.spi.sessions import has_sessions

if TYPE_CHECKING:
    from perdure import ImportResult


def export(
    name: shared.SessionName,
    file: Path = typer.Argument(
        ..., help="Where to write: .md and .jsonl give the text, other names the whole session."
    ),
    state: bool = typer.Option(
        True, "--state/--no-state", help="With its computed state, for which the model is loaded, or without."
    ),
    kind: str | None = typer.Option(None, "--kind", help="Kind to write into the file."),
    force: bool = typer.Option(False, "--force", "-f", help="Replace a file that is there."),
    model: shared.ModelFor = None,
    namespace: shared.Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Write a session to a file. Whole, to import it elsewhere, or as text."""
    if file.exists() and not force:
        raise InvalidInputError(f"{file} exists already: choose another name, or --force")
    suffix = file.suffix.lower()
    with working(f"Writing {file.name}") as progress:
        if suffix in (".md", ".jsonl"):
            with sessions_in(store, readonly=True) as sessions:
                text = sessions.get(name, namespace).transcript("markdown" if suffix == ".md" else "jsonl")
            write_text(file, text)
        elif not state:
            with sessions_in(store, readonly=True) as sessions:
                sessions.get(name, namespace).export(file, state=False, kind=kind, progress=progress)
        else:
            with awake(store, model, name, namespace) as (_, session):
                session.export(file, kind=kind, progress=progress)
    written = file.stat().st_size
    tell(
        as_json,
        f"{words.quoted(name)} is in {file} ({words.size(written)})",
        {"file": str(file), "bytes": written},
    )


def import_(
    file: Path = typer.Argument(..., metavar="FILE", help="A file that `perdure sessions export` wrote."),
    name: str | None = typer.Option(
        None, "--as", metavar="NAME", show_default="the name in the file", help="Name of the session here."
    ),
    state: bool = typer.Option(
        True, "--state/--no-state", help="With the state in it, for which the model is loaded, or without."
    ),
    trust_state: bool = typer.Option(
        False, "--trust-state", help="Use state that another store computed. Only for files that you trust."
    ),
    model: shared.ModelFor = None,
    namespace: shared.Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Read a session from a file. All of it is checked first, and what is left out is said."""
    manifest = manifest_of(file)
    with working(f"Reading {file.name}") as progress:
        if state and manifest.get("identity") is not None:
            folder = session_folder(store, create=True)
            if has_sessions(folder):
                # An unusable file is better reported before a model is loaded.
                sessions_in(folder, readonly=False).close()
            with opened(model, EngineConfig(slots=1), store=folder) as runtime:
                result = runtime.sessions.import_(
                    file, name, namespace=namespace, trust_state=trust_state, progress=progress
                )
                estimate = result.session.plan_wake()
                facts = {**taken(result), "tiers": dict(estimate.tiers), "compute": estimate.computed}
                came = f"; to wake it: {words.sources(estimate.tiers, estimate.computed)}"
        else:
            with sessions_in(store, readonly=False, create=True) as sessions:
                result = sessions.import_(file, name, namespace=namespace, progress=progress)
                facts, came = taken(result), ""
    turns = words.count(result.turns, "turn")
    left = "".join(f"\nleft out: its {what}; {why}" for what, why in result.left_out.items())
    tell(as_json, f"{words.quoted(result.session.name)} has come with {turns}{came}{left}", facts)


def write_text(file: Path, text: str) -> None:
    """Write a file that only its owner may read."""
    try:
        with open_private(file) as out:
            out.write(text.encode())
    except OSError as error:
        raise InvalidInputError(f"{file} cannot be written: {error.strerror}") from None


def taken(result: ImportResult) -> dict[str, Any]:
    taken = {"turns": result.turns, "tokens": result.tokens, "state_tokens": result.state_tokens}
    return {**figures(result.session), "taken": taken, "left_out": dict(result.left_out)}
