"""`perdure batch`: a file of requests, answered by a running server in the background."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import httpx
import typer

from perdure import PerdureError
from perdure.ext.batches.batch import ENDPOINTS, RUNNING
from perdure.spi.base import atomic_write, read_lines
from perdure.spi.cli import Json, Key, Url, ask, note, print_json, server_url, working, write

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
    server = _Server(server_url(url), key)
    is_id = file.startswith("batch_") and not Path(file).exists()
    shown = server.ask(f"/v1/batches/{file}") if is_id else _begin(server, Path(file))
    if not wait:
        print_json(shown) if as_json else write(f"{shown['id']}\n")
        return
    try:
        shown = _waited(server, shown)
    except KeyboardInterrupt:
        note(f"The batch goes on. To wait for it again: perdure batch {shown['id']}")
        raise
    path = out or Path(f"{file}.answers.jsonl")
    answers = server.download(shown["output_file_id"], path)
    errors = server.download(shown["error_file_id"], path.with_name(f"{path.stem}.errors.jsonl"))
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


@dataclass(frozen=True, slots=True)
class _Server:
    """The running server: asked as other commands ask it, and with files."""

    url: str
    key: str | None

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return ask(path, self.url, self.key, body=body, seconds=_SECONDS)

    def upload(self, path: Path) -> str:
        """The id of a file that it keeps."""
        with path.open("rb") as file, self._files("POST", "", file) as answer:
            shown = json.loads(next(answer.iter_bytes(_PIECE), b""))
        return str(shown["id"])

    def download(self, file_id: str | None, path: Path) -> Path | None:
        if file_id is None:
            return None
        with self._files("GET", f"/{file_id}/content") as answer, atomic_write(path) as file:
            for piece in answer.iter_bytes(_PIECE):
                file.write(piece)
        return path

    @contextmanager
    def _files(self, method: str, path: str, file: BinaryIO | None = None) -> Iterator[httpx.Response]:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        form = None if file is None else {"file": file}
        data = None if file is None else {"purpose": "batch"}
        url = f"{self.url}/v1/files{path}"
        try:
            with httpx.stream(
                method, url, headers=headers, files=form, data=data, timeout=_SECONDS
            ) as answer:
                if answer.status_code != 200:
                    said = next(answer.iter_bytes(500), b"").decode("utf-8", "replace")
                    raise PerdureError(f"{self.url} answered {answer.status_code}: {said}")
                yield answer
        except httpx.HTTPError as error:
            raise PerdureError(f"{self.url} does not answer: {error}") from None


def _begin(server: _Server, path: Path) -> dict[str, Any]:
    endpoint = _endpoint(path)
    body = {"input_file_id": server.upload(path), "endpoint": endpoint, "completion_window": "24h"}
    return server.ask("/v1/batches", body)


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


def _waited(server: _Server, shown: dict[str, Any]) -> dict[str, Any]:
    with working("Answering") as progress:
        while shown["status"] in (*RUNNING, "cancelling"):
            counts = shown["request_counts"]
            if counts["total"]:
                progress(counts["completed"] + counts["failed"], counts["total"])
            time.sleep(_LOOK)
            shown = server.ask(f"/v1/batches/{shown['id']}")
    return shown
