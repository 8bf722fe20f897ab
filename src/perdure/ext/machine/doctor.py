"""`perdure doctor`: whether this machine is set up well, and what to change."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from perdure import InvalidInputError, ModelError, PerdureError, StoreKeyError
from perdure.spi.base import (
    STORE_BYTES,
    atomic_write,
    brought,
    extensions,
    imported,
    left_out,
    settings,
    system,
)
from perdure.spi.cli import Json, StoreFolder, model_option, print_json, terminal, usual_store
from perdure.spi.engine import Finding, registry

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
    blocks: list[str] | None = typer.Option(
        None, "--blocks", metavar="URL", help="Place where machines share state, to be tried too."
    ),
    as_json: Json = False,
    report: Path | None = typer.Option(
        None,
        "--report",
        metavar="FILE",
        help="Also write a report about this machine to a new file, for an issue; secrets are left out.",
    ),
) -> None:
    """Check this machine and say what to change.

    That is the engine library, extensions, the processor, memory, disk and store.

    The exit code is 1 if something is bad. Nothing is changed.
    """
    if report is not None and report.exists():
        raise typer.BadParameter(f"{report} is there already; name a new file", param_hint="--report")
    folder = store or usual_store()
    findings = [*_engines(), *_extensions(), *_threads(), *_memory(model), *_deadly()]
    findings += [*_disk(folder), *_store(folder)]
    try:
        for check in brought("checks"):
            findings += check(folder, tuple(blocks or ()))
    except InvalidInputError as error:
        raise typer.BadParameter(str(error)) from None
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
    from perdure.ext.machine.problem_report import problem_report

    try:
        with atomic_write(path) as file:
            file.write(problem_report(findings).encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror or error}", param_hint="--report") from None
    terminal.note(f"wrote {path}: read it before you attach it to an issue")


def _engines() -> Iterator[Finding]:
    for name in registry.engines():
        yield from imported(name).findings()


def _extensions() -> Iterator[Finding]:
    yield Finding("extensions", "ok", ", ".join(extensions()) or "none is installed")
    for name, reason in left_out():
        yield Finding(
            "extensions",
            "warn",
            f"{name} is left out: {reason}",
            "install what it needs or a version that fits, or uninstall the package that brings it",
        )


def _threads() -> Iterator[Finding]:
    usable, there = system.usable_cores(), os.cpu_count() or 1
    load = system.busy_cores() or 0.0
    summary = f"{usable} of {there} cores may be used, {load:.1f} are busy"
    if load > usable:
        yield Finding("threads", "warn", summary, "other programs take the cores; replies will be slow")
    else:
        yield Finding("threads", "ok", summary)


def _memory(model: str | None) -> Iterator[Finding]:
    from perdure.spi.models import DEFAULT, locate, read_parts, resolve

    total, free = system.physical_memory(), system.available_memory()
    if total is None or free is None:
        summary = "this system does not report its memory"
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


def _deadly() -> Iterator[Finding]:
    from perdure.ext.workers import deadly_files

    for each in deadly_files.remembered():
        advice = f"fetch it anew, or have it tried once more: `perdure engine retry {each.files[0]}`"
        yield Finding("model", "warn", f"{each}, and is not loaded so again", advice)


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
    from perdure.spi.cache import block_folders

    folders = block_folders(store)
    if not folders:
        yield Finding("store", "ok", f"no blocks are kept at {store} yet")
    for folder in folders:
        yield _blocks(store, folder)


def _blocks(store: Path, folder: Path) -> Finding:
    from perdure.spi.cache import PLAIN, DiskTier
    from perdure.spi.sessions import encryption_of

    try:
        encryption = encryption_of(store)
        disk = DiskTier(folder, budget=STORE_BYTES, readonly=True, encryption=encryption)
        try:
            disk.index.check()
            count, sample, damaged = len(disk), 0, 0
            for block in disk.page(limit=_SAMPLE):
                sample += 1
                damaged += disk.load(block.id) is None
            kind = "blocks" if disk.files.codec is PLAIN else "encrypted blocks"
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


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
