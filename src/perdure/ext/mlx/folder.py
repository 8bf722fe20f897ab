"""A model's folder, judged before anything of it is loaded.

    config.json                     which model class, and its sizes
    model.safetensors               weights; or several files with model.safetensors.index.json
    tokenizer.json                  the vocabulary
    tokenizer_config.json           special tokens, the chat template; or chat_template.jinja
    generation_config.json          the tokens that end a text

No code of a folder is ever run: one that needs its own model class is refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure import ModelFileError, ModelNotFoundError, TooLargeError
from perdure.ext.weights.safetensors import SafetensorsHeader, read_safetensors
from perdure.spi.base import content_digest, is_integer, read_file, read_text

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
_LARGEST_CONFIG = 16 << 20
_LARGEST_TOKENIZER = 256 << 20
_LARGEST_NUMBER = 1 << 40
_MOST_FILES = 10_000
_MODEL_TYPE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_SHARD = re.compile(r"model[^/\\]{0,200}\.safetensors")


def is_folder(path: Path) -> bool:
    """Whether there is a model of this kind at `path`. Nothing is read."""
    try:
        return (path / CONFIG).is_file() and any(path.glob("model*.safetensors*"))
    except (OSError, ValueError):
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The judged files of a model: all weights are there and whole, every number has a sane size."""

    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    """What tokenizer_config.json says."""
    template: str
    tool_template: str
    weights: tuple[SafetensorsHeader, ...]

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of the config that is about text."""
        part = self.config.get("text_config")
        return {**self.config, **part} if isinstance(part, dict) else self.config

    @property
    def files(self) -> list[Path]:
        """All files that change what the model computes or says."""
        names = (
            CONFIG,
            TOKENIZER,
            "tokenizer_config.json",
            "generation_config.json",
            "chat_template.jinja",
            "hf_quant_config.json",
        )
        here = [self.path / name for name in names if (self.path / name).is_file()]
        return [*here, *(header.path for header in self.weights)]

    @property
    def nbytes(self) -> int:
        return sum(header.path.stat().st_size for header in self.weights)

    @property
    def parameters(self) -> int:
        """Numbers of all tensors; of a packed type, as many as are in a word."""
        bits = self.bits
        total = 0
        for header in self.weights:
            for tensor in header.tensors:
                count = functools.reduce(lambda a, b: a * b, tensor.shape, 1)
                if tensor.dtype == "U32" and bits:
                    total += count * 32 // bits
                elif not tensor.name.endswith((".scales", ".biases")):
                    total += count
        return total

    @property
    def bits(self) -> int:
        """Bits of a quantised weight; 0 where they are plain numbers."""
        for name in ("quantization", "quantization_config"):
            part = self.config.get(name)
            if isinstance(part, dict) and is_integer(part.get("bits")):
                return int(part["bits"])
        return 0

    @property
    def quantisation(self) -> str:
        """What most weights are stored in."""
        if self.bits:
            return f"{self.bits}-bit"
        sizes: dict[str, int] = {}
        for header in self.weights:
            for tensor in header.tensors:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.size
        return max(sizes, key=lambda name: sizes[name]) if sizes else ""

    def digest(self) -> str:
        """A SHA-256 over the content of all files that count, paid once a file."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name} {content_digest(file)}\n".encode())
        return digest.hexdigest()


def read_folder(path: Path) -> Folder:
    """Judge the model in the folder at `path`."""
    if not path.is_dir():
        raise ModelNotFoundError(f"there is no folder {path}")
    config = _table(path / CONFIG, needed=True)
    _check_config(path, config)
    weights = _weights(path)
    _check_layers(path, config, sum(len(header.tensors) for header in weights))
    vocabulary = path / TOKENIZER
    if not vocabulary.is_file():
        raise ModelNotFoundError(
            f"{path} has no {TOKENIZER}, which says how text becomes tokens: fetch the whole repository, or "
            "write it with transformers (AutoTokenizer.from_pretrained(…).save_pretrained(…))"
        )
    if vocabulary.stat().st_size > _LARGEST_TOKENIZER:
        raise ModelFileError(
            f"{vocabulary} has {vocabulary.stat().st_size} bytes, at most {_LARGEST_TOKENIZER} are read"
        )
    tokenizer = _table(path / "tokenizer_config.json")
    template, tool_template = _templates(path, tokenizer)
    return Folder(
        path=path,
        config=config,
        generation=_table(path / "generation_config.json"),
        tokenizer=tokenizer,
        template=template,
        tool_template=tool_template,
        weights=weights,
    )


