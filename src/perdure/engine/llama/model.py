"""A model file on llama.cpp, and the contexts opened on it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Never, Unpack

import numpy as np
from numpy.typing import NDArray

from perdure import models, system
from perdure.checks import check_whole, is_whole
from perdure.config import N_CTX, settings
from perdure.engine.context import Context
from perdure.engine.contract import (
    Adapter,
    Capabilities,
    ContextKeywords,
    ModelInfo,
    PairForm,
    Tokens,
    token_array,
)
from perdure.engine.embedder import CHUNK, Embedder, Pooling
from perdure.engine.key_values import Rope
from perdure.engine.llama.adapters import ControlVector, LlamaAdapter
from perdure.engine.llama.cache_size import TYPES, CacheSize
from perdure.engine.llama.core import SCORE_POOLING, CoreKeywords, LlamaCore
from perdure.engine.llama.first_steps import StepTime, translate
from perdure.engine.llama.guessing.assistant import AssistantCore, check_assistant, refuse_drafter
from perdure.engine.llama.guessing.next_token import NextTokenCore, check_next_token
from perdure.engine.llama.kv_numbers import rope_of
from perdure.engine.llama.native import library
from perdure.engine.llama.offload import (
    CPU_ONLY,
    CpuExperts,
    GpuLayers,
    Offload,
    check_cpu_experts,
    check_gpu_layers,
    check_split,
    choose_devices,
    count_experts,
    plan_again,
    plan_offload,
)
from perdure.engine.llama.preflight import check_header, rope_factors, rope_limit
from perdure.engine.llama.tokenizer import Tokenizer
from perdure.engine.llama.tracer import TracedCore, check_size, traced
from perdure.engine.llama.weights import Weights
from perdure.engine.model import FileModel
from perdure.engine.trace import Trace, checked_layers, checked_parts
from perdure.errors import (
    ClosedError,
    EngineError,
    InvalidInputError,
    ModelFileError,
    ModelLoadError,
    OutOfMemoryError,
)
from perdure.identity import Identity, content_digest, file_version
from perdure.memory import FullAttention, Hybrid, MemorySpec, Recurrent, SlidingWindow
from perdure.models.adapter_file import read_adapter
from perdure.models.card import ASSISTANTS, part_names
from perdure.models.fit import N_BATCH, ROWS, Setup, Sizes
from perdure.models.header import FILE_TYPES, Tensor
from perdure.options import refuse_unknown

log = logging.getLogger("perdure.engine")

MAX_SEQUENCES = 256
MAX_THREADS = 512
_PLAIN = ("f32", "f16", "bf16")
_NO_POOLING = 0
_POOLINGS = {"0": Pooling.MEAN, "1": Pooling.MEAN, "2": Pooling.FIRST, "3": Pooling.LAST}
_COVERING = ("gpt2", "llama")
"""Kinds of tokenizers whose tokens cover all of a text. Others collapse white space, or drop characters."""
_LARGEST = 3.4e38
"""The library's floats end here."""


