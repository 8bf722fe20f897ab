"""A plugin for pytest: has the row kernels loaded from the file that `PERDURE_TEST_ROW_KERNELS` names."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_LIBRARY = Path(os.environ["PERDURE_TEST_ROW_KERNELS"])
_load = ctypes.CDLL


class _Redirected(ctypes.CDLL):
    def __init__(self, name: object, *args: object, **keywords: object) -> None:
        chosen = _LIBRARY if Path(str(name)).name == _LIBRARY.name else name
        super().__init__(str(chosen) if chosen is not None else None, *args, **keywords)  # type: ignore[arg-type]


ctypes.CDLL = _Redirected  # type: ignore[misc]
