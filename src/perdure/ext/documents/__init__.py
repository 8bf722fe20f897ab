"""Documents: the text of a PDF, for a message.

pdf     the text of a file, read in a child process with bounds
child   that process
routes  `/v1/documents/text`
"""

from perdure.spi import Extension

EXTENSION = Extension(
    name="documents", routes=("perdure.ext.documents.routes:router",), uploads=("/v1/documents/text",)
)
