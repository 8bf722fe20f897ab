"""Events as lines of JSON."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import IO

from perdure import Event
from perdure.spi.base import Closing
from perdure.spi.runtime import Ended


class JsonLines(Closing):
    """Appends each event to a file, a line each. `close` it, or use `with`."""

    def __init__(self, target: str | os.PathLike[str] | IO[str]) -> None:
        self._own = isinstance(target, (str, os.PathLike))
        self._file: IO[str]
        if isinstance(target, (str, os.PathLike)):
            self._file = Path(target).open("a", encoding="utf-8")  # noqa: SIM115
        else:
            self._file = target
        self._writing = threading.Lock()

    def __call__(self, event: Event) -> None:
        line = json_line(event)
        with self._writing:
            if not self._file.closed:
                self._file.write(line + "\n")
                if isinstance(event, Ended):
                    self._file.flush()

    def close(self) -> None:
        with self._writing:
            if self._own:
                self._file.close()
            else:
                self._file.flush()


def json_line(event: Event) -> str:
    """An event as one line of JSON."""
    return json.dumps(event.to_dict(), ensure_ascii=False, separators=(",", ":"))
