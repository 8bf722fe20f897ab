"""The command. Exit codes: 0 done, 1 it could not be done, 2 wrong usage, 130 stopped by Ctrl-C."""

from __future__ import annotations

import sys

from perdure.errors import PerdureError


def main() -> None:
    """Run the command that the process was started with, and exit."""
    from perdure.cli.app import app

    try:
        app()
    except PerdureError as error:
        print(f"perdure: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
