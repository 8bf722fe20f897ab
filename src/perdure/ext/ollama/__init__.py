"""Ollama's API."""

from perdure.spi import Extension

EXTENSION = Extension(
    name="ollama",
    needs=("embeddings",),
    protocols=("perdure.ext.ollama.routes:PROTOCOL",),
)
