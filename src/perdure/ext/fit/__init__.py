"""How a model is best opened on this machine, by its memory, its speed, and what K/V types cost it.

fit       `perdure.fit`: whether a model fits, what it takes, and how to open it
tuning    the settings with which a model is fastest here, measured and remembered
kv_loss   what types of K and V cost a model, measured and remembered
commands  `perdure fit`, `perdure tune`, `perdure show --kv`
"""

from perdure.spi import Extension, ExtensionCommand

EXTENSION = Extension(
    name="fit",
    needs=("fetching",),
    commands=(
        ExtensionCommand(name="fit", target="perdure.ext.fit.commands:fit", section="Models"),
        ExtensionCommand(name="tune", target="perdure.ext.fit.commands:tune", section="Models"),
    ),
    parts={
        "advice": "perdure.ext.fit.tuning:ADVISOR",
        "show --kv": "perdure.ext.fit.commands:show_losses",
    },
)
