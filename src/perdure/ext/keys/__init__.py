"""Keys of a server: who may use it, until when, and how much."""

from perdure.spi import Extension, ExtensionCommand

EXTENSION = Extension(
    name="keys",
    commands=(ExtensionCommand(name="keys", target="perdure.ext.keys.command:app", section="Serve a model"),),
)
