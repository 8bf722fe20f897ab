"""`perdure start`, `stop`, `status` and `ps`: a server in the background."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from perdure import system
from perdure.atomic import TABLE_BYTES, read_stream, read_text
from perdure.cli.options.shared import Json
from perdure.cli.output import terminal, words
from perdure.cli.output.facts import print_json
from perdure.cli.output.terminal import note
from perdure.cli.runtime import usual_store
from perdure.config import settings
from perdure.errors import PerdureError
from perdure.system import processes

_STATE = "server.json"
_LOOK = 5.0
"""Seconds that a server may take to list its models."""
_POLL = 0.1
"""Seconds between two looks at a server that is starting or stopping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """What `perdure serve --state FILE` writes: its process, where it listens, and what it serves."""

    pid: int
    address: str
    model: str
    store: str
    since: float
    log: str = ""
    """Of a server in the background."""


def start(context: typer.Context) -> None:
    """Start a server in the background. It takes the arguments of `perdure serve`.

    `perdure serve --help` shows them. It goes on when the terminal is closed, until `perdure stop`.
    """
    if (running := current()) is not None:
        raise PerdureError(f"a server runs already, at {running.address}: `perdure stop` ends it")
    folder = _folder()
    log = folder / "server.log"
    state = folder / _STATE
    with _claimed() as claim, open(log, "w", encoding="utf-8", opener=private) as output:
        child = subprocess.Popen(
            processes.isolated_python("-m", "perdure.cli", "serve", *context.args, "--state", str(state)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # The process that has this open is the server: without one, its state file is not trusted.
            pass_fds=[claim],
        )
        terminal.tell(f"Starting; its log is {log}")
        try:
            while (server := _read_state()) is None or server.pid != child.pid:
                if child.poll() is not None:
                    raise PerdureError(f"the server did not start: {_last_line(log, child.returncode)}")
                time.sleep(_POLL)
        except BaseException:
            child.terminate()
            raise
    typer.echo(f"{server.address} serves {server.model}; `perdure stop` ends it")


def stop(
    seconds: float = typer.Option(
        60.0, "--seconds", metavar="S", help="Seconds to wait for replies to finish."
    ),
) -> None:
    """Stop the server in the background. Replies that are being written are finished first."""
    running = current()
    lost = [] if running is not None else _lost_servers()
    if running is None and not lost:
        typer.echo("no server runs in the background")
        return
    pids = lost if running is None else [running.pid]
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    ends = time.monotonic() + seconds
    while _lost_servers() if running is None else current():
        if time.monotonic() > ends:
            log = f"; see {running.log}" if running is not None else ""
            raise PerdureError(f"process {pids[0]} has not ended within {seconds:g} seconds{log}")
        time.sleep(_POLL)
    if running is None:
        typer.echo(f"stopped process {pids[0]}, a server whose folder was deleted")
    else:
        typer.echo(f"stopped the server at {running.address}")


def status(as_json: Json = False) -> None:
    """Show the server in the background, and who uses the store. The exit code is 1 where no server runs."""
    from perdure.store.owner import read_owner

    running = current()
    store = usual_store()
    locked = _is_locked(store / "sessions.lock")
    holder = read_owner(store) if locked else None
    if as_json:
        facts = {
            "server": asdict(running) if running else None,
            "store": str(store),
            "holder": asdict(holder) if holder else None,
            "models": _models(running),
        }
        print_json(facts)
    else:
        if running is None:
            terminal.write_line("server  none in the background; `perdure start` starts one", indent=8)
        else:
            terminal.write_line(
                f"server  {running.address}, {running.model}; process {running.pid}, "
                f"since {words.moment(running.since)}",
                indent=8,
            )
            for model in _models(running):
                terminal.write_line(f"model   {words.served_model(model)}", indent=8)
        used = f"in use by {holder}" if holder else "in use" if locked else "not in use"
        terminal.write_line(f"store   {store}, {used}", indent=8)
    if running is None:
        raise typer.Exit(1)


def _models(running: RunningServer | None) -> list[dict[str, Any]]:
    """The models of a server with their states; none where it needs a key for that."""
    from urllib.request import urlopen

    address = running.address.split(" and ")[0] if running is not None else ""
    if not address.startswith("http://"):
        return []
    try:
        with urlopen(f"{address}/v1/models", timeout=_LOOK) as answer:
            models: list[dict[str, Any]] = json.loads(read_stream(answer, TABLE_BYTES, address))["data"]
    except (OSError, ValueError, KeyError):
        return []
    return models


def current() -> RunningServer | None:
    """The server that runs in the background, if one does."""
    return _read_state() if _is_locked(_folder() / "server.lock") else None


def _read_state() -> RunningServer | None:
    folder = _folder()
    try:
        facts = json.loads(read_text(folder / _STATE))
        return RunningServer(**facts | {"log": str(folder / "server.log")})
    except (OSError, ValueError, TypeError):
        return None


def _lost_servers() -> list[int]:
    """Servers in the background whose folder was deleted under them: they still have its lock open."""
    return system.holders_of_deleted(_folder() / "server.lock")


def _folder() -> Path:
    home = settings().home
    home.mkdir(parents=True, exist_ok=True)
    return home


@contextmanager
def _claimed() -> Iterator[int]:
    """A lock that the server inherits and that the system drops with it, however it ends."""
    processes.require_child_pipes("a server in the background")
    handle = os.open(_folder() / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not processes.lock_with_children(handle):
            raise PerdureError("another `perdure start` is under way")
        (_folder() / _STATE).unlink(missing_ok=True)
        yield handle
    finally:
        os.close(handle)


def private(path: str, flags: int) -> int:
    """Opens a file for its owner alone."""
    return os.open(path, flags, 0o600)


def _is_locked(path: Path) -> bool:
    """Whether a process holds the lock of that file."""
    from filelock import FileLock, Timeout

    if not path.exists():
        return False
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def _last_line(log: Path, code: int) -> str:
    """What a server has said before it ended."""
    with log.open("rb") as file:
        lines = file.read(TABLE_BYTES).decode("utf-8", "replace").strip().splitlines()
    silent = f"it ended with code {code} and wrote nothing to {log}; is that disk full?"
    return lines[-1].removeprefix("perdure: ") if lines else silent


# `perdure page`: the server with its page, and a browser that shows it.


def page(context: typer.Context) -> None:
    """Open the page: chat, branch, and see what was reused. It takes the arguments of `perdure serve`.

    A server that was started with `perdure start` is used; else one is started, and Ctrl-C stops it.
    """

    running = current()
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

    if not webbrowser.open(address):
        note(f"no browser could be started here: open {address} in one")
