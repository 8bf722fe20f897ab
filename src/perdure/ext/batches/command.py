"""`perdure batch`: a file of requests, answered by a running server in the background."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import httpx
import typer

from perdure import PerdureError
from perdure.ext.batches.batch import ENDPOINTS, RUNNING
from perdure.spi.base import atomic_write, read_lines
from perdure.spi.cli import Json, Key, Url, note, print_json, server_url, working, write

_SECONDS = 60.0
"""That a server may take to answer."""
_LOOK = 0.5
_LINE = 16 << 20
_PIECE = 256 << 10


def batch(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE|ID",
            help="Requests, one a line, in OpenAI's form; or the id of a batch to wait for.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            show_default="FILE.answers.jsonl",
            help="Where the answers go; those that failed into FILE.errors.jsonl beside it.",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait for the answers, or print the batch's id and go.")
    ] = True,
    url: Url = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Answer a file of requests in the background.

    A running server does that, behind all others. What was answered stays when the server ends; the next one
    goes on. Ctrl-C ends the waiting alone.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=server_url(url), headers=headers, timeout=_SECONDS) as client:
        is_id = file.startswith("batch_") and not Path(file).exists()
        shown = _ask(client, "GET", f"/v1/batches/{file}") if is_id else _begin(client, Path(file))
        if not wait:
            print_json(shown) if as_json else write(f"{shown['id']}\n")
            return
        try:
            shown = _waited(client, shown)
        except KeyboardInterrupt:
            note(f"The batch goes on. To wait for it again: perdure batch {shown['id']}")
            raise
        path = out or Path(f"{file}.answers.jsonl")
        answers = _fetch(client, shown["output_file_id"], path)
        errors = _fetch(client, shown["error_file_id"], path.with_name(f"{path.stem}.errors.jsonl"))
    counts = shown["request_counts"]
    if as_json:
        print_json(shown)
    else:
        write(f"{shown['status']}: {counts['completed']} answered, {counts['failed']} failed\n")
        for name, written in (("answers", answers), ("errors", errors)):
            if written is not None:
                write(f"{name}: {written}\n")
    for problem in (shown["errors"] or {"data": []})["data"]:
        where = f"line {problem['line']}: " if problem["line"] else ""
        note(f"{where}{problem['message']}")
    if shown["status"] != "completed":
        raise typer.Exit(1)


def _begin(client: httpx.Client, path: Path) -> dict[str, Any]:
    endpoint = _endpoint(path)
    with path.open("rb") as file:
        sent = _ask(client, "POST", "/v1/files", files={"file": file}, data={"purpose": "batch"})
    body = {"input_file_id": sent["id"], "endpoint": endpoint, "completion_window": "24h"}
    return _ask(client, "POST", "/v1/batches", json=body)


def _endpoint(path: Path) -> str:
    """What the first line asks."""
    try:
        with path.open("rb") as file:
            endpoint = json.loads(next(read_lines(file, _LINE, str(path)), b"").decode("utf-8-sig"))["url"]
    except (ValueError, KeyError, TypeError):
        endpoint = None
    if endpoint not in ENDPOINTS:
        raise PerdureError(
            f"{path}: the first line is a JSON object with custom_id, method, url and body; its url is one "
            f"of {', '.join(ENDPOINTS)}"
        )
    return str(endpoint)


def _waited(client: httpx.Client, shown: dict[str, Any]) -> dict[str, Any]:
    with working("Answering") as progress:
        while shown["status"] in (*RUNNING, "cancelling"):
            counts = shown["request_counts"]
            if counts["total"]:
                progress(counts["completed"] + counts["failed"], counts["total"])
            time.sleep(_LOOK)
            shown = _ask(client, "GET", f"/v1/batches/{shown['id']}")
    return shown


def _fetch(client: httpx.Client, file_id: str | None, path: Path) -> Path | None:
    if file_id is None:
        return None
    with client.stream("GET", f"/v1/files/{file_id}/content") as answer, atomic_write(path) as file:
        answer.raise_for_status()
        for piece in answer.iter_bytes(_PIECE):
            file.write(piece)
    return path


def _ask(
    client: httpx.Client,
    method: str,
    path: str,
    *,
    json: object = None,
    files: Mapping[str, BinaryIO] | None = None,
    data: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    try:
        answer = client.request(method, path, json=json, files=files, data=data)
    except httpx.HTTPError as error:
        raise PerdureError(f"{client.base_url} does not answer: {error}") from None
    if answer.status_code != 200:
        raise PerdureError(f"{client.base_url} answered {answer.status_code}: {answer.text[:500]}")
    shown: dict[str, Any] = answer.json()
    return shown
