"""`perdure sessions`: what is kept of conversations, and what can be done with it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.atomic import open_private
from perdure.cli.commands import memories
from perdure.cli.commands.backup import migrate
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
from perdure.cli.output.progress import working
from perdure.cli.output.words import quoted
from perdure.cli.runtime import opened, session_folder, session_store_in, sessions_in
from perdure.config import N_CTX
from perdure.errors import InvalidInputError

if TYPE_CHECKING:
    from perdure import ImportResult, Message, Runtime, Session, Turn
    from perdure.sessions.info import SessionInfo
    from perdure.sessions.store.registry import Verification


# What the commands about sessions tell of one.


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
        facts.append(f"{how} of {quoted(str(origin.get('session')))} after turn {origin.get('turn')}")
    if agent := origin.get("agent"):
        facts.append(f"made by {quoted(str(agent))}")
    if parent := origin.get("parent"):
        facts.append(f"started from {quoted(str(parent))}")
    return ", ".join(facts)


# `perdure sessions ls`, `show` and `sizes`: what is kept.

_IN_USE = 3
"""The exit code of a check that found nothing wrong and could not look at all, since the store is in use."""
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
    everyone: Annotated[
        bool, typer.Option("--all", help="Those of every namespace, for whoever runs a server.")
    ] = False,
    text: Annotated[
        str | None,
        typer.Option("--text", metavar="TEXT", help="Those with TEXT in their names or in what was said."),
    ] = None,
    limit: Limit = None,
    after: AfterName = None,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """List the sessions, the latest first. Those that an agent started stand below its own."""
    from perdure.sessions.info import as_tree

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
        terminal.write(f"{line}{words.quoted(row.name)}{origin}\n")
    if not rows:
        terminal.tell(f"No session has {words.quoted(text)}." if text else "There are no sessions yet.")
    if others:
        terminal.tell(f"{words.count(others, 'session')} of other namespaces; --all lists them too.")


def show(
    name: SessionName,
    limit: Limit = None,
    after: Annotated[int, typer.Option("--after", min=0, metavar="N", help="Skip the first N turns.")] = 0,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Show a session. What was said in it, its system prompt, settings and dates."""
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


# `perdure sessions fork`, `rewind`, `label` and `rm`: changes that need no model.


def fork(
    name: SessionName,
    new: Annotated[str, typer.Argument(metavar="NEW", help="Name of the copy.")],
    turn: Annotated[
        int | None,
        typer.Option(
            "--turn", min=0, metavar="N", show_default="the last", help="The last turn that is copied."
        ),
    ] = None,
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
    turns: Annotated[int, typer.Argument(min=0, metavar="TURNS", help="How many turns to take back.")] = 1,
    to: Annotated[
        int | None, typer.Option("--to", min=0, metavar="N", help="Keep the first N turns instead.")
    ] = None,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Take back the last turns. They are deleted, unless a fork or a memory has them."""
    with sessions_in(store, readonly=False) as sessions:
        session = sessions.get(name, namespace)
        session.rewind(turns, to=to)
        tell(
            as_json,
            f"{words.quoted(name)} has {words.count(session.turns, 'turn')} now",
            figures(session),
        )


def label(
    name: SessionName,
    label: Annotated[str, typer.Argument(metavar="LABEL", help="What to call this point.")],
    turn: Annotated[
        int | None,
        typer.Option("--turn", min=0, metavar="N", show_default="the last", help="After which turn."),
    ] = None,
    kind: Annotated[
        str, typer.Option("--kind", metavar="TEXT", help="Kind of the memory, to search by.")
    ] = "memory",
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="A text to find it by.")] = "",
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Label a point of a session, and print its address.

    `perdure sessions memories wake` starts a new session there.
    """
    with sessions_in(store, readonly=False) as sessions:
        memory = sessions.get(name, namespace).label(label, kind=kind, turn=turn, note=note)
    tell(as_json, memory.address, memories.plain(memory))


def rm(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            autocompletion=session_names,
            help="Sessions, as `perdure sessions ls` shows them.",
        ),
    ],
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


# `perdure sessions sleep`, `wake` and `verify`: state on disk, and whether it is sound.


