"""Chat record: a resumable stream of chat completions in the store, and the same stream made again.

A stream that is made again has the same id, the same events and the same numbers: where the engine is exact,
they follow from the request, the settings, the seed and the prompt, which the record has or proves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from perdure.chat.message import Message
from perdure.errors import SessionNotFoundError
from perdure.request_options import draw_seed
from perdure.server.core.app_state import AppState
from perdure.server.core.event_log import (
    SECONDS,
    WHY_NOT,
    StreamRecord,
    not_resumable,
    prompt_digest,
    take_record,
    write_record,
)
from perdure.server.core.settings import ReplyDefaults
from perdure.server.core.visit import Caller
from perdure.server.protocols.chat import ChatHead, ChatRequest, reply_request
from perdure.server.protocols.openai import new_id
from perdure.server.protocols.reply_request import ReplyRequest, named_conversations, options_in_session
from perdure.sessions.fold import TurnStream
from perdure.sessions.pending_turn import TurnExtra
from perdure.sessions.session import Session, today
from perdure.sessions.turn import Turn

_CHAT = "chat"
_STREAM = "stream"
"""Among the settings of a turn: the id of the stream that it was sent as."""
_ASK = "send the request again, or go on from the session's last turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatStream:
    """A resumable chat that is being answered, and the record by which another server can go on with it."""

    body: ChatRequest
    request: ReplyRequest
    stream: TurnStream
    session: str | None = None
    name: str = ""
    """The id of its answer, where that is known before."""
    created: int | None = None
    record: StreamRecord | None = None
    again: bool = False
    """Whether another server has sent a part of it."""
    turn_stored: bool = False
    """Whether its turn was stored before it was made again."""


def submit(body: ChatRequest, app_state: AppState, caller: Caller) -> ChatStream:
    """Queue a resumable stream, which is written down before anybody hears of its id. To read and to render
    takes time: this is called in a thread."""
    request = reply_request(body, app_state, caller.notes)
    name, created, date = new_id(ChatHead.prefix), int(time.time()), today()
    seed = request.options.get("seed")
    seed = draw_seed() if seed is None else seed
    request = _seeded(request, name, seed, date)
    stream = request.submit(app_state, caller, body)
    about: dict[str, Any] = {"how": _CHAT, "model": body.model, "session": caller.session}
    if (why := _why_not(body, app_state)) is not None:
        about[WHY_NOT] = why
    else:
        about |= {
            "request": body.model_dump(mode="json", exclude_none=True, by_alias=True),
            "seed": seed,
            # Those of now: the settings may be others where the reply is made again.
            "defaults": app_state.server.defaults.to_json(),
            "created": created,
            "date": date,
            "engine": app_state.runtime.cache.identity().digest.hex(),
            "prompt": prompt_digest(stream.first_prompt),
            "turns": _session(app_state, caller.namespace, caller.session).turns if caller.session else None,
            "idempotency_key": caller.idempotency_key,
        }
    record = None
    if request.stores:
        # Else the stream is to be had from this process alone.
        sessions = app_state.runtime.sessions
        record = write_record(sessions, caller.namespace, name, about, seconds=window(app_state))
    return ChatStream(
        body=body,
        request=request,
        stream=stream,
        session=caller.session,
        name=name,
        created=created,
        record=record,
    )


def window(app_state: AppState) -> float:
    """Seconds that a record is of use: a stream takes so long at most, and its events stay so long then."""
    return app_state.server.limits.request_seconds + SECONDS


def take(app_state: AppState, caller: Caller, name: str) -> StreamRecord | None:
    """The record of a chat stream whose server is gone, if there is one."""
    sessions = app_state.runtime.sessions
    record = take_record(sessions, caller.namespace, name, seconds=window(app_state))
    if record is not None and (why := record.about.get(WHY_NOT)) is not None:
        record.release()
        raise not_resumable(f"{why}; {_ASK}")
    return record


def submit_again(record: StreamRecord, app_state: AppState, caller: Caller) -> ChatStream:
    """Have the stream of a record made again, from its beginning. 409 where it would not be the same."""
    about, name = record.about, record.info.name
    runtime = app_state.runtime
    if not runtime.backend.exact:
        raise not_resumable(f"this server does not run with --exact; {_ASK}")
    if runtime.cache.identity().digest.hex() != about["engine"]:
        raise not_resumable(
            f"the engine here differs from the one that has begun it (`perdure doctor` says in what); {_ASK}"
        )
    body = ChatRequest.model_validate(about["request"])
    # The settings may be others by now.
    defaults = ReplyDefaults.from_json(about["defaults"])
    request = reply_request(body, app_state, caller.notes, defaults=defaults)
    request = _seeded(request, name, about["seed"], about["date"])
    turn: Turn | None = None
    if about["session"] is None:
        stream = request.submit_alone(runtime, caller.namespace)
    else:
        stream, turn = _submit_turn(record, request, app_state, caller)
        caller.in_session(about["session"])
    if prompt_digest(stream.first_prompt) != about["prompt"]:
        stream.cancel()
        raise not_resumable(f"its prompt is another one by now; {_ASK}")
    return ChatStream(
        body=body,
        request=request,
        stream=stream,
        session=about["session"],
        name=name,
        created=about["created"],
        record=record,
        again=True,
        turn_stored=turn is not None,
    )


def _submit_turn(
    record: StreamRecord, request: ReplyRequest, app_state: AppState, caller: Caller
) -> tuple[TurnStream, Turn | None]:
    """Have a turn of a session made again: to be kept, or only to be sent if it was kept before, which is
    then the second."""
    about = record.about
    turns: int = about["turns"]
    try:
        session = _session(app_state, caller.namespace, about["session"])
        standing = session.turns
    except SessionNotFoundError:
        raise not_resumable("its session was deleted") from None
    options = request.options
    if request.place is None:
        options = options_in_session(options) or {}
    if standing == turns and (new := _new_messages(session, request, app_state)) is not None:
        messages, extra = new
        extra = replace(extra, idempotency_key=about["idempotency_key"])
        try:
            return session.submit(messages, extra=extra, **options), None
        except SessionNotFoundError:
            raise not_resumable("its session was deleted") from None
    if standing > turns:
        [turn] = session.history(after=turns, limit=1)
        if turn.settings.get(_STREAM) == record.info.name and turn.finish_reason != "cancelled":
            return session.submit_unkept(
                turn.messages, turn=turns, call_ids=record.info.name, **_unkept(options, turn)
            ), turn
    raise not_resumable(f"session {about['session']!r} has moved on since; go on from its last turn")


def _new_messages(
    session: Session, request: ReplyRequest, app_state: AppState
) -> tuple[list[Message], TurnExtra] | None:
    """What the turn says, in the words of `ReplyRequest.submit`; None where the session is not that one."""
    if request.place is not None:
        return request.new_messages()[0], request.extra or TurnExtra()
    said = (each.said_in(session, request, app_state) for each in named_conversations())
    return next((each for each in said if each is not None), None)


def _unkept(options: Mapping[str, Any], turn: Turn) -> dict[str, Any]:
    """The options of a turn that was kept, to make its reply again."""
    remaining = {name: value for name, value in options.items() if name != "keep_partial"}
    return {**remaining, "date": turn.settings.get("date")}


def _seeded(request: ReplyRequest, name: str, seed: int, date: str) -> ReplyRequest:
    """A request with all that a second reply to it needs to be the same."""
    options = {**request.options, "seed": seed}
    if request.place is None:
        options.setdefault("date", date)
    extra = TurnExtra(notes={_STREAM: name}, date=date, call_ids=name)
    return replace(request, options=options, extra=extra)


def _why_not(body: ChatRequest, app_state: AppState) -> str | None:
    """Why no other server can make the same stream, if none can."""
    if not app_state.runtime.backend.exact:
        return "its server is gone, and did not run with --exact, so that the reply would be another one"
    if (body.n or 1) > 1:
        return "its server is gone, and the order in which several samples come is not the same twice"
    if body.perdure is not None and body.perdure.keep_partial:
        return "its server is gone, and perdure.keep_partial keeps a turn as far as it was written"
    return None


def _session(app_state: AppState, namespace: str, name: str) -> Session:
    return app_state.runtime.sessions.get(name, namespace)
