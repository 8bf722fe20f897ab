"""`perdure sessions`: what is kept of conversations, and what can be done with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.commands import memories
from perdure.config import N_CTX

if TYPE_CHECKING:
    from perdure import ImportResult, Message, Runtime, Session, Turn
    from perdure.sessions.info import SessionInfo

app = typer.Typer(help="Conversations that are kept.", no_args_is_help=True)
app.add_typer(memories.app, name="memories")

Name = Annotated[str, typer.Argument(help="The session's name.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Store = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="The folder of the store; else the one under PERDURE_HOME."),
]
Namespace = Annotated[
    str, typer.Option("--namespace", help="Whose sessions: a server keeps one namespace a key.")
]
ModelName = Annotated[str | None, typer.Option("--model", "-m", help="A model's name or file.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="How many at most.")]


@app.command()
def ls(
    everyone: Annotated[bool, typer.Option("--all", help="Those of every namespace.")] = False,
    limit: Limit = None,
    after: Annotated[str | None, typer.Option("--after", help="Those behind the one of that name.")] = None,
    namespace: Namespace = "",
    store: Store = None,
    as_json: Json = False,
) -> None:
    """List the sessions, the latest first."""
    from perdure.cli.output import terminal, words
    from perdure.cli.store import sessions_in

    with sessions_in(store, readonly=True) as sessions:
        last = sessions.store.find(namespace, after) if after is not None else None
        rows = sessions.store.list(None if everyone else namespace, limit=limit, after=last)
    if as_json:
        _print([_listed(row) for row in rows])
        return
    for row in rows:
        whose = f"  {words.quoted(row.namespace)}" if everyone else ""
        origin = f"  ({_origin(row.origin)})" if row.origin else ""
        turns = words.count(row.depth, "turn")
        terminal.write(f"{turns:>10}  {words.moment(row.updated)}{whose}  {words.quoted(row.name)}{origin}\n")
    if not rows:
        terminal.tell("There are no sessions yet.")


@app.command()
def show(
    name: Name,
    limit: Limit = None,
    after: Annotated[int, typer.Option("--after", min=0, help="Turns behind the one of that number.")] = 0,
    namespace: Namespace = "",
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Show what was said, and what is known of the session."""
    from perdure.cli.output import terminal, words
    from perdure.cli.store import sessions_in

    with sessions_in(store, readonly=True) as sessions:
        row = sessions.store.find(namespace, name)
        session = sessions.get(name, namespace)
    turns = session.history(limit=limit, after=after)
    if as_json:
        _print(
            {
                **_listed(row),
                "tokens": session.token_count,
                "system": session.system,
                "settings": dict(row.settings),
                "history": [_turn(number, turn) for number, turn in enumerate(turns, after + 1)],
            }
        )
        return
    facts = {
        "session": words.quoted(row.name),
        "turns": f"{session.turns}, {words.count(session.token_count, 'token')}",
        "system": session.system or "",
        "settings": json.dumps(dict(row.settings), ensure_ascii=False) if row.settings else "",
        "origin": _origin(row.origin) if row.origin else "",
        "created": words.moment(row.created),
        "updated": words.moment(row.updated),
    }
    terminal.write("".join(f"{fact:<9} {value}\n" for fact, value in facts.items() if value))
    for number, turn in enumerate(turns, after + 1):
        ended = "" if turn.finish_reason in ("stop", "") else f" ({turn.finish_reason})"
        terminal.write(f"\n[{number}]{' folded' if turn.kind == 'fold' else ''}{ended}\n")
        for message in [*turn.messages, *([turn.reply] if turn.reply is not None else [])]:
            terminal.write(_said(message))