class Model(FileModel):
    """Weights and a vocabulary, read from a GGUF file.

    It may be closed or dropped before its contexts: the weights go with the last of them.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | None = None,
        *,
        gpu_layers: GpuLayers | None = None,
        devices: Sequence[str] | None = None,
        tensor_split: Sequence[float] | None = None,
        kv_offload: bool = True,
        cpu_experts: CpuExperts | None = None,
        mtp: bool = False,
        cells: int = N_CTX,
        progress: Callable[[float], bool] | None = None,
        **unknown: Never,
    ) -> None:
        """Load a model: a file, a name, or the default one.

        `gpu_layers` is how many layers go to the GPU: "auto" for as many as fit beside a context of `cells`
        tokens; None for PERDURE_GPU_LAYERS, or "auto". `devices` names GPUs, `tensor_split` has a share for
        each. Without `kv_offload` the K/V cache stays in the machine's own memory. `cpu_experts` is of how
        many layers the experts stay there too: "all", "auto" (the default) for as few as must, or a number.
        With `mtp` its next-token layers are loaded too, for contexts that guess by them.
        """
        refuse_unknown(unknown, Model.__init__)
        self.path: Path = models.path(source)
        header = models.read_header(self.path)
        check_header(header)
        architecture = header.text("general.architecture")
        if architecture not in ASSISTANTS:
            refuse_drafter(self.path.name, architecture)
        self._files = [self.path.with_name(name) for name in part_names(self.path.name)]
        self._versions = [_version(file) for file in self._files]
        lib = library.load()
        self._kv_offload = kv_offload
        self._mtp = mtp
        self.sizes = Sizes.of(models.read_parts(self.path))
        """What it takes in memory, as its file says."""
        self._offload = self._plan(gpu_layers, devices, cells, cpu_experts)
        self._say_if_larger_than_free()
        split = check_split(tensor_split, self._offload.devices)
        weights = self._load(split, progress, cells)
        if not lib.llama_model_has_decoder(weights.handle) or lib.llama_model_has_encoder(weights.handle):
            raise ModelLoadError(f"{self.path.name} has an encoder; only decoder models can keep sessions")
        self._weights: Weights | None = weights
        self._text: Tokenizer | None = Tokenizer(weights)
        self.n_vocab = weights.n_vocab
        self._split = split
        self._memory = _memory(lib, weights)
        self._rope_limit = rope_limit(header)
        # Without them the library would end the process over a text.
        self._has_score_head = any(tensor.name.startswith("cls.") for tensor in header.tensors)
        self._said_trained = False
        self._first_steps(weights)

    def _plan(
        self,
        gpu_layers: GpuLayers | None,
        devices: Sequence[str] | None,
        cells: int,
        cpu_experts: CpuExperts | None,
    ) -> Offload:
        """What goes to the GPU. What does not fit is said here, before anything is loaded."""
        layers = settings().gpu_layers if gpu_layers is None else check_gpu_layers(gpu_layers)
        experts = settings().cpu_experts if cpu_experts is None else check_cpu_experts(cpu_experts)
        chosen = choose_devices(library.loaded().device_list, devices)
        here = dataclasses.replace(CPU_ONLY, cpu_experts=count_experts(experts, self.sizes))
        if not chosen or layers == 0:
            if layers not in (0, "auto"):
                problem = library.loaded().gpu_problem
                raise InvalidInputError(
                    f"{layers} layers were to go to a GPU, but the llama.cpp library in use "
                    + (f"cannot use its GPU backend: {problem}. " if problem else "has none: install ")
                    + ("Or " if problem else "one with a GPU backend (perdure engine install), or ")
                    + "leave gpu_layers out"
                )
            return here
        plan = plan_offload(
            layers, chosen, self.sizes, self.path.name, setup=self._setup(cells), cpu_experts=experts
        )
        return plan if plan.layers else dataclasses.replace(here, note=plan.note)

    def _setup(self, cells: int) -> Setup:
        return Setup(n_ctx=max(1, cells), kv_offload=self._kv_offload)

    def _load(
        self, split: tuple[float, ...] | None, progress: Callable[[float], bool] | None, cells: int
    ) -> Weights:
        """The weights, with fewer layers on the GPU where "auto" found more room than there was then."""
        size = sum(file.stat().st_size for file in self._files if file.exists())
        while True:
            plan = self._offload
            try:
                return Weights(
                    self.path,
                    size=size,
                    offload=plan,
                    tensor_split=split,
                    mtp=self._mtp,
                    progress=progress,
                )
            except OutOfMemoryError:
                if not plan.flexible:
                    raise
            names = [device.name for device in plan.devices]
            now = choose_devices(library.loaded().device_list, names)
            self._offload = plan_again(plan, now, self.sizes, self.path.name, setup=self._setup(cells))

    def _first_steps(self, weights: Weights) -> None:
        """Have the driver translate what it must, and say how much slower it is that layers did not fit."""
        plan = self._offload
        measured = None
        if plan.layers and weights.causal and self.info.architecture not in ASSISTANTS:
            params = _params(self._threads(None), True, 0.0, 0.0)
            params.offload_kqv = self._kv_offload
            if library.loaded().translated:
                translate(weights, params, self.path.name)
            if plan.note:
                measured = StepTime.measure(weights, plan.layers, params)
        if plan.note:
            log.warning("%s%s", plan.note, f": {measured}" if measured else "")

    # What it is.

    @property
    def gpu_layers(self) -> int:
        """How many layers are on a GPU; one more than the model has where all are."""
        return self._offload.layers

    @property
    def cpu_experts(self) -> int:
        """Of how many layers the experts are in the machine's own memory, whatever is on a GPU."""
        return self._offload.cpu_experts

    @property
    def memory(self) -> MemorySpec:
        return self._memory

    @functools.cached_property
    def metadata(self) -> Mapping[str, str]:
        """The file's own description, values as text; long lists are cut short by the library."""
        return MappingProxyType(self._open().metadata)

    @functools.cached_property
    def info(self) -> ModelInfo:
        """What the file says of the model: architecture, template, special tokens and the like."""
        keys = self.metadata
        file_type = keys.get("general.file_type", "")
        return ModelInfo(
            architecture=keys.get("general.architecture", ""),
            name=keys.get("general.name", ""),
            size_label=keys.get("general.size_label", ""),
            quantisation=FILE_TYPES.get(int(file_type), "") if file_type.isdigit() else "",
            file_format="gguf",
            nbytes=sum(file.stat().st_size for file in self._files if file.exists()),
            n_ctx_train=self.n_ctx_train,
            template=keys.get("tokenizer.chat_template", ""),
            tool_template=keys.get("tokenizer.chat_template.tool_use", ""),
            bos=self._named_token("bos"),
            eos=self._named_token("eos"),
            covers_text=keys.get("tokenizer.ggml.model", "") in _COVERING,
            pair=self._pair_form(),
        )

    def _pair_form(self) -> PairForm | None:
        """As llama.cpp's own server puts a pair together."""
        keys = self.metadata
        if _pooling_type(keys) != str(SCORE_POOLING) or not self._has_score_head:
            return None
        if template := keys.get("tokenizer.chat_template.rerank", ""):
            return PairForm(template=template)
        lib, vocab = library.load(), self._open().vocab
        bos, eos, sep = (getattr(lib, f"llama_vocab_{name}")(vocab) for name in ("bos", "eos", "sep"))
        opening = (bos,) if lib.llama_vocab_get_add_bos(vocab) and bos >= 0 else ()
        end = eos if eos >= 0 else sep
        ending = (end,) if lib.llama_vocab_get_add_eos(vocab) and end >= 0 else ()
        parting = (sep,) if lib.llama_vocab_get_add_sep(vocab) and sep >= 0 else ()
        # BERT's own form ends with the token that parts the two, where no other one ends a text.
        return PairForm(before=opening, between=(*ending, *parting), after=ending or parting)

    def _named_token(self, name: str) -> str:
        """The text of the token that the file names so; the library has a guess where it names none."""
        token = self.metadata.get(f"tokenizer.ggml.{name}_token_id", "")
        if not token.isdigit() or int(token) >= self.n_vocab:
            return ""
        return self.piece(int(token), special=True).decode("utf-8", "replace")

    @functools.cached_property
    def digest(self) -> str:
        """The SHA-256 of the file's content (of all its parts, in order), paid once a file."""
        digest = "+".join(content_digest(file) for file in self._files if file.exists())
        if [_version(file) for file in self._files] != self._versions:
            raise ModelFileError(f"{self.path} was changed since it was loaded; load it again to keep state")
        return digest

    @property
    def n_ctx_train(self) -> int:
        return int(library.load().llama_model_n_ctx_train(self._open().handle))

    @property
    def bos(self) -> int | None:
        return self._tokenizer().special("bos")

    @property
    def eos(self) -> int | None:
        return self._tokenizer().special("eos")

    @property
    def closed(self) -> bool:
        return self._weights is None

    # Contexts.

    def adapter(
        self, path: str | os.PathLike[str], *, layers: tuple[int, int] | None = None
    ) -> LlamaAdapter | ControlVector:
        """A LoRA or a control vector for this model, to be given to `Context.adapt`: a GGUF file. A control
        vector can be kept to some `layers`, from the first to the last of them."""
        weights, file = self._open(), read_adapter(path)
        architecture = self.metadata.get("general.architecture", "")
        if file.kind == "control vector":
            lib = library.load()
            n_embd, n_layer = lib.llama_model_n_embd(weights.handle), lib.llama_model_n_layer(weights.handle)
            file.check_vector(architecture, int(n_embd), int(n_layer))
            return ControlVector(weights, file, layers)
        if layers is not None:
            raise InvalidInputError(f"{file.path.name} is a LoRA, which has no layers to choose")
        file.check_lora(architecture, self._tensors, self.n_vocab)
        return LlamaAdapter(weights, file)

    @functools.cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for part in models.read_parts(self.path) for tensor in part.tensors}

    def _rope(self, base: float, scale: float) -> Rope | str:
        """How keys are rotated in a context with this base and scale."""
        weights, lib = self._open(), library.load()
        heads = int(lib.llama_model_n_head(weights.handle))
        size = int(lib.llama_model_n_embd(weights.handle)) // max(1, heads)
        known = weights.metadata.get(f"{self.info.architecture}.attention.key_length")
        kind = int(lib.llama_model_rope_type(weights.handle))
        return rope_of(weights.metadata, self._tensors, kind, base, scale, int(known) if known else size)

    def context(
        self,
        *,
        n_ctx: int = N_CTX,
        n_seq: int = 1,
        shared: bool = False,
        n_batch: int = N_BATCH,
        threads: int | None = None,
        k_type: str = "f16",
        v_type: str = "f16",
        flash: bool = True,
        swa_full: bool = True,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        mtp: bool = False,
        assistant: Model | None = None,
        trace: str | Sequence[str] | None = None,
        trace_layers: Sequence[int] | None = None,
        **unknown: Never,
    ) -> Context:
        """A context of `n_seq` sequences that hold `n_ctx` tokens each.

        With `shared` they use one pool of cells, so that forks cost nothing but depend in the last bits
        on where their cells lie; else each has a stream of its own and is exact. With `mtp` the model's
        next-token layers read along, and guess (`Context.guess`). An `assistant` is a drafter that
        guesses from this model's hidden states. With `trace` (`hidden`, `ffn`, `router`) its steps keep what
        these layers computed, all of them or `trace_layers` (`Context.step_trace`), and take longer for it.
        """
        refuse_unknown(unknown, self.context)
        refuse_drafter(self.path.name, self.info.architecture)
        weights = self._open()
        check_whole("n_seq", n_seq, 1, MAX_SEQUENCES)
        check_whole("n_ctx", n_ctx, 1, (1 << 31) // n_seq - 256)
        check_whole("n_batch", n_batch, 1, 1 << 16)
        _check_types(k_type, v_type)
        if v_type not in _PLAIN and not flash:
            raise InvalidInputError(f"v_type {v_type} needs flash attention; leave flash on")
        size = self._cache_size()
        size.check(Setup(n_ctx=n_ctx, slots=n_seq, k_type=k_type, v_type=v_type))
        if not rope_freq_base and not rope_freq_scale:
            self._say_if_longer_than_trained(n_ctx)

        params = _params(self._threads(threads), flash, rope_freq_base, rope_freq_scale)
        n_batch = max(min(n_batch, n_ctx), n_seq)
        params.n_ctx = n_ctx * n_seq if shared else -(-n_ctx // 256) * 256 * n_seq
        params.n_seq_max = n_seq
        # One physical batch a native step, so that a failed step is never half done for one sequence.
        params.n_batch = params.n_ubatch = n_batch
        params.n_outputs_max = max(min(ROWS, n_batch), n_seq)
        params.type_k, params.type_v = TYPES[k_type], TYPES[v_type]
        params.kv_unified = shared
        params.offload_kqv = self._kv_offload
        params.swa_full = swa_full
        largest = size.bytes(params.n_ctx // n_seq, k_type, v_type)
        if mtp and not self._mtp:
            raise InvalidInputError("this model was loaded without its next-token layers: Model(…, mtp=True)")
        if mtp:
            check_next_token(weights, self._memory, self.path.name, self._tensors)
        known = CoreKeywords(
            causal=weights.causal,
            largest_state=largest,
            rope=lambda: self._rope(rope_freq_base, rope_freq_scale),
        )
        core: NextTokenCore | LlamaCore
        if trace is not None:
            if mtp or assistant is not None:
                raise InvalidInputError("a context with trace has no drafter of its own: leave one out")
            n_layer = int(library.load().llama_model_n_layer(weights.handle))
            core = TracedCore(
                weights, params, self._memory, what=trace, layers=trace_layers, n_layer=n_layer, **known
            )
        elif assistant is not None:
            drafter = assistant._open()
            check_assistant(models.read_header(self.path), models.read_header(assistant.path), mtp=mtp)
            core = AssistantCore(weights, params, self._memory, assistant=drafter, **known)
        else:
            core = (NextTokenCore if mtp else LlamaCore)(weights, params, self._memory, **known)
        memory = dataclasses.replace(self._memory, keeps_window=swa_full)
        streams = 1 if shared else n_seq
        engine = library.loaded()

        def identity(adapters: str) -> Identity:
            return Identity(
                weights=self.digest,
                tokenizer="of the file",
                template="of the file",
                adapters=adapters,
                k_type=k_type,
                v_type=v_type,
                attention="flash" if flash else "plain",
                rope=f"{rope_freq_base}/{rope_freq_scale}/{rope_factors(self._rope_limit, core.n_ctx_seq)}",
                window=memory.identity,
                layout=f"{streams} streams{', next-token layers' if mtp else ''}",
                engine=engine.identity,
                kernels=engine.kernels,
                devices=f"{engine.devices}; {self._offload.describe(self._split, self._kv_offload)}",
            )

        return Context(
            core,
            memory=memory,
            capabilities=Capabilities(
                truncate=memory.cuts,
                shift=core.can_shift(),
                abort=self._offload.layers == 0,
                shared=shared,
                max_outputs=params.n_outputs_max,
                threads=params.n_threads,
                asynchronous=self._offload.layers > 0,
                guesses=mtp or assistant is not None,
            ),
            identity=identity,
            n_ctx=n_ctx,
            n_seq=n_seq,
            n_batch=n_batch,
            tracer=functools.partial(
                self._trace,
                threads=threads,
                rope_freq_base=rope_freq_base,
                rope_freq_scale=rope_freq_scale,
            ),
        )

    def trace(
        self,
        tokens: Tokens,
        *,
        layers: Sequence[int] | None = None,
        what: str | Sequence[str] = ("hidden",),
        threads: int | None = None,
    ) -> Trace:
        """What layers compute for `tokens`, as `Context.trace` tells it of a sequence."""
        ids = token_array(tokens, self.n_vocab)
        return self._trace(ids, checked_parts(what), layers, {}, 0, threads, 0.0, 0.0)

    def _trace(
        self,
        tokens: NDArray[np.int32],
        parts: tuple[str, ...],
        layers: Sequence[int] | None,
        adapters: Mapping[Adapter, float],
        start: int,
        threads: int | None,
        rope_freq_base: float,
        rope_freq_scale: float,
    ) -> Trace:
        """A pass over tokens in a context of its own that is looked at."""
        weights, lib = self._open(), library.load()
        chosen = checked_layers(layers, int(lib.llama_model_n_layer(weights.handle)))
        heads = int(lib.llama_model_n_head(weights.handle))
        width = int(lib.llama_model_n_embd(weights.handle))
        check_size(parts, len(chosen), len(tokens), len(tokens) - start, heads, width)
        flash = "attention" not in parts

        def open_core(callback: Any, chunk: int) -> LlamaCore:
            params = _params(self._threads(threads), flash, rope_freq_base, rope_freq_scale)
            params.n_ctx = -(-len(tokens) // 256) * 256
            params.n_seq_max = 1
            params.n_batch = params.n_ubatch = params.n_outputs_max = chunk
            params.type_k = params.type_v = TYPES["f16"]
            params.swa_full, params.offload_kqv, params.cb_eval = True, self._kv_offload, callback
            core = LlamaCore(weights, params, self._memory, causal=weights.causal)
            if adapters and not core.adapt(adapters):
                core.close()
                raise EngineError("the engine refused the adapters of this sequence")
            return core

        return traced(
            tokens,
            parts,
            chosen,
            open_core,
            start=start,
            heads=heads,
            experts=weights.experts,
            flash=flash,
        )

    def embedder(
        self,
        *,
        n_ctx: int = N_CTX,
        threads: int | None = None,
        flash: bool = True,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
    ) -> Embedder:
        """A context that makes vectors of texts of up to `n_ctx` tokens, pooled as the model's file says.

        A model whose tokens also look at what follows them takes a text in one step, and no longer one
        than it was trained for.
        """
        weights = self._open()
        pooling = _pooling(weights.metadata, self._has_score_head)
        check_whole("n_ctx", n_ctx, 1, (1 << 31) - 256)
        self._cache_size().check(Setup(n_ctx=n_ctx))
        params = _params(self._threads(threads), flash, rope_freq_base, rope_freq_scale)
        params.embeddings = True
        scores = pooling is Pooling.SCORE
        params.pooling_type = SCORE_POOLING if scores else _NO_POOLING
        params.n_ctx = -(-n_ctx // 256) * 256
        params.n_seq_max = 1
        chunk = min(CHUNK, n_ctx)
        params.n_batch = params.n_ubatch = params.n_outputs_max = chunk
        core = LlamaCore(weights, params, self._memory, causal=weights.causal)
        if scores or not core.reads_on:
            core.close()
            # The library reserves a row of logits for every token, though such a model has none.
            rows = system.memory_to_share() // 4 // (4 * self.n_vocab)
            chunk = n_ctx = max(1, min(n_ctx, self.n_ctx_train, rows))
            params.n_batch = params.n_ubatch = params.n_outputs_max = chunk
            core = LlamaCore(weights, params, self._memory, causal=weights.causal)
        return Embedder(core, pooling=pooling, n_ctx=n_ctx, chunk=chunk)

    def close(self) -> None:
        """Take no more calls. The weights stay until the last context is closed."""
        self._weights = self._text = None

    def __repr__(self) -> str:
        return f"<Model {self.path.name}{', closed' if self.closed else ''}>"

    def _open(self) -> Weights:
        if self._weights is None:
            raise ClosedError(f"the model {self.path.name} is closed")
        return self._weights

    def _tokenizer(self) -> Tokenizer:
        self._open()
        assert self._text is not None
        return self._text

    def _threads(self, threads: int | None) -> int:
        """Threads of a context. With all layers and the cache on a GPU, the CPU only looks up embeddings.
        To wake a second thread for that, at every step, takes longer than it saves."""
        check_whole("threads", 1 if threads is None else threads, 1, MAX_THREADS)
        layers = int(library.load().llama_model_n_layer(self._open().handle))
        if self._kv_offload and self._offload.layers > layers and not self._offload.cpu_experts:
            return 1
        return system.usable_cores() if threads is None else threads

    def _say_if_longer_than_trained(self, n_ctx: int) -> None:
        if n_ctx > self.n_ctx_train > 0 and not self._said_trained:
            self._said_trained = True
            log.warning(
                "%s was trained on texts of up to %d tokens, and n_ctx is %d: what it writes beyond that "
                "may make no sense",
                self.path.name,
                self.n_ctx_train,
                n_ctx,
            )

    def _say_if_larger_than_free(self) -> None:
        placed = Setup(gpu_layers=self._offload.layers, cpu_experts=self._offload.cpu_experts)
        needed, free = self.sizes.machine(placed).weights, system.available_memory()
        if free is not None and needed > free:
            log.warning(
                "%s has %.1f GiB of weights for the machine's memory, and %.1f are free: they are read from "
                "the disk again at every step. `perdure fit` shows what fits",
                self.path.name,
                needed / 2**30,
                free / 2**30,
            )

    def spare_sequences(self, n_ctx: int, **context: Unpack[ContextKeywords]) -> int:
        """How many more sequences of so many tokens fit into a quarter of what the devices have besides the
        weights; 0 where the K/V cache is not there, or all sequences share one pool."""
        k_type, v_type = context.get("k_type", "f16"), context.get("v_type", "f16")
        if context.get("shared") or not is_whole(n_ctx):
            return 0
        _check_types(k_type, v_type)
        return self._cache_size().spare_sequences(n_ctx, k_type, v_type)

    def fit_context(
        self, n_ctx: int | None, slots: int | None, **context: Unpack[ContextKeywords]
    ) -> tuple[int, int]:
        """Tokens of a request and requests at once that fit into what is free. None is for it to choose: up
        to the tokens that the model was trained for, and up to four requests."""
        setup = Setup(
            k_type=context.get("k_type", "f16"),
            v_type=context.get("v_type", "f16"),
            n_batch=context.get("n_batch", N_BATCH),
            flash=context.get("flash", True),
        )
        _check_types(setup.k_type, setup.v_type)
        check_whole("n_batch", setup.n_batch, 1, 1 << 16)
        check_whole("slots", 1 if slots is None else slots, 1, MAX_SEQUENCES)
        check_whole("n_ctx", 1 if n_ctx is None else n_ctx, 1, 1 << 31)
        return self._cache_size().fit_context(n_ctx, slots, setup)

    def _cache_size(self) -> CacheSize:
        self._open()
        return CacheSize(self.sizes, self._offload, kv_offload=self._kv_offload)


def _check_types(k_type: object, v_type: object) -> None:
    for name, value in (("k_type", k_type), ("v_type", v_type)):
        if not isinstance(value, str) or value not in TYPES:
            raise InvalidInputError(f"{name} is one of {', '.join(TYPES)}, got {value!r}")


def _params(threads: int, flash: bool, rope_freq_base: float, rope_freq_scale: float) -> Any:
    """What contexts of either sort have in common."""
    for name, number in (("rope_freq_base", rope_freq_base), ("rope_freq_scale", rope_freq_scale)):
        if not 0.0 <= number <= _LARGEST:
            raise InvalidInputError(f"{name} is 0 (the model's own) or above, got {number}")
    params = library.load().llama_context_default_params()
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = 1 if flash else 0
    params.rope_freq_base = rope_freq_base
    params.rope_freq_scale = rope_freq_scale
    params.no_perf = True
    return params


def _pooling_type(metadata: Mapping[str, str]) -> str:
    architecture = metadata.get("general.architecture", "")
    return metadata.get(f"{architecture}.pooling_type", "0")


def _pooling(metadata: Mapping[str, str], has_score_head: bool) -> Pooling:
    """As the model's file says; the mean where it says nothing."""
    named = _pooling_type(metadata)
    if named == str(SCORE_POOLING) and has_score_head:
        return Pooling.SCORE
    if named not in _POOLINGS:
        raise InvalidInputError(
            f"this model has no vector for a text (pooling type {named}), and no tensors to score pairs; "
            "use a model with pooling type 0 to 3"
        )
    return _POOLINGS[named]


def _memory(lib: Any, weights: Weights) -> MemorySpec:
    window = int(lib.llama_model_n_swa(weights.handle)) or None
    if lib.llama_model_is_recurrent(weights.handle):
        return Recurrent(window=window)
    if lib.llama_model_is_hybrid(weights.handle):
        return Hybrid(window=window)
    return SlidingWindow(window=window) if window else FullAttention()


def _version(file: Path) -> tuple[int, ...] | None:
    """What changes when a file is written or replaced; None where there is none."""
    try:
        return file_version(file)
    except OSError:
        return None
