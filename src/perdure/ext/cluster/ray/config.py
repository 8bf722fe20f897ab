"""The file that `perdure cluster serve` reads.

model = "qwen3:4b"
store = "postgresql://perdure@db.example/chats"
blocks = ["file:///mnt/shared/perdure?size=200"]

[engine]                 # whatever `perdure.open` takes
n_ctx = 8192
slots = 4

[replicas]
min = 1
max = 8
requests = 4             # that one is to have, served and waiting
cpus = 4
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from perdure import InvalidInputError
from perdure import open as open_runtime
from perdure.ext.cluster.postgres.place import is_url, parse_place
from perdure.spi.base import EngineConfig, is_number, is_whole, read_text

_OF_A_RUNTIME = ("encrypt", "template")
"""Of what `perdure.open` takes, that is no option of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """How many replicas there are, and what each of them gets of a machine."""

    min: int = 1
    max: int = 1
    requests: float = 4
    """That one is to have at once, served and waiting: where there are more, replicas are added."""
    queue: int = 256
    """Requests that one takes at most; more wait in front of all of them."""
    cpus: float = 1
    gpus: float = 0
    memory: int = 0
    """Bytes that Ray reserves for one; 0: none."""
    up_seconds: float = 10
    """Of more work than its replicas should have, after which there is one more."""
    down_seconds: float = 300
    grace_seconds: float = 120
    """For replies to finish and state to be written, when one is to go."""
    facts_seconds: float = 1
    """Between two reports of a replica to routers of what is warm there."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value, whole = getattr(self, each.name), each.name in ("min", "max", "queue", "memory")
            least = 0 if each.name in ("gpus", "memory") else 1 if whole else 0.001
            right = is_whole(value) if whole else is_number(value)
            if not right or not least <= value <= 1e15:
                kind = "a whole number" if whole else "a number"
                raise InvalidInputError(f"[replicas] {each.name} is {kind} from {least:g}, got {value!r}")
        if self.max < self.min:
            raise InvalidInputError(f"[replicas] max is at least min, got {self.max} and {self.min}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What a cluster serves, where it keeps things, and how large it is."""

    store: str
    """A database: postgresql://…"""
    model: str | None = None
    name: str = ""
    """What the model is called in answers; else after its file."""
    blocks: tuple[str, ...] = ()
    """Places where replicas share state."""
    folder: str = ""
    """Of each machine, for the blocks of its replicas; else that of the store."""
    keys: str = ""
    """A file of keys, at this path on every machine; else those of the database are asked for."""
    host: str = "127.0.0.1"
    port: int = 8000
    address: str = ""
    """Of a Ray cluster that runs; else one is started on this machine."""
    body_bytes: int = 16 << 20
    """Of a request."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Whatever `perdure.open` takes."""
    replicas: ReplicaSettings = field(default_factory=ReplicaSettings)

    def __post_init__(self) -> None:
        for name in ("store", "name", "folder", "keys", "host", "address"):
            if not isinstance(getattr(self, name), str):
                raise InvalidInputError(f"{name} is a text, got {getattr(self, name)!r}")
        if self.model is not None and not isinstance(self.model, str):
            raise InvalidInputError(f"model is a text, got {self.model!r}")
        if not is_url(self.store):
            raise InvalidInputError(
                f"store is a database that all replicas share, postgresql://…, got {self.store!r}"
            )
        parse_place(self.store)
        if self.folder and not Path(self.folder).is_absolute():
            raise InvalidInputError(f"folder is an absolute path, got {self.folder!r}")
        if not is_whole(self.port) or not 0 < self.port < 65536:
            raise InvalidInputError(f"port is a whole number from 1 to 65535, got {self.port!r}")
        if not is_whole(self.body_bytes) or not 0 < self.body_bytes <= 1 << 30:
            raise InvalidInputError(f"body_bytes is a whole number up to 1 GiB, got {self.body_bytes!r}")

    @classmethod
    def read(cls, path: Path) -> ClusterConfig:
        try:
            table = tomllib.loads(read_text(path, regular=False))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"{path} cannot be read: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise InvalidInputError(f"{path} is no TOML: {error}") from None
        try:
            return cls.from_dict(table)
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> ClusterConfig:
        _refuse_unknown(table, cls, "")
        options = dict(table)
        if "store" not in options:
            raise InvalidInputError("store is missing: the database that all replicas share, postgresql://…")
        for name in ("engine", "replicas"):
            if not isinstance(options.get(name, {}), Mapping):
                raise InvalidInputError(f"[{name}] is a table, got {options[name]!r}")
        if "replicas" in options:
            _refuse_unknown(options["replicas"], ReplicaSettings, "[replicas] ")
            options["replicas"] = ReplicaSettings(**options["replicas"])
        blocks = options.get("blocks", ())
        if not isinstance(blocks, (list, tuple)) or not all(isinstance(each, str) for each in blocks):
            raise InvalidInputError(f"blocks is a list of URLs, got {blocks!r}")
        taken = sorted({"store", "blocks", "model", "isolated"} & set(options.get("engine", {})))
        if taken:
            raise InvalidInputError(f"[engine] {taken[0]} stands above, or is not for replicas: remove it")
        # Now, rather than when a replica starts.
        own = {name: value for name, value in options.get("engine", {}).items() if name not in _OF_A_RUNTIME}
        try:
            EngineConfig.of(own, open_runtime)
        except InvalidInputError as error:
            raise InvalidInputError(f"[engine] {error}") from None
        return cls(**{**options, "blocks": tuple(blocks)})


def _refuse_unknown(table: Mapping[str, Any], kind: type, where: str) -> None:
    known = [each.name for each in fields(kind)]
    for name in table:
        if name not in known:
            raise InvalidInputError(f"{where}{name} is not known; known are {', '.join(known)}")
