"""What perdure uses of llama.cpp's C interface: types, structs and functions, and nothing else.

By version: `layout_of` gives the declarations for one (`llama.h`, `ggml-backend.h`, `ggml.h`). `guard.py`
checks a loaded library against them before it is trusted. `tools/next_engine.py` says what a new one changes.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    PYFUNCTYPE,
    Array,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from typing import Any

OLDEST, NEXT = (0, 4), (0, 7)
"""The versions of llama.cpp that there are declarations for: from the first, below the second."""

MAX_THREADS = 512
"""`GGML_MAX_N_THREADS`: the length of a thread pool's CPU mask."""
CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2}
"""The types of keys and values, by the library's numbers."""

LogCallback = CFUNCTYPE(None, c_int, c_char_p, c_void_p)
ProgressCallback = CFUNCTYPE(c_bool, c_float, c_void_p)
AbortCallback = CFUNCTYPE(c_bool, c_void_p)
EvalCallback = CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)

Token = c_int32
Adapter = c_void_p
"""A LoRA adapter's handle, for arrays of them."""


class LlamaBatch(Structure):
    """`llama_batch`: the tokens of one step."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )

    @classmethod
    def of(cls, tokens: Array[c_int32]) -> LlamaBatch:
        """A step that appends `tokens` to sequence 0 and gives one row, that of the last."""
        return cls(n_tokens=len(tokens), token=ctypes.cast(tokens, POINTER(c_int32)))


class BufferOverride(Structure):
    """`llama_model_tensor_buft_override`: tensors whose names match go to a buffer type. NULL ends a list."""

    _fields_ = (("pattern", c_char_p), ("buffer_type", c_void_p))


class ModelParams(Structure):
    """`llama_model_params`."""

    _fields_ = (
        ("devices", POINTER(c_void_p)),
        ("tensor_buft_overrides", POINTER(BufferOverride)),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", POINTER(c_float)),
        ("progress_callback", ProgressCallback),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class ContextParams(Structure):
    """`llama_context_params` of 0.4 and 0.5."""

    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int32),
        ("rope_scaling_type", c_int32),
        ("pooling_type", c_int32),
        ("attention_type", c_int32),
        ("flash_attn_type", c_int32),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", EvalCallback),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("abort_callback", AbortCallback),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


def _inserted(fields: Sequence[tuple[str, Any]], after: str, *new: tuple[str, Any]) -> tuple[Any, ...]:
    """`fields` with further ones after one of them."""
    place = next(index for index, (name, _) in enumerate(fields) if name == after) + 1
    return (*fields[:place], *new, *fields[place:])


class ContextParams06(Structure):
    """`llama_context_params` of 0.6: experts in host memory may have a cache on the device."""

    _fields_ = _inserted(ContextParams._fields_, "type_v", ("moe_cache_size", c_size_t))


class QuantizeParams(Structure):
    """`llama_model_quantize_params`, with room for the fields of later versions."""

    _fields_ = (
        ("nthread", c_int32),
        ("ftype", c_int32),
        ("output_tensor_type", c_int32),
        ("token_embedding_type", c_int32),
        ("allow_requantize", c_bool),
        ("quantize_output_tensor", c_bool),
        ("only_copy", c_bool),
        ("pure", c_bool),
        ("keep_split", c_bool),
        ("dry_run", c_bool),
        ("imatrix", c_void_p),
        ("kv_overrides", c_void_p),
        ("tt_overrides", c_void_p),
        ("prune_layers", c_void_p),
        ("later", c_uint8 * 200),
    )


class TypeTraits(Structure):
    """`ggml_type_traits`: a tensor type's block, and how it becomes floats."""

    _fields_ = (
        ("type_name", c_char_p),
        ("block", c_int64),
        ("interleave", c_int64),
        ("size", c_size_t),
        ("quantized", c_bool),
        ("to_float", CFUNCTYPE(None, c_void_p, c_void_p, c_int64)),
    )


class GraphTensor(Structure):
    """`ggml_tensor`: a node of the graph that an evaluation callback is shown."""

    OPERATIONS = 10
    """Inputs that a node can have."""


