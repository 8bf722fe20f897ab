"""Messages between the encoder's process and its parent: a line of JSON, then bytes of a given length.

{"size": 57833, "encode": "image"}\\n…57,833 bytes…
"""

from __future__ import annotations

import json
from typing import IO, Any

_LINE = 1 << 20


def send(out: IO[bytes], message: dict[str, Any], *parts: bytes) -> None:
    out.write(json.dumps({"size": sum(map(len, parts)), **message}).encode() + b"\n")
    for part in parts:
        out.write(part)
    out.flush()


def receive(source: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    """A message and its bytes; EOFError where the other side is gone."""
    line = source.readline(_LINE)
    if not line.endswith(b"\n"):
        raise EOFError
    message: dict[str, Any] = json.loads(line)
    size = message.pop("size")
    data = source.read(size)
    if len(data) != size:
        raise EOFError
    return message, data
