"""`perdure engine`: ls, install, rm, test, retry."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from perdure import EngineLibraryError, LibraryFetchError
from perdure.spi.cli import Json, Yes, fetching, print_json, terminal

if TYPE_CHECKING:
    from perdure.ext.builds.machine import LibraryFit
    from perdure.spi.libraries import ChosenLibrary, Installed, LibrarySource, ProbeResult

app = typer.Typer(help="The llama.cpp library that runs models.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A name or a backend, as `perdure engine ls` shows it.")]

_WHY = {
    "own": "PERDURE_LLAMA names it",
    "installed": "the last one installed",
    "llama-cpp-python": "no other is installed, and this Python has llama-cpp-python",
    "fetched": "no other is here",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the list: a library that is here, or the one that would be fetched."""

    name: str
    backend: str = ""
    version: str
    origin: str
    licence: str
    nbytes: int | None = None
    """On disk, or to fetch."""
    folder: str | None = None
    used: bool = False
    why: str
    """Why it is used, or why not."""
    variant: str | None = None
    devices: tuple[str, ...] = ()


@app.command(name="ls")
def list_(as_json: Json = False) -> None:
    """Show the libraries that are here, and which one is used.

    It says why, and what can be installed.
    """
    rows = _rows()
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        for row in rows:
            _show(row)


@app.command()
def install(
    backend: str | None = typer.Argument(
        None,
        help="cpu, vulkan, cuda, cuda12 or metal.",
        metavar="BACKEND",
        show_default="the best for this machine",
    ),
    source: Path | None = typer.Option(
        None,
        "--from",
        metavar="PATH",
        help="A folder with a build of llama.cpp, or a package's .tgz; nothing is fetched.",
    ),
    yes: Yes = False,
) -> None:
    """Install a prebuilt llama.cpp, or a build of your own.

    It is used from then on. A prebuilt one is fetched. Without a name, the drivers and cards of this machine
    decide: the best package is taken, and the next one if its GPU does not run. More than 50 MB are fetched
    from a terminal after a question.
    """
    import perdure.ext.builds as libraries

    if source is not None and backend is not None:
        raise typer.BadParameter("give a backend or --from, not both", param_hint="BACKEND")
    if backend is not None and backend not in libraries.BACKENDS:
        raise typer.BadParameter(
            f"there is no backend {backend!r}; there are {', '.join(libraries.BACKENDS)}",
            param_hint="BACKEND",
        )
    if source is None and backend is None:
        _install_best(yes=yes)
        return
    if source is None:
        with fetching("the engine") as progress:
            entry = libraries.install(backend, progress)
        _fetch_runtime(next((fit for fit in _fits() if fit.package.backend == backend), None), yes=yes)
    elif source.is_file():
        entry = libraries.install_file(source)
    else:
        from perdure.spi.libraries import library_folder

        entry = libraries.install_folder(library_folder(source) or source)
    typer.echo(entry.folder)
    probe = _probe(entry.name)
    _report(probe)
    if not probe.usable:
        raise typer.Exit(1)


def _install_best(*, yes: bool) -> None:
    """Install the first package, of those that can run here, whose GPU runs."""
    import perdure.ext.builds as libraries
    from perdure.ext.builds.machine import installable, read_machine

    machine = read_machine()
    typer.echo(f"Found {machine}.")
    candidates = installable(machine)
    if not candidates:
        libraries.package_for()
    for fit in candidates:
        typer.echo(f"Taking {fit.package} ({fit.megabytes}): {fit.reason}.")
        if not terminal.may_fetch(str(fit.package), fit.nbytes, yes=yes):
            continue
        with fetching("the engine") as progress:
            entry = libraries.install(fit.package.backend, progress)
        _fetch_runtime(fit, yes=True)
        result = _probe(entry.name)
        if result.usable and not result.gpu_problem:
            typer.echo(entry.folder)
            _report(result)
            return
        typer.echo(f"{entry.name} is not used: {result.gpu_problem or result.attempts[-1]}")
    raise typer.Exit(1)


def _fits() -> list[LibraryFit]:
    from perdure.ext.builds.machine import fits, read_machine

    return fits(read_machine())


def _fetch_runtime(fit: LibraryFit | None, *, yes: bool) -> None:
    """NVIDIA's runtime, where a CUDA package needs it and the machine has none."""
    from perdure.ext.builds.runtime import RUNTIMES, install_runtime

    if fit is None or fit.runtime is None:
        return
    size = RUNTIMES[fit.runtime].size
    what = f"NVIDIA's CUDA {fit.runtime} runtime"
    if terminal.may_fetch(what, size, yes=yes):
        with fetching(what) as progress:
            install_runtime(fit.runtime, progress)


@app.command()
def rm(name: Name, yes: Yes = False) -> None:
    """Delete an installed library."""
    import perdure.ext.builds as libraries

    entry = libraries.find(name)
    size = decimal(entry.nbytes)
    if not yes:
        typer.confirm(f"Delete {entry.folder} ({size})?", abort=True)
    libraries.remove(entry.name)
    typer.echo(f"Deleted {entry.folder} ({size})")


@app.command(name="test")
def check(
    name: str | None = typer.Argument(None, help="An installed library, by its name."), as_json: Json = False
) -> None:
    """Check a library's files, and run toy models on it.

    They run in a child process, which may crash.

    The exit code is 1 if it cannot be used. What was found is remembered.
    """
    import perdure.ext.builds as libraries

    probe = _probe(name)
    damaged = [
        f"{entry.name}: {file}"
        for entry in libraries.installed()
        if str(entry.folder) == probe.folder
        for file in libraries.damaged(entry)
    ]
    if as_json:
        print_json({**asdict(probe), "usable": probe.usable, "damaged": damaged})
    else:
        _report(probe)
        for file in damaged:
            typer.echo(f"{file} is not as it was installed: install it again")
    if damaged or not probe.usable:
        raise typer.Exit(1)


