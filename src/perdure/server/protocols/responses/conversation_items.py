"""Items of a conversation: what was said in it, in pages."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic_core import to_json

from perdure.server.protocols.responses import ids
from perdure.server.protocols.responses.answers import ItemList
from perdure.server.protocols.responses.items import Item, said_items
from perdure.sessions.session import Session

_PAGE_BYTES = 4 << 20
"""Of the items of one page, unless a single one is longer."""


class ConversationItems:
    """The items of a session's turns.

    An id names the turn and the place in it, so a page reads the turns that it shows, and finds where the
    page before it ended without counting.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def page(self, limit: int, order: str, after: str | None) -> ItemList:
        """Up to `limit` items, behind the one that is called `after`."""
        latest_first = order == "desc"
        turns, start = self._session.turns, None
        if after is not None:
            start = self._place(after)
            if start is None:
                return ItemList.of((), limit)
        first = start[0] if start else turns if latest_first else 1
        numbers = range(first, 0, -1) if latest_first else range(first, turns + 1)
        items: list[Item] = []
        size = 0
        for item in self._walk(numbers, start, latest_first=latest_first):
            size += len(to_json(item))
            if len(items) == limit or (items and size > _PAGE_BYTES):
                return ItemList.of([*items, item], len(items))
            items.append(item)
        return ItemList.of(items, limit)

    def after_turn(self, turn: int) -> list[Item]:
        """All items behind a turn."""
        numbers = range(turn + 1, self._session.turns + 1)
        return list(self._walk(numbers, None, latest_first=False))

    def get(self, item_id: str) -> Item | None:
        place = self._place(item_id)
        return self._of_turn(place[0])[place[1]] if place else None

    def _walk(self, numbers: range, start: tuple[int, int] | None, *, latest_first: bool) -> Iterator[Item]:
        """The items of turns, without those of the first turn up to the place `start`."""
        for number in numbers:
            items = self._of_turn(number)
            if start is not None and number == start[0]:
                items = items[: start[1]] if latest_first else items[start[1] + 1 :]
            yield from reversed(items) if latest_first else items

    def _of_turn(self, number: int) -> list[Item]:
        [turn] = self._session.history(limit=1, after=number - 1)
        said = [*turn.messages, *([turn.reply] if turn.reply is not None else [])]
        items = said_items(said, self._session.name)
        for at, item in enumerate(items):
            item["id"] = ids.conversation_item(item["id"].partition("_")[0], self._session.name, number, at)
        return items

    def _place(self, item_id: str) -> tuple[int, int] | None:
        """The turn of an item and its place there; None where there is no such item."""
        place = ids.conversation_place(item_id, self._session.name)
        if place is None or not 0 < place[0] <= self._session.turns:
            return None
        items = self._of_turn(place[0])
        return place if place[1] < len(items) and items[place[1]]["id"] == item_id else None
