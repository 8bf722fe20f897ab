"""For extensions that use llama.cpp itself: its library, its models and their files."""

from perdure.engine.llama.core import CachedState, CoreKeywords, LlamaCore
from perdure.engine.llama.core_maker import CachedStateCore, ContextCore, CoreMaker, CoreSetup
from perdure.engine.llama.layer_plan import room_now
from perdure.engine.llama.model import TracePass, weights_of
from perdure.engine.llama.native import library
from perdure.engine.llama.native.declarations import (
    EvalCallback,
    GraphTensor,
    ImportanceRow,
    LlamaBatch,
    Override,
)
from perdure.engine.llama.native.layout import StateLayout
from perdure.engine.llama.native.layout import window as window_rows
from perdure.engine.llama.native.log_sink import captured_errors
from perdure.engine.llama.offload import CPU_ONLY
from perdure.engine.llama.tokenizer import LlamaTokenizer
from perdure.engine.llama.weights import LlamaWeights

__all__ = [
    "CPU_ONLY",
    "CachedState",
    "CachedStateCore",
    "ContextCore",
    "CoreKeywords",
    "CoreMaker",
    "CoreSetup",
    "EvalCallback",
    "GraphTensor",
    "ImportanceRow",
    "LlamaBatch",
    "LlamaCore",
    "LlamaTokenizer",
    "LlamaWeights",
    "Override",
    "StateLayout",
    "TracePass",
    "captured_errors",
    "library",
    "room_now",
    "weights_of",
    "window_rows",
]
