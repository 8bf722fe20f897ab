"""`perdure cache`: stats, blocks, warm, clear, verify."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure import StoreError, StoreKeyError
from perdure.spi.base import STORE_BYTES
from perdure.spi.cli import (
    Json,
    StoreFolder,
    Yes,
    groups,
    print_json,
    shared,
    standard_input,
    terminal,
    usual_store,
    words,
    working,
    write_columns,
)

if TYPE_CHECKING:
    from perdure import KeptPrefix
    from perdure.spi.cache import BlockMeta, DiskTier

app = typer.Typer(help="Computed state that is kept between runs.", no_args_is_help=True)

Labels = Annotated[
    list[str] | None,
    typer.Option("--label", "-l", metavar="TEXT", help="A label; may be given several times."),
]


@app.command()
def stats(
    limit: shared.Limit = None,
    after: int = typer.Option(0, "--after", min=0, metavar="N", help="Continue the list after this number."),
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Show what is kept, and under which labels."""
    with _opened(store, readonly=True) as disks:
        page = [entry for disk in disks for entry in disk.prefix_table.page(limit=limit, after=after)]
        facts = {
            "store": str(disks[0].folder),
            "blocks": sum(map(len, disks)),
            "bytes": sum(disk.nbytes for disk in disks),
            "records": sum(len(disk.prefix_table) for disk in disks),
        }
    if as_json:
        shown = [{"number": number, **_plain(record)} for number, record in page]
        print_json({**facts, "records": shown})
    else:
        _table(facts, page)


@app.command()
def blocks(
    limit: shared.Limit = 100, after: shared.AfterId = None, store: StoreFolder = None, as_json: Json = False
) -> None:
    """List the blocks that are kept on disk, by their ids."""
    with _opened(store, readonly=True) as disks:
        entries = [entry for disk in disks for entry in disk.page(limit=limit, after=after)]
    if len(disks) > 1:
        entries = sorted(entries, key=lambda entry: entry.id)[:limit]
    if as_json:
        print_json([_block(entry) for entry in entries])
    for entry in () if as_json else entries:
        typer.echo(f"{entry.id.hex()}  tokens {entry.start} to {entry.end}, {entry.nbytes} bytes")


