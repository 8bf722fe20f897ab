"""For tests of extensions: the toy engine."""

from perdure.testing.toy import (
    Faults as Faults,
    Gate as Gate,
    PlannedFault as PlannedFault,
    ToyAbort as ToyAbort,
    ToyAdapter as ToyAdapter,
    ToyCore as ToyCore,
    ToyModel as ToyModel,
)
