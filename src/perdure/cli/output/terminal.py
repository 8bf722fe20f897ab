"""What the commands that run a model share: opening it, and text for a terminal or a pipe."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TextIO, Unpack

from rich.cells import cell_len, set_cell_size

from perdure.engine_config import N_CTX
from perdure.system import processes

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure import Stream
    from perdure.engine.contract import LoadingKeywords
    from perdure.engine.model import EngineModel


_PATIENCE = 0.5
"""Seconds of loading that need no bar."""
_INSISTENCE = 2.0
"""Seconds after which a second Ctrl-C means that the first did not help."""
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}, "\ufffd")


class CancellableJob(Protocol):
    """A job of any kind."""

    def cancel(self) -> None: ...


def load(name: str | None, *, cells: int = N_CTX, **loading: Unpack[LoadingKeywords]) -> EngineModel:
    """The model of that name, or the default one: fetched if need be, with progress bars in a terminal."""
    from perdure.cli.output.progress import fetching
    from perdure.engine.registry import engine_for

    engine = engine_for(name)
    source = engine.fetch(name, fetching, agrees)
    left = threading.Event()
    with _loading(Path(source)) as report, ThreadPoolExecutor(1) as loader:
        # Native code in the main thread would hold Ctrl-C back until it returns.
        loaded = loader.submit(
            engine.open,
            source,
            progress=lambda done: report(done) and not left.is_set(),
            cells=cells,
            **loading,
        )
        try:
            return loaded.result()
        finally:
            left.set()


def agrees(what: str, nbytes: int) -> bool:
    """Whether a person is there, and says yes to fetching so much."""
    import typer

    if not sys.stdin.isatty() or not sys.stderr.isatty():
        return False
    return typer.confirm(f"{what}. Fetch {nbytes / 1e6:.0f} MB?", default=True, err=True)


def may_fetch(what: str, nbytes: int, *, yes: bool = False) -> bool:
    """Whether a command may fetch so much: large files, after a question."""
    from perdure.models.registry import MUCH

    return yes or nbytes <= MUCH or not sys.stdin.isatty() or agrees(what, nbytes)


class Stop:
    """What has stopped a job, if anything has: Ctrl-C, or a signal that ends the process."""

    def __init__(self) -> None:
        self.code = 0
        """The exit code for that signal; 0 without one."""

    @property
    def ends_process(self) -> bool:
        """Whether the terminal is gone, so that no output can be read."""
        return self.code not in (0, 128 + signal.SIGINT)


@contextmanager
def stopped_by_signal(job: CancellableJob, *, ended: Callable[[], object] | None = None) -> Iterator[Stop]:
    """While this is open, Ctrl-C, a closed window or a plain kill cancels `job` and is noted; one much later
    is as usual. `ended` is called instead where it is not Ctrl-C.

    An exception could strike between taking a piece of text and showing it, and lose it.
    """
    stop = Stop()
    since = 0.0

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal since
        if number != signal.SIGINT and not stop.ends_process:
            # It also ends what Ctrl-C has stopped.
            stop.code = 0
        if not stop.code:
            since = time.monotonic()
            stop.code = 128 + number
            (job.cancel if ended is None or number == signal.SIGINT else ended)()
        elif time.monotonic() - since > _INSISTENCE:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    numbers = (signal.SIGINT, *processes.ending_signals())
    before = {number: signal.signal(number, press) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show(stream: Stream[Any, Any], view: Callable[[Any], object]) -> OSError | None:
    """Show what comes of a stream. Where it cannot be shown any more the stream is stopped, and read to its
    end, so that what came is kept; then the reason."""
    lost: OSError | None = None
    for delta in stream:
        if lost is not None:
            continue
        try:
            view(delta)
        except OSError as error:
            lost = error
            stream.cancel()
            discard_output()
    return lost


def discard_output() -> None:
    """Have nothing written any more: the reader has gone, and Python would complain once more when it closes
    the stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def leaving_in_order() -> Iterator[None]:
    """While this is open, a closed window or a plain kill ends the process as an error would: what is open
    is closed, and nothing that was meant to end with it is left behind. The exit code tells the signal."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in processes.ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def keys_held_back() -> Iterator[None]:
    """While this is open, keys are not shown; typed text waits for the next read. Ctrl-C works."""
    with _keys(shown=False):
        yield


@contextmanager
def keys_shown() -> Iterator[None]:
    """While this is open, typed keys are shown, also where they are held back around it."""
    with _keys(shown=True):
        yield


@contextmanager
def _keys(*, shown: bool) -> Iterator[None]:
    try:
        import termios
    except ImportError:
        # This system has no such terminals.
        yield
        return
    try:
        keys = sys.stdin.fileno()
        before = termios.tcgetattr(keys)
    except (termios.error, AttributeError, OSError, ValueError):
        yield
        return
    attributes = list(before)
    if shown:
        attributes[3] |= termios.ECHO | termios.ICANON
    else:
        attributes[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(keys, termios.TCSANOW, attributes)
    try:
        yield
    finally:
        # A window that was closed has no keys.
        with suppress(termios.error):
            termios.tcsetattr(keys, termios.TCSANOW, before)


def write(text: str) -> None:
    """Put a model's text on standard output at once. A terminal sees none of its control characters."""
    emit(harmless(text) if sys.stdout.isatty() else text)


