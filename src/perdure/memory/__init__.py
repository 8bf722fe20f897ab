"""The kinds of memory that models have, one class each with its reuse rule.

A new kind is a new file here, and a line where an engine says which kind its model has.
"""

from perdure.memory.full_attention import FullAttention as FullAttention
from perdure.memory.hybrid import Hybrid as Hybrid
from perdure.memory.recurrent import Recurrent as Recurrent
from perdure.memory.sliding_window import SlidingWindow as SlidingWindow
from perdure.memory.spec import MemorySpec as MemorySpec

MEMORY_KINDS: tuple[type[MemorySpec], ...] = (FullAttention, SlidingWindow, Recurrent, Hybrid)
