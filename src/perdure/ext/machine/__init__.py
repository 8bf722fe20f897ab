"""This machine: whether it is set up well, its disk, and the builds of llama.cpp that are on it.

doctor          `perdure doctor`: what is wrong here, and what to change
problem_report  one file about the machine, to attach to an issue
disk_use        `perdure du`: how much disk is used, by what it is for
engine          `perdure engine`: libraries of llama.cpp installed, tested, removed
"""

from perdure.spi import Extension, ExtensionCommand

_SECTION = "This machine"

EXTENSION = Extension(
    name="machine",
    needs=("builds", "fetching", "workers"),
    commands=(
        ExtensionCommand(name="engine", target="perdure.ext.machine.engine:app", section=_SECTION),
        ExtensionCommand(name="doctor", target="perdure.ext.machine.doctor:doctor", section=_SECTION),
        ExtensionCommand(name="du", target="perdure.ext.machine.disk_use:du", section="Models"),
        ExtensionCommand(name="du", target="perdure.ext.machine.disk_use:du", below="models"),
    ),
)
