"""Loads, uses and leaves the library: `python -m promises.quiet WHAT MODEL`."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import sys
from pathlib import Path


class Watch:
    """An audit hook that notes the environment at the moment when the library is about to be loaded."""

    def __init__(self) -> None:
        self.seen: dict[str, object] = {}

    def __call__(self, event: str, args: tuple[object, ...]) -> None:
        is_library = any(name in str(args[0]) for name in ("ggml", "xllamacpp"))
        if event == "ctypes.dlopen" and is_library and not self.seen:
            self.seen["loaded before"] = "libgomp" in Path("/proc/self/maps").read_text()
            getenv = ctypes.CDLL(None).getenv
            getenv.restype = ctypes.c_char_p
            value = getenv(b"GOMP_SPINCOUNT")
            self.seen["spin"] = value.decode() if value else None


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
        sys.addaudithook(watch)
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
