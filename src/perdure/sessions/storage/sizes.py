"""How much of a store each namespace takes, for whoever runs it: numbers, never words."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.sessions.storage.session_store import SessionStore


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSize:
    """What is kept for a namespace. Turns that several of its sessions share are counted once."""

    namespace: str
    sessions: int
    turns: int
    nbytes: int
    """Of the turns: texts, tokens and settings. State beside them is bounded for all together."""


def namespace_sizes(store: SessionStore) -> list[NamespaceSize]:
    """Of every namespace that has sessions, by its name."""
    rows = store.index.rows(
        "WITH RECURSIVE up (namespace, number) AS ("
        " SELECT namespace, head FROM session"
        " UNION SELECT up.namespace, t.parent FROM up JOIN turn t ON t.number = up.number"
        " WHERE t.parent IS NOT NULL"
        ") SELECT up.namespace,"
        " (SELECT count(*) FROM session s WHERE s.namespace = up.namespace),"
        " sum(t.kind != 'start'),"
        " sum(length(CAST(t.messages AS BLOB)) + coalesce(length(CAST(t.reply AS BLOB)), 0)"
        " + length(CAST(t.text AS BLOB)) + length(t.tokens) + length(t.cuts) + length(t.settings))"
        " FROM up JOIN turn t ON t.number = up.number GROUP BY up.namespace ORDER BY up.namespace"
    )
    return [
        NamespaceSize(namespace=str(name), sessions=int(sessions), turns=int(turns), nbytes=int(nbytes))
        for name, sessions, turns, nbytes in rows
    ]