@app.command()
def retry(
    file: str | None = typer.Argument(
        None, help="Name of a file, as `perdure doctor` shows it.", metavar="FILE", show_default="all of them"
    ),
) -> None:
    """Have files tried once more that ended the engine.

    A model, an adapter or a projector at which the engine's process died twice while it was loaded is not
    loaded again, unless its file, the build of the engine or a setting has changed.
    """
    from perdure.ext.workers import deadly_files

    gone = deadly_files.forget(file)
    for each in gone:
        typer.echo(f"{each}; it is tried again")
    if not gone:
        typer.echo("no such file is remembered" if file else "no file is remembered")


def _probe(name: str | None) -> ProbeResult:
    import perdure.ext.builds as libraries
    from perdure.ext.builds import probe
    from perdure.spi.libraries import LibrarySource, find_library

    if name is None:
        with fetching("the engine") as progress:
            return probe.test(find_library(progress))
    # Also where PERDURE_LLAMA hides it.
    entry = libraries.find(name)
    return probe.test(LibrarySource(kind="installed", folder=entry.folder, version=entry.name))


def _report(result: ProbeResult) -> None:
    for attempt in result.attempts:
        typer.echo(str(attempt))
    if result.devices:
        typer.echo(f"It uses {', '.join(result.devices)}.")
    elif result.gpu_problem:
        typer.echo(f"It does not use the GPU: {result.gpu_problem}.")


def _rows() -> list[Row]:
    from perdure.spi.libraries import candidates, choose, libraries

    here = list(candidates())
    try:
        choice = choose() if here else None
    except EngineLibraryError:
        choice = None
    passed = {result.folder: result for result in choice.passed} if choice else {}
    rows = [_row(source, choice, passed.get(str(source.folder))) for source in here]
    # PERDURE_LLAMA hides what is installed.
    shown = {row.folder for row in rows}
    rows += [
        _entry_row(entry, why="PERDURE_LLAMA names another")
        for entry in libraries.installed()
        if str(entry.folder) not in shown
    ]
    rows += _absent({row.origin for row in rows}, used=not here)
    return rows


def _row(source: LibrarySource, choice: ChosenLibrary | None, failed: ProbeResult | None) -> Row:
    import perdure.ext.builds as libraries

    used = choice is not None and choice.source == source
    if used:
        assert choice is not None
        why = _WHY[source.kind]
        if choice.passed:
            why = f"the first that runs here ({'; '.join(map(str, choice.passed))})"
        if choice.result.deaths:
            why += f"; {'; '.join(map(str, choice.result.attempts))}"
    elif failed is not None or choice is None:
        why = f"it cannot run here: {failed}" if failed else "it cannot run here"
    else:
        why = "another comes first"
    entry = next((each for each in libraries.installed() if each.folder == source.folder), None)
    row = (
        _entry_row(entry, why=why)
        if entry is not None
        else Row(
            name=source.kind,
            version=source.version,
            origin=source.kind,
            licence="MIT" if source.kind == "llama-cpp-python" else "",
            folder=str(source.folder),
            why=why,
        )
    )
    if not used:
        return row
    variant, version, devices = _loaded()
    return replace(row, used=True, variant=variant, version=version, devices=devices)


def _entry_row(entry: Installed, *, why: str) -> Row:
    return Row(
        name=entry.name,
        backend=entry.backend,
        version=entry.version,
        origin=entry.origin,
        licence=entry.licence,
        nbytes=entry.nbytes,
        folder=str(entry.folder),
        why=why,
    )


def _absent(there: set[str], *, used: bool) -> list[Row]:
    """What can be fetched for this machine and is not here."""
    import perdure.ext.builds as libraries

    rows = []
    for backend in libraries.BACKENDS:
        try:
            package = libraries.package_for(backend)
        except LibraryFetchError:
            continue
        if package.spec not in there:
            usual = used and backend == libraries.default_backend()
            rows.append(
                Row(
                    name=package.folder,
                    backend=backend,
                    version=package.llama,
                    origin=package.spec,
                    licence=package.licence,
                    nbytes=package.fetched,
                    why="fetched when it is first needed" if usual else f"perdure engine install {backend}",
                )
            )
    return rows


def _loaded() -> tuple[str, str, tuple[str, ...]]:
    """The CPU variant, version and devices of the library in use."""
    from perdure.spi.libraries import loaded

    library = loaded()
    return library.variant, library.version, tuple(device.shown for device in library.device_list)


def _show(row: Row) -> None:
    about = [
        f"llama.cpp {row.version}" if row.version else "",
        f"CPU variant {row.variant}" if row.variant else "",
    ]
    about += [
        decimal(row.nbytes) if row.nbytes is not None else "",
        f"licence {row.licence}" if row.licence else "",
    ]
    terminal.write_line(
        f"{'*' if row.used else ' '} {row.name:<18} {', '.join(filter(None, about))}", indent=21
    )
    terminal.write_line(f"{'':<20} {'from' if row.folder else 'available from'} {row.origin}", indent=21)
    if row.devices:
        terminal.write_line(f"{'':<20} devices: {', '.join(row.devices)}", indent=21)
    terminal.write_line(f"{'':<20} {'used: ' if row.used else ''}{row.why}", indent=21)
