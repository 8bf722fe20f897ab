"""`perdure page`: the server with its page, and a browser that shows it."""

from __future__ import annotations

from typing import Any

import typer


def page(context: typer.Context) -> None:
    """Open the page: chat, branch, and see what was reused. It takes the arguments of `perdure serve`.

    A server that was started with `perdure start` is used; else one is started, and Ctrl-C stops it.
    """
    from perdure.cli.commands import background

    running = background.current()
    if running is not None and not context.args:
        open_browser(running.address)
        return
    above = context.parent
    assert above is not None
    group: Any = above.command
    serve = group.commands["serve"]
    serve.main(
        [*context.args, "--open"],
        prog_name="perdure serve",
        # What the config file and the environment say about its options.
        default_map=(above.default_map or {}).get("serve"),
    )


def open_browser(address: str) -> None:
    """Show an address in a browser; where there is none, say where it is."""
    import webbrowser

    from perdure.cli.output.terminal import note

    if not webbrowser.open(address):
        note(f"no browser could be started here: open {address} in one")
