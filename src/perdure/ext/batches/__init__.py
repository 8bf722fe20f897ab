"""Batches: files of requests that are answered in the background, each line once.

files    files of a namespace, in the session store
batch    batches: what is asked, how far it is, and the answers
runner   the task that answers them
form     a file that comes in a form
routes   `/v1/files`, `/v1/batches`
command  `perdure batch`
"""

from perdure.spi import Extension, ExtensionCommand

EXTENSION = Extension(
    name="batches",
    routes=("perdure.ext.batches.routes:files", "perdure.ext.batches.routes:batches"),
    forms=("/v1/files",),
    tasks=("perdure.ext.batches.runner:run_batches",),
    commands=(ExtensionCommand(name="batch", target="perdure.ext.batches.command:batch", section="Serve"),),
)
