"""Where sessions in PostgreSQL are: a URL, and a folder of this machine that stands for it.

    postgresql://user@host/database?schema=perdure&folder=/var/lib/perdure/blocks&lease=10&timeout=10&pool=8

What the URL says is libpq's, but for five words: `schema` is where the tables are, `folder` where this
machine keeps blocks of state and its locks, `lease` after how many seconds of silence a session may be taken
over, `timeout` how many seconds an answer of the server may take, and `pool` how many connections a process
opens at most. The folder remembers the URL without its password, so that it is a store like any other: a
process that opens the folder finds the sessions in the database.
"""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from perdure import InvalidInputError, StoreError
from perdure.spi.base import make_folder, settings, write_file
from perdure.spi.sessions import FILE, url_in

_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_LEASE, _TIMEOUT, _POOL = 10.0, 10.0, 8
_SHORTEST, _LONGEST = 0.2, 3600.0
_SECRETS: dict[Path, str] = {}
"""Whole URLs that this process was given, by folder: a password is written nowhere."""
_SECRET_WORDS = ("password", "sslpassword", "oauth_client_secret")
"""What libpq takes and nobody else may read."""
_CHANGING = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresPlace:
    """A database of sessions, and the folder that stands for it on this machine."""

    conninfo: str
    """For libpq; may have a password in it."""
    schema: str
    folder: Path
    lease: float
    timeout: float
    pool: int
    shown: str
    """The URL without its password."""


def is_url(text: str) -> bool:
    """Whether a database is meant, and not a folder."""
    return text.partition("://")[0].lower() in ("postgresql", "postgres")


def parse_place(url: str) -> PostgresPlace:
    """What a URL says; `InvalidInputError` where it makes no sense."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise InvalidInputError(f"this is no URL of a PostgreSQL database: {error}") from None
    schema, folder = query.pop("schema", "perdure"), query.pop("folder", "")
    if not _SCHEMA.fullmatch(schema):
        raise InvalidInputError(
            f"schema has 1 to 63 lower-case letters, digits and underscores, got {schema!r}"
        )
    lease = _number("lease", query.pop("lease", str(_LEASE)), _SHORTEST, _LONGEST)
    timeout = _number("timeout", query.pop("timeout", str(_TIMEOUT)), _SHORTEST, _LONGEST)
    pool = _number("pool", query.pop("pool", str(_POOL)), 3, 1000)
    plain = {name: value for name, value in query.items() if name not in _SECRET_WORDS}
    who = parts.netloc.rpartition("@")
    netloc = f"{who[0].split(':', 1)[0]}@{who[2]}" if who[1] else parts.netloc
    own = {"schema": schema, "lease": f"{lease:g}", "timeout": f"{timeout:g}", "pool": f"{pool:g}"}
    name = hashlib.sha256(f"{netloc}\0{parts.path}\0{sorted(plain.items())}\0{schema}".encode()).hexdigest()[
        :16
    ]
    place = Path(folder) if folder else settings().home / "cluster" / name
    if not place.is_absolute():
        raise InvalidInputError(f"folder is an absolute path, got {folder!r}")
    return PostgresPlace(
        conninfo=urlunsplit(("postgresql", parts.netloc, parts.path, urlencode(query), "")),
        schema=schema,
        folder=place,
        lease=lease,
        timeout=timeout,
        pool=int(pool),
        shown=urlunsplit(
            ("postgresql", netloc, parts.path, urlencode({**plain, **own, "folder": str(place)}), "")
        ),
    )


def stand_in(url: str) -> Path:
    """The folder that stands for a database on this machine, made where there is none."""
    place = parse_place(url)
    make_folder(place.folder)
    path = place.folder / FILE
    known = url_in(place.folder)
    if known is not None and known != place.shown and _database(known) != _database(place.shown):
        raise StoreError(
            f"{place.folder} keeps the blocks of {known}: choose another folder=… for {place.shown}"
        )
    if known is None and (place.folder / "sessions.sqlite").exists():
        raise StoreError(f"{place.folder} has other sessions already: choose another folder=…")
    if known != place.shown:
        write_file(path, [f"{place.shown}\n".encode()])
    with _CHANGING:
        _SECRETS[place.folder.resolve()] = url
    return place.folder


def place_in(folder: Path) -> PostgresPlace | None:
    """The database that a folder stands for; None for a folder that has its sessions in it."""
    known = url_in(folder)
    if known is None:
        return None
    with _CHANGING:
        whole = _SECRETS.get(folder.resolve())
    try:
        return parse_place(whole if whole is not None else known)
    except InvalidInputError as error:
        raise StoreError(f"{folder / FILE} is damaged: {error}") from None


def _database(shown: str) -> tuple[str, str, str]:
    """What says which database this is, leases and the like apart."""
    parts = urlsplit(shown)
    return parts.netloc.rpartition("@")[2], parts.path, dict(parse_qsl(parts.query)).get("schema", "")


def _number(name: str, text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not low <= value <= high:
        raise InvalidInputError(f"{name} is a number from {low:g} to {high:g}, got {text!r}")
    return value
