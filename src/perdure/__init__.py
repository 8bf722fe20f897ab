"""perdure: a runtime for local language models whose sessions last."""

from perdure import errors
from perdure.engine.context import Context, Feed
from perdure.engine.contract import Capabilities, Memory, MemoryKind
from perdure.engine.llama.model import Model
from perdure.engine.logits import Candidate, LogitsView
from perdure.engine.state import Checkpoint
from perdure.errors import *  # noqa: F403
from perdure.identity import Identity

__version__ = "0.1.0"

__all__ = [
    "Candidate",
    "Capabilities",
    "Checkpoint",
    "Context",
    "Feed",
    "Identity",
    "LogitsView",
    "Memory",
    "MemoryKind",
    "Model",
    "__version__",
    *errors.__all__,
]
