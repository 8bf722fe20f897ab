"""All commands in one place. A new one is an import and a line below.

Commands import what they run inside their functions: `perdure --help` must not load the engine.
"""

from __future__ import annotations

from typing import Annotated

import typer

from perdure import __version__
from perdure.cli import cache, chat, doctor, engine, inspect, models, run, serve, sessions

app = typer.Typer(
    name="perdure",
    help="Local language models whose sessions last.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"perdure {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command(name="chat")(chat.chat)
app.command(name="run")(run.run)
app.command(name="serve")(serve.serve)
app.command(name="inspect")(inspect.inspect)
app.command(name="doctor")(doctor.doctor)
app.add_typer(models.app, name="models")
app.add_typer(engine.app, name="engine")
app.add_typer(sessions.app, name="sessions")
app.add_typer(cache.app, name="cache")
