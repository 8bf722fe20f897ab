"""The child process that makes an analysis: `python -m perdure.ext.inspection.child`.

It reads one line and writes some:

    {"path": "model.gguf", "tokens": [1, 9112, …], "prompt": 31, "title": "work, turn 2", …}

    {"stage": "reading", "done": 64, "total": 212}
    {"page": "<!doctype html>…", "notes": ["No logit lens: …"]}     or
    {"error": "OutOfMemoryError", "message": "…"}

It takes cores that nobody else wants, and no GPU; it does not outlive its parent.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

from perdure import PerdureError
from perdure.spi.base import processes, system

_HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES", "GGML_NO_BACKTRACE")
"""Devices are for replies: also a model that is not on one would have buffers there."""


def main() -> None:
    for each in (signal.SIGINT, *processes.ending_signals()):
        signal.signal(each, signal.SIG_IGN)
    processes.die_with_parent()
    processes.leave_no_core()
    processes.yield_to_others()
    for name in _HIDDEN:
        os.environ[name] = "1" if name == "GGML_NO_BACKTRACE" else ""
    # What anything else prints is for the log.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.WARNING)
    job = json.loads(sys.stdin.readline())
    try:
        _tell(out, _made(job, out))
    except PerdureError as error:
        _tell(out, {"error": type(error).__name__, "message": str(error)})


def _made(job: dict[str, Any], out: TextIO) -> dict[str, Any]:
    """The page. What takes long to import is imported here, by its process alone."""
    from perdure import Model
    from perdure.ext.inspection.analysis import ReplyFigures, check_memory, examine
    from perdure.ext.inspection.page import page_of
    from perdure.spi.engine import AdapterTable
    from perdure.spi.models import Sizes, models

    def progress(stage: str, done: int, total: int) -> None:
        _tell(out, {"stage": stage, "done": done, "total": total})

    tokens = job["tokens"]
    check_memory(Sizes.of(models.read_parts(Path(job["path"]))), len(tokens))
    progress("model", 0, 0)
    figures = job["figures"]
    with Model(job["path"], gpu_layers=0) as model:
        adapters = AdapterTable(model.adapter).resolve(job["adapters"], tokens)
        analysis = examine(
            model,
            tokens,
            prompt=job["prompt"],
            title=job["title"],
            figures=ReplyFigures(
                tiers=tuple(map(tuple, figures["tiers"])),
                tier_seconds=figures["tier_seconds"],
                seconds=tuple(map(tuple, figures["seconds"])),
            ),
            adapters=adapters,
            rope=tuple(job["rope"]),
            # The others are for replies, if there are several.
            threads=max(1, system.usable_cores() // 2),
            progress=progress,
        )
    progress("page", 0, 0)
    return {"page": page_of(analysis), "notes": list(analysis.notes)}


def _tell(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
