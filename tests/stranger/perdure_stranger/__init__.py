"""A package that is not ours, and brings an engine, commands, a route, a tier and a check of `doctor`.

tests/test_stranger.py builds its wheel, installs it and uses each of them.
"""

from perdure.spi import Extension, ExtensionCommand

EXTENSION = Extension(
    name="stranger",
    engines=("perdure_stranger.engine:ENGINE",),
    commands=(
        ExtensionCommand(name="hello", target="perdure_stranger.commands:hello", section="Strangers"),
        # Both names are taken: by the command itself, and by an extension of ours.
        ExtensionCommand(name="ls", target="perdure_stranger.commands:hello"),
        ExtensionCommand(name="train", target="perdure_stranger.commands:hello"),
    ),
    routes=("perdure_stranger.routes:router",),
    checks=("perdure_stranger.commands:findings",),
    tiers={"drawer": "perdure_stranger.tier:OPENER", "redis": "perdure_stranger.tier:OPENER"},
)
