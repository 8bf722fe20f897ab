"""Writes what `perdure --help` prints: `python tools/command_help.py`. A test compares it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from perdure.cli import HELP
from perdure.cli.app import add_extensions, app


def text() -> str:
    """The help of the root command, in a terminal of 80 columns, of which two stay free."""
    add_extensions()
    command: Any = typer.main.get_command(app)
    with command.make_context("perdure", ["run"], resilient_parsing=True, terminal_width=78) as context:
        return f"{command.get_help(context)}\n"


if __name__ == "__main__":
    Path(HELP).write_text(text(), encoding="utf-8")
