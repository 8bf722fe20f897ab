"""Rendering cache: conversations that were rendered, found again by those that go on from them."""

from __future__ import annotations

import threading
from collections import OrderedDict

from perdure.chat.message import Message
from perdure.chat.templates.renderer import Rendering

_Key = tuple[str, int, Message, tuple[Message, ...]]
_LIMIT = 8 << 20
_MESSAGE, _OVERHEAD = 256, 1024
"""Bytes that a message takes, and a rendering besides what it holds."""
_REACH = 8
"""Messages that a conversation may have gone on by since it was last rendered."""


class RenderingCache:
    """The latest renderings, by namespace and messages, up to a number of bytes. Safe from any thread.

    A client that sends its whole history each time then has only what is new of it rendered.
    """

    def __init__(self, *, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._held: OrderedDict[_Key, Rendering] = OrderedDict()
        self.nbytes = 0
        """What it takes of memory, about."""

    def lookup(self, messages: tuple[Message, ...], namespace: str) -> Rendering | None:
        """What `messages` go on from."""
        for count in range(len(messages) - 1, max(0, len(messages) - 1 - _REACH), -1):
            with self._lock:
                found = self._held.get(_key(messages[:count], namespace))
            if found is not None and found.begins(messages):
                return found
        return None

    def store(self, rendering: Rendering, namespace: str, instead_of: Rendering | None = None) -> None:
        """Remember a rendering, in the place of the one that it goes on from."""
        with self._lock:
            for each in (instead_of, rendering):
                if (
                    each is not None
                    and (gone := self._held.pop(_key(each.messages, namespace), None)) is not None
                ):
                    self.nbytes -= _size(gone)
            self._held[_key(rendering.messages, namespace)] = rendering
            self.nbytes += _size(rendering)
            while self.nbytes > self._limit:
                self.nbytes -= _size(self._held.popitem(last=False)[1])


def _size(rendering: Rendering) -> int:
    """In memory, about: the text stands in the messages too."""
    characters = len(rendering.text) * (1 if rendering.text.isascii() else 4)
    return 2 * characters + _MESSAGE * len(rendering.messages) + _OVERHEAD


def _key(messages: tuple[Message, ...], namespace: str) -> _Key:
    """What tells most conversations apart; their messages decide."""
    return namespace, len(messages), messages[0], messages[-2:]
