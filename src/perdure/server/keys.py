"""Who may come in, and whose namespace that is."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from perdure.errors import InvalidInputError

METRICS = "metrics"
"""The namespace whose keys open /metrics and nothing else."""

_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Key:
    """A key as it is kept: only its digest, so that the file gives nobody entry."""

    namespace: str
    digest: str

    def __post_init__(self) -> None:
        if not _NAMESPACE.fullmatch(self.namespace):
            raise InvalidInputError(
                f"a key's name has 1 to 64 letters, digits, dots, dashes and underscores, "
                f"got {self.namespace!r}"
            )
        if not _DIGEST.fullmatch(self.digest):
            raise InvalidInputError(
                f"the key of {self.namespace} is not a SHA-256 in 64 lower-case hex digits; "
                "`perdure serve --new-key NAME` makes a key and its line"
            )

    @property
    def line(self) -> str:
        return f"{self.namespace}:{self.digest}"


class Keys:
    """The keys of a server. With none, everybody comes in, and all are in the namespace ""."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def namespaces(self) -> list[str]:
        return sorted({key.namespace for key in self._keys})

    def namespace(self, secret: str | None) -> str | None:
        """Whose key this is; None where it is nobody's. Takes as long for a wrong key as for a right one."""
        if not self._keys:
            return ""
        digest = hashlib.sha256((secret or "").encode("utf-8", "surrogatepass")).hexdigest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key.namespace
        return found if secret else None

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Keys out of a file: lines of `namespace:sha256`, or the same in TOML under `[keys]`."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"the keys in {path} cannot be read: {error}") from None
        keys = _toml(path, text) if path.suffix.lower() == ".toml" else _lines(path, text)
        if not keys:
            raise InvalidInputError(
                f"{path} has no key in it; `perdure serve --new-key NAME` makes one and its line"
            )
        return cls(keys)


def new_key(namespace: str) -> tuple[str, Key]:
    """A fresh secret, and the key as it is kept."""
    secret = f"pk-{secrets.token_urlsafe(32)}"
    return secret, Key(namespace, hashlib.sha256(secret.encode()).hexdigest())


def _lines(path: Path, text: str) -> list[Key]:
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.split("#")[0].strip()
        if not entry:
            continue
        namespace, separator, digest = entry.rpartition(":")
        if not separator:
            raise InvalidInputError(f"{path}, line {number}: not `namespace:sha256`")
        keys.append(Key(namespace.strip(), digest.strip().lower()))
    return keys


def _toml(path: Path, text: str) -> list[Key]:
    try:
        table = tomllib.loads(text).get("keys", {})
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{path} is no TOML: {error}") from None
    if not isinstance(table, dict):
        raise InvalidInputError(f"{path}: keys is a table of namespaces")
    keys = []
    for namespace, digests in table.items():
        for digest in digests if isinstance(digests, list) else [digests]:
            if not isinstance(digest, str):
                raise InvalidInputError(f"{path}: the key of {namespace} is a text, or a list of texts")
            keys.append(Key(namespace, digest.lower()))
    return keys