def _table(path: Path, *, needed: bool = False) -> dict[str, Any]:
    """A JSON object of a file, or none where the file is not there."""
    if not path.is_file():
        if needed:
            raise ModelNotFoundError(f"{path.parent} has no {path.name}: it is no folder of an MLX model")
        return {}
    try:
        table = json.loads(read_file(path, _LARGEST_CONFIG))
    except TooLargeError as error:
        raise ModelFileError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is no JSON: {error}") from None
    if not isinstance(table, dict):
        raise ModelFileError(f"{path} is no JSON object")
    return table


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if not isinstance(kind, str) or _MODEL_TYPE.fullmatch(kind) is None:
        raise ModelFileError(f"{path / CONFIG} names no usable model_type: {str(kind)[:80]!r}")
    if config.get("model_file") is not None:
        raise ModelFileError(
            f"{path} wants its own code run ({str(config['model_file'])[:80]!r}) to build the model. perdure "
            "never runs code of a model: use one whose architecture mlx-lm knows"
        )
    waiting: list[tuple[str, Any]] = list(config.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += ((name, each) for each in value)
        elif is_integer(value) and not -_LARGEST_NUMBER <= value <= _LARGEST_NUMBER:
            raise ModelFileError(f"{path / CONFIG} has an impossible {name[:80]!r}: {str(value)[:40]}")


def _check_layers(path: Path, config: Mapping[str, Any], tensors: int) -> None:
    """A model class makes an object a layer and an expert before it looks at any weights."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for part in parts:
        for name, value in part.items():
            counted = "layer" in name and "types" not in name and name.startswith(("n", "num"))
            if counted and is_integer(value) and value > tensors:
                raise ModelFileError(
                    f"{path / CONFIG} says {name[:80]} {value}, and there are {tensors} tensors in all"
                )


def _weights(path: Path) -> tuple[SafetensorsHeader, ...]:
    names = sorted(file.name for file in path.glob("model*.safetensors"))
    if len(names) > _MOST_FILES:
        raise ModelFileError(f"{path} has {len(names)} files of weights, at most {_MOST_FILES} are read")
    listed: dict[str, set[str]] = {}
    if (path / INDEX).is_file():
        places = _table(path / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ModelFileError(f"{path / INDEX} has no weight_map")
        for tensor, shard in places.items():
            if not isinstance(shard, str) or _SHARD.fullmatch(shard) is None:
                raise ModelFileError(f"{path / INDEX} names the impossible file {str(shard)[:80]!r}")
            listed.setdefault(shard, set()).add(tensor)
    missing = sorted(set(listed) - set(names))
    if missing:
        raise ModelNotFoundError(
            f"{path} lacks {len(missing)} of {len(listed)} files of weights: {', '.join(missing[:3])}"
            f"{' …' if len(missing) > 3 else ''}. Fetch the whole repository"
        )
    if not names:
        raise ModelNotFoundError(f"{path} has no model*.safetensors: there are no weights to load")
    headers = tuple(read_safetensors(path / name) for name in names)
    owners: dict[str, str] = {}
    for header in headers:
        tensors = {tensor.name for tensor in header.tensors}
        if absent := sorted(listed.get(header.path.name, set()) - tensors):
            raise ModelFileError(
                f"{header.path} lacks {len(absent)} tensors that the index says it has, such as "
                f"{absent[0][:80]!r}: the files are of different models"
            )
        for tensor in tensors:
            if other := owners.get(tensor):
                raise ModelFileError(f"{tensor[:80]!r} is in {other} and in {header.path.name}")
            owners[tensor] = header.path.name
    return headers


def _templates(path: Path, tokenizer: Mapping[str, Any]) -> tuple[str, str]:
    """The chat template, and the one for conversations with tools where there is a second one."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return read_text(file, _LARGEST_CONFIG, errors="replace"), ""
        except TooLargeError as error:
            raise ModelFileError(str(error)) from None
    templates = tokenizer.get("chat_template")
    if isinstance(templates, str):
        return templates, ""
    named: dict[str, str] = {}
    for entry in templates if isinstance(templates, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("template"), str):
            named[str(entry.get("name"))] = entry["template"]
    return named.get("default", ""), named.get("tool_use", "")
