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

from perdure.cli.options.shared import AfterId, Ctx, Json, Limit, ModelFor, StoreFolder, Yes, parse_auto
from perdure.cli.output.facts import print_json
from perdure.cli.output.terminal import load
from perdure.cli.prompt import standard_input
from perdure.cli.runtime import usual_store
from perdure.config import N_CTX, STORE_BYTES
from perdure.errors import StoreError, StoreKeyError

if TYPE_CHECKING:
    from perdure.cache.block import BlockMeta
    from perdure.cache.tiers.disk import DiskTier
    from perdure.decode.request import KeptPrefix

app = typer.Typer(help="Computed state that is kept between runs.", no_args_is_help=True)

Labels = Annotated[
    list[str] | None,
    typer.Option("--label", "-l", metavar="TEXT", help="A label; may be given several times."),
]


@app.command()
def stats(
    limit: Limit = None,
    after: Annotated[
        int, typer.Option("--after", min=0, metavar="N", help="Continue the list after this number.")
    ] = 0,
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
    limit: Limit = 100,
    after: AfterId = None,
    store: StoreFolder = None,
    as_json: Json = False,
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
    prompt: Annotated[str | None, typer.Argument(help="The text; '-' or none reads standard input.")] = None,
    labels: Labels = None,
    model: ModelFor = None,
    ctx: Ctx = None,
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Compute the state of a text once, and keep it for every later run."""
    from perdure.backend import LocalBackend
    from perdure.sessions.store.registry import encryption_of

    text = standard_input("a text", from_pipe=True) if prompt is None or prompt == "-" else prompt
    folder = store or usual_store()
    with closing(
        LocalBackend(
            load(model),
            n_ctx=parse_auto(ctx) or N_CTX,
            slots=1,
            store=folder,
            own_model=True,
            encryption=encryption_of(folder),
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
    everything: Annotated[bool, typer.Option("--all", help="Delete everything.")] = False,
    yes: Yes = False,
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace",
            metavar="NAME",
            show_default="your own",
            help="Whose labels: on a server each key has a namespace.",
        ),
    ] = "",
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Delete what is kept under labels, or everything."""
    from perdure.cache.tiers.disk import delete_encrypted

    if bool(labels) == everything:
        raise typer.BadParameter("give labels, or --all")
    from perdure.chat.beginnings import FOLDER as BEGINNINGS

    count = freed = 0
    if everything and (lost := _without_key(store)):
        if not yes:
            typer.confirm(f"The key of {lost[0]} is not there. Drop all its blocks?", abort=True, err=True)
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
    from rich.console import Console
    from rich.progress import Progress

    with _opened(store, readonly=False, rebuild=True) as disks:
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("Reading", total=None)
            first, *others = [
                disk.verify(lambda done, total: bar.update(task, completed=done, total=total))
                for disk in disks
            ]
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
    from perdure.cache.tiers.archive import block_folders
    from perdure.cache.tiers.disk import DiskTier
    from perdure.sessions.store.registry import encryption_of

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
    from perdure.cache.tiers.archive import block_folders
    from perdure.cache.tiers.encryption import check_mark, read_mark
    from perdure.sessions.store.registry import encryption_of

    folder, lost = store or usual_store(), []
    for place in block_folders(folder):
        try:
            if (mark := read_mark(place)) is not None:
                check_mark(place, mark, encryption_of(folder))
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
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for name, value in facts.items():
        console.print(f"{name:<8} {value}", highlight=False, markup=False, soft_wrap=True)
    if page:
        table = Table("number", "tokens", "kept", "labels")
        for number, record in page:
            labels = escape(", ".join(sorted(record.labels)))
            table.add_row(str(number), str(len(record.tokens)), str(record.kept), labels)
        console.print(table)