@app.command()
def warm(
    prompt: str | None = typer.Argument(None, help="The text; '-' or none reads standard input."),
    labels: Labels = None,
    model: shared.ModelFor = None,
    ctx: shared.Ctx = None,
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Compute the state of a text once, and keep it for every later run."""
    from perdure.spi.runtime import BlockStorage, LocalBackend
    from perdure.spi.sessions import encryption_of

    text = standard_input("a text", from_pipe=True) if prompt is None or prompt == "-" else prompt
    folder = store or usual_store()
    with closing(
        LocalBackend(
            terminal.load(model),
            groups.engine_config(n_ctx=ctx, slots=1),
            storage=BlockStorage(folder=folder, encryption=encryption_of(folder)),
            own_model=True,
        )
    ) as backend:
        record = backend.cache.warm(text, labels=labels or ())
        computed = backend.cache.stats().computed_tokens
    if as_json:
        print_json({**_plain(record), "computed": computed})
    else:
        how = f"{computed} computed" if computed else "nothing had to be computed"
        typer.echo(f"{record.kept} of {len(record.tokens)} tokens are kept in {folder}; {how}")


@app.command()
def clear(
    labels: Labels = None,
    everything: bool = typer.Option(False, "--all", help="Delete everything."),
    yes: Yes = False,
    namespace: str = typer.Option(
        "",
        "--namespace",
        metavar="NAME",
        show_default="your own",
        help="Whose labels: on a server each key has a namespace.",
    ),
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Delete what is kept under labels, or everything."""
    from perdure.spi.cache import BEGINNINGS, delete_encrypted

    if bool(labels) == everything:
        raise typer.BadParameter("give labels, or --all")
    count = freed = 0
    if everything and (lost := _without_key(store)):
        if not yes:
            typer.confirm(f"The key of {lost[0]} is missing. Drop all its blocks?", abort=True, err=True)
        freed = sum(map(delete_encrypted, lost))
    with _opened(store, readonly=False) as disks:
        size = sum(disk.nbytes for disk in disks)
        if everything and not yes:
            typer.confirm(f"Drop all {size} bytes of {disks[0].folder}?", abort=True, err=True)
        for disk in disks:
            before = disk.nbytes
            if everything:
                prefixes = disk.prefixes()
                disk.drop((), prefixes)
                disk.clear()
            else:
                prefixes, blocks = disk.prefix_table.labelled(labels or (), namespace=namespace)
                disk.drop(blocks, prefixes)
            count += len(prefixes)
            freed += before - disk.nbytes
    if everything:
        shutil.rmtree((store or usual_store()) / BEGINNINGS, ignore_errors=True)
    if as_json:
        typer.echo(json.dumps({"records": count, "bytes": freed}))
    else:
        typer.echo(f"dropped {count} records and {freed} bytes")


@app.command()
def verify(store: StoreFolder = None, as_json: Json = False) -> None:
    """Check everything that is kept, and move damaged files aside.

    The index is mended too. The exit code is 1 if anything was wrong, and 0 when all is well.
    """
    with _opened(store, readonly=False, rebuild=True) as disks, working("Reading") as progress:
        first, *others = [disk.verify(progress) for disk in disks]
    findings = sum(others, start=first)
    if as_json:
        print_json(dataclasses.asdict(findings))
    else:
        typer.echo(
            f"{findings.blocks} blocks, {findings.nbytes} bytes: {findings.missing} missing, "
            f"{findings.adopted} adopted, {findings.mended} entries mended, "
            f"{findings.quarantined} damaged and moved aside, {findings.leftovers} leftovers deleted"
        )
        if findings.rebuilt:
            typer.echo("the index was damaged and has been rebuilt; labels were lost with it")
    if not findings.sound:
        raise typer.Exit(1)


@contextmanager
def _opened(store: Path | None, *, readonly: bool, rebuild: bool = False) -> Iterator[list[DiskTier]]:
    """All folders of a store that have blocks."""
    from perdure.spi.cache import DiskTier, block_folders
    from perdure.spi.sessions import encryption_of

    folder = store or usual_store()
    encryption = encryption_of(folder)
    if not (places := block_folders(folder)):
        raise StoreError(f"there is no store at {folder}: `perdure cache warm` makes one")
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                closing(
                    DiskTier(
                        place, budget=STORE_BYTES, readonly=readonly, rebuild=rebuild, encryption=encryption
                    )
                )
            )
            for place in places
        ]


def _without_key(store: Path | None) -> list[Path]:
    """The folders whose blocks cannot be read, because they are encrypted and their key is not at hand."""
    from perdure.spi.cache import block_folders, codec_of, is_encrypted
    from perdure.spi.sessions import encryption_of

    folder, lost = store or usual_store(), []
    for place in block_folders(folder):
        try:
            if is_encrypted(place):
                codec_of(place, encryption_of(folder))
        except StoreKeyError:
            lost.append(place)
    return lost


def _plain(record: KeptPrefix) -> dict[str, object]:
    return {
        "tokens": len(record.tokens),
        "kept": record.kept,
        "labels": sorted(record.labels),
        "namespace": record.namespace,
    }


def _block(entry: BlockMeta) -> dict[str, object]:
    return {
        "id": entry.id.hex(),
        "parent": entry.parent.hex() if entry.start else "",
        "start": entry.start,
        "tokens": len(entry.tokens),
        "nbytes": entry.nbytes,
    }


def _table(facts: dict[str, object], page: list[tuple[int, KeptPrefix]]) -> None:
    for name, value in facts.items():
        terminal.write_line(f"{name:<8} {value}", indent=9)
    if page:
        rows = [("number", "tokens", "kept", "labels")]
        for number, record in page:
            labels = words.quoted(", ".join(sorted(record.labels)))
            rows.append((str(number), str(len(record.tokens)), str(record.kept), labels))
        write_columns(rows, right=frozenset({0, 1, 2}))
