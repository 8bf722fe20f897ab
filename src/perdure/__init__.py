"""perdure: a runtime for local language models whose sessions last."""

from perdure import errors
from perdure.decode.grammar import Grammar
from perdure.decode.job import Job
from perdure.decode.request import Delta, Reply, Timings, TokenLogprob, Usage
from perdure.decode.sampling import Sampling
from perdure.engine.context import Context, Feed
from perdure.engine.contract import Capabilities, Memory, MemoryKind
from perdure.engine.llama.model import Model
from perdure.engine.logits import Candidate, LogitsView
from perdure.engine.state import Checkpoint
from perdure.errors import *  # noqa: F403
from perdure.identity import Identity
from perdure.runtime import Runtime, open

__version__ = "0.1.0"

__all__ = [
    "Candidate",
    "Capabilities",
    "Checkpoint",
    "Context",
    "Delta",
    "Feed",
    "Grammar",
    "Identity",
    "Job",
    "LogitsView",
    "Memory",
    "MemoryKind",
    "Model",
    "Reply",
    "Runtime",
    "Sampling",
    "Timings",
    "TokenLogprob",
    "Usage",
    "__version__",
    "open",
    *errors.__all__,
]
