"""PDF: the text of a file, page by page, read in a child process.

    Page 1                    a heading before each page where there are several
    The quick brown fox …

Always holds: a file that hangs, fills the memory or crashes its reader costs that process and its own call.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

from perdure import InvalidInputError, TooLargeError
from perdure.spi.base import processes, read_stream
from perdure.spi.runtime import BackgroundTimer

MOST_BYTES = 64 << 20
"""Of a file."""
MOST_PAGES = 2000
MOST_CHARACTERS = 4 << 20
"""Of its text."""
MOST_MEMORY = 2 << 30
"""That its reader may take, where the system can hold it to that."""
SECONDS = 60
_ANSWER_BYTES = 16 * MOST_CHARACTERS
"""Of its text as JSON."""


@dataclass(frozen=True, slots=True)
class PdfText:
    """What can be read of a PDF."""

    text: str
    pages: int


def pdf_text(path: Path, *, seconds: float = SECONDS, memory: int = MOST_MEMORY) -> PdfText:
    """The text of a file. InvalidInputError, TooLargeError: the file's fault."""
    if (size := path.stat().st_size) > MOST_BYTES:
        raise TooLargeError(f"the file has {size} bytes, and {MOST_BYTES} are read of one", limit=MOST_BYTES)
    with path.open("rb") as file:
        # Some programs write a line before it.
        if b"%PDF-" not in file.read(1024):
            raise InvalidInputError("this is no PDF: it does not begin as one")
    if importlib.util.find_spec("pypdf") is None:
        raise InvalidInputError(
            'this server reads no PDF: pypdf is not installed beside it (pip install "perdure[documents]")'
        )
    command = processes.isolated_python("-m", "perdure.ext.documents.child", str(path), str(memory))
    overdue = threading.Event()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:

        def end() -> None:
            overdue.set()
            child.kill()

        timer = BackgroundTimer(seconds, end, name="perdure-pdf")
        timer.start()
        try:
            assert child.stdout is not None
            said = read_stream(child.stdout, _ANSWER_BYTES, "the text of this PDF")
        except BaseException:
            child.kill()
            raise
        finally:
            timer.cancel()
    if overdue.is_set():
        raise InvalidInputError(
            f"this PDF took more than {seconds:g} seconds to read; split it, or attach its text"
        )
    try:
        answer = json.loads(said)
    except ValueError:
        raise InvalidInputError(
            f"this PDF cannot be read: its reader ended with {child.returncode}, as it does where a file is "
            "damaged or takes too much memory; attach its text"
        ) from None
    if "limit" in answer:
        raise TooLargeError(answer["error"], limit=answer["limit"])
    if "error" in answer:
        raise InvalidInputError(answer["error"])
    return PdfText(str(answer["text"]), int(answer["pages"]))
