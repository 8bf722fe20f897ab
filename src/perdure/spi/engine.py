"""For extensions that bring or use an engine: the contract, contexts and what they read."""

from perdure.engine import registry
from perdure.engine.adapters import PLAIN, AdapterSet, AdapterTable
from perdure.engine.advice import Advisor, remembered
from perdure.engine.contract import (
    Batch,
    BatchPart,
    Capture,
    ContextKeywords,
    Floats,
    LoadingKeywords,
    ModelInfo,
    Outcome,
    Tokenizer,
    TokenRows,
    check_token,
)
from perdure.engine.core import Adapter, Core
from perdure.engine.embedder import CHUNK
from perdure.engine.inspection import Traced
from perdure.engine.model import EngineModel, FileModel
from perdure.engine.registry import Agree, Bars, Engine, Finding, Source, no_bars
from perdure.engine.row_kernels.measures import Measure, measure

__all__ = [
    "CHUNK",
    "PLAIN",
    "Adapter",
    "AdapterSet",
    "AdapterTable",
    "Advisor",
    "Agree",
    "Bars",
    "Batch",
    "BatchPart",
    "Capture",
    "ContextKeywords",
    "Core",
    "Engine",
    "EngineModel",
    "FileModel",
    "Finding",
    "Floats",
    "LoadingKeywords",
    "Measure",
    "ModelInfo",
    "Outcome",
    "Source",
    "TokenRows",
    "Tokenizer",
    "Traced",
    "check_token",
    "measure",
    "no_bars",
    "registry",
    "remembered",
]
