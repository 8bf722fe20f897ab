"""libmtmd, llama.cpp's encoder of images and sounds: where it is found, and its calls.

    the folder of the engine's library    libmtmd beside libllama, as one has that is compiled here
    the package `xllamacpp`               one file with all of it (`pip install "perdure[images]"`)

It is loaded in a separate process: libmtmd ends its process where it meets what it did not expect. Layouts
of structs are believed where their defaults are those that are known.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint8, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure import EngineError, EngineLibraryError, InvalidInputError, ModelFileError
from perdure.ext.images import fetched
from perdure.ext.images.media import Medium, Piece
from perdure.spi.libraries import LibrarySource, open_files

_MARKER = b"<__media__>"
_ROOM = 128
"""Bytes behind the known fields of a struct that is passed by value, as the last argument: a later version
may have more."""
_NO_LOAD_MODE = 0
"""Weights are neither mapped nor read."""


def find_library(engine: Path | None) -> Path:
    """The library's file: that of the engine's folder, else that of the package."""
    if (path := fetched.engine_library(engine)) is not None:
        return path
    package = fetched.module_folder("xllamacpp")
    for path in sorted(package.glob("xllamacpp*")) if package is not None else ():
        if path.suffix in (".so", ".pyd"):
            return path
    raise fetched.missing("libmtmd")


class _ModelParams(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("devices", "overrides")),
        *((name, c_int32) for name in ("n_gpu_layers", "split_mode", "load_mode", "lazy_mode", "main_gpu")),
        *((name, c_void_p) for name in ("tensor_split", "progress", "progress_data", "kv_overrides")),
        *((name, c_bool) for name in ("vocab_only", "check", "extra", "no_host", "no_alloc", "mtp")),
        ("room", c_uint8 * _ROOM),
    ]


class _MtmdParams(ctypes.Structure):
    _fields_ = [
        ("use_gpu", c_bool),
        ("device", c_void_p),
        ("print_timings", c_bool),
        ("n_threads", c_int),
        ("image_marker", c_char_p),
        ("media_marker", c_char_p),
        ("flash", c_int),
        ("warmup", c_bool),
        ("min_tokens", c_int),
        ("max_tokens", c_int),
        ("room", c_uint8 * _ROOM),
    ]


class _InputText(ctypes.Structure):
    _fields_ = [("text", c_char_p), ("length", c_size_t), ("special", c_bool), ("parse", c_bool)]


class _DecoderPosition(ctypes.Structure):
    _fields_ = [(name, c_uint32) for name in ("t", "x", "y", "z")]


_LOG = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_WARNING = 3
"""The level from which on what the library says is kept as a reason."""


class Mtmd:
    """A projector with the model that it belongs to, of which no weights are loaded."""

    def __init__(
        self, library: Path, projector: Path, model: Path, *, threads: int, gpu: bool = True
    ) -> None:
        self._said: list[str] = []
        try:
            # What it needs of the engine's folder, as the engine loads it.
            self._parts = open_files(LibrarySource(kind="own", folder=library.parent, version=""))
            self._lib = ctypes.CDLL(str(library))
            self._check_layouts()
        except (OSError, AttributeError) as error:
            raise EngineLibraryError(f"{library} cannot be used for images: {error}") from None
        self.version = self.call("llama_version", c_char_p)().decode()
        self._sink = _LOG(self._hear)
        for name in ("llama_log_set", "mtmd_log_set", "mtmd_helper_log_set"):
            if hasattr(self._lib, name):
                self.call(name, None, _LOG, c_void_p)(self._sink, None)
        if hasattr(self._lib, "ggml_backend_load_all_from_path"):
            # Backends that are files beside the library.
            self.call("ggml_backend_load_all_from_path", None, c_char_p)(os.fsencode(library.parent))
        self.call("llama_backend_init", None)()
        self._model = self._load_model(model)
        self.handle = self._load_projector(projector, threads, gpu)
        self.width = int(self.call("llama_model_n_embd_inp", c_int32, c_void_p)(self._model))
        self.two_dimensions = bool(self.call("mtmd_decode_use_mrope", c_bool, c_void_p)(self.handle))
        self.images = bool(self.call("mtmd_support_vision", c_bool, c_void_p)(self.handle))
        self.sounds = bool(self.call("mtmd_support_audio", c_bool, c_void_p)(self.handle))
        self.sample_rate = 0
        if self.sounds:
            self.sample_rate = int(self.call("mtmd_get_audio_sample_rate", c_int, c_void_p)(self.handle))

    def encode_image(self, pixels: NDArray[np.uint8]) -> list[Piece]:
        """What stands for an image in a prompt."""
        with self.chunks(self.bitmap(pixels.shape[1], pixels.shape[0], pixels.ctypes.data)) as chunks:
            return [self._piece(chunk) for chunk in chunks]

    def count_image(self, width: int, height: int) -> int:
        """How many tokens an image of this size will be."""
        with self.chunks(self.bitmap(width, height, None)) as chunks:
            return sum(map(self._length, chunks))

    def encode_sound(self, samples: NDArray[np.float32]) -> list[Piece]:
        """What stands for a sound in a prompt; its samples are those of one channel at `sample_rate`."""
        with self.chunks(self._sound(samples)) as chunks:
            return [self._piece(chunk) for chunk in chunks]

    def count_sound(self, samples: NDArray[np.float32]) -> int:
        """How many tokens a sound will be."""
        with self.chunks(self._sound(samples)) as chunks:
            return sum(map(self._length, chunks))

    def _sound(self, samples: NDArray[np.float32]) -> Any:
        new = self.call("mtmd_bitmap_init_from_audio", c_void_p, c_size_t, c_void_p)
        return new(len(samples), samples.ctypes.data)

    def bitmap(self, width: int, height: int, pixels: int | None) -> Any:
        return self.call("mtmd_bitmap_init", c_void_p, c_uint32, c_uint32, c_void_p)(width, height, pixels)

    @contextmanager
    def chunks(self, bitmap: Any) -> Iterator[list[Any]]:
        """The chunks that the library makes of a bitmap, as long as this is open. The bitmap goes with it."""
        chunks = self.call("mtmd_input_chunks_init", c_void_p)()
        try:
            # No token that opens a prompt: the marker is all of the text.
            text = _InputText(_MARKER, len(_MARKER), False, True)
            bitmaps = (c_void_p * 1)(bitmap)
            tokenize = self.call("mtmd_tokenize", c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_size_t)
            self._said.clear()
            if tokenize(self.handle, chunks, ctypes.byref(text), bitmaps, 1):
                raise InvalidInputError(f"the encoder cannot take this file{self._reason()}")
            size = self.call("mtmd_input_chunks_size", c_size_t, c_void_p)(chunks)
            get = self.call("mtmd_input_chunks_get", c_void_p, c_void_p, c_size_t)
            yield [get(chunks, at) for at in range(size)]
        finally:
            self.call("mtmd_input_chunks_free", None, c_void_p)(chunks)
            self.call("mtmd_bitmap_free", None, c_void_p)(bitmap)

    def _length(self, chunk: Any) -> int:
        return int(self.call("mtmd_input_chunk_get_n_tokens", c_size_t, c_void_p)(chunk))

    def _piece(self, chunk: Any) -> Piece:
        kind = self.call("mtmd_input_chunk_get_type", c_int, c_void_p)(chunk)
        n = self._length(chunk)
        if kind == 0:
            length = c_size_t()
            tokens = self.call("mtmd_input_chunk_get_tokens_text", POINTER(c_int32), c_void_p, c_void_p)(
                chunk, ctypes.byref(length)
            )
            return [int(token) for token in tokens[: length.value]]
        grid = self._grid(chunk, n) if kind == 1 and self.two_dimensions else (0, 0)
        self._said.clear()
        if self.call("mtmd_encode_chunk", c_int32, c_void_p, c_void_p)(self.handle, chunk):
            raise EngineError(f"the encoder failed{self._reason()}")
        rows = self.call("mtmd_get_output_embd", POINTER(c_float), c_void_p)(self.handle)
        return Medium(
            kind="image" if kind == 1 else "audio",
            rows=np.ctypeslib.as_array(rows, (n, self.width)).copy(),
            n_pos=int(self.call("mtmd_input_chunk_get_n_pos", c_int32, c_void_p)(chunk)),
            grid=grid,
            causal=not self.call("mtmd_decode_use_non_causal", c_bool, c_void_p, c_void_p)(
                self.handle, chunk
            ),
        )

    def _grid(self, chunk: Any, n: int) -> tuple[int, int]:
        """Tokens across and down. Positions that do not follow from them are refused: rows can be kept, but
        not those positions."""
        tokens = self.call("mtmd_input_chunk_get_tokens_image", c_void_p, c_void_p)(chunk)
        across = int(self.call("mtmd_image_tokens_get_nx", c_size_t, c_void_p)(tokens))
        down = int(self.call("mtmd_image_tokens_get_ny", c_size_t, c_void_p)(tokens))
        at = self.call("mtmd_image_tokens_get_decoder_pos", _DecoderPosition, c_void_p, c_int32, c_size_t)
        for index in range(n):
            place = at(tokens, 7, index)
            if (place.t, place.y, place.x) != (7, 7 + index // across, 7 + index % across):
                raise EngineError("this model gives images positions that perdure does not know yet")
        return across, down

    # Loading.

    def _check_layouts(self) -> None:
        params = self.call("mtmd_context_params_default", _MtmdParams)()
        known = (_MARKER, 4, -1, -1, True)
        if (
            params.media_marker,
            params.n_threads,
            params.min_tokens,
            params.max_tokens,
            params.warmup,
        ) != known:
            raise AttributeError("mtmd_context_params is laid out in another way")
        model = self.call("llama_model_default_params", _ModelParams)()
        if (model.load_mode, model.lazy_mode, model.vocab_only, model.extra) != (-1, 1, False, True):
            raise AttributeError("llama_model_params is laid out in another way")

    def _load_model(self, path: Path) -> Any:
        params = self.call("llama_model_default_params", _ModelParams)()
        # All figures, and no weights.
        params.n_gpu_layers, params.no_alloc, params.load_mode = 0, True, _NO_LOAD_MODE
        load = self.call("llama_model_load_from_file", c_void_p, c_char_p, _ModelParams)
        if not (model := load(os.fsencode(path), params)):
            raise ModelFileError(f"the encoder cannot read {path.name}{self._reason()}")
        return model

    def _load_projector(self, path: Path, threads: int, gpu: bool) -> Any:
        params = self.call("mtmd_context_params_default", _MtmdParams)()
        params.n_threads, params.warmup, params.print_timings = threads, False, False
        params.use_gpu = gpu
        load = self.call("mtmd_init_from_file", c_void_p, c_char_p, c_void_p, _MtmdParams)
        self._said.clear()
        if not (handle := load(os.fsencode(path), self._model, params)):
            raise ModelFileError(f"{path.name} is no projector for this model{self._reason()}")
        return handle

    def call(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function = self._lib[name]
        function.restype, function.argtypes = result, list(arguments)
        return function

    def _hear(self, level: int, text: bytes, _: object) -> None:
        if level >= _WARNING and len(self._said) < 16:
            self._said.append(text.decode("utf-8", "replace").strip())

    def _reason(self) -> str:
        said = [each for each in self._said if each]
        return f": {said[-1]}" if said else ""
