"""`perdure doctor`: whether this machine is set up well, and what to change."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from perdure import system
from perdure.atomic import atomic_write
from perdure.cli.options.shared import Json, StoreFolder, model_option
from perdure.cli.output import terminal
from perdure.cli.output.facts import print_json
from perdure.cli.runtime import usual_store
from perdure.config import STORE_BYTES, settings
from perdure.engine import registry
from perdure.engine.registry import Finding
from perdure.errors import InvalidInputError, ModelError, PerdureError, StoreKeyError

_WRITTEN = 64 << 20
_SLOW_DISK = 50
"""MiB a second below which waking from disk is slower than it should be."""
_SAMPLE = 200
"""Blocks of a store that are read."""


def doctor(
    model: Annotated[
        str | None,
        model_option(
            show_default="the default one, if it is here", help="A model that must fit into memory."
        ),
    ] = None,
    store: StoreFolder = None,
    blocks: Annotated[
        list[str] | None,
        typer.Option("--blocks", metavar="URL", help="Place where machines share state, to be tried too."),
    ] = None,
    as_json: Json = False,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Also write a report about this machine to a new file, for an issue; secrets are left out.",
        ),
    ] = None,
) -> None:
    """Check this machine and say what to change.

    That is the engine library, the processor, memory, disk and store.

    The exit code is 1 if something is bad. Nothing is changed.
    """
    if report is not None and report.exists():
        raise typer.BadParameter(f"{report} is there already; name a new file", param_hint="--report")
    folder = store or usual_store()
    findings = [*_engines(), *_threads(), *_memory(model), *_disk(folder), *_store(folder)]
    findings += [*_database(folder), *(each for url in blocks or () for each in _place(url))]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            terminal.write_line(f"{finding.state:<5} {finding.name:<10} {finding.found}", indent=17)
            if finding.advice:
                terminal.write_line(f"{'':<16} → {finding.advice}", indent=19)
    if report is not None:
        _write_report(report, findings)
    if any(finding.state == "bad" for finding in findings):
        raise typer.Exit(1)


def _write_report(path: Path, findings: list[Finding]) -> None:
    from perdure.cli.output.problem_report import problem_report

    try:
        with atomic_write(path) as file:
            file.write(problem_report(findings).encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror or error}", param_hint="--report") from None
    terminal.note(f"wrote {path}: read it before you attach it to an issue")


def _engines() -> Iterator[Finding]:
    for name in registry.engines():
        yield from registry.imported(name).findings()


def _threads() -> Iterator[Finding]:
    usable, there = system.usable_cores(), os.cpu_count() or 1
    load = system.busy_cores() or 0.0
    summary = f"{usable} of {there} cores may be used, {load:.1f} are busy"
    if load > usable:
        yield Finding("threads", "warn", summary, "other programs take the cores; replies will be slow")
    else:
        yield Finding("threads", "ok", summary)


def _memory(model: str | None) -> Iterator[Finding]:
    from perdure.models import read_parts, resolve
    from perdure.models.local_models import locate
    from perdure.models.registry import DEFAULT

    total, free = system.physical_memory(), system.available_memory()
    if total is None or free is None:
        summary = "this system does not tell how much there is"
    else:
        summary = f"{_size(free)} of {_size(total)} are free"
    name = model or settings().model or DEFAULT
    try:
        # Nothing is fetched by looking.
        path = locate(resolve(name))
        parts = read_parts(path) if path is not None else []
    except ModelError as error:
        yield Finding("memory", "ok", summary)
        yield Finding("model", "bad", str(error), "`perdure ls` shows what is here")
        return
    if not parts:
        yield Finding("memory", "ok", summary)
        yield Finding("model", "ok", f"{name} is not here yet; it is fetched when it is first used")
        return
    needed = sum(part.path.stat().st_size for part in parts)
    if free is not None and needed > free:
        advice = "close other programs, or take a smaller quantisation"
        yield Finding("memory", "bad", f"{summary}, {name} needs {_size(needed)}", advice)
    else:
        yield Finding("memory", "ok", f"{summary}, {name} needs {_size(needed)} and its contexts")


def _disk(folder: Path) -> Iterator[Finding]:
    place = next((each for each in (folder, *folder.parents) if each.is_dir()), None)
    if place is None or not os.access(place, os.W_OK):
        yield Finding("disk", "bad", f"{folder} cannot be written", "choose another folder with --store")
        return
    data = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            started = time.perf_counter()
            for _ in range(_WRITTEN >> 20):
                file.write(data)
            file.flush()
            system.sync(file.fileno())
            speed = (_WRITTEN >> 20) / (time.perf_counter() - started)
            started = time.perf_counter()
            system.sync(file.fileno())
            wait = time.perf_counter() - started
    except OSError as error:
        yield Finding(
            "disk", "bad", f"{place}: {error.strerror}", "free some space, or choose another folder"
        )
        return
    summary = f"{speed:,.0f} MiB/s written to {place}, {wait * 1e3:.1f} ms to make sure"
    if speed < _SLOW_DISK:
        yield Finding("disk", "warn", summary, "a faster disk for --store makes sleeping and waking faster")
    else:
        yield Finding("disk", "ok", summary)


def _store(store: Path) -> Iterator[Finding]:
    from perdure.cache.tiers.archive import block_folders

    folders = block_folders(store)
    if not folders:
        yield Finding("store", "ok", f"no blocks are kept at {store} yet")
    for folder in folders:
        yield _blocks(store, folder)


def _blocks(store: Path, folder: Path) -> Finding:
    from perdure.cache.tiers.disk import DiskTier
    from perdure.sessions.store.registry import encryption_of

    try:
        encryption = encryption_of(store)
        disk = DiskTier(folder, budget=STORE_BYTES, readonly=True, encryption=encryption)
        try:
            disk.index.check()
            count, sample, damaged = len(disk), 0, 0
            for block in disk.page(limit=_SAMPLE):
                sample += 1
                damaged += disk.load(block.id) is None
            kind = "blocks" if disk.files.seal is None else "encrypted blocks"
            summary = (
                f"{count} {kind}, {_size(disk.nbytes)} at {folder}; {sample} were read, {damaged} are damaged"
            )
        finally:
            disk.close()
    except StoreKeyError as error:
        return Finding("store", "bad", str(error), "give the key by --encrypt, or put its file back")
    except PerdureError as error:
        return Finding("store", "bad", str(error), f"perdure cache verify --store {store}")
    if damaged:
        return Finding("store", "warn", summary, f"perdure cache verify --store {store}")
    return Finding("store", "ok", summary)


def _database(folder: Path) -> Iterator[Finding]:
    """The database of sessions, where the folder stands for one."""
    from perdure.sessions.store.postgres.place import place_in
    from perdure.sessions.store.registry import open_store

    place = place_in(folder)
    if place is None:
        return
    try:
        began = time.perf_counter()
        store = open_store(folder, readonly=True)
        try:
            opened = time.perf_counter()
            store.list(limit=1)
            summary = (
                f"{place.shown} opened in {1e3 * (opened - began):.0f} ms, "
                f"asked in {1e3 * (time.perf_counter() - opened):.1f} ms"
            )
        finally:
            store.close()
        yield Finding("sessions", "ok", summary)
    except PerdureError as error:
        yield Finding(
            "sessions", "bad", str(error), "start the database, or look at the URL and its password"
        )


def _place(url: str) -> Iterator[Finding]:
    """A place where machines share state: an object is written, read and deleted there."""
    import secrets

    from perdure.cache.tiers.places import open_place
    from perdure.cache.tiers.shared import writers

    shown, name = url.split("?")[0].rpartition("@")[2], f"list-doctor-{secrets.token_hex(8)}"
    try:
        place, size, _ = open_place(url)
        with closing(place):
            began = time.perf_counter()
            place.put(name, b"x" * (1 << 20))
            written = time.perf_counter()
            whole = place.get(name) == b"x" * (1 << 20)
            read = time.perf_counter()
            place.delete([name])
            engines = writers(place)
    except InvalidInputError as error:
        raise typer.BadParameter(str(error), param_hint="--blocks") from None
    except Exception as error:
        yield Finding(
            "blocks", "bad", f"{shown}: {error}", "replicas go on without it; start it, or look at the URL"
        )
        return
    summary = (
        f"{shown}: 1 MiB written in {1e3 * (written - began):.0f} ms and read in "
        f"{1e3 * (read - written):.0f} ms; {_size(size)} at most"
    )
    if not whole:
        yield Finding("blocks", "bad", f"{summary}; what was read is not what was written")
    elif len(engines) > 1:
        yield Finding(
            "blocks",
            "warn",
            f"{summary}; {len(engines)} kinds of engines write there",
            "only machines with the same CPU variant, library, model and layers share state; tokens are "
            "shared by all",
        )
    else:
        yield Finding("blocks", "ok", summary)


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
