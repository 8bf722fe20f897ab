"""Sessions for single responses, which begin where another session stands."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.chat.message import Message
from perdure.sessions.info import RESPONSE, check_session_name
from perdure.sessions.session import Session
from perdure.sessions.sessions import Sessions
from perdure.sessions.turn import Turn, said_messages


def respond(
    sessions: Sessions,
    name: str,
    origin: Mapping[str, Any],
    *,
    after: Session | None = None,
    turn: int | None = None,
    namespace: str = "",
    kind: str = RESPONSE,
    said: Sequence[Message] = (),
) -> Session:
    """A session for one response: it starts where `after` stands, or after its turn number `turn`, and
    its next turn is the response. A new one may begin with what was `said` already.

    Its origin says where that is. History and number of turns are of one moment: `after` may go on
    meanwhile.
    """
    check_session_name(name)
    for message in said:
        for _, image in message.images:
            sessions.chat_format.image_reader().keep(image, namespace)
    if after is None:
        origin = {"session": None, "turn": 0, **origin}
        turns = [Turn(kind="start", messages=())]
        if said:
            messages = tuple(said_messages(said))
            turns.append(Turn(kind="turn", messages=messages, created=time.time(), before=turns[0].digest))
        with sessions._lock:
            info = sessions.store.create(namespace, name, turns, kind=kind, origin=origin)
            return sessions._opened(info)
    history, saved = after.standing(turn), after.saved
    origin = {"session": after.name, "turn": len(history), **origin}
    with sessions._lock:
        info = sessions.store.create(
            namespace, name, head=history.head, digest=history.place.digest, kind=kind, origin=origin
        )
        session = sessions._opened(info)
        session.rebase(history, saved)
        return session
