"""A loaded model file: the native object and its one owner."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure import system
from perdure.engine.llama.native import library
from perdure.engine.llama.native.declarations import BufferOverride, ProgressCallback
from perdure.engine.llama.native.log_sink import captured_errors
from perdure.engine.llama.offload import Offload
from perdure.errors import ModelLoadError, OutOfMemoryError
from perdure.models.placement import is_read

_NO_MEMORY = re.compile(r"out of memory|OutOf\w*Memory|(?:unable|failed) to allocate|allocation .*failed")
"""How backends say that a device has no room."""
_MAX_DEVICES = 128
"""The library reads as many shares as it may have devices, which is fewer."""
_READ = 0
"""How a file is loaded: read into memory, not mapped."""


def _experts_here(lib: Any, layers: int) -> Any:
    """What keeps the experts of the first layers in the machine's memory; None where none stay."""
    if not layers:
        return None
    here = lib.ggml_backend_cpu_buffer_type()
    patterns = [rf"blk\.{layer}\.ffn_\w+_exps".encode() for layer in range(layers)]
    return (BufferOverride * (layers + 1))(*(BufferOverride(pattern, here) for pattern in patterns))


class _Pages:
    """The memory that the library takes for weights: those that it lays out anew, and all where they are read
    rather than mapped. All of it is gone through at every step, which is faster in pages of 2 MiB."""

    def __init__(self) -> None:
        self._before: set[range] | None = system.own_memory()

    def enlarge(self) -> None:
        """Ask for large pages. The first call comes when the memory was taken and nothing is in it yet."""
        if self._before is None:
            return
        for new in system.own_memory() - self._before:
            system.prefer_large_pages(new.start, len(new))
        self._before = None


class LlamaWeights:
    """Owns one `llama_model`. Contexts hold it too, so it goes with the last of them."""

    def __init__(
        self,
        path: Path,
        *,
        size: int,
        offload: Offload,
        tensor_split: tuple[float, ...] | None = None,
        change: Callable[[Any], None] = lambda params: None,
        progress: Callable[[float], bool] | None,
    ) -> None:
        """`size` is how many bytes the file has, with its other parts. `change` may change the library's own
        parameters."""
        self._lib = lib = library.load()
        self.path = path
        self.handle: Any = None
        self.devices = offload.devices if offload.layers else ()
        """Where its layers are, besides the machine's own memory."""
        params = lib.llama_model_default_params()
        params.n_gpu_layers = offload.layers
        # Held here until the file is loaded: the library only gets pointers.
        handles = (ctypes.c_void_p * (len(offload.devices) + 1))(*(each.handle for each in offload.devices))
        shares = (ctypes.c_float * max(_MAX_DEVICES, len(offload.devices)))(*(tensor_split or ()))
        # An empty list keeps the library from using a GPU at all.
        params.devices = handles
        if tensor_split is not None:
            params.tensor_split = shares
        overrides = _experts_here(lib, offload.cpu_experts)
        if overrides is not None:
            params.tensor_buft_overrides = overrides
        change(params)
        params.use_extra_bufts = library.loaded().extra_buffers
        if not offload.layers and is_read(size):
            params.load_mode = _READ
        pages = _Pages()

        def report(done: float, _: Any) -> bool:
            pages.enlarge()
            return progress is None or progress(done)

        callback = ProgressCallback(report)
        params.progress_callback = callback
        with captured_errors() as reasons:
            self.handle = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self.handle and offload.layers and _NO_MEMORY.search(str(reasons)):
            raise OutOfMemoryError(
                f"{offload.layers} layers of {path.name} could not be put on "
                f"{' and '.join(map(str, offload.devices))}: {reasons}. Choose fewer gpu_layers, or end what "
                "else uses that memory (`nvidia-smi` shows it)"
            )
        if not self.handle:
            raise ModelLoadError(
                f"{library.build()} refused {path.name}: {reasons}. "
                "Its architecture may be newer than this build, or its tensors incomplete"
            )
        self.vocab = lib.llama_model_get_vocab(self.handle)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self.vocab))

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._lib.llama_model_free(self.handle)
            self.handle = None

    @functools.cached_property
    def metadata(self) -> dict[str, str]:
        lib = self._lib
        entries = {}
        for index in range(lib.llama_model_meta_count(self.handle)):
            key = self._text(lib.llama_model_meta_key_by_index, index)
            entries[key] = self._text(lib.llama_model_meta_val_str_by_index, index)
        return entries

    @property
    def causal(self) -> bool:
        """Whether no token looks at those that follow it, as far as the file says."""
        architecture = self.metadata.get("general.architecture", "")
        return self.metadata.get(f"{architecture}.attention.causal", "true") != "false"

    @property
    def experts(self) -> int:
        """How many networks a token's may be chosen from; 0 where there is nothing to choose."""
        architecture = self.metadata.get("general.architecture", "")
        return int(self.metadata.get(f"{architecture}.expert_count", "0"))

    def _text(self, call: Callable[..., int], index: int) -> str:
        size = 1 << 10
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = int(call(self.handle, index, buffer, size))
            if length < size:
                return buffer.raw[: max(0, length)].decode("utf-8", "replace")
            size = length + 1
