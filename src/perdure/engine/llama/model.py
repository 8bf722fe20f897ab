"""A model file on llama.cpp, and the contexts opened on it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, cast

from perdure import models, system
from perdure.checks import check_whole
from perdure.config import settings
from perdure.engine.context import Context
from perdure.engine.contract import (
    Capabilities,
    GuessingCore,
    ModelInfo,
    PairForm,
    Tokens,
    token_array,
)
from perdure.engine.llama.core import (
    SCORE_POOLING,
    CoreKeywords,
    LlamaCore,
)
from perdure.engine.llama.native import library
from perdure.engine.llama.native.declarations import CACHE_TYPES
from perdure.engine.llama.offload import CPU_ONLY, ContextRoom, Offload, check_split, choose_devices
from perdure.engine.llama.preflight import check_header, refuse_drafter, rope_factors, rope_limit
from perdure.engine.llama.tokenizer import LlamaTokenizer
from perdure.engine.llama.weights import LlamaWeights
from perdure.engine.model import FileModel
from perdure.engine_config import (
    MAX_SEQUENCES,
    MAX_THREADS,
    N_BATCH,
    N_CTX,
    ContextConfig,
    LoadingConfig,
)
from perdure.engine_config.keywords import ContextKeywords, LoadingKeywords
from perdure.errors import (
    ClosedError,
    InvalidInputError,
    ModelFileError,
    ModelLoadError,
    OutOfMemoryError,
)
from perdure.extension import by_name, imported
from perdure.identity import Identity, content_digest, file_version
from perdure.memory import FullAttention, Hybrid, MemorySpec, Recurrent, SlidingWindow
from perdure.models.header import FILE_TYPES, Tensor
from perdure.models.parts import part_names
from perdure.models.placement import ASSISTANTS, ROWS, ModelPlacement, Sizes
from perdure.options import named_by

if TYPE_CHECKING:
    from perdure.engine.embedder import Embedder, Pooling
    from perdure.engine.inspection import Trace
    from perdure.engine.llama.adapters import ControlVector, LlamaAdapter
    from perdure.engine.llama.core_maker import ContextCore, CoreMaker


log = logging.getLogger("perdure.engine")

_PLAIN = ("f32", "f16", "bf16")
_NO_POOLING = 0
_POOLINGS = {"0": "MEAN", "1": "MEAN", "2": "FIRST", "3": "LAST"}
_COVERING = ("gpt2", "llama")
"""Kinds of tokenizers whose tokens cover all of a text. Others collapse white space, or drop characters."""
_LARGEST = 3.4e38
"""The library's floats end here."""


class TracePass(NamedTuple):
    """What it takes to read tokens once more in a context of their own whose nodes are looked at."""

    weights: LlamaWeights
    open_core: Callable[[Any, int, int, bool], LlamaCore]
    """Takes the library's callback, cells, tokens of a step, and whether to use flash attention."""


