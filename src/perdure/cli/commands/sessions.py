"""`perdure sessions`: what is kept of conversations, and what can be done with it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perdure.cli.options.shared import (
    AfterName,
    Json,
    Limit,
    ModelFor,
    Namespace,
    SessionName,
    StoreFolder,
    Yes,
    session_names,
)
from perdure.cli.output import terminal, words
from perdure.cli.output.facts import print_json, tell
from perdure.cli.output.words import quoted
from perdure.cli.runtime import opened, session_folder, session_store_in, sessions_in
from perdure.engine_config import N_CTX, EngineConfig
from perdure.errors import InvalidInputError

if TYPE_CHECKING:
    from perdure import Message, Runtime, Session, SessionMemory, Turn
    from perdure.sessions.info import SessionInfo
    from perdure.sessions.pending_info import PendingInfo


# The fields of a session that the commands print.


def listed(row: SessionInfo) -> dict[str, Any]:
    return {
        "name": row.name,
        "namespace": row.namespace,
        "kind": row.kind,
        "turns": row.depth,
        "tokens": row.tokens,
        "model": row.model,
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
    """Where a session came from, in words: a fork, the program that made it, the agent that started it."""
    facts = []
    if how := origin.get("how"):
        # A conversation of the Responses API came from nowhere; what a repair found has no name any more.
        source, turn = origin.get("session"), origin.get("turn")
        from_session = f" of {quoted(str(source))}" if source else ""
        facts.append(f"{how}{from_session}" + (f" after turn {turn}" if turn is not None else ""))
    if agent := origin.get("agent"):
        facts.append(f"made by {quoted(str(agent))}")
    if parent := origin.get("parent"):
        facts.append(f"started from {quoted(str(parent))}")
    return ", ".join(facts)


# `perdure sessions ls`, `show` and `sizes`: what is kept.

_ENDED = {
    "": "",
    "stop": "",
    "length": " (cut at the length limit)",
    "repetition": " (ended since it repeated itself)",
    "cancelled": " (stopped)",
    "tool_calls": " (waits for the result of a tool)",
}
"""How a reply ended, if not by itself."""


def ls(
    everyone: bool = typer.Option(
        False, "--all", help="List the sessions of every namespace, for the operator of a server."
    ),
    text: str | None = typer.Option(
        None, "--text", metavar="TEXT", help="Those with TEXT in their names or in what was said."
    ),
    limit: Limit = None,
    after: AfterName = None,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """List the sessions, the latest first. Those that an agent started stand below its own."""
    from perdure.sessions.tree import as_tree

    with session_store_in(store) as session_store:
        last = session_store.find(namespace, after) if after is not None else None
        rows = session_store.list(None if everyone else namespace, limit=limit, after=last, text=text)
        sizes = [] if everyone or as_json or text else session_store.sizes()
        others = sum(each.sessions for each in sizes if each.namespace != namespace)
    if as_json:
        print_json([listed(row) for row in rows])
        return
    for level, row in as_tree(rows):
        whose = f"  {words.quoted(row.namespace)}" if everyone else ""
        model = f"  {words.quoted(row.model)}" if row.model else ""
        note = origin_line(row.origin)
        origin = f"  ({note})" if note else ""
        turns, tokens = words.count(row.depth, "turn"), words.count(row.tokens, "token") if row.tokens else ""
        line = f"{turns:>10} {tokens:>14}  {words.moment(row.updated)}{whose}{model}  {'  ' * level}"
        title = f"  {words.quoted(row.title)}" if row.title else ""
        terminal.write(f"{line}{words.quoted(row.name)}{title}{origin}\n")
    if not rows:
        terminal.tell(f"No session has {words.quoted(text)}." if text else "There are no sessions yet.")
    if others:
        terminal.tell(f"{words.count(others, 'session')} of other namespaces; --all lists them too.")


def show(
    name: SessionName,
    limit: Limit = None,
    after: int = typer.Option(0, "--after", min=0, metavar="N", help="Skip the first N turns."),
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Show a session. What was said in it, its system prompt, settings and dates."""
    with sessions_in(store, readonly=True) as sessions:
        row = sessions.store.find(namespace, name)
        session = sessions.get(name, namespace)
        pending = session.pending
    turns = session.history(limit=limit, after=after)
    if as_json:
        print_json(
            {
                **listed(row),
                "tokens": session.token_count,
                "system": session.system,
                "settings": dict(row.settings),
                "history": [plain_turn(number, turn) for number, turn in enumerate(turns, after + 1)],
                "pending": _plain_pending(pending) if pending is not None else None,
            }
        )
        return
    facts = {
        "session": words.quoted(row.name),
        "title": words.quoted(row.title) if row.title else "",
        "turns": f"{session.turns}, {words.count(session.token_count, 'token')}",
        "model": words.quoted(row.model) if row.model else "",
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
    if pending is not None:
        terminal.write(f"\n[pending] (interrupted{f': {pending.ended}' if pending.ended else ''})\n")
        for message in [*pending.messages, *([pending.reply] if pending.tokens else [])]:
            terminal.write_line(said(message).removesuffix("\n"))


def sizes(store: StoreFolder = None, as_json: Json = False) -> None:
    """Show how much each namespace of a server has. Numbers of sessions, turns and bytes, never texts."""
    with sessions_in(store, readonly=True) as sessions:
        sizes = sessions.store.sizes()
    if as_json:
        print_json([asdict(each) for each in sizes])
        return
    for each in sizes:
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


def _plain_pending(info: PendingInfo) -> dict[str, Any]:
    return {
        "after": info.after,
        "messages": [message.to_dict() for message in info.messages],
        "reply": info.reply.to_dict(),
        "tokens": len(info.tokens),
        "started": info.started,
        "ended": info.ended,
    }


# `perdure sessions fork`, `rewind`, `label` and `rm`: changes that need no model.


def fork(
    name: SessionName,
    new: str = typer.Argument(..., metavar="NEW", help="Name of the copy."),
    turn: int | None = typer.Option(
        None, "--turn", min=0, metavar="N", show_default="the last", help="The last turn that is copied."
    ),
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Copy a session under a new name.

    As it is, or as it was after an earlier turn. What the two have in common is stored once.
    """
    with sessions_in(store, readonly=False) as sessions:
        made = sessions.get(name, namespace).fork(new, turn=turn)
        turns = words.count(made.turns, "turn")
        tell(as_json, f"{words.quoted(new)} starts with {turns} of {words.quoted(name)}", figures(made))


def rewind(
    name: SessionName,
    turns: int = typer.Argument(1, min=0, metavar="TURNS", help="How many turns to take back."),
    to: int | None = typer.Option(None, "--to", min=0, metavar="N", help="Keep the first N turns instead."),
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Take back the last turns. They are deleted, unless a fork or a memory has them."""
    with sessions_in(store, readonly=False) as sessions:
        session = sessions.get(name, namespace)
        session.rewind(turns, to=to)
        tell(as_json, f"{words.quoted(name)} has {words.count(session.turns, 'turn')} now", figures(session))


def rename(
    name: SessionName,
    title: str = typer.Argument(..., metavar="TITLE", help="What it is called in lists; empty: its name."),
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Give a session a title. Its name, by which it is opened, stays."""
    with sessions_in(store, readonly=False) as sessions:
        session = sessions.get(name, namespace)
        session.note({"title": title_of(title)})
        called = words.quoted(title_of(title) or name)
        tell(as_json, f"{words.quoted(name)} is called {called} in lists", figures(session))


def title_of(text: str) -> str:
    """A title, as it is kept."""
    from perdure.sessions.info import TITLE_LENGTH

    if len(title := " ".join(text.split())) > TITLE_LENGTH:
        raise InvalidInputError(f"a title has at most {TITLE_LENGTH} characters, this one has {len(title)}")
    return title


def search(
    text: str = typer.Argument(..., metavar="TEXT", help="What is looked for."),
    limit: Limit = None,
    after: AfterName = None,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """List sessions with a text in names, titles or messages."""
    ls(everyone=False, text=text, limit=limit, after=after, namespace=namespace, store=store, as_json=as_json)


def label(
    name: SessionName,
    label: str = typer.Argument(..., metavar="LABEL", help="What to call this point."),
    turn: int | None = typer.Option(
        None, "--turn", min=0, metavar="N", show_default="the last", help="After which turn."
    ),
    kind: str = typer.Option("memory", "--kind", metavar="TEXT", help="Kind of the memory, to search by."),
    note: str = typer.Option("", "--note", metavar="TEXT", help="A text to find it by."),
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Label a point of a session, and print its address.

    `perdure sessions memories wake` starts a new session there.
    """
    with sessions_in(store, readonly=False) as sessions:
        memory = sessions.get(name, namespace).label(label, kind=kind, turn=turn, note=note)
    tell(as_json, memory.address, memory_facts(memory))


def rm(
    names: list[str] = typer.Argument(
        ...,
        metavar="NAME...",
        autocompletion=session_names,
        help="Sessions, as `perdure sessions ls` shows them.",
    ),
    yes: Yes = False,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Delete sessions. Forks and memories of them stay."""
    with sessions_in(store, readonly=False) as sessions:
        # All are looked up first: a wrong name deletes none.
        removed = [sessions.store.find(namespace, name).name for name in dict.fromkeys(names)]
        shown = ", ".join(map(words.quoted, removed))
        if not yes:
            typer.confirm(f"Forget {shown}?", abort=True, err=True)
        for name in removed:
            sessions.delete(name, namespace)
    tell(as_json, f"forgot {shown}", {"removed": removed})


# `perdure sessions sleep` and `wake`: state on disk.


def sleep(
    name: SessionName,
    model: ModelFor = None,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Write a session's state to disk, so that it continues fast. What is missing is computed first."""
    with awake(store, model, name, namespace) as (runtime, session):
        computed = session.plan_wake().computed
        if computed > 1:
            runtime.generate(session.tokens, max_tokens=1, temperature=0, namespace=namespace)
        session.sleep()
        estimate = session.plan_wake()
    tell(
        as_json,
        f"{words.quoted(name)} sleeps: {words.size(estimate.nbytes)}; to wake it: "
        f"{words.sources(estimate.tiers, estimate.computed)}",
        {
            **figures(session),
            "tiers": dict(estimate.tiers),
            "compute": estimate.computed,
            "bytes": estimate.nbytes,
        },
    )


def wake(
    name: SessionName,
    plan_only: bool = typer.Option(False, "--plan", help="Only say what would be read and computed."),
    model: ModelFor = None,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Load a session's state once, and say how long that took.

    Its turns are checked first. It also says what came from where.
    """
    with awake(store, model, name, namespace) as (_, session):
        estimate = session.plan_wake()
        facts = {"tiers": dict(estimate.tiers), "compute": estimate.computed, "bytes": estimate.nbytes}
        sources = words.sources(estimate.tiers, estimate.computed)
        line = f"{words.quoted(name)}: {sources}; {words.size(estimate.nbytes)}"
        if not plan_only:
            started = time.monotonic()
            report = session.wake()
            took = time.monotonic() - started
            facts |= {"tiers": dict(report.tiers), "compute": report.computed, "seconds": took}
            sources = words.sources(report.tiers, report.computed)
            line = f"{words.quoted(name)} woke in {words.milliseconds(took)}: {sources}"
    tell(as_json, line, {**figures(session), **facts})


@contextmanager
def awake(
    store: Path | None, model: str | None, name: str, namespace: str
) -> Iterator[tuple[Runtime, Session]]:
    """A session with an engine that has room for it. Errors are reported before a model is loaded."""
    with sessions_in(store, readonly=True) as sessions:
        needed = len(sessions.get(name, namespace).tokens)
    ctx = needed + 1 if needed >= N_CTX else None
    with opened(model, EngineConfig(n_ctx=ctx, slots=1), store=session_folder(store)) as runtime:
        yield runtime, runtime.sessions.get(name, namespace)


app = typer.Typer(help="Conversations that are kept.", no_args_is_help=True)
app.command()(ls)
app.command()(search)
app.command()(show)
app.command()(rename)
app.command()(fork)
app.command()(rewind)
app.command()(label)
app.command()(rm)
app.command()(sleep)
app.command()(wake)
app.command()(sizes)


def memory_facts(memory: SessionMemory) -> dict[str, Any]:
    return {
        "address": memory.address,
        "session": memory.session,
        "namespace": memory.namespace,
        "turn": memory.turn,
        "label": memory.label,
        "kind": memory.kind,
        "note": memory.note,
        "digest": memory.digest.hex(),
        "created": memory.created,
    }
