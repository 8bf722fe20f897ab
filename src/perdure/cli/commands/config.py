"""`perdure config`: path, show, set, unset. And `perdure paths`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from perdure import system
from perdure.atomic import atomic_write, read_text
from perdure.cli.options.shared import Json
from perdure.cli.output import terminal
from perdure.cli.output.facts import print_json
from perdure.config import (
    all_settings,
    choices,
    config_file,
    find_setting,
    parse_setting,
    read_config,
    settings,
)
from perdure.errors import InvalidInputError

app = typer.Typer(help="Defaults for the commands, in a file.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A name that `perdure config show` lists.")]


@app.command()
def path() -> None:
    """Print where the config file is."""
    typer.echo(config_file())


@app.command()
def show(
    context: typer.Context,
    name: str | None = typer.Argument(None, help="Only this setting.", show_default="all of them"),
    as_json: Json = False,
) -> None:
    """Show every setting, its value, and where it came from.

    An option wins over the environment, the environment over the file, the file over the default.
    """
    from perdure.cli.options.shared import usual_value

    chosen = choices()
    shown = all_settings().values() if name is None else (find_setting(name),)
    if as_json:
        facts = {
            setting.name: {"value": each.value, "origin": each.origin}
            for setting in shown
            if (each := chosen.get(setting.name))
        }
        print_json(facts)
        return
    commands = context.find_root().command
    for setting in shown:
        if each := chosen.get(setting.name):
            text = f"{each.value}  (from {each.origin})"
        else:
            value = usual_value(commands, setting.name)
            text = f"{value}  (default; {setting.about}; {setting.variable})"
        terminal.write_line(f"{setting.name:<18}  {text}", indent=20)


@app.command(name="set")
def set_(name: Name, value: str = typer.Argument(..., help="Its value from now on.")) -> None:
    """Write a setting into the config file."""
    file = config_file()
    # A file that cannot be read is not written over.
    read_config(file)
    parsed = parse_setting(name, value)
    _rewrite(file, name, f"{name} = {json.dumps(parsed, ensure_ascii=False)}")
    typer.echo(f"{name} is {parsed} from now on, by {file}")


@app.command()
def unset(name: Name) -> None:
    """Remove a setting from the config file. Its default holds again."""
    file = config_file()
    find_setting(name)
    if name not in read_config(file):
        raise InvalidInputError(f"{file} does not set {name!r}")
    _rewrite(file, name, None)
    typer.echo(f"{name} has its default again")


def paths(as_json: Json = False) -> None:
    """Print the folders and files that perdure uses."""
    now = settings()
    places = {
        "config": config_file(),
        "home": now.home,
        "models": now.models,
        "engines": now.engines,
        "store": now.store,
        "history": now.home / "chat.history",
    }
    if as_json:
        print_json({name: str(place) for name, place in places.items()})
        return
    for name, place in places.items():
        terminal.write(f"{name:<8} {place}{'' if place.exists() else '  (not there yet)'}\n")


def _rewrite(file: Path, name: str, line: str | None) -> None:
    """Replace the line of a setting, and leave every other line unchanged."""
    lines = read_text(file).splitlines() if file.exists() else []
    own = re.compile(rf"""\s*["']?{re.escape(name)}["']?\s*=""")
    rewritten = [each for each in lines if not own.match(each)]
    place = next((at for at, each in enumerate(lines) if own.match(each)), len(rewritten))
    if line is not None:
        rewritten.insert(place, line)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as written:
        written.write("".join(f"{each}\n" for each in rewritten).encode())
    system.sync_folder(file.parent)
