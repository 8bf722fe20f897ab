"""All commands in one place. A new one is an import and a line below.

Commands import what they run inside their functions: `perdure --help` must not load the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from perdure import __version__
from perdure.cli import page
from perdure.cli.command_names import advice_for_word, as_options, shown_name
from perdure.cli.commands import (
    background,
    backup,
    cache,
    chat,
    config,
    doctor,
    engine,
    inspect,
    keys,
    models,
    run,
    serve,
    sessions,
)
from perdure.cli.help_sections import in_sections
from perdure.cli.options.config_defaults import defaults
from perdure.cli.options.peers import advice_for, plain_options
from perdure.cli.output.log_notes import tell_warnings

_Ask = "Ask a model"
_Serve = "Serve a model"
_Kept = "What is kept"
_Models = "Models"
_Machine = "This machine"

app = typer.Typer(
    name="perdure",
    help="Local language models whose sessions last.",
    epilog='Begin with `perdure run "Why is the sky blue?"`; `perdure COMMAND --help` tells more.',
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Its frames and colours take half a second to import.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"perdure {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    from perdure.config import choices

    if context.invoked_subcommand != "config":
        # `perdure config` is what mends a file that cannot be read.
        chosen = {name: choice.value for name, choice in choices().items()}
        context.default_map = defaults(context.command, chosen)


app.command(name="run", options_metavar="[OPTIONS] [MODEL]", rich_help_panel=_Ask)(run.run)
app.command(name="chat", options_metavar="[OPTIONS] [MODEL]", rich_help_panel=_Ask)(chat.chat)
app.command(name="serve", rich_help_panel=_Serve)(serve.serve)
app.command(
    name="page",
    rich_help_panel=_Serve,
    options_metavar="[MODEL] [OPTIONS OF SERVE]",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(page.page)
app.command(
    name="start",
    rich_help_panel=_Serve,
    options_metavar="[MODEL] [OPTIONS OF SERVE]",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(background.start)
app.command(name="stop", rich_help_panel=_Serve)(background.stop)
app.command(name="status", rich_help_panel=_Serve)(background.status)
app.command(name="ps", hidden=True)(background.status)
app.add_typer(keys.app, name="keys", rich_help_panel=_Serve)
app.add_typer(sessions.app, name="sessions", rich_help_panel=_Kept)
app.add_typer(cache.app, name="cache", rich_help_panel=_Kept)
app.command(name="backup", rich_help_panel=_Kept)(backup.backup)
app.command(name="restore", rich_help_panel=_Kept)(backup.restore)
app.command(name="pull", rich_help_panel=_Models)(models.pull)
app.command(name="ls", rich_help_panel=_Models)(models.list_)
app.command(name="show", rich_help_panel=_Models)(inspect.inspect)
app.command(name="rm", rich_help_panel=_Models)(models.rm)
# By longer names.
app.command(name="inspect", hidden=True)(inspect.inspect)
app.add_typer(models.app, name="models", hidden=True)
app.add_typer(config.app, name="config", rich_help_panel=_Machine)
app.command(name="paths", rich_help_panel=_Machine)(config.paths)
app.add_typer(engine.app, name="engine", rich_help_panel=_Machine)
app.command(name="doctor", rich_help_panel=_Machine)(doctor.doctor)
in_sections(app)


def start(arguments: Sequence[str]) -> None:
    """Run a command."""
    tell_warnings()
    plain = as_options(plain_options(arguments))
    group: Any = typer.main.get_command(app)
    command = group
    for word in plain:
        below = getattr(command, "commands", {})
        command = below.get(shown_name(word, below), command)
    if command.name in ("start", "page"):
        # What it is given goes to serve.
        command = group.commands["serve"]
    known = frozenset(name for option in command.params for name in (*option.opts, *option.secondary_opts))
    word_advice = advice_for_word(plain[0], group.commands) if plain else None
    if advice := word_advice or advice_for(plain, known):
        from perdure.cli.output.terminal import note

        note(advice)
        raise SystemExit(2)
    # Shells complete `perdure`, also where it was started as a module.
    group(plain, prog_name="perdure")
