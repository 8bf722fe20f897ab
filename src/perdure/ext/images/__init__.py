"""Images and sounds, encoded once: rows of a projector, kept by what they are.

library      libmtmd: where it is found, and its calls, checked by their defaults
child        the process that decodes files and encodes them; `pixels` reads images there, with limits
fetched      what that needs, fetched where it is not installed
encoder      that process from outside: started when a file comes, ended when idle, never trusted
projector    the projector's file (mmproj): found beside a model
media        what an encoded file is: text tokens and media, whose ids in a ledger are below zero
reader       images in messages: encoded once, then found
encoding_turns  which file is encoded next
links        images behind URLs, fetched from hosts that the operator has named
routes       what an image costs in tokens, and the file of one in a session
media_store  the folder `media/` of a store: rows by their digest, and which file gave which
"""

from perdure.spi import Extension

EXTENSION = Extension(
    name="images",
    needs=("fetching", "workers"),
    routes=("perdure.ext.images.routes:router",),
    parts={
        "images in a prompt": "perdure.ext.images.media_store:stored_media",
        "projector beside a model": "perdure.ext.images.projector:find_projector",
        "images behind URLs": "perdure.ext.images.links:with_files",
        "hosts of images": "perdure.ext.images.links:check_hosts",
        "what encodes images": "perdure.ext.images.fetched:provide",
        "images in messages": "perdure.ext.images.reader:StoredImages",
    },
)