def sleep(
    name: SessionName,
    model: ModelFor = None,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Write the state of a session to disk, so that it continues fast. What is missing is computed first."""
    with awake(store, model, name, namespace) as (runtime, session):
        computed = session.plan_wake().computed
        if computed > 1:
            runtime.generate(session.tokens, max_tokens=1, temperature=0, namespace=namespace)
        session.sleep()
        plan = session.plan_wake()
    tell(
        as_json,
        f"{words.quoted(name)} sleeps: {words.size(plan.nbytes)}; to wake it: "
        f"{words.sources(plan.tiers, plan.computed)}",
        {**figures(session), "tiers": dict(plan.tiers), "compute": plan.computed, "bytes": plan.nbytes},
    )


def wake(
    name: SessionName,
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Only say what would be read and computed.")
    ] = False,
    model: ModelFor = None,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Load the state of a session once, and say how long that took.

    Its turns are checked first. It also says what came from where.
    """
    with awake(store, model, name, namespace) as (_, session):
        plan = session.plan_wake()
        facts = {"tiers": dict(plan.tiers), "compute": plan.computed, "bytes": plan.nbytes}
        line = f"{words.quoted(name)}: {words.sources(plan.tiers, plan.computed)}; {words.size(plan.nbytes)}"
        if not plan_only:
            started = time.monotonic()
            report = session.wake()
            took = time.monotonic() - started
            facts |= {"tiers": dict(report.tiers), "compute": report.computed, "seconds": took}
            sources = words.sources(report.tiers, report.computed)
            line = f"{words.quoted(name)} woke in {words.milliseconds(took)}: {sources}"
    tell(as_json, line, {**figures(session), **facts})


def verify(store: StoreFolder = None, as_json: Json = False) -> None:
    """Check all sessions and all state. Damaged files are moved aside.

    The exit code is 0 when all is well, 1 if anything was wrong, and 3 if nothing was, but blocks of state
    could not be looked at since a server or a chat has the store open.
    """
    from perdure.sessions.store.registry import verify as verify_store

    folder = session_folder(store)
    with working("Reading") as progress:
        verification = verify_store(folder, progress)
    if as_json:
        print_json(verification.plain())
    else:
        for line in lines(verification):
            terminal.write_line(line)
    if not verification.sound:
        # What could be looked at was all right: somebody who has the store open is no damage.
        raise typer.Exit(_IN_USE if verification.unread and replace(verification, unread="").sound else 1)


@contextmanager
def awake(
    store: Path | None, model: str | None, name: str, namespace: str
) -> Iterator[tuple[Runtime, Session]]:
    """A session with an engine that has room for it. Whatever is wrong is told before a model is loaded."""
    with sessions_in(store, readonly=True) as sessions:
        needed = len(sessions.get(name, namespace).tokens)
    ctx = needed + 1 if needed >= N_CTX else None
    with opened(model, ctx=ctx, slots=1, store=session_folder(store)) as runtime:
        yield runtime, runtime.sessions.get(name, namespace)


# What `perdure sessions verify` and `perdure cache verify` print.


def lines(verification: Verification) -> Iterator[str]:
    """What was found in a store, for a terminal."""
    from perdure.sessions.store.registry import FOUND

    yield (
        f"{words.count(verification.sessions, 'session')}, {words.count(verification.turns, 'turn')}, "
        f"{verification.memories} memories: {len(verification.damaged)} damaged"
    )
    yield from (f"  {what}: {why}" for what, why in verification.damaged)
    if verification.database:
        yield f"the database of sessions is damaged: {verification.database}"
    if verification.repair is not None:
        repair = verification.repair
        yield (
            f"kept {words.count(repair.sessions, 'session')}, {words.count(repair.turns, 'turn')} and "
            f"{repair.memories} memories; the damaged database is {repair.aside.name} now"
        )
        yield from (f"  {what}" for what in repair.cut)
        if repair.found:
            yield f"  turns whose session is not known are in the namespace {FOUND!r}"
    if verification.not_repaired:
        yield f"nothing was done about it: {verification.not_repaired}"
    blocks = verification.blocks
    if blocks is not None:
        yield (
            f"{words.count(blocks.blocks, 'block')}, {blocks.nbytes} bytes: {blocks.missing} missing, "
            f"{blocks.adopted} adopted, {blocks.mended} entries mended, {blocks.quarantined} damaged and "
            f"moved aside, {blocks.leftovers} leftovers deleted"
        )
        if blocks.rebuilt:
            yield "the index of blocks was damaged and has been rebuilt; labels were lost with it"
    if verification.unread:
        yield f"blocks were not looked at: {verification.unread}"
    if verification.sound:
        yield "all is well"
    elif not verification.damaged and not verification.database and not verification.unread:
        yield "sessions are whole; state that is gone is computed anew when it is needed"


# `perdure sessions export` and `import`: sessions as files.


def export(
    name: SessionName,
    file: Annotated[
        Path,
        typer.Argument(help="Where to write: .md and .jsonl give the text, other names the whole session."),
    ],
    state: Annotated[
        bool,
        typer.Option(
            "--state/--no-state", help="With its computed state, for which the model is loaded, or without."
        ),
    ] = True,
    kind: Annotated[str | None, typer.Option("--kind", help="Kind to write into the file.")] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace a file that is there.")] = False,
    model: ModelFor = None,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Write a session to a file. Whole, to import it elsewhere, or as text."""
    if file.exists() and not force:
        raise InvalidInputError(f"{file} exists already: choose another name, or --force")
    suffix = file.suffix.lower()
    with working(f"Writing {file.name}") as progress:
        if suffix in (".md", ".jsonl"):
            with sessions_in(store, readonly=True) as sessions:
                text = sessions.get(name, namespace).transcript("markdown" if suffix == ".md" else "jsonl")
            _write(file, text)
        elif not state:
            with sessions_in(store, readonly=True) as sessions:
                sessions.get(name, namespace).export(file, state=False, kind=kind, progress=progress)
        else:
            with awake(store, model, name, namespace) as (_, session):
                session.export(file, kind=kind, progress=progress)
    written = file.stat().st_size
    tell(
        as_json,
        f"{words.quoted(name)} is in {file} ({words.size(written)})",
        {"file": str(file), "bytes": written},
    )


def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A file that `perdure sessions export` wrote.")
    ],
    name: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="NAME", show_default="the name in the file", help="Name of the session here."
        ),
    ] = None,
    state: Annotated[
        bool,
        typer.Option(
            "--state/--no-state", help="With the state in it, for which the model is loaded, or without."
        ),
    ] = True,
    trust_state: Annotated[
        bool,
        typer.Option(
            "--trust-state", help="Use state that another store computed. Only for files that you trust."
        ),
    ] = False,
    model: ModelFor = None,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Read a session from a file. All of it is checked first, and what is left out is said."""
    from perdure.sessions.export import manifest_of
    from perdure.sessions.store.registry import has_sessions

    manifest = manifest_of(file)
    with working(f"Reading {file.name}") as progress:
        if state and manifest.get("identity") is not None:
            folder = session_folder(store, create=True)
            if has_sessions(folder):
                # That it cannot be used is better told before a model is loaded.
                sessions_in(folder, readonly=False).close()
            with opened(model, ctx=None, slots=1, store=folder) as runtime:
                result = runtime.sessions.import_(
                    file, name, namespace=namespace, trust_state=trust_state, progress=progress
                )
                plan = result.session.plan_wake()
                facts = {**taken(result), "tiers": dict(plan.tiers), "compute": plan.computed}
                came = f"; to wake it: {words.sources(plan.tiers, plan.computed)}"
        else:
            with sessions_in(store, readonly=False, create=True) as sessions:
                result = sessions.import_(file, name, namespace=namespace, progress=progress)
                facts, came = taken(result), ""
    turns = words.count(result.turns, "turn")
    left = "".join(f"\nleft out: its {what}; {why}" for what, why in result.left_out.items())
    tell(as_json, f"{words.quoted(result.session.name)} has come with {turns}{came}{left}", facts)


def _write(file: Path, text: str) -> None:
    try:
        with open_private(file) as out:
            out.write(text.encode())
    except OSError as error:
        raise InvalidInputError(f"{file} cannot be written: {error.strerror}") from None


def taken(result: ImportResult) -> dict[str, Any]:
    taken = {"turns": result.turns, "tokens": result.tokens, "state_tokens": result.state_tokens}
    return {**figures(result.session), "taken": taken, "left_out": dict(result.left_out)}


app = typer.Typer(help="Conversations that are kept.", no_args_is_help=True)
app.command()(ls)
app.command()(show)
app.command()(fork)
app.command()(rewind)
app.command()(label)
app.command()(rm)
app.command()(sleep)
app.command()(wake)
app.command()(export)
app.command(name="import")(import_)
app.command()(sizes)
app.command()(verify)
app.command()(migrate)
app.add_typer(memories.app, name="memories")
