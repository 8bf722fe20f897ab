"""A folder of an MLX model, and the contexts opened on it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Never

import mlx.core as mx

from perdure import (
    Capabilities,
    ClosedError,
    Context,
    Embedder,
    Identity,
    InvalidInputError,
    MemorySpec,
    ModelFileError,
    OutOfMemoryError,
    Pooling,
)
from perdure.ext.mlx.adapters import read_adapter
from perdure.ext.mlx.caches import made_for
from perdure.ext.mlx.core import MlxCore
from perdure.ext.mlx.folder import read_folder
from perdure.ext.mlx.packages import versions
from perdure.ext.mlx.tokenizer import MlxTokenizer
from perdure.ext.mlx.weights import MlxWeights
from perdure.spi.base import (
    N_CTX,
    SLOTS,
    ContextConfig,
    check_whole,
    file_version,
    is_whole,
    refuse_unknown,
    system,
)
from perdure.spi.engine import CHUNK, Adapter, FileModel, ModelInfo

MAX_SEQUENCES = 256
_ROWS = 16
_N_BATCH = 512
_LONGEST = 32_768
"""Tokens of a context that nobody chose the length of, at most."""
_BITS = {"f16": 0, "f32": 0, "bf16": 0, "q8_0": 8, "q4_0": 4}
"""Of a number in the cache; 0 is the type that the model computes in."""


class MlxModel(FileModel):
    """Weights and a vocabulary, read from a folder.

    It may be closed or dropped before its contexts: the weights go with the last of them.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, progress: Callable[[float], bool] | None = None
    ) -> None:
        self.path = Path(path).expanduser().absolute()
        self._folder = read_folder(self.path)
        self._versions = [file_version(file) for file in self._folder.files]
        weights = MlxWeights(self._folder)
        self._weights: MlxWeights | None = weights
        self._text = MlxTokenizer(self._folder, weights.n_vocab)
        self.n_vocab = weights.n_vocab
        self._memory = weights.memory()
        if progress is not None:
            progress(1.0)

    # What it is.

    @property
    def memory(self) -> MemorySpec:
        return self._memory

    @functools.cached_property
    def metadata(self) -> Mapping[str, str]:
        """What the config says, values as text."""
        config = self._folder.config
        return MappingProxyType({name: str(value)[:1000] for name, value in sorted(config.items())})

    @functools.cached_property
    def info(self) -> ModelInfo:
        folder = self._folder
        count = folder.parameters
        label = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M" if count >= 1e6 else ""
        return ModelInfo(
            architecture=str(folder.config["model_type"]),
            name=str(folder.config.get("_name_or_path") or self.path.name),
            size_label=label,
            quantisation=folder.quantisation,
            file_format="mlx",
            nbytes=folder.nbytes,
            n_ctx_train=self.n_ctx_train,
            template=folder.template,
            tool_template=folder.tool_template,
            bos=self._text.text_of(self._text.bos),
            eos=self._text.text_of(self._text.eos),
            covers_text=self._text.covers_text,
        )

    @functools.cached_property
    def digest(self) -> str:
        """A SHA-256 over all files of the folder that count."""
        digest = self._folder.digest()
        if [file_version(file) for file in self._folder.files] != self._versions:
            raise ModelFileError(f"{self.path} has changed since it was loaded; open it again")
        return digest

    @property
    def n_ctx_train(self) -> int:
        positions = self._folder.text.get("max_position_embeddings")
        return positions if is_whole(positions) else 0

    @property
    def bos(self) -> int | None:
        return self._text.bos

    @property
    def eos(self) -> int | None:
        return self._text.eos

    @property
    def closed(self) -> bool:
        return self._weights is None

    # Contexts.

    def adapter(self, path: str, *, layers: tuple[int, int] | None = None) -> Adapter:
        """A LoRA or a DoRA for this model: a folder as mlx-lm writes it. A DoRA goes alone, at scale 1."""
        weights = self._open()
        if layers is not None:
            raise InvalidInputError("an adapter for MLX has no layers to choose")
        with weights.lock:
            return read_adapter(path, weights.model, weights)

    def context(
        self,
        *,
        n_ctx: int = N_CTX,
        n_seq: int = 1,
        shared: bool = False,
        n_batch: int = _N_BATCH,
        threads: int | None = None,
        k_type: str = "f16",
        v_type: str = "f16",
        swa_full: bool = True,
        **unknown: Never,
    ) -> Context:
        """A context of `n_seq` sequences that hold `n_ctx` tokens each.

        Memory is taken as sequences grow, and forks share it until one of them goes on: `shared` changes
        nothing. MLX chooses its `threads` itself. `k_type` and `v_type` are one type: f16 (the type that the
        model computes in), q8_0 or q4_0 (MLX's own quantisation of 8 or 4 bits). Without `swa_full` the rows
        that have slid out of a window are given up.
        """
        refuse_unknown(unknown, self.context)
        weights = self._open()
        check_whole("n_seq", n_seq, 1, MAX_SEQUENCES)
        check_whole("n_ctx", n_ctx, 1, (1 << 31) // n_seq)
        check_whole("n_batch", n_batch, 1, 1 << 16)
        check_whole("threads", 1 if threads is None else threads, 1, 512)
        bits, group = self._quantised(k_type, v_type)
        n_batch = max(min(n_batch, n_ctx), n_seq)
        rows = max(min(_ROWS, n_batch), n_seq)
        core = MlxCore(
            weights,
            make=lambda: made_for(weights.model, keeps_window=swa_full, bits=bits, group=group),
            keeps_window=swa_full,
            n_seq=n_seq,
            n_ctx=n_ctx,
        )
        memory, layout = core.layout.memory, str(core.layout)
        self._check_room(n_ctx * n_seq * core.layout.row_bytes)

        def identity(adapters: str) -> Identity:
            installed = versions()
            return Identity(
                weights=self.digest,
                tokenizer="of the folder",
                template="of the folder",
                adapters=adapters,
                k_type=f"{bits or 'own'} bits",
                v_type=f"{bits or 'own'} bits",
                attention="mlx",
                rope="of the folder",
                window=memory.identity,
                layout=layout,
                engine=f"mlx {installed['mlx']}, mlx-lm {installed['mlx-lm']}",
                kernels=_kernels(),
                devices=str(mx.default_device()),
            )

        return Context(
            core,
            memory=memory,
            capabilities=Capabilities(
                truncate=memory.cuts, shift=False, abort=False, shared=shared, max_outputs=rows
            ),
            identity=identity,
            n_ctx=n_ctx,
            n_seq=n_seq,
            n_batch=n_batch,
        )

    def embedder(self, *, n_ctx: int = N_CTX, threads: int | None = None) -> Embedder:
        """A context that makes vectors of texts of up to `n_ctx` tokens: the mean of the last layer."""
        weights = self._open()
        check_whole("n_ctx", n_ctx, 1, 1 << 31)
        if not weights.shows_hidden:
            raise InvalidInputError(
                f"mlx-lm's class of {self.info.architecture} does not show its hidden states: it makes no "
                "vectors"
            )
        core = MlxCore(
            weights,
            make=lambda: made_for(weights.model),
            keeps_window=True,
            n_seq=1,
            n_ctx=n_ctx,
            embeds=True,
        )
        return Embedder(core, pooling=Pooling.MEAN, n_ctx=n_ctx, chunk=min(CHUNK, n_ctx))

    def spare_sequences(self, n_ctx: int, config: ContextConfig) -> int:
        """It computes in the machine's own memory, which a GPU shares."""
        return 0

    def fit_context(self, n_ctx: int | None, slots: int | None, config: ContextConfig) -> tuple[int, int]:
        """Tokens of a request and requests at once that fit into half of what is free."""
        check_whole("slots", 1 if slots is None else slots, 1, MAX_SEQUENCES)
        check_whole("n_ctx", 1 if n_ctx is None else n_ctx, 1, 1 << 31)
        chosen = n_ctx or min(self.n_ctx_train or N_CTX, _LONGEST)
        count = slots or SLOTS
        free = (system.available_memory() or 1 << 33) // 2
        row = self._open().row_bytes
        while count > 1 and slots is None and chosen * count * row > free:
            count -= 1
        while n_ctx is None and chosen > 1024 and chosen * count * row > free:
            chosen //= 2
        return chosen, count

    def close(self) -> None:
        """Take no more calls. The weights stay until the last context is closed."""
        self._weights = None

    def __repr__(self) -> str:
        return f"<MlxModel {self.path.name}{', closed' if self.closed else ''}>"

    # Inside.

    def _open(self) -> MlxWeights:
        if self._weights is None:
            raise ClosedError(f"the model {self.path.name} is closed")
        return self._weights

    def _tokenizer(self) -> MlxTokenizer:
        self._open()
        return self._text

    def _check_room(self, nbytes: int) -> None:
        """Memory is taken as sequences grow: what could never be there is refused now."""
        total = system.physical_memory()
        if total is not None and nbytes > total:
            raise OutOfMemoryError(
                f"the cache of this context would grow to {nbytes} bytes, the machine has {total}: "
                "try a smaller n_ctx or n_seq"
            )

    def _quantised(self, k_type: object, v_type: object) -> tuple[int, int]:
        """Bits and group size of the cache; 0 where it is plain."""
        for name, value in (("k_type", k_type), ("v_type", v_type)):
            if not isinstance(value, str) or value not in _BITS:
                raise InvalidInputError(f"{name} is one of {', '.join(_BITS)} on MLX, got {value!r}")
        bits = _BITS[str(k_type)]
        if bits != _BITS[str(v_type)]:
            raise InvalidInputError(f"K and V have one type on MLX, got {k_type} and {v_type}")
        if not bits:
            return 0, 0
        widths = self._open().widths
        group = next((size for size in (64, 32) if all(width % size == 0 for width in widths)), 0)
        if not group or not widths:
            raise InvalidInputError(
                f"a quantised cache needs rows of a multiple of 32 numbers a head; this model has "
                f"{sorted(widths)}. Leave kv_type out"
            )
        return bits, group


@functools.cache
def _kernels() -> str:
    """What computes, as far as it changes the last bits: the processor, by what it can do."""
    try:
        named = str(mx.device_info().get("device_name", ""))
    except (AttributeError, RuntimeError, TypeError):
        named = ""
    flags = " ".join(sorted(system.cpu_flags()))
    return f"{system.architecture()} {named} {flags}".strip()
