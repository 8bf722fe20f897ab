"""`perdure sessions import-chats`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from perdure.spi.cli import Json, StoreFolder, sessions_in, shared, tell, words, working


def import_chats(
    file: Path = typer.Argument(
        ..., metavar="FILE", help="The zip that ChatGPT or Claude sent, or a JSON file of Open WebUI."
    ),
    namespace: shared.Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Import chats that ChatGPT, Claude or Open WebUI exported.

    Branches become branches, and files with text stay in their messages; pictures are not in such exports. A
    chat that came before is not imported again.
    """
    from perdure.ext.chat_imports.importing import import_chats as import_file

    with working(f"Reading {file.name}"), sessions_in(store, readonly=False, create=True) as sessions:
        made = import_file(sessions, file, namespace=namespace)
    lines = [
        f"{words.count(len(made.names), 'chat')} came with {words.count(made.turns, 'turn')} and "
        f"{made.branches} further {'branch' if made.branches == 1 else 'branches'}"
    ]
    if made.known:
        lines.append(f"{words.count(made.known, 'chat')} had come before")
    lines += [f"left out: {title}: {why}" for title, why in made.left_out]
    if made.not_named:
        lines.append(f"left out: {made.not_named} more")
    facts = {**asdict(made), "left_out": [{"title": title, "why": why} for title, why in made.left_out]}
    tell(as_json, "\n".join(lines), facts)
