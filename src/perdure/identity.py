"""Everything that changes what state bytes mean, and its digest."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import threading
from dataclasses import dataclass
from pathlib import Path

from perdure.atomic import read_table, write_table
from perdure.config import settings
from perdure.engine_config import KvType
from perdure.errors import InvalidInputError


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A value that two contexts share exactly when each can use the other's state.

    No field may be empty: an unknown identity must not match another unknown one.
    """

    weights: str
    tokenizer: str
    template: str
    adapters: str
    k_type: str
    v_type: str
    attention: str
    rope: str
    window: str
    layout: str
    engine: str
    """The library: its version and the digest of its files."""
    kernels: str
    """The code that computes: CPU variant, its features, extra buffers."""
    devices: str
    """Where it computes: backends, devices, layers on the GPU."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) or not value:
                raise InvalidInputError(f"identity field {field.name!r} must be a text that is not empty")

    @property
    def kv_type(self) -> str:
        """The types of K and V in one word."""
        return str(KvType(self.k_type, self.v_type))

    @functools.cached_property
    def digest(self) -> bytes:
        # Asked for several times a request.
        return hashlib.sha256(self.to_json()).digest()

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Identity:
        """The identity in `data`; ValueError or TypeError where it is none."""
        fields = json.loads(data)
        if not isinstance(fields, dict):
            raise ValueError("not an identity")
        return cls(**fields)

    def difference(self, other: Identity) -> str | None:
        """The first field in which `other` differs, or None."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) != getattr(other, field.name):
                return field.name
        return None


_CHUNK = 1 << 22
_digests_lock = threading.Lock()


def content_digest(path: Path) -> str:
    """The SHA-256 of a file's content, in hex.

    Hashing is paid once a file: the result is kept by what changes when a file is written or replaced
    (`file_version`) and its path.
    """
    key = "|".join(map(str, (path.resolve(), *file_version(path))))
    return _cached_digest(path.resolve(), key)


def file_version(path: Path) -> tuple[int, int, int, int]:
    """Size, mtime, ctime and inode: one of them changes whenever a file is written or replaced.

    Copying tools keep the mtime of what they copy; nobody can set the ctime.
    """
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


@functools.lru_cache(maxsize=256)
def _cached_digest(path: Path, key: str) -> str:
    digests = settings().home / "digests.json"
    with _digests_lock:
        known = _read_digests(digests).get(key)
    if known is not None:
        return known
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    with _digests_lock:
        entries = _read_digests(digests)
        # One entry a path: a file that changed leaves no dead entries behind.
        prefix = key.split("|", 1)[0] + "|"
        entries = {old: value for old, value in entries.items() if not old.startswith(prefix)}
        entries[key] = digest.hexdigest()
        write_table(digests, entries)
    return digest.hexdigest()


def _read_digests(digests: Path) -> dict[str, str]:
    return {k: v for k, v in read_table(digests).items() if isinstance(v, str) and len(v) == 64}
