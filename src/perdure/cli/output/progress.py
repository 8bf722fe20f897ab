"""How work that takes time looks: a bar in a terminal; elsewhere a few plain lines, or nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.filesize import decimal

from perdure.events.background import BackgroundThread

if TYPE_CHECKING:
    from rich.console import Console

    from perdure.models import Progress

_PATIENCE = 1.0
"""Seconds of waiting that need no word."""


def _console() -> Console:
    """Standard error. What draws there is slow to import."""
    from rich.console import Console

    return Console(stderr=True)


@contextmanager
def fetching(name: str) -> Iterator[Progress]:
    """A progress callback for the fetch of `name`, on standard error. Silent if nothing is fetched."""
    console = _console()
    with _bar(console, name) if console.is_terminal else _lines(console, name) as report:
        yield report


def file_of(name: str) -> Path:
    """A safetensors file itself; else the model of that name, fetched first if it is not here."""
    from perdure import models

    if Path(name).suffix == ".safetensors":
        return Path(name)
    with fetching(name) as report:
        return models.path(name, report)


@contextmanager
def _bar(console: Console, name: str) -> Iterator[Progress]:
    from rich import progress as rich_progress

    bar = rich_progress.Progress(
        rich_progress.TextColumn("Fetching {task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
        console=console,
    )
    task: rich_progress.TaskID | None = None

    def report(done: int, total: int | None) -> None:
        nonlocal task
        if task is None:
            bar.start()
            # The first report is what earlier tries left, which says nothing about the speed of this one.
            task = bar.add_task(name, total=total, completed=done)
        else:
            bar.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        if task is not None:
            bar.stop()


@contextmanager
def _lines(console: Console, name: str) -> Iterator[Progress]:
    last_tenths = -1

    def report(done: int, total: int | None) -> None:
        nonlocal last_tenths
        tenths = done * 10 // total if total else 0
        if tenths != last_tenths:
            last_tenths = tenths
            of = f" of {decimal(total)}" if total else ""
            console.print(
                f"Fetching {name}: {decimal(done)}{of}", highlight=False, markup=False, soft_wrap=True
            )

    yield report


@contextmanager
def working(what: str) -> Iterator[Callable[[int, int], None]]:
    """A callback for work whose end is known, on standard error: a bar in a terminal, nothing elsewhere."""
    from rich import progress as rich_progress

    console = _console()
    bar = rich_progress.Progress(
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class PromptProgress(Protocol):
    """A job, as far as its prompt goes."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def prompt_read(self) -> int: ...


@contextmanager
def reading(prompt: PromptProgress, watched: bool = True) -> Iterator[Callable[[], None]]:
    """Shows how much of the prompt is read, and for how long, until the reply's first words.
    The callback says that they have come."""
    console = _console()
    if not (watched and console.is_terminal and not console.is_dumb_terminal):
        yield lambda: None
        return
    from rich import progress as rich_progress
    from rich.text import Text

    class Tokens(rich_progress.ProgressColumn):
        """How many tokens, as often as it is drawn."""

        max_refresh = 0.1

        def render(self, task: rich_progress.Task) -> Text:
            total, done = f"{prompt.prompt_tokens:,}", prompt.prompt_read
            # An engine in another process may not report it.
            return Text(f"{done:,} of {total} tokens" if done else f"{total} tokens")

    bar = rich_progress.Progress(
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("Reading the prompt:"),
        Tokens(),
        rich_progress.TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    # Only a process that has to wait prints why.
    begun = threading.Event()
    showing = threading.Lock()

    def show() -> None:
        if not begun.wait(_PATIENCE):
            with showing:
                if not begun.is_set():
                    bar.add_task("", total=None)
                    bar.start()

    def end() -> None:
        if not begun.is_set():
            begun.set()
            with showing:
                bar.stop()

    thread = BackgroundThread(show, name="perdure-reading")
    thread.start()
    try:
        yield end
    finally:
        end()
        thread.join()
