"""llama.cpp as `xllamacpp` builds it, called like ours: what llama-server has to work with."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

from perdure.engine.llama.native import library
from perdure.engine.llama.native.declarations import FUNCTIONS, Functions, LogCallback

_SETTINGS = {
    "llama_model_default_params": "llama_model_load_from_file",
    "llama_context_default_params": "llama_init_from_model",
}
"""What gives the settings of something, and what makes it by them."""


class Foreign(Functions):
    """The functions of another build behind our declarations.

    Always holds: settings are laid out as that build has them, or it is not made. Its version may have a
    field that ours has not, so layouts are tried until its defaults read like ours.
    """

    def __init__(self) -> None:
        self.handle = ctypes.CDLL(str(_path()))
        super().__init__([self.handle])
        ours = library.load()
        for defaults, make in _SETTINGS.items():
            give = getattr(self, defaults)
            give.restype = _layout(give, getattr(ours, defaults)())
            getattr(self, make).argtypes = [FUNCTIONS[make][1][0], give.restype]
        self.llama_log_set(ctypes.cast(ctypes.CDLL(None).getpid, LogCallback), None)
        self.llama_backend_init()


def _path() -> Path:
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise RuntimeError("xllamacpp is not installed: pip install 'perdure[bench]'")
    return next(Path(spec.origin).parent.glob("xllamacpp*.so"))


def _layout(give: Any, ours: Any) -> type[ctypes.Structure]:
    """Our fields, with one more word among them where that build has one."""
    fields = list(ours._fields_)
    for at in range(len(fields), -1, -1):
        more = [("_more", ctypes.c_void_p)]
        # What it writes past the last field must fall on memory of ours.
        laid_out = [*fields[:at], *more, *fields[at:], ("_tail", ctypes.c_uint8 * 256)]
        layout = type("Settings", (ctypes.Structure,), {"_fields_": laid_out})
        give.restype = layout
        if _plain(give(), fields) == _plain(ours, fields):
            return layout
    raise RuntimeError("xllamacpp and our library have settings that are too different")


def _plain(settings: Any, fields: list[tuple[str, Any]]) -> dict[str, Any]:
    values = {name: getattr(settings, name) for name, _ in fields}
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}
