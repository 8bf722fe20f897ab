"""Requests of commands to a running server: its options, and one call."""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import typer

from perdure.atomic import TEXT_BYTES, read_stream
from perdure.errors import PerdureError

_SECONDS = 10.0
"""That a server may take to answer."""

Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="The server; the one in the background, if not said."),
]
Key = Annotated[
    str | None,
    typer.Option("--key", envvar="PERDURE_KEY", metavar="KEY", help="Your key, where it needs one."),
]


def server_url(url: str | None) -> str:
    """Where the server is that is meant, without a slash at the end."""
    from perdure.cli.commands.background import current

    if url is None:
        if (running := current()) is None:
            raise PerdureError("no server runs in the background; name one with --url")
        url = running.address.partition(" and ")[0]
    if not url.startswith(("http://", "https://")):
        raise PerdureError(f"--url is such as http://127.0.0.1:8000, got {url!r}")
    return url.rstrip("/")


def ask(
    path: str,
    url: str | None,
    key: str | None,
    *,
    body: dict[str, Any] | None = None,
    seconds: float = _SECONDS,
) -> dict[str, Any]:
    """What a server answers; with a `body`, to a POST."""
    url = server_url(url)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    data = None if body is None else json.dumps(body).encode()
    if data is not None:
        headers["Content-Type"] = "application/json"
    try:
        with urlopen(Request(url + path, data, headers), timeout=seconds) as answer:
            reply: dict[str, Any] = json.loads(read_stream(answer, TEXT_BYTES, url))
            return reply
    except HTTPError as error:
        raise PerdureError(
            f"{url} answered {error.code}: {error.read(500).decode('utf-8', 'replace')}"
        ) from None
    except (URLError, OSError, ValueError) as error:
        raise PerdureError(f"{url} does not answer: {error}") from None
