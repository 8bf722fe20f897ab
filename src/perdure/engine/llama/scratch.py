"""Memory for states on their way into or out of a context."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.engine.llama.native.declarations import Functions
from perdure.engine.parallel import spread

Bytes = NDArray[np.uint8]

_PIECE = 16 << 20


class Scratch:
    """A buffer that is used again, since fresh pages cost more than the copy into them.

    Always holds: no more than `limit` bytes are kept between calls; larger states get separate memory for as
    long as they are on their way. Where a device offers pinned memory that is what is kept: copies then run
    at the speed of the bus.
    """

    def __init__(self, lib: Functions, device: Any, limit: int) -> None:
        self._lib = lib
        self._pinned = lib.ggml_backend_dev_host_buffer_type(device) if device else None
        self._buffer: Bytes = np.empty(0, np.uint8)
        self._limit = limit

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def limit(self, nbytes: int) -> None:
        self._limit = nbytes
        if len(self._buffer) > nbytes:
            self._buffer = np.empty(0, np.uint8)

    def room(self, size: int) -> Bytes:
        """Memory of `size` bytes, good until the next call."""
        if size > self._limit:
            return np.empty(size, np.uint8)
        if len(self._buffer) < size:
            self._buffer = np.empty(0, np.uint8)
            self._buffer = self._new(min(size + size // 4, self._limit))
        return self._buffer[:size]

    def prepare(self, size: int) -> None:
        """Have room for a state of `size` bytes, as far as the limit goes, with its pages there already."""
        self.room(min(size, self._limit))[::4096] = 0

    def staged(self, state: Bytes) -> Bytes:
        """The same bytes where a device reads them fastest."""
        if (
            not self._pinned
            or not _PIECE < state.nbytes <= self._limit
            or np.shares_memory(state, self._buffer)
        ):
            return state
        room = self.room(state.nbytes)
        places = range(0, state.nbytes, _PIECE)
        for _ in spread(
            lambda at: np.copyto(room[at : at + _PIECE], state[at : at + _PIECE]), places, state.nbytes
        ):
            pass
        return room

    def _new(self, size: int) -> Bytes:
        if self._pinned and (handle := self._lib.ggml_backend_buft_alloc_buffer(self._pinned, size)):
            return _PinnedBuffer(self._lib, handle, size).array()
        return np.empty(size, np.uint8)


class _PinnedBuffer:
    """Owns one buffer of the library. It goes with the last array over it."""

    def __init__(self, lib: Functions, handle: Any, size: int) -> None:
        self._lib = lib
        self._handle = handle
        self._size = size

    def array(self) -> Bytes:
        memory = (ctypes.c_uint8 * self._size).from_address(
            self._lib.ggml_backend_buffer_get_base(self._handle)
        )
        memory.owner = self  # type: ignore[attr-defined]
        return np.frombuffer(memoryview(memory), np.uint8)

    def __del__(self) -> None:
        self._lib.ggml_backend_buffer_free(self._handle)
