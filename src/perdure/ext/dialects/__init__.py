"""Routes of other servers that clients ask for: llama-server's and SGLang's."""

from perdure.spi import Extension

EXTENSION = Extension(
    name="dialects",
    routes=("perdure.ext.dialects.llama_server:router", "perdure.ext.dialects.sglang:router"),
)
