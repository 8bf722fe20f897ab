"""What the commands about sessions tell of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure import Session
    from perdure.sessions.info import SessionInfo


def listed(row: SessionInfo) -> dict[str, Any]:
    return {
        "name": row.name,
        "namespace": row.namespace,
        "kind": row.kind,
        "turns": row.depth,
        "origin": dict(row.origin),
        "created": row.created,
        "updated": row.updated,
    }


def figures(session: Session) -> dict[str, Any]:
    return {
        "name": session.name,
        "namespace": session.namespace,
        "turns": session.turns,
        "tokens": session.token_count,
        "origin": dict(session.origin),
    }


def origin_line(origin: Any) -> str:
    from perdure.cli.output.words import quoted

    return f"{origin.get('how')} of {quoted(str(origin.get('session')))} after turn {origin.get('turn')}"
