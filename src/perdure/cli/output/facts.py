"""The output of a command: a line, or JSON."""

from __future__ import annotations

import json
from typing import Any

import typer

from perdure.cli.output import terminal


def tell(as_json: bool, text: str, facts: dict[str, Any]) -> None:
    if as_json:
        print_json(facts)
    else:
        terminal.write(f"{text}\n")


def print_json(facts: Any) -> None:
    typer.echo(json.dumps(facts, indent=2))
