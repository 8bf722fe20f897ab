"""Sessions with a text in their names or in what was said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from perdure.sessions.info import SessionInfo
from perdure.sessions.store.sql.database import Dialect
from perdure.sessions.store.sql.tables import Rows, proved_session

SEARCHED = 64
"""Sessions that a search reads at a time."""


def search(
    rows: Rows,
    dialect: Dialect,
    page: Callable[[SessionInfo | None], Sequence[Sequence[Any]]],
    text: str,
    *,
    limit: int | None,
    after: SessionInfo | None,
) -> list[SessionInfo]:
    """The sessions that have a text, up to `limit`, out of the pages of them that follow `after`."""
    matches: list[SessionInfo] = []
    while rows_of_page := page(after):
        sessions = [proved_session(row) for row in rows_of_page]
        marks = ", ".join("?" * len(sessions))
        has_text: dict[int | None, bool] = {}
        heads = {session.head for session in sessions}
        for number, parent, here in rows(dialect.spoken.format(heads=", ".join(map(str, heads))), text, text):
            has_text[number] = bool(here) or has_text.get(parent, False)
        named = rows(
            f"SELECT number FROM session WHERE number IN ({marks}) AND {dialect.contains.format('name')}",
            *(session.number for session in sessions),
            text,
        )
        numbers = {number for (number,) in named}
        for session in sessions:
            titled = text.casefold() in session.title.casefold()
            if titled or session.number in numbers or has_text.get(session.head):
                matches.append(session)
                if len(matches) == limit:
                    return matches
        after = sessions[-1]
    return matches
