"""For extensions that bring or use an engine: the contract, contexts and what they read."""

from perdure.engine import registry as registry
from perdure.engine.adapters import (
    PLAIN as PLAIN,
    AdapterSet as AdapterSet,
    AdapterTable as AdapterTable,
)
from perdure.engine.advice import Advisor as Advisor, remembered as remembered
from perdure.engine.contract import (
    Batch as Batch,
    BatchPart as BatchPart,
    Capture as Capture,
    ContextKeywords as ContextKeywords,
    Floats as Floats,
    LoadingKeywords as LoadingKeywords,
    ModelInfo as ModelInfo,
    Outcome as Outcome,
    Tokenizer as Tokenizer,
    TokenRows as TokenRows,
    check_token as check_token,
)
from perdure.engine.core import Adapter as Adapter, Core as Core
from perdure.engine.embedder import CHUNK as CHUNK, Reading as Reading
from perdure.engine.inspection import Traced as Traced
from perdure.engine.model import EngineModel as EngineModel, FileModel as FileModel
from perdure.engine.registry import (
    Agree as Agree,
    Bars as Bars,
    Engine as Engine,
    Finding as Finding,
    Source as Source,
    no_bars as no_bars,
)
from perdure.engine.row_kernels.measures import Measure as Measure, measure as measure
