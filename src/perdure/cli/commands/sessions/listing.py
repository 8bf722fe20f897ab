"""`perdure sessions ls`, `show` and `sizes`: what is kept."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.commands.sessions.facts import listed, origin_line
from perdure.cli.options.shared import AfterName, Json, Limit, Namespace, SessionName, StoreFolder
from perdure.cli.output.facts import print_json

if TYPE_CHECKING:
    from perdure import Message, Turn

_ENDED = {
    "": "",
    "stop": "",
    "length": " (cut off at its longest)",
    "cancelled": " (stopped)",
    "tool_calls": " (waits for the result of a tool)",
}
"""How a reply ended, if not by itself."""


def ls(
    everyone: Annotated[
        bool, typer.Option("--all", help="Those of every namespace, for whoever runs a server.")
    ] = False,
    limit: Limit = None,
    after: AfterName = None,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """List the sessions, the latest first."""
    from perdure.cli.output import terminal, words
    from perdure.cli.store import session_store_in

    with session_store_in(store) as kept:
        last = kept.find(namespace, after) if after is not None else None
        rows = kept.list(None if everyone else namespace, limit=limit, after=last)
    if as_json:
        print_json([listed(row) for row in rows])
        return
    for row in rows:
        whose = f"  {words.quoted(row.namespace)}" if everyone else ""
        origin = f"  ({origin_line(row.origin)})" if row.origin else ""
        turns = words.count(row.depth, "turn")
        terminal.write(f"{turns:>10}  {words.moment(row.updated)}{whose}  {words.quoted(row.name)}{origin}\n")
    if not rows:
        terminal.tell("There are no sessions yet.")


def show(
    name: SessionName,
    limit: Limit = None,
    after: Annotated[int, typer.Option("--after", min=0, metavar="N", help="Skip the first N turns.")] = 0,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Show a session. What was said in it, its system prompt, settings and dates."""
    from perdure.cli.output import terminal, words
    from perdure.cli.store import sessions_in

    with sessions_in(store, readonly=True) as sessions:
        row = sessions.store.find(namespace, name)
        session = sessions.get(name, namespace)
    turns = session.history(limit=limit, after=after)
    if as_json:
        print_json(
            {
                **listed(row),
                "tokens": session.token_count,
                "system": session.system,
                "settings": dict(row.settings),
                "history": [plain_turn(number, turn) for number, turn in enumerate(turns, after + 1)],
            }
        )
        return
    facts = {
        "session": words.quoted(row.name),
        "turns": f"{session.turns}, {words.count(session.token_count, 'token')}",
        "system": session.system or "",
        "settings": json.dumps(dict(row.settings), ensure_ascii=False) if row.settings else "",
        "origin": origin_line(row.origin) if row.origin else "",
        "created": words.moment(row.created),
        "updated": words.moment(row.updated),
    }
    for fact, value in facts.items():
        if value:
            terminal.write_line(f"{fact:<9} {value}", indent=10)
    for number, turn in enumerate(turns, after + 1):
        ended = _ENDED.get(turn.finish_reason, f" ({turn.finish_reason})")
        terminal.write(f"\n[{number}]{' folded' if turn.kind == 'fold' else ''}{ended}\n")
        for message in [*turn.messages, *([turn.reply] if turn.reply is not None else [])]:
            terminal.write_line(said(message).removesuffix("\n"))


def sizes(store: StoreFolder = None, as_json: Json = False) -> None:
    """Show how much each namespace of a server has. Numbers of sessions, turns and bytes, never texts."""
    from dataclasses import asdict

    from perdure.cli.output import words
    from perdure.cli.store import sessions_in

    with sessions_in(store, readonly=True) as sessions:
        found = sessions.store.sizes()
    if as_json:
        print_json([asdict(each) for each in found])
        return
    for each in found:
        name = words.quoted(each.namespace) if each.namespace else "(no key)"
        counts = f"{words.count(each.sessions, 'session')}, {words.count(each.turns, 'turn')}"
        typer.echo(f"{name:<24}  {counts:<28}  {words.size(each.nbytes)}")


def said(message: Message) -> str:
    """A message with everything in it that a model may read."""
    thought = f"{message.role} (reasoning): {message.reasoning}\n" if message.reasoning else ""
    named = f" ({message.name})" if message.name else ""
    calls = "".join(f"{message.role} (call): {call.name}({call.arguments})\n" for call in message.tool_calls)
    return f"{thought}{message.role}{named}: {message.content or ''}\n{calls}"


def plain_turn(number: int, turn: Turn) -> dict[str, Any]:
    """A turn without its tokens."""
    facts = turn.to_json()
    left_out = ("tokens", "cuts", "keep", "text")
    return {"number": number, **{key: value for key, value in facts.items() if key not in left_out}}
