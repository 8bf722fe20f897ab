"""A deterministic engine in plain Python with the contract of the real one, traps included.

`core.py` is what a sequence holds and the native calls over it, `model.py` a vocabulary of bytes, `faults.py`
planned faults. Nothing here protects the caller: that is what `Context` is for.
"""

from perdure.testing.toy.core import ToyAbort, ToyAdapter, ToyCore
from perdure.testing.toy.faults import Faults, Gate, PlannedFault
from perdure.testing.toy.model import ToyModel

__all__ = ["Faults", "Gate", "PlannedFault", "ToyAbort", "ToyAdapter", "ToyCore", "ToyModel"]
