"""`perdure keys`: who may use a server, kept as hashes in a file."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure import InvalidInputError
from perdure.spi.base import make_folder, read_text, settings, sync_folder, write_file
from perdure.spi.cli import (
    Json,
    StoreFolder,
    print_json,
    shared_keys,
    terminal,
    usual_store,
    write_columns,
)

if TYPE_CHECKING:
    from perdure.spi.server import Key, KeyUsage

app = typer.Typer(help="Keys of a server: who may use it, until when, and how much.", no_args_is_help=True)

_LIMITS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_day": "tokens a day",
    "sessions": "sessions",
    "stored_bytes": "bytes stored",
    "weight": "weight",
}
"""What a key may be limited to."""

File = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        metavar="FILE",
        show_default="keys, in the folder that `perdure paths` shows",
        help="The file of the keys, as `perdure serve --keys FILE` takes it.",
    ),
]


@app.command()
def add(
    namespace: str = typer.Argument(
        ...,
        metavar="NAMESPACE",
        help="Whose key it is. Keys of one namespace share their sessions, and see no others.",
    ),
    expires: str | None = typer.Option(
        None,
        "--expires",
        metavar="DAY|Nd",
        help="The day from which it no longer works, such as 2027-01-31, or 90d for 90 days from now.",
    ),
    requests_per_minute: int | None = typer.Option(
        None, "--requests-per-minute", min=1, metavar="N", help="Most requests a minute."
    ),
    tokens_per_day: int | None = typer.Option(
        None, "--tokens-per-day", min=1, metavar="N", help="Most tokens a day, prompts and replies."
    ),
    sessions: int | None = typer.Option(
        None, "--sessions", min=1, metavar="N", help="Most sessions and stored responses."
    ),
    stored_bytes: int | None = typer.Option(
        None, "--stored-bytes", min=1, metavar="N", help="Most bytes stored, of all kinds."
    ),
    weight: int | None = typer.Option(
        None,
        "--weight",
        min=1,
        metavar="N",
        show_default="1",
        help="Part of the engine that its namespace has while others ask too.",
    ),
    file: File = None,
    store: StoreFolder = None,
) -> None:
    """Make a key, print it once, and put its hash into the file.

    With `--store postgresql://…` it is kept in the database: for all replicas, at once.
    """
    from perdure.spi.server import new_key

    secret, key = new_key(
        namespace,
        expires=_day(expires),
        requests_per_minute=requests_per_minute,
        tokens_per_day=tokens_per_day,
        sessions=sessions,
        stored_bytes=stored_bytes,
        weight=weight,
    )
    if (folder := _database(file, store)) is not None:
        with shared_keys(folder) as shared:
            assert shared is not None
            shared.add(key)
        typer.echo(secret)
        terminal.note(
            "this is shown once; its hash is in the database, and all replicas ask for it from now on"
        )
        return
    path = _path(file)
    lines = _lines(path)
    write_lines(path, [*lines, key.line])
    typer.echo(secret)
    terminal.note(
        f"this is shown once; its hash is in {path}. `perdure serve --keys {path}` asks for it; a running "
        "server takes it in when it reads its keys again: kill -HUP, or a restart"
    )


@app.command(name="ls")
def list_(file: File = None, store: StoreFolder = None, as_json: Json = False) -> None:
    """List the keys by id, with namespace and limits. The keys themselves are not stored."""
    keys, where, option = _found(file, store)
    if as_json:
        print_json([_plain(key) for key in keys])
        return
    for key in keys:
        limits = [f"expires {key.expires}"] if key.expires else []
        limits += [f"{most} {words}" for name, words in _LIMITS.items() if (most := getattr(key, name))]
        terminal.write_line(f"{key.id}  {key.namespace:<20}  {', '.join(limits)}".rstrip(), indent=36)
    if not keys:
        terminal.write_line(f"no keys in {where}; `perdure keys add NAMESPACE {option}` makes one")


@app.command()
def rm(
    key: str = typer.Argument(
        ..., metavar="NAME|ID", help="Whose key it is, or the id that `perdure keys ls` shows."
    ),
    file: File = None,
    store: StoreFolder = None,
) -> None:
    """Remove a key from the file. A server that runs takes it until it reads its keys again (kill -HUP).

    With `--store postgresql://…` it is withdrawn from all replicas, within seconds.
    """
    keys, where, option = _found(file, store)
    matches = [each for each in keys if each.namespace == key]
    if not matches:
        matches = [each for each in keys if len(key) >= 4 and each.digest.startswith(key.lower())]
    if len(matches) != 1:
        ids = ", ".join(each.id for each in matches)
        wrong = (
            f"{key!r} has {len(matches)} keys in {where}: {ids}"
            if matches
            else f"no key in {where} is {key!r}"
        )
        raise InvalidInputError(f"{wrong}; give an id that `perdure keys ls {option}` shows")
    if (folder := _database(file, store)) is not None:
        with shared_keys(folder) as shared:
            assert shared is not None
            shared.withdraw(matches[0])
        typer.echo(f"{matches[0].id} of {matches[0].namespace} is out of {where}")
        return
    path = _path(file)
    write_lines(path, [line for line in _lines(path) if matches[0].digest not in line.lower()])
    typer.echo(f"{matches[0].id} of {matches[0].namespace} is out of {path}")
    terminal.note("a running server accepts it until it reads its keys again: kill -HUP, or a restart")


@app.command()
def usage(file: File = None, store: StoreFolder = None, as_json: Json = False) -> None:
    """Show what each key has used, by day of UTC.

    A server writes it beside its keys some seconds after each reply; it is kept for 31 days.
    """
    from perdure.spi.server import SAVED_AFTER

    keys, where, _ = _found(file, store)
    used = _usage(file, store)
    rows: list[dict[str, Any]] = [
        {
            "day": day,
            "namespace": key.namespace,
            "id": key.id,
            "requests": each.requests,
            "prompt_tokens": each.prompt_tokens,
            "cached_tokens": each.cached_tokens,
            "completion_tokens": each.completion_tokens,
            "tokens_per_day": key.tokens_per_day,
        }
        for key in keys
        for day, each in used.days(key).items()
    ]
    rows.sort(key=lambda row: (row["day"], row["namespace"]), reverse=True)
    if as_json:
        print_json(rows)
        return
    if not rows:
        typer.echo(
            f"no use of a key of {where} is noted yet: a server does that {SAVED_AFTER:g} seconds after it"
        )
        return
    shown = [("day", "name", "requests", "prompt", "cached", "written", "left of the day")]
    for row in rows:
        prompt, cached, written = row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]
        share = f"{100 * cached / prompt:.0f}%" if prompt else ""
        limit = row["tokens_per_day"]
        left = str(max(0, limit - prompt - written)) if limit else ""
        first = (row["day"], row["namespace"], str(row["requests"]))
        shown.append((*first, str(prompt), share, str(written), left))
    write_columns(shown, right=frozenset({2, 3, 4, 5, 6}))


def _database(file: Path | None, store: Path | None) -> Path | None:
    """The folder that stands for the database whose keys are meant; None where a file is."""
    from perdure.spi.sessions import url_in

    folder = store or usual_store()
    return folder if file is None and url_in(folder) is not None else None


def _found(file: Path | None, store: Path | None) -> tuple[list[Key], str, str]:
    """The keys, what they are in, and the option that says so."""
    from perdure.spi.sessions import remote_of

    folder = _database(file, store)
    with shared_keys(folder) as shared:
        remote = remote_of(folder) if folder is not None else None
        if folder is None or shared is None or remote is None:
            path = _path(file)
            return _keys(path), str(path), f"--keys {path}"
        shown = remote.shown(folder).partition("?")[0]
        return shared.keys(), shown, f"--store {shown}"


def _usage(file: Path | None, store: Path | None) -> KeyUsage:
    from perdure.spi.server import KeyUsage, usage_file

    with shared_keys(_database(file, store)) as shared:
        return KeyUsage(usage_file(_path(file))) if shared is None else shared.usage()


def _path(file: Path | None) -> Path:
    path = file or settings().home / "keys"
    if path.suffix.lower() == ".toml":
        raise InvalidInputError(
            f"{path} is TOML, which is yours to edit: these commands keep a file of lines"
        )
    return path


def _lines(path: Path) -> list[str]:
    try:
        return read_text(path).splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"the keys in {path} cannot be read: {error}") from None


def _keys(path: Path) -> list[Key]:
    from perdure.spi.server import Keys

    has_some = any(line.split("#")[0].strip() for line in _lines(path))
    return list(Keys.read(path)) if has_some else []


def write_lines(path: Path, lines: list[str]) -> None:
    make_folder(path.parent)
    # A server that runs as another user reads it by its group.
    write_file(path, ["".join(f"{line}\n" for line in lines).encode()], keep_access=True)
    sync_folder(path.parent)


def _day(text: str | None) -> str | None:
    if text is not None and (days := re.fullmatch(r"(\d{1,5})d", text)):
        return (datetime.now(UTC) + timedelta(days=int(days[1]))).strftime("%Y-%m-%d")
    return text


def _plain(key: Key) -> dict[str, Any]:
    return {name: getattr(key, name) for name in ("id", "namespace", "expires", *_LIMITS)}