@app.command()
def fork(
    name: Name,
    new: Annotated[str, typer.Argument(help="The name of the new session.")],
    turn: Annotated[int | None, typer.Option("--turn", min=0, help="Start after that turn.")] = None,
    namespace: Namespace = "",
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Start a new session where one stands, or stood; the two share what they have in common."""
    from perdure.cli.output import words
    from perdure.cli.store import sessions_in

    with sessions_in(store, readonly=False) as sessions:
        made = sessions.get(name, namespace).fork(new, turn=turn)
        turns = words.count(made.turns, "turn")
        _tell(as_json, f"{words.quoted(new)} starts with {turns} of {words.quoted(name)}", _figures(made))


@app.command()
def rewind(
    name: Name,
    turns: Annotated[int, typer.Argument(min=0, help="How many turns to go back by.")] = 1,
    to: Annotated[int | None, typer.Option("--to", min=0, help="Go back to after that turn instead.")] = None,
    namespace: Namespace = "",
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Go back by some turns. What neither a fork nor a memory needs is deleted."""
    from perdure.cli.output import words
    from perdure.cli.store import sessions_in

    with sessions_in(store, readonly=False) as sessions:
        session = sessions.get(name, namespace)
        session.rewind(turns, to=to)
        _tell(
            as_json,
            f"{words.quoted(name)} has {words.count(session.turns, 'turn')} now",
            _figures(session),
        )


@app.command()
def label(
    name: Name,
    label: Annotated[str, typer.Argument(help="What to call this point.")],
    turn: Annotated[int | None, typer.Option("--turn", min=0, help="After that turn, not the last.")] = None,
    kind: Annotated[str, typer.Option("--kind", help="What kind of memory it is.")] = "memory",
    note: Annotated[str, typer.Option("--note", help="A text to find it by.")] = "",
    namespace: Namespace = "",
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Remember a point of a session, and print the address that it can be woken by."""
    from perdure.cli.store import sessions_in

    with sessions_in(store, readonly=False) as sessions:
        memory = sessions.get(name, namespace).label(label, kind=kind, turn=turn, note=note)
    _tell(as_json, memory.address, memories.plain(memory))


@app.command()
def rm(
    names: Annotated[list[str], typer.Argument(help="The sessions' names.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    namespace: Namespace = "",
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Forget sessions. Forks of them and memories stay; cached state goes when its room is needed."""
    from perdure.cli.output import words
    from perdure.cli.store import sessions_in

    with sessions_in(store, readonly=False) as sessions:
        # All are looked up first: a wrong name deletes none.
        found = [sessions.store.find(namespace, name).name for name in dict.fromkeys(names)]
        shown = ", ".join(map(words.quoted, found))
        if not yes:
            typer.confirm(f"Forget {shown}?", abort=True, err=True)
        for name in found:
            sessions.delete(name, namespace)
    _tell(as_json, f"forgot {shown}", {"removed": found})


@app.command()
def sleep(
    name: Name,
    model: ModelName = None,
    namespace: Namespace = "",
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Put the whole state of a session on disk, so that it wakes fast. What is missing is computed."""
    from perdure.cli.output import words

    with _awake(store, model, name, namespace) as (runtime, session):
        computed = session.plan_wake().computed
        if computed > 1:
            runtime.generate(session.tokens, max_tokens=1, temperature=0, namespace=namespace)
        session.sleep()
        plan = session.plan_wake()
    _tell(
        as_json,
        f"{words.quoted(name)} sleeps: {words.size(plan.nbytes)}; to wake it: "
        f"{words.sources(plan.tiers, plan.computed)}",
        {**_figures(session), "tiers": dict(plan.tiers), "compute": plan.computed, "bytes": plan.nbytes},
    )


@app.command()
def wake(
    name: Name,
    plan_only: Annotated[bool, typer.Option("--plan", help="Only say what it would take.")] = False,
    model: ModelName = None,
    namespace: Namespace = "",
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Prove a session's turns, bring its state back once, and say what that took."""
    import time

    from perdure.cli.output import words

    with _awake(store, model, name, namespace) as (_, session):
        plan = session.plan_wake()
        facts = {"tiers": dict(plan.tiers), "compute": plan.computed, "bytes": plan.nbytes}
        told = f"{words.quoted(name)}: {words.sources(plan.tiers, plan.computed)}; {words.size(plan.nbytes)}"
        if not plan_only:
            started = time.monotonic()
            report = session.wake()
            took = time.monotonic() - started
            facts |= {"tiers": dict(report.tiers), "compute": report.computed, "seconds": took}
            sources = words.sources(report.tiers, report.computed)
            told = f"{words.quoted(name)} woke in {words.milliseconds(took)}: {sources}"
    _tell(as_json, told, {**_figures(session), **facts})


@app.command()
def export(
    name: Name,
    file: Annotated[
        Path, typer.Argument(help="Where to: .md and .jsonl give text, others the session as a whole.")
    ],
    state: Annotated[
        bool, typer.Option("--state/--no-state", help="With its state, which takes the model, or without.")
    ] = True,
    kind: Annotated[str | None, typer.Option("--kind", help="What kind of export it says it is.")] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace a file that is there.")] = False,
    model: ModelName = None,
    namespace: Namespace = "",
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Write a session to one file that can be moved, or what was said in it as text."""
    from perdure.cli.output import words
    from perdure.cli.output.progress import working
    from perdure.cli.store import sessions_in
    from perdure.errors import InvalidInputError

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
            with _awake(store, model, name, namespace) as (_, session):
                session.export(file, kind=kind, progress=progress)
    written = file.stat().st_size
    _tell(
        as_json,
        f"{words.quoted(name)} is in {file} ({words.size(written)})",
        {"file": str(file), "bytes": written},
    )


@app.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(help="A file that `export` wrote.")],
    name: Annotated[str | None, typer.Option("--as", help="Another name for it.")] = None,
    state: Annotated[
        bool,
        typer.Option("--state/--no-state", help="With the state in it, which takes the model, or without."),
    ] = True,
    trust_state: Annotated[
        bool,
        typer.Option("--trust-state", help="Believe state that another store wrote. Only if you trust it."),
    ] = False,
    model: ModelName = None,
    namespace: Namespace = "",
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Bring in a session that was exported, after proving all of it, and say what was left out."""
    from perdure.cli.output import words
    from perdure.cli.output.progress import working
    from perdure.cli.runtime import opened
    from perdure.cli.store import session_folder, sessions_in
    from perdure.sessions.export import manifest_of

    manifest = manifest_of(file)
    with working(f"Reading {file.name}") as progress:
        if state and manifest.get("identity") is not None:
            folder = session_folder(store, create=True)
            if (folder / "sessions.sqlite").is_file():
                # That it cannot be used is better told before a model is loaded.
                sessions_in(folder, readonly=False).close()
            with opened(model, ctx=None, slots=1, store=folder) as runtime:
                result = runtime.sessions.import_(
                    file, name, namespace=namespace, trust_state=trust_state, progress=progress
                )
                plan = result.session.plan_wake()
                facts = {**_taken(result), "tiers": dict(plan.tiers), "compute": plan.computed}
                came = f"; to wake it: {words.sources(plan.tiers, plan.computed)}"
        else:
            with sessions_in(store, readonly=False, create=True) as sessions:
                result = sessions.import_(file, name, namespace=namespace, progress=progress)
                facts, came = _taken(result), ""
    turns = words.count(result.turns, "turn")
    left = "".join(f"\nleft out: its {what}; {why}" for what, why in result.left_out.items())
    _tell(as_json, f"{words.quoted(result.session.name)} has come with {turns}{came}{left}", facts)


@app.command()
def sizes(store: Store = None, as_json: Json = False) -> None:
    """Show how many sessions, turns and bytes each namespace of a server has; never what was said."""
    from dataclasses import asdict

    from perdure.cli.output import words
    from perdure.cli.store import sessions_in
    from perdure.sessions.storage.sizes import namespace_sizes

    with sessions_in(store, readonly=True) as sessions:
        found = namespace_sizes(sessions.store)
    if as_json:
        _print([asdict(each) for each in found])
        return
    for each in found:
        name = words.quoted(each.namespace) if each.namespace else "(no key)"
        counts = f"{words.count(each.sessions, 'session')}, {words.count(each.turns, 'turn')}"
        typer.echo(f"{name:<24}  {counts:<28}  {words.size(each.nbytes)}")


@app.command()
def verify(store: Store = None, as_json: Json = False) -> None:
    """Prove every turn of every session and read all state that is kept, moving damaged files aside.

    The exit code is 1 if anything was wrong, and 0 when all is well.
    """
    from perdure.cli.output import terminal
    from perdure.cli.output.progress import working
    from perdure.cli.output.verification import lines
    from perdure.cli.store import session_folder
    from perdure.sessions.storage.verify import verify as verify_store

    folder = session_folder(store)
    with working("Reading") as progress:
        found = verify_store(folder, progress)
    if as_json:
        _print(found.plain())
    else:
        terminal.write("".join(f"{line}\n" for line in lines(found)))
    if not found.sound:
        raise typer.Exit(1)


@contextmanager
def _awake(
    store: Path | None, model: str | None, name: str, namespace: str
) -> Iterator[tuple[Runtime, Session]]:
    """A session with an engine that has room for it. Whatever is wrong is told before a model is loaded."""
    from perdure.cli.runtime import opened
    from perdure.cli.store import session_folder, sessions_in

    with sessions_in(store, readonly=True) as sessions:
        needed = len(sessions.get(name, namespace).tokens)
    ctx = needed + 1 if needed >= N_CTX else None
    with opened(model, ctx=ctx, slots=1, store=session_folder(store)) as runtime:
        yield runtime, runtime.sessions.get(name, namespace)


def _write(file: Path, text: str) -> None:
    from perdure.atomic import open_private
    from perdure.errors import InvalidInputError

    try:
        with open_private(file) as out:
            out.write(text.encode())
    except OSError as error:
        raise InvalidInputError(f"{file} cannot be written: {error.strerror}") from None


def _listed(row: SessionInfo) -> dict[str, Any]:
    return {
        "name": row.name,
        "namespace": row.namespace,
        "kind": row.kind,
        "turns": row.depth,
        "origin": dict(row.origin),
        "created": row.created,
        "updated": row.updated,
    }


def _figures(session: Session) -> dict[str, Any]:
    return {
        "name": session.name,
        "namespace": session.namespace,
        "turns": session.turns,
        "tokens": session.token_count,
        "origin": dict(session.origin),
    }


def _taken(result: ImportResult) -> dict[str, Any]:
    taken = {"turns": result.turns, "tokens": result.tokens, "state_tokens": result.state_tokens}
    return {**_figures(result.session), "taken": taken, "left_out": dict(result.left_out)}


def _said(message: Message) -> str:
    """A message with everything in it that a model may read."""
    thought = f"{message.role} (reasoning): {message.reasoning}\n" if message.reasoning else ""
    named = f" ({message.name})" if message.name else ""
    calls = "".join(f"{message.role} (call): {call.name}({call.arguments})\n" for call in message.tool_calls)
    return f"{thought}{message.role}{named}: {message.content or ''}\n{calls}"


def _turn(number: int, turn: Turn) -> dict[str, Any]:
    """A turn without its tokens."""
    facts = turn.to_json()
    left_out = ("tokens", "cuts", "keep", "text")
    return {"number": number, **{key: value for key, value in facts.items() if key not in left_out}}


def _origin(origin: Any) -> str:
    from perdure.cli.output.words import quoted

    return f"{origin.get('how')} of {quoted(str(origin.get('session')))} after turn {origin.get('turn')}"


def _tell(as_json: bool, text: str, facts: dict[str, Any]) -> None:
    from perdure.cli.output import terminal

    if as_json:
        _print(facts)
    else:
        terminal.write(f"{text}\n")


def _print(facts: Any) -> None:
    typer.echo(json.dumps(facts, indent=2))
