"""Loads, uses and leaves the library: `python -m promises.quiet WHAT MODEL`."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class Watch(importlib.abc.MetaPathFinder):
    """Notes the environment at the moment when the library is about to be loaded."""

    def __init__(self) -> None:
        self.seen: dict[str, object] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "llama_cpp" and not self.seen:
            getenv = ctypes.CDLL(None).getenv
            getenv.restype = ctypes.c_char_p
            value = getenv(b"GOMP_SPINCOUNT")
            self.seen["spin"] = value.decode() if value else None
            self.seen["loaded before"] = "libgomp" in Path("/proc/self/maps").read_text()
        return None


class Lines(logging.Handler):
    """Keeps what the library says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def use(path: str) -> None:
    import perdure

    model = perdure.Model(path)
    with model.context(n_ctx=64, n_seq=2, threads=1) as ctx:
        ctx.decode([1, 2, 3])
        ctx.logits().argmax()
        ctx.fork(0, 1)
        with contextlib.suppress(perdure.PerdureError):
            ctx.decode([-1])
    for refused in (__file__, str(Path(path).with_name("llama-lora.gguf"))):
        with contextlib.suppress(perdure.PerdureError):
            perdure.Model(refused)
    # Left open on purpose: the interpreter's end must be as quiet.
    sys.kept = [model, model.context(n_ctx=64, threads=1)]  # type: ignore[attr-defined]


def main(what: str, path: str) -> None:
    if what == "spin":
        watch = Watch()
        sys.meta_path.insert(0, watch)
        use(path)
        print(json.dumps(watch.seen | {"environ": os.environ.get("GOMP_SPINCOUNT")}))
    elif what == "log":
        handler = Lines()
        logger = logging.getLogger("perdure.llama")
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        use(path)
        print(json.dumps(handler.lines))
    else:
        use(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
