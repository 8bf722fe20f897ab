"""Ids of responses, conversations and their items. An item's id says which response it belongs to."""

from __future__ import annotations

import re
import uuid

_RESPONSE = re.compile(r"resp_([0-9a-f]{32})")
_CONVERSATION = re.compile(r"conv_([0-9a-f]{32})")
_ITEM = re.compile(r"([a-z]{2,4})_([0-9a-f]{32})(?:_([a-z]?)(\d{1,6}))?")
_PLACE = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})_(\d{1,9})i(\d{1,6})")


def new_response() -> str:
    return f"resp_{uuid.uuid4().hex}"


def new_conversation() -> str:
    return f"conv_{uuid.uuid4().hex}"


def is_response(given: str) -> bool:
    return _RESPONSE.fullmatch(given) is not None


def is_conversation(given: str) -> bool:
    return _CONVERSATION.fullmatch(given) is not None


def item(kind: str, owner: str, number: int | None = None, *, of_input: bool = False) -> str:
    """The id of an item of a response or conversation: its reasoning, its message, its calls, its input."""
    key = owner.partition("_")[2]
    if number is None:
        return f"{kind}_{key}"
    return f"{kind}_{key}_{'i' if of_input else ''}{number}"


def owner_of(item_id: str) -> str | None:
    """The response that an item belongs to, by its id."""
    found = _ITEM.fullmatch(item_id)
    return f"resp_{found[2]}" if found else None


def conversation_item(kind: str, owner: str, turn: int, place: int) -> str:
    """The id of an item of a conversation: the turn that it was said in, and its place there."""
    return f"{kind}_{owner.partition('_')[2]}_{turn}i{place}"


def conversation_place(item_id: str, owner: str) -> tuple[int, int] | None:
    """The turn and the place that the id of an item names, if it is of this conversation."""
    found = _PLACE.fullmatch(item_id)
    return (int(found[2]), int(found[3])) if found and found[1] == owner.partition("_")[2] else None