def write_line(text: str, *, indent: int = 0) -> None:
    """Put a line on standard output. In a terminal that is too narrow it breaks between words, and what does
    not fit is indented."""
    write(wrapped(text, sys.stdout, indent=indent) + "\n")


def emit(text: str) -> None:
    """Put text on standard output at once, unchanged."""
    out = sys.stdout
    try:
        out.write(text)
    except UnicodeEncodeError:
        out.write(text.encode(out.encoding, "replace").decode(out.encoding))
    out.flush()


def harmless(text: str) -> str:
    """Text without characters that a terminal would act on."""
    return text.translate(_CONTROLS)


def styled() -> bool:
    """Whether standard output is a terminal that shows colours, and nobody asked for none."""
    from rich.console import Console

    console = Console()
    return sys.stdout.isatty() and not console.no_color and not console.is_dumb_terminal


def note(text: str) -> None:
    """A line on standard error, in the form of error lines."""
    tell(f"perdure: {text}")


def tell(text: str) -> None:
    """A line on standard error. Quoted text may be anything."""
    # Standard error replaces what it cannot encode by itself. In a window that was closed nobody reads it.
    with suppress(OSError):
        print(wrapped(harmless(text)), file=sys.stderr, flush=True)


def wrapped(text: str, stream: TextIO | None = None, *, indent: int | None = None) -> str:
    """Text with its lines broken between words, if `stream` (or else standard error) is a terminal that is
    too narrow. What does not fit is indented, as far as the second column of a table if nothing is said."""
    import textwrap

    try:
        columns = os.get_terminal_size((stream or sys.stderr).fileno()).columns
    except (OSError, ValueError, AttributeError):
        return text
    lines = text.split("\n")
    if not columns or all(cell_len(line) < columns for line in lines):
        return text
    second = [re.match(r"\S.*?  +(?=\S)|", line) for line in lines]
    hangs = [indent if indent is not None else len(match[0]) if match else 0 for match in second]
    return "\n".join(
        textwrap.fill(
            line,
            columns - 1,
            subsequent_indent=" " * hang,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            drop_whitespace=True,
        )
        if cell_len(line) >= columns
        else line
        for line, hang in zip(lines, hangs, strict=True)
    )


@contextmanager
def _loading(path: Path) -> Iterator[Callable[[float], bool]]:
    from rich import progress as rich_progress
    from rich.console import Console

    console = Console(stderr=True)
    bar = rich_progress.Progress(
        "Loading {task.description}", rich_progress.BarColumn(), console=console, transient=True
    )
    started = time.monotonic()
    task: rich_progress.TaskID | None = None

    def report(done: float) -> bool:
        nonlocal task
        if task is not None:
            bar.update(task, completed=100 * done)
        elif console.is_terminal and time.monotonic() - started > _PATIENCE:
            bar.start()
            task = bar.add_task(path.name, total=100, completed=int(100 * done))
        return True

    try:
        yield report
    finally:
        if task is not None:
            bar.stop()


# Rows in columns, whose last one is never cut: it holds what people copy.

_GAP = "  "


def write_columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> None:
    """Write rows under each other, the columns in `right` flush right.

    In a terminal that is too narrow for a row, its last column has a separate line.
    """
    widths = [max(cell_len(cell) for cell in column) for column in zip(*rows, strict=True)]
    space = _columns()
    for row in rows:
        *others, last = row
        cells = [
            " " * (width - cell_len(cell)) + cell if at in right else set_cell_size(cell, width)
            for at, (cell, width) in enumerate(zip(others, widths, strict=False))
        ]
        start = _GAP.join(cells)
        if space is not None and cell_len(start) + len(_GAP) + cell_len(last) > space and others:
            write(f"{start.rstrip()}\n{_GAP * 2}{last}\n")
        else:
            write(f"{start}{_GAP}{last}".rstrip() + "\n")


def _columns() -> int | None:
    """How wide the terminal is that standard output goes to, if it is one."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError, AttributeError):
        return None
