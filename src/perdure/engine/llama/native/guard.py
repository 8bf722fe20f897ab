"""Checks of a loaded library before it is trusted: its version, its functions, the layout of its structs."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_uint8
from pathlib import Path
from typing import Any

from perdure.engine.llama.native.declarations import (
    NEXT,
    OLDEST,
    Functions,
    ModelParams,
    ThreadpoolParams,
    numbers,
)
from perdure.errors import EngineLibraryError

_IN_REGISTERS = 16
"""Bytes of a struct that is returned in registers; a larger one is written to memory."""

_MODEL = {
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "use_extra_bufts": True,
}
_CONTEXT = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": -1.0,
    "yarn_beta_fast": -1.0,
    "yarn_beta_slow": -1.0,
    "defrag_thold": -1.0,
    "type_k": 1,
    "type_v": 1,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
}
_THREADS = {"n_threads": 3, "poll": 50}


def check(lib: Functions, folder: Path) -> None:
    """Raise `EngineLibraryError` where `lib` is not what the declarations say.

    A struct of another layout would be misread without a word, or end the process. A version that is newer
    than any that is known is held to the newest declarations: it may be used where all is as they say.
    """
    if lib.missing:
        raise _refused(
            folder, f"it lacks {len(lib.missing)} functions, such as {', '.join(sorted(lib.missing)[:3])}"
        )
    if not numbers(lib.version) >= OLDEST:
        raise _refused(folder, f"it is version {lib.version}")
    for name, layout, expected in (
        ("llama_model_default_params", ModelParams, _MODEL),
        ("llama_context_default_params", lib.layout.context_params, _CONTEXT),
    ):
        _compare(folder, name, layout, expected, _call(lib, name, layout))
    threads = _padded(ThreadpoolParams)()
    lib.ggml_threadpool_params_init(ctypes.cast(ctypes.byref(threads), ctypes.POINTER(ThreadpoolParams)), 3)
    _compare(folder, "ggml_threadpool_params_init", ThreadpoolParams, _THREADS, threads)


def is_newer(version: str) -> bool:
    """Whether a version is newer than any that there are declarations for."""
    return numbers(version) >= NEXT


def _call(lib: Functions, name: str, layout: type[Structure]) -> Structure:
    address = ctypes.cast(getattr(lib, name), ctypes.c_void_p).value
    assert address is not None
    struct: Structure = ctypes.CFUNCTYPE(_padded(layout))(address)()
    return struct


def _padded(layout: type[Structure]) -> type[Structure]:
    """`layout` with room behind it: what a larger struct writes must fall on memory of ours."""
    if ctypes.sizeof(layout) <= _IN_REGISTERS:
        return layout
    fields = [*layout._fields_, ("_beyond", c_uint8 * 512)]
    return type(f"Padded{layout.__name__}", (Structure,), {"_fields_": fields})


def _compare(
    folder: Path, name: str, layout: type[Structure], expected: dict[str, Any], struct: Structure
) -> None:
    for field, kind, *_ in layout._fields_:
        value = getattr(struct, field)
        if not isinstance(value, (bool, int, float, type(None))):
            if isinstance(value, ctypes.Array):
                continue
            # A pointer or a callback: all of them are NULL.
            value = ctypes.cast(value, ctypes.c_void_p).value
        default = expected.get(field, 0)
        if (value or 0) != default or _raw(struct, layout, field, kind) > 1:
            raise _refused(
                folder,
                f"its structs are laid out otherwise: {name} gives {field} = {value!r}, not {default!r}",
            )


def _raw(struct: Structure, layout: type[Structure], field: str, kind: Any) -> int:
    """The byte behind a bool, which must be 0 or 1; 0 for other kinds."""
    if kind is not ctypes.c_bool:
        return 0
    offset = getattr(layout, field).offset
    return c_uint8.from_buffer(struct, offset).value


def _refused(folder: Path, reason: str) -> EngineLibraryError:
    versions = f"{'.'.join(map(str, OLDEST))} to below {'.'.join(map(str, NEXT))}"
    return EngineLibraryError(
        f"the llama.cpp library at {folder} cannot be used: {reason}. perdure is written for versions "
        f"{versions}: `perdure engine install` fetches one that fits",
        tried=(f"{folder}: {reason}",),
    )