GraphTensor._fields_ = (
    ("type", c_int),
    ("buffer", c_void_p),
    ("shape", c_int64 * 4),
    ("strides", c_size_t * 4),
    ("operation", c_int),
    ("parameters", c_int32 * 16),
    ("flags", c_int32),
    ("inputs", POINTER(GraphTensor) * GraphTensor.OPERATIONS),
    ("view", c_void_p),
    ("view_offset", c_size_t),
    ("data", c_void_p),
    ("name", ctypes.c_char * 64),
    ("extra", c_void_p),
    ("padding", ctypes.c_char * 8),
)


class ThreadpoolParams(Structure):
    """`ggml_threadpool_params`."""

    _fields_ = (
        ("cpumask", c_bool * MAX_THREADS),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


class Feature(Structure):
    """`ggml_backend_feature`: a name and a value, such as AVX2 = 1."""

    _fields_ = (("name", c_char_p), ("value", c_char_p))


# What a CPU backend gives through `ggml_backend_reg_get_proc_address`.
GetFeatures = CFUNCTYPE(POINTER(Feature), c_void_p)
NewThreadpool = CFUNCTYPE(c_void_p, POINTER(ThreadpoolParams))
FreeThreadpool = CFUNCTYPE(None, c_void_p)

_BYTES = POINTER(c_uint8)
_FLOATS = POINTER(c_float)
_TOKENS = POINTER(c_int32)

FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    # The library.
    "llama_version": (c_char_p, []),
    "llama_backend_init": (None, []),
    "llama_log_get": (None, [POINTER(LogCallback), POINTER(c_void_p)]),
    "llama_log_set": (None, [LogCallback, c_void_p]),
    "llama_print_system_info": (c_char_p, []),
    "llama_supports_gpu_offload": (c_bool, []),
    # Backends and devices.
    "ggml_backend_load": (c_void_p, [c_char_p]),
    "ggml_backend_reg_count": (c_size_t, []),
    "ggml_backend_reg_get": (c_void_p, [c_size_t]),
    "ggml_backend_reg_name": (c_char_p, [c_void_p]),
    "ggml_backend_reg_by_name": (c_void_p, [c_char_p]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_dev_count": (c_size_t, []),
    "ggml_backend_dev_get": (c_void_p, [c_size_t]),
    "ggml_backend_dev_name": (c_char_p, [c_void_p]),
    "ggml_backend_dev_description": (c_char_p, [c_void_p]),
    "ggml_backend_dev_type": (c_int, [c_void_p]),
    "ggml_backend_dev_memory": (None, [c_void_p, POINTER(c_size_t), POINTER(c_size_t)]),
    "ggml_get_name": (c_char_p, [c_void_p]),
    "ggml_backend_dev_host_buffer_type": (c_void_p, [c_void_p]),
    "ggml_backend_cpu_buffer_type": (c_void_p, []),
    "ggml_backend_buft_alloc_buffer": (c_void_p, [c_void_p, c_size_t]),
    "ggml_backend_buffer_get_base": (c_void_p, [c_void_p]),
    "ggml_backend_buffer_free": (None, [c_void_p]),
    "ggml_threadpool_params_init": (None, [POINTER(ThreadpoolParams), c_int]),
    # Models.
    "llama_model_default_params": (ModelParams, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, ModelParams]),
    "llama_model_free": (None, [c_void_p]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_model_n_ctx_train": (c_int32, [c_void_p]),
    "llama_model_n_embd": (c_int32, [c_void_p]),
    "llama_model_n_embd_out": (c_int32, [c_void_p]),
    "llama_model_n_layer": (c_int32, [c_void_p]),
    "llama_model_n_layer_nextn": (c_int32, [c_void_p]),
    "llama_model_n_head": (c_int32, [c_void_p]),
    "llama_model_n_head_kv": (c_int32, [c_void_p]),
    "llama_model_n_embd_inp": (c_int32, [c_void_p]),
    "llama_model_rope_type": (c_int32, [c_void_p]),
    "llama_model_n_cls_out": (c_uint32, [c_void_p]),
    "llama_model_n_swa": (c_int32, [c_void_p]),
    "llama_model_n_params": (c_uint64, [c_void_p]),
    "llama_model_size": (c_uint64, [c_void_p]),
    "llama_model_meta_count": (c_int32, [c_void_p]),
    "llama_model_meta_key_by_index": (c_int32, [c_void_p, c_int32, c_char_p, c_size_t]),
    "llama_model_meta_val_str_by_index": (c_int32, [c_void_p, c_int32, c_char_p, c_size_t]),
    "llama_model_chat_template": (c_char_p, [c_void_p, c_char_p]),
    "llama_model_has_encoder": (c_bool, [c_void_p]),
    "llama_model_has_decoder": (c_bool, [c_void_p]),
    "llama_model_is_recurrent": (c_bool, [c_void_p]),
    "llama_model_is_hybrid": (c_bool, [c_void_p]),
    "llama_adapter_lora_init": (c_void_p, [c_void_p, c_char_p]),
    # Model files.
    "llama_model_quantize_default_params": (QuantizeParams, []),
    "llama_model_quantize": (c_uint32, [c_char_p, c_char_p, POINTER(QuantizeParams)]),
    "ggml_get_type_traits": (POINTER(TypeTraits), [c_int]),
    "ggml_quantize_requires_imatrix": (c_bool, [c_int]),
    "ggml_quantize_chunk": (
        c_size_t,
        [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p],
    ),
    "ggml_op_name": (c_char_p, [c_int]),
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    # Vocabularies.
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_vocab_is_eog": (c_bool, [c_void_p, c_int32]),
    "llama_vocab_is_control": (c_bool, [c_void_p, c_int32]),
    "llama_vocab_bos": (c_int32, [c_void_p]),
    "llama_vocab_eos": (c_int32, [c_void_p]),
    "llama_vocab_sep": (c_int32, [c_void_p]),
    "llama_vocab_get_add_bos": (c_bool, [c_void_p]),
    "llama_vocab_get_add_eos": (c_bool, [c_void_p]),
    "llama_vocab_get_add_sep": (c_bool, [c_void_p]),
    "llama_tokenize": (c_int32, [c_void_p, c_char_p, c_int32, _TOKENS, c_int32, c_bool, c_bool]),
    "llama_token_to_piece": (c_int32, [c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool]),
    "llama_detokenize": (c_int32, [c_void_p, _TOKENS, c_int32, c_char_p, c_int32, c_bool, c_bool]),
    # Contexts.
    "llama_context_default_params": (ContextParams, []),
    "llama_init_from_model": (c_void_p, [c_void_p, ContextParams]),
    "llama_free": (None, [c_void_p]),
    "llama_n_ctx_seq": (c_uint32, [c_void_p]),
    "llama_attach_threadpool": (None, [c_void_p, c_void_p, c_void_p]),
    "llama_detach_threadpool": (None, [c_void_p]),
    "llama_set_abort_callback": (None, [c_void_p, AbortCallback, c_void_p]),
    "llama_set_adapters_lora": (c_int32, [c_void_p, POINTER(Adapter), c_size_t, _FLOATS]),
    "llama_set_adapter_cvec": (c_int32, [c_void_p, _FLOATS, c_size_t, c_int32, c_int32, c_int32]),
    "llama_decode": (c_int32, [c_void_p, LlamaBatch]),
    "llama_set_causal_attn": (None, [c_void_p, c_bool]),
    "llama_synchronize": (None, [c_void_p]),
    "llama_get_logits_ith": (_FLOATS, [c_void_p, c_int32]),
    "llama_get_embeddings": (_FLOATS, [c_void_p]),
    "llama_get_embeddings_seq": (_FLOATS, [c_void_p, c_int32]),
    # Hidden states for next-token layers. In no header of the library.
    "llama_set_embeddings_nextn": (None, [c_void_p, c_bool, c_bool]),
    "llama_get_embeddings_nextn_ith": (_FLOATS, [c_void_p, c_int32]),
    # Memory and state.
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_memory_clear": (None, [c_void_p, c_bool]),
    "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    "llama_memory_seq_cp": (None, [c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "llama_memory_seq_add": (None, [c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "llama_memory_seq_pos_min": (c_int32, [c_void_p, c_int32]),
    "llama_memory_seq_pos_max": (c_int32, [c_void_p, c_int32]),
    "llama_memory_can_shift": (c_bool, [c_void_p]),
    "llama_state_seq_get_size_ext": (c_size_t, [c_void_p, c_int32, c_uint32]),
    "llama_state_seq_get_data_ext": (c_size_t, [c_void_p, _BYTES, c_size_t, c_int32, c_uint32]),
    "llama_state_seq_set_data_ext": (c_size_t, [c_void_p, _BYTES, c_size_t, c_int32, c_uint32]),
}
"""Every function that perdure calls: its result, then its arguments."""
OPTIONAL = frozenset(
    {
        "llama_model_quantize_default_params",
        "llama_model_quantize",
        "llama_model_n_layer_nextn",
        "llama_set_embeddings_nextn",
        "llama_get_embeddings_nextn_ith",
    }
)
"""Those that no model needs to run, and that some builds leave out (xllamacpp's): ask before the call."""
_MANGLED = {
    "llama_set_embeddings_nextn": (
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
    ),
    "llama_get_embeddings_nextn_ith": (
        "_Z30llama_get_embeddings_nextn_ithP13llama_contexti",
        "?llama_get_embeddings_nextn_ith@@YAPEAMPEAUllama_context@@H@Z",
    ),
}
"""What functions are called that the library exports as C++: by most compilers, and by Microsoft's."""


@dataclass(frozen=True, slots=True)
class StructLayout:
    """The declarations for one version."""

    context_params: type[Structure]

    @property
    def functions(self) -> dict[str, tuple[Any, list[Any]]]:
        """Every function: its result, then its arguments."""

        def of_version(kind: Any) -> Any:
            return self.context_params if kind is ContextParams else kind

        return {
            name: (of_version(result), [of_version(each) for each in arguments])
            for name, (result, arguments) in FUNCTIONS.items()
        }


_LAYOUTS = {(0, 4): StructLayout(ContextParams), (0, 6): StructLayout(ContextParams06)}
"""By the version that each begins with."""


def layout_of(version: tuple[int, ...]) -> StructLayout:
    """The declarations for a version: those of the newest known one for what is newer."""
    return _LAYOUTS[max((known for known in _LAYOUTS if known <= version), default=min(_LAYOUTS))]


def numbers(version: str) -> tuple[int, ...]:
    """0.6.0-dev as (0, 6)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


class Functions:
    """The functions of one loaded library, each an attribute of its C name, with its types declared.

    Always holds: an attribute that exists may be called. `missing` names those the library lacks, but for
    optional ones.
    """

    def __init__(self, libraries: Iterable[ctypes.CDLL]) -> None:
        handles = list(libraries)
        missing = []
        self.version = _version(handles)
        self.layout = layout_of(numbers(self.version))
        self._declared = self.layout.functions
        for name, (result, arguments) in self._declared.items():
            # A function object of our own: one taken from a CDLL by attribute is shared.
            names = (name, *_MANGLED.get(name, ()))
            function = next(
                (handle[each] for handle in handles for each in names if _has(handle, each)), None
            )
            if function is None:
                missing += [] if name in OPTIONAL else [name]
                continue
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.missing = tuple(missing)

    def quick(self, name: str) -> Any:
        """The function `name`, for calls that take no time: Python's lock is kept meanwhile.

        A thread that releases the lock while other threads want it waits up to 5 ms to have it back.
        A pointer is given as its plain address, or None.
        """
        address = ctypes.cast(getattr(self, name), c_void_p).value
        assert address is not None
        result, arguments = self._declared[name]
        return PYFUNCTYPE(c_void_p if result is _FLOATS else result, *arguments)(address)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this llama.cpp library has no function {name}")


def _version(handles: Iterable[ctypes.CDLL]) -> str:
    """What a library says that it is; empty where it does not."""
    for handle in handles:
        if _has(handle, "llama_version"):
            ask = handle["llama_version"]
            ask.restype = c_char_p
            return str(ask().decode("utf-8", "replace"))
    return ""


def _has(handle: ctypes.CDLL, name: str) -> bool:
    try:
        handle[name]
    except AttributeError:
        return False
    return True
