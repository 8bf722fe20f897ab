"""`perdure models loaded`, `load` and `unload`: the models of a server."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from perdure.cli.commands.agents.why import Key, Url, ask
from perdure.cli.options.shared import Json
from perdure.cli.output.facts import print_json

_PATIENCE = 900.0
"""Seconds that loading may take."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="A model of the server, or an alias of one.")]


def loaded(url: Url = None, key: Key = None, as_json: Json = False) -> None:
    """Show the models of the server, and which of them are loaded."""
    from perdure.cli.output import terminal, words

    found = ask("/v1/models", url, key)["data"]
    if as_json:
        print_json(found)
        return
    for model in found:
        terminal.write_line(words.served_model(model))


def load(
    name: Name,
    keep_alive: Annotated[
        str | None,
        typer.Option("--keep-alive", metavar="SECONDS", help="Unload it after so long without a request."),
    ] = None,
    url: Url = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Have the server load a model now. It returns when it is loaded."""
    body = {} if keep_alive is None else {"keep_alive": keep_alive}
    _told(ask(f"/v1/models/{quote(name)}/load", url, key, body=body, seconds=_PATIENCE), as_json)


def unload(name: Name, url: Url = None, key: Key = None, as_json: Json = False) -> None:
    """Have the server unload a model. Requests that it has are answered first; its state stays."""
    _told(ask(f"/v1/models/{quote(name)}/unload", url, key, body={}, seconds=_PATIENCE), as_json)


def _told(model: dict[str, Any], as_json: bool) -> None:
    from perdure.cli.output import terminal, words

    if as_json:
        print_json(model)
    else:
        terminal.write_line(words.served_model(model))
