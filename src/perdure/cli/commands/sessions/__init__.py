"""`perdure sessions`: what is kept of conversations, and what can be done with it."""

from __future__ import annotations

import typer

from perdure.cli.commands import memories
from perdure.cli.commands.sessions import changes, files, listing, state

app = typer.Typer(help="Conversations that are kept.", no_args_is_help=True)
app.command()(listing.ls)
app.command()(listing.show)
app.command()(changes.fork)
app.command()(changes.rewind)
app.command()(changes.label)
app.command()(changes.rm)
app.command()(state.sleep)
app.command()(state.wake)
app.command()(files.export)
app.command(name="import")(files.import_)
app.command()(listing.sizes)
app.command()(state.verify)
app.add_typer(memories.app, name="memories")
