"""For extensions that use llama.cpp itself: its library, its models and their files."""

from perdure.engine.llama.core import (
    CachedState as CachedState,
    CoreKeywords as CoreKeywords,
    LlamaCore as LlamaCore,
)
from perdure.engine.llama.core_maker import (
    CachedStateCore as CachedStateCore,
    ContextCore as ContextCore,
    CoreMaker as CoreMaker,
    CoreSetup as CoreSetup,
)
from perdure.engine.llama.layer_plan import room_now as room_now
from perdure.engine.llama.model import TracePass as TracePass, weights_of as weights_of
from perdure.engine.llama.native import library as library
from perdure.engine.llama.native.declarations import (
    EvalCallback as EvalCallback,
    GraphTensor as GraphTensor,
    LlamaBatch as LlamaBatch,
)
from perdure.engine.llama.native.layout import StateLayout as StateLayout, window_rows as window_rows
from perdure.engine.llama.native.log_sink import captured_errors as captured_errors
from perdure.engine.llama.offload import CPU_ONLY as CPU_ONLY
from perdure.engine.llama.tokenizer import LlamaTokenizer as LlamaTokenizer
from perdure.engine.llama.weights import LlamaWeights as LlamaWeights
