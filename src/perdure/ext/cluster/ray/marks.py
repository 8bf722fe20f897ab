"""Marks of a request: digests by which a router knows where its state is, without keeping a word of it.

A session's mark is made of its name and of the key that came with it, so that two users with a session of one
name have two marks. A conversation that comes whole with each request has a mark for each message: the
next request begins with the same ones. A plain prompt has one for each 1,024 characters.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from perdure.ext.cluster.ray.policy import Mark, RoutedRequest
from perdure.spi.server import ApiError, JsonScan, Limits, session_id

_IN_PATH = re.compile(r"/v1/(?:sessions|responses|conversations)/([^/]+)")
_PIECE = 1024
_MOST_PIECES = 64
_CHARACTERS = 4
"""Of a token, roughly: costs are compared, not reported."""


def ask_of(path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> RoutedRequest:
    """What is known of a request before it is answered."""
    sent = _json(body)
    key = _key(headers)
    roughly = max(1, len(body) // _CHARACTERS)
    if (name := _session_name(path, headers, sent)) is not None:
        # The replica that answers refuses an invalid name.
        named = name.encode("utf-8", "surrogatepass")
        return RoutedRequest(((_digest(b"session", key, named), roughly),), roughly)
    marks = list(_chain(key, _pieces(sent)))
    return RoutedRequest(tuple(marks[:_MOST_PIECES]), roughly)


def _session_name(path: str, headers: Sequence[tuple[bytes, bytes]], sent: Mapping[str, Any]) -> str | None:
    own = sent.get("perdure")
    for named in (own.get("session") if isinstance(own, dict) else None, sent.get("previous_response_id")):
        if isinstance(named, str) and named:
            return named
    if (match := _IN_PATH.match(path)) is not None:
        return unquote(match[1])
    header = session_id(headers)
    return None if header is None else header.decode("ascii")


def _pieces(sent: Mapping[str, Any]) -> Iterable[bytes]:
    """The parts that a prompt grows by: what comes before all messages first."""
    first = [sent.get(name) for name in ("model", "system", "instructions", "tools")]
    messages = sent.get("messages", sent.get("input"))
    if isinstance(messages, list):
        # A model's name alone is no beginning that is worth anything.
        if any(first[1:]):
            yield _plain(first)
        for number, message in enumerate(messages):
            yield _plain([sent.get("model"), message] if not number else message)
        return
    prompt = sent.get("prompt", messages)
    if isinstance(prompt, str) and prompt:
        text = prompt.encode("utf-8", "surrogatepass")
        yield _plain(first) + text[:_PIECE]
        for at in range(_PIECE, len(text) - _PIECE + 1, _PIECE):
            yield text[at : at + _PIECE]


def _chain(key: bytes, pieces: Iterable[bytes]) -> Iterable[tuple[Mark, int]]:
    before, size = b"", 0
    for piece in pieces:
        size += len(piece)
        mark = _digest(b"prefix", key, before, piece)
        yield mark, max(1, size // _CHARACTERS)
        before = mark.encode()


def _digest(kind: bytes, *parts: bytes) -> Mark:
    made = hashlib.blake2b(digest_size=8, person=kind)
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.hexdigest()


def _plain(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _json(body: bytes) -> Mapping[str, Any]:
    """The object that a body is; nothing where it is none, or one that no server takes: the replica that
    answers says what is wrong with it. No key was asked for yet, so it is not parsed before it was
    scanned."""
    scan = JsonScan()
    try:
        text = body.decode() if body[:1] in (b"{", b" ", b"\n", b"\r", b"\t") else "null"
        scan.push(body)
        scan.check(Limits())
        parsed = json.loads(text)
    except (ValueError, RecursionError, ApiError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _key(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    return b"\0".join(value for name, value in headers if name in (b"authorization", b"x-api-key"))
