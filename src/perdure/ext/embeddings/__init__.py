"""Texts as vectors, and documents by how near they are to a query: `/v1/embeddings`, `/v1/rerank`."""

from perdure.spi import Extension

EXTENSION = Extension(
    name="embeddings",
    routes=("perdure.ext.embeddings.routes:router",),
    parts={"rt.embed and rt.rank": "perdure.ext.embeddings.queue:EmbeddingQueue"},
)
