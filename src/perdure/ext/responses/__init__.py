"""OpenAI's Responses."""

from perdure.spi import Extension

EXTENSION = Extension(
    name="responses",
    protocols=("perdure.ext.responses.routes:PROTOCOL",),
)
