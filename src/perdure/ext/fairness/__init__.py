"""The engine shared between namespaces by the weights of their keys.

order    which request goes first where several namespaces ask
metrics  what each namespace has had, and by how many tokens it is behind its share
"""

from perdure.spi import Extension

EXTENSION = Extension(
    name="fairness",
    parts={"order of namespaces": "perdure.ext.fairness.order:FairOrder"},
    tasks=("perdure.ext.fairness.metrics:report_shares",),
)
