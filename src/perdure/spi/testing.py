"""For tests of extensions: the toy engine."""

from perdure.testing.toy import Faults, Gate, PlannedFault, ToyAbort, ToyAdapter, ToyCore, ToyModel

__all__ = [
    "Faults",
    "Gate",
    "PlannedFault",
    "ToyAbort",
    "ToyAdapter",
    "ToyCore",
    "ToyModel",
]
