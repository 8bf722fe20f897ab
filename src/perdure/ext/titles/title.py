"""Title: what the model is asked for behind a conversation, and what is taken of its reply.

    user       What grows in the shade?
    assistant  Ferns, hostas, and most herbs that like it moist.
    user       Write a title for this conversation: …          the side request, in no history
    assistant  **"Plants for the shade"**                      →  Plants for the shade

Always holds: it is asked where the conversation's state is in a slot, so its prompt is read there up to the
last words and no other state moves; it is idle work, which gives way to every request; nothing of it is kept.
"""

from __future__ import annotations

import re
from typing import Any

from perdure import Session
from perdure.spi.sessions import TurnStream

REQUEST = (
    "Write a title for this conversation: three to six words, in its language, without quotation marks. "
    "Answer with the title alone."
)
MOST = 60
"""Characters of a title; a longer reply is none."""
_TOKENS = 32
_SAME = ("tools", "adapters", "date", "variables", "keep_reasoning", "stable_prefix")
"""Settings of the last turn that its prompt depends on: with others, nothing of it is reused."""
_ROOM = 128
"""Tokens that the request and its reply take, at most."""
_LABEL = re.compile(r"^(?:#+\s*)?(?:title|titel|titre|título)\s*[:：]\s*", re.IGNORECASE)
_MARKS = " \t*_`#\"'“”„«»‘’"


def ask_for_title(session: Session) -> TurnStream | None:
    """The request for a title; None where the state of the conversation is in no slot, so that other state
    would have to move, or where the context is full."""
    if not session.turns or session.pending is not None:
        return None
    plan = session.plan_wake()
    if plan.computed > _ROOM or set(plan.tiers) - {"slot"}:
        return None
    last = session.history(after=session.turns - 1)[-1]
    settings: dict[str, Any] = {name: value for name, value in last.settings.items() if name in _SAME}
    return session.submit_unkept(
        REQUEST,
        idle=True,
        side=True,
        max_tokens=_TOKENS,
        temperature=0,
        seed=1,
        reasoning="hide",
        reasoning_budget=0,
        overflow="error",
        **settings,
    )


def title_of(reply: str) -> str:
    """The title in a reply; empty where there is none: nothing, a paragraph, or a text without letters."""
    lines = [line.strip() for line in reply.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    title = _LABEL.sub("", lines[0].strip(_MARKS)).strip(_MARKS)
    title = " ".join(title.split()).removesuffix(".")
    if len(title) > MOST or not any(map(str.isalpha, title)):
        return ""
    return title[:1].upper() + title[1:]