class Model(FileModel):
    """Weights and a vocabulary, read from a GGUF file.

    It may be closed or dropped before its contexts: the weights go with the last of them.
    """

    @named_by(LoadingKeywords)
    def __init__(
        self,
        source: str | os.PathLike[str] | None = None,
        *,
        cells: int = N_CTX,
        progress: Callable[[float], bool] | None = None,
        **options: Unpack[LoadingKeywords],
    ) -> None:
        """Load a model: a file, a name, or the default one.

        `gpu_layers` is how many layers go to the GPU: "auto" for as many as fit beside a context of `cells`
        tokens; None for PERDURE_GPU_LAYERS, or "auto". `devices` names GPUs, `tensor_split` has a share for
        each. Without `kv_offload` the K/V cache stays in the machine's own memory. `cpu_experts` is of how
        many layers the experts stay there too: "all", "auto" (the default) for as few as must, or a number.
        With `mtp` its next-token layers are loaded too, for contexts that guess by them.
        """
        config = LoadingConfig.of(options, Model.__init__)
        self.path: Path = models.path(source)
        header = models.read_header(self.path)
        check_header(header)
        architecture = header.text("general.architecture")
        if architecture not in ASSISTANTS:
            refuse_drafter(self.path.name, architecture)
        self._files = [self.path.with_name(name) for name in part_names(self.path.name)]
        self._versions = [_version(file) for file in self._files]
        lib = library.load()
        self._kv_offload = config.kv_offload is not False
        self._extended = config.extended
        self.sizes = Sizes.of(models.read_parts(self.path))
        """What it takes in memory, as its file says."""
        self._offload = self._place_layers(config, cells)
        self._say_if_larger_than_free()
        split = check_split(config.tensor_split, self._offload.devices)
        weights = self._load(split, progress, cells)
        if not lib.llama_model_has_decoder(weights.handle) or lib.llama_model_has_encoder(weights.handle):
            raise ModelLoadError(f"{self.path.name} has an encoder; only decoder models can keep sessions")
        self._weights: LlamaWeights | None = weights
        self._text: LlamaTokenizer | None = LlamaTokenizer(weights)
        self.n_vocab = weights.n_vocab
        self._split = split
        self._memory = _memory(lib, weights)
        self._rope_limit = rope_limit(header)
        # Without them the library would end the process over a text.
        self._has_score_head = any(tensor.name.startswith("cls.") for tensor in header.tensors)
        self._said_trained = False
        self._first_steps(weights)

    def _place_layers(self, config: LoadingConfig, cells: int) -> Offload:
        """What goes to the GPU. What does not fit is said here, before anything is loaded."""
        layers = settings().gpu_layers if config.gpu_layers is None else config.gpu_layers
        experts = settings().cpu_experts if config.cpu_experts is None else config.cpu_experts
        chosen = choose_devices(library.loaded().device_list, config.devices)
        here = dataclasses.replace(CPU_ONLY, cpu_experts=self.sizes.count_experts(experts) or 0)
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
        from perdure.engine.llama.layer_plan import plan_offload

        offload = plan_offload(
            layers, chosen, self.sizes, self.path.name, setup=self._setup(cells), cpu_experts=experts
        )
        return offload if offload.layers else dataclasses.replace(here, note=offload.note)

    def _setup(self, cells: int) -> ModelPlacement:
        return ModelPlacement(n_ctx=max(1, cells), kv_offload=self._kv_offload)

    def _load(
        self, split: tuple[float, ...] | None, progress: Callable[[float], bool] | None, cells: int
    ) -> LlamaWeights:
        """The weights, with fewer layers on the GPU where "auto" found more room than there was then."""
        size = sum(file.stat().st_size for file in self._files if file.exists())
        while True:
            offload = self._offload
            try:
                return LlamaWeights(
                    self.path,
                    size=size,
                    offload=offload,
                    tensor_split=split,
                    change=self._change,
                    progress=progress,
                )
            except OutOfMemoryError:
                if not offload.flexible:
                    raise
            from perdure.engine.llama.layer_plan import plan_again

            names = [device.name for device in offload.devices]
            now = choose_devices(library.loaded().device_list, names)
            self._offload = plan_again(offload, now, self.sizes, self.path.name, setup=self._setup(cells))

    def _change(self, params: Any) -> None:
        for name, value in self._extended.items():
            if value and (maker := _core_maker(name)) is not None:
                maker.load(params)

    def _first_steps(self, weights: LlamaWeights) -> None:
        """Have the driver translate what it must, and say how much slower it is that layers did not fit."""
        offload = self._offload
        measured = None
        if offload.layers and weights.causal and self.info.architecture not in ASSISTANTS:
            params = _params(self._threads(None), True, 0.0, 0.0)
            params.offload_kqv = self._kv_offload
            from perdure.engine.llama.first_steps import StepTime, translate

            if library.loaded().translated:
                translate(weights, params, self.path.name)
            if offload.note:
                measured = StepTime.measure(weights, offload.layers, params)
        if offload.note:
            log.warning("%s%s", offload.note, f": {measured}" if measured else "")

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
    def experts_on_gpu(self) -> bool:
        return self.gpu_layers > 0 and any(self.sizes.experts[self.cpu_experts :])

    @property
    def traces(self) -> bool:
        return True

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
        from perdure.engine.llama.adapters import ControlVector, LlamaAdapter
        from perdure.models.adapter_file import read_adapter

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

    @named_by(ContextKeywords)
    def context(
        self,
        *,
        n_ctx: int = N_CTX,
        n_seq: int = 1,
        **options: Unpack[ContextKeywords],
    ) -> Context:
        """A context of `n_seq` sequences that hold `n_ctx` tokens each.

        With `shared` they use one pool of cells, so that forks cost nothing but depend in the last bits
        on where their cells lie; else each has a separate stream and is exact. With `mtp` the model's
        next-token layers read along, and guess (`Context.guess`). An `assistant` is a drafter that
        guesses from this model's hidden states. With `trace` (`hidden`, `ffn`, `router`) its steps keep what
        these layers computed, all of them or `trace_layers` (`Context.step_trace`), and take longer for it.
        """
        config = ContextConfig.of(options, Model.context, none=False)
        refuse_drafter(self.path.name, self.info.architecture)
        weights = self._open()
        check_whole("n_seq", n_seq, 1, MAX_SEQUENCES)
        check_whole("n_ctx", n_ctx, 1, (1 << 31) // n_seq - 256)
        shared, kv = bool(config.shared), config.kv
        chosen = [(name, value) for name, value in config.extended.items() if value]
        flash, swa_full = config.flash is not False, config.swa_full is not False
        rope_base, rope_scale = config.rope_freq_base or 0.0, config.rope_freq_scale or 0.0
        if kv.v not in _PLAIN and not flash:
            raise InvalidInputError(f"v_type {kv.v} needs flash attention; leave flash on")
        size = self._context_room()
        size.check(ModelPlacement(n_ctx=n_ctx, slots=n_seq, kv=kv))
        if not rope_base and not rope_scale:
            self._say_if_longer_than_trained(n_ctx)

        params = _params(self._threads(config.threads), flash, rope_base, rope_scale)
        n_batch = max(min(config.n_batch or N_BATCH, n_ctx), n_seq)
        params.n_ctx = n_ctx * n_seq if shared else -(-n_ctx // 256) * 256 * n_seq
        params.n_seq_max = n_seq
        # One physical batch a native step, so that a failed step is never half done for one sequence.
        params.n_batch = params.n_ubatch = n_batch
        params.n_outputs_max = max(min(ROWS, n_batch), n_seq)
        params.type_k, params.type_v = CACHE_TYPES[kv.k], CACHE_TYPES[kv.v]
        params.kv_unified = shared
        params.offload_kqv = self._kv_offload
        params.swa_full = swa_full
        largest = size.bytes(params.n_ctx // n_seq, kv)
        known = CoreKeywords(
            causal=weights.causal,
            largest_state=largest,
            rope=(rope_base, rope_scale),
        )
        core: ContextCore
        layout = ""
        if config.trace is not None:
            if chosen:
                raise InvalidInputError(f"a context has trace or {chosen[0][0]}, not both: leave one out")
            what = {"what": config.trace, "layers": config.trace_layers}
            from perdure.engine.inspection import inspector

            core = inspector("a context with trace")(weights, params, self._memory, **what, **known)
        elif len(chosen) > 1:
            raise InvalidInputError(f"a context has {' or '.join(name for name, _ in chosen)}: leave one out")
        elif chosen and (maker := _core_maker(chosen[0][0])) is not None:
            from perdure.engine.llama.core_maker import CoreSetup

            layout = maker.layout
            setup = CoreSetup(
                path=self.path,
                weights=weights,
                params=params,
                memory=self._memory,
                keywords=known,
                tensors=lambda: self._tensors,
                loaded_with=self._extended,
            )
            core = maker.open(setup, chosen[0][1])
        else:
            core = LlamaCore(weights, params, self._memory, **known)
        if core.two_dimensions:
            layout += ", rows with positions"
        memory = dataclasses.replace(self._memory, keeps_window=swa_full)
        streams = 1 if shared else n_seq
        engine = library.loaded()

        def identity(adapters: str) -> Identity:
            return Identity(
                weights=self.digest,
                tokenizer="of the file",
                template="of the file",
                adapters=adapters,
                attention="flash" if flash else "plain",
                rope=f"{rope_base}/{rope_scale}/{rope_factors(self._rope_limit, core.n_ctx_seq)}",
                window=memory.identity,
                layout=f"{streams} streams{layout}",
                engine=engine.identity,
                kernels=engine.kernels,
                devices=f"{engine.devices}; {self._offload.describe(self._split, self._kv_offload)}",
                **kv.keywords,
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
                guesses=isinstance(core, GuessingCore),
            ),
            identity=identity,
            n_ctx=n_ctx,
            n_seq=n_seq,
            n_batch=n_batch,
            trace_pass=self._trace_pass(config.threads, rope_base, rope_scale),
        )

    def trace(
        self,
        tokens: Tokens,
        *,
        layers: Sequence[int] | None = None,
        what: str | Sequence[str] = ("hidden",),
        threads: int | None = None,
    ) -> Trace:
        """What layers compute for `tokens`, as `Context.trace` returns it for a sequence."""
        from perdure.engine.inspection import inspector

        ids = token_array(tokens, self.n_vocab)
        trace: Trace = inspector("ctx.trace")(self._trace_pass(threads, 0.0, 0.0), ids, what, layers, {}, 0)
        return trace

    def _trace_pass(self, threads: int | None, rope_base: float, rope_scale: float) -> TracePass:
        weights = self._open()

        def open_core(callback: Any, cells: int, chunk: int, flash: bool) -> LlamaCore:
            params = _params(self._threads(threads), flash, rope_base, rope_scale)
            params.n_ctx = -(-cells // 256) * 256
            params.n_seq_max = 1
            params.n_batch = params.n_ubatch = params.n_outputs_max = chunk
            params.type_k = params.type_v = CACHE_TYPES["f16"]
            params.swa_full, params.offload_kqv, params.cb_eval = True, self._kv_offload, callback
            return LlamaCore(weights, params, self._memory, causal=weights.causal)

        return TracePass(weights, open_core)

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
        from perdure.engine.embedder import CHUNK, Embedder, Pooling

        weights = self._open()
        pooling = _pooling(weights.metadata, self._has_score_head)
        check_whole("n_ctx", n_ctx, 1, (1 << 31) - 256)
        self._context_room().check(ModelPlacement(n_ctx=n_ctx))
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

    def _open(self) -> LlamaWeights:
        if self._weights is None:
            raise ClosedError(f"the model {self.path.name} is closed")
        return self._weights

    def _tokenizer(self) -> LlamaTokenizer:
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
        needed, free = (
            self.sizes.machine(self._offload.placed(ModelPlacement())).weights,
            system.available_memory(),
        )
        if free is not None and needed > free:
            log.warning(
                "%s has %.1f GiB of weights for the machine's memory, and %.1f are free: they are read from "
                "the disk again at every step. `perdure fit` shows what fits",
                self.path.name,
                needed / 2**30,
                free / 2**30,
            )

    def spare_sequences(self, n_ctx: int, config: ContextConfig) -> int:
        """How many more sequences of so many tokens fit into a quarter of what the devices have besides the
        weights; 0 where the K/V cache is not there, or all sequences share one pool."""
        if config.shared or not self._kv_offload or not self._offload.layers:
            return 0
        from perdure.engine.llama.layer_plan import spare_sequences

        sequence = self._context_room().bytes(n_ctx, config.kv)
        return spare_sequences(self._offload.devices, weights=self.sizes.weights, sequence=sequence)

    def fit_context(self, n_ctx: int | None, slots: int | None, config: ContextConfig) -> tuple[int, int]:
        """Tokens of a request and requests at once that fit into what is free. None is for it to choose: up
        to the tokens that the model was trained for, and up to four requests."""
        setup = ModelPlacement(
            kv=config.kv, n_batch=config.n_batch or N_BATCH, flash=config.flash is not False
        )
        check_whole("slots", 1 if slots is None else slots, 1, MAX_SEQUENCES)
        check_whole("n_ctx", 1 if n_ctx is None else n_ctx, 1, 1 << 31)
        from perdure.engine.llama.layer_plan import fit_context

        return fit_context(self._context_room(), n_ctx, slots, setup)

    def _context_room(self) -> ContextRoom:
        self._open()
        return ContextRoom(sizes=self.sizes, offload=self._offload, kv_offload=self._kv_offload)


def weights_of(model: Model) -> LlamaWeights:
    """The weights of an open model, for a context of another one that reads them."""
    return model._open()


def _core_maker(option: str) -> CoreMaker | None:
    """What opens contexts with an option of an extension; None where it is no option of their core."""
    reference = by_name("cores").get(option)
    return None if reference is None else cast("CoreMaker", imported(reference))


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
    from perdure.engine.embedder import Pooling

    named = _pooling_type(metadata)
    if named == str(SCORE_POOLING) and has_score_head:
        return Pooling.SCORE
    if named not in _POOLINGS:
        raise InvalidInputError(
            f"this model has no vector for a text (pooling type {named}), and no tensors to score pairs; "
            "use a model with pooling type 0 to 3"
        )
    return Pooling[_POOLINGS[named]]


def _memory(lib: Any, weights: LlamaWeights) -> MemorySpec:
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
