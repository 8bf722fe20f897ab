"""Images in requests: base64, or a data: URL. What lies behind other URLs is never fetched.

A server with keys takes none: the files count for no limit of a key, and outlast its sessions.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable

from perdure.chat.message import Image, Message, parse_messages
from perdure.server.core.api_error import invalid
from perdure.server.core.app_state import AppState

_DATA_URL = re.compile(r"data:(image/[\w.+-]+)?(;[\w=.+-]+)*;base64,", re.IGNORECASE)


def image_of_url(url: object, where: str) -> Image:
    """The image in a data: URL."""
    if not isinstance(url, str) or not (head := _DATA_URL.match(url[:200])):
        raise invalid(
            where,
            "images are not fetched from URLs; send one as data:image/png;base64,…",
            code="unsupported_content",
        )
    return image_of_base64(url[head.end() :], where)


def image_of_base64(data: object, where: str) -> Image:
    """The image in base64."""
    try:
        if isinstance(data, str) and (content := base64.b64decode(data, validate=True)):
            return Image(content)
    except (binascii.Error, ValueError):
        pass
    raise invalid(where, "an image in base64", code="invalid_image")


def readable_messages(messages: Iterable[object], app_state: AppState) -> tuple[Message, ...]:
    """Messages of a request, if this server reads all that is in them."""
    parsed = parse_messages(messages)
    if app_state.server.keys.required and any(message.images for message in parsed):
        raise invalid(
            "messages",
            "a server with keys reads no images yet: their files would count for no limit of a key",
            code="unsupported_content",
        )
    return parsed
