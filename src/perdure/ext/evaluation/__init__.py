"""How good a model is at a file of texts or tasks, and whether two models really differ.

tasks        what a file asks: a class a kind, each with how it is put to a model and judged
statistics   intervals: of a share, of a mean, of the difference of two models on the same tasks
evaluate     one model on one file: batched over the slots, resumed after a kill, a report at the end
command      `perdure eval`
"""

from perdure.spi import Extension, ExtensionCommand

EXTENSION = Extension(
    name="evaluation",
    needs=("weights",),
    commands=(
        ExtensionCommand(name="eval", target="perdure.ext.evaluation.command:evaluate", section="Models"),
    ),
)
