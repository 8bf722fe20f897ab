"""`perdure sessions sleep`, `wake` and `verify`: state on disk, and whether it is sound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.commands.sessions.facts import figures
from perdure.cli.options.shared import Json, ModelFor, Namespace, SessionName, StoreFolder
from perdure.cli.output.facts import print_json, tell
from perdure.config import N_CTX

if TYPE_CHECKING:
    from perdure import Runtime, Session


def sleep(
    name: SessionName,
    model: ModelFor = None,
    namespace: Namespace = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Write the state of a session to disk, so that it continues fast. What is missing is computed first."""
    from perdure.cli.output import words

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
    import time

    from perdure.cli.output import words

    with awake(store, model, name, namespace) as (_, session):
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
    tell(as_json, told, {**figures(session), **facts})


def verify(store: StoreFolder = None, as_json: Json = False) -> None:
    """Check all sessions and all state. Damaged files are moved aside.

    The exit code is 1 if anything was wrong, and 0 when all is well.
    """
    from perdure.cli.output import terminal
    from perdure.cli.output.progress import working
    from perdure.cli.output.verification import lines
    from perdure.cli.store import session_folder
    from perdure.sessions.store.registry import verify as verify_store

    folder = session_folder(store)
    with working("Reading") as progress:
        found = verify_store(folder, progress)
    if as_json:
        print_json(found.plain())
    else:
        for line in lines(found):
            terminal.write_line(line)
    if not found.sound:
        raise typer.Exit(1)


@contextmanager
def awake(
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
