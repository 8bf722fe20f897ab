"""Reasoning cache: what a model thought before it called tools, found again by the ids of its calls."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from perdure.chat.message import Message

_Key = tuple[str, ...]
_LIMIT = 4 << 20
_OURS = re.compile(r"call_[0-9a-f]{24}")
"""An id that was drawn here, and so is of one call only."""


class ReasoningCache:
    """The latest reasoning of replies with calls, by namespace, up to a number of characters. Safe from any
    thread.

    Templates show it while the model works with tools, but clients of OpenAI's shape do not send it back.
    """

    def __init__(self, *, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._held: OrderedDict[_Key, str] = OrderedDict()
        self._chars = 0

    def store(self, asked: Sequence[Message], reply: Message, namespace: str) -> None:
        """Remember the reasoning of a reply to `asked`."""
        if not reply.reasoning or not reply.tool_calls:
            return
        key = _key(asked[-1] if asked else None, reply, namespace)
        size = _size(key, reply.reasoning)
        if size > self._limit:
            return
        with self._lock:
            if (gone := self._held.pop(key, None)) is not None:
                self._chars -= _size(key, gone)
            self._held[key] = reply.reasoning
            self._chars += size
            while self._chars > self._limit:
                self._chars -= _size(*self._held.popitem(last=False))

    def put_back(self, messages: Sequence[Message], namespace: str) -> tuple[Message, ...]:
        """The messages, with the reasoning of calls that came without it."""
        found = []
        for index, message in enumerate(messages):
            if message.tool_calls and message.reasoning is None:
                key = _key(messages[index - 1] if index else None, message, namespace)
                with self._lock:
                    reasoning = self._held.get(key)
                    if reasoning is not None:
                        self._held.move_to_end(key)
                if reasoning is not None:
                    message = replace(message, reasoning=reasoning)
            found.append(message)
        return tuple(found)


def _key(before: Message | None, reply: Message, namespace: str) -> _Key:
    """The ids of the calls. Those that a model writes may come again in another conversation, so that the
    message before them counts too."""
    ids = tuple(call.id for call in reply.tool_calls)
    if all(_OURS.fullmatch(each) for each in ids):
        return (namespace, *ids)
    said = "" if before is None else f"{before.role} {before.tool_call_id or ''} {before.content or ''}"
    return (namespace, *ids, *(call.name for call in reply.tool_calls), said)


def _size(key: _Key, reasoning: str) -> int:
    return len(reasoning) + sum(map(len, key))
