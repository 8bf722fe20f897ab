"""`perdure cluster`: replicas of a server under Ray Serve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure import InvalidInputError
from perdure.spi.cli import note

if TYPE_CHECKING:
    from perdure.ext.cluster.ray.config import ClusterConfig

app = typer.Typer(help="Replicas of a server on several machines, under Ray Serve.", no_args_is_help=True)


@app.command()
def serve(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="A TOML file: model, store, blocks, [engine], [replicas]."),
    ],
) -> None:
    """Serve a model by replicas that Ray starts, adds and takes away.

    Without `address` in the file Ray is started on this machine, and Ctrl-C ends it all: replies finish, and
    state is written where other replicas find it. With the address of a Ray cluster the application is put
    there, and goes on when this command has ended. The exit code is 2 if the file is wrong, and 1 if Ray is
    not installed or the replicas do not start.
    """
    from perdure.ext.cluster.ray.config import ClusterConfig

    try:
        from perdure.spi.cli import keys_in
        from perdure.spi.server import Keys, check_address
        from perdure.spi.sessions import store_folder

        settings = ClusterConfig.read(config)
        known = (
            len(Keys.read(Path(settings.keys))) if settings.keys else keys_in(store_folder(settings.store))
        )
        check_address(settings.host, known)
    except InvalidInputError as error:
        note(str(error))
        raise typer.Exit(2) from None
    except ModuleNotFoundError as error:
        note(f"{error.name} is not installed: pip install 'perdure[server,cluster,ray]'")
        raise typer.Exit(1) from None
    try:
        _run(settings)
    except ModuleNotFoundError as error:
        note(f"{error.name} is not installed: pip install 'perdure[server,cluster,ray]'")
        raise typer.Exit(1) from None


def _run(settings: ClusterConfig) -> None:
    import signal
    import threading

    import ray
    from ray import serve

    from perdure.ext.cluster.ray.application import NAME, build

    ray.init(
        address=settings.address or "local",
        include_dashboard=None if settings.address else False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        serve.start(http_options={"host": settings.host, "port": settings.port})
        try:
            serve.run(build(settings), name=NAME)
        except RuntimeError as error:
            note(f"the replicas did not start: {error}")
            raise typer.Exit(1) from None
        typer.echo(f"address  http://{settings.host}:{settings.port}")
        typer.echo(f"replicas {settings.replicas.min} to {settings.replicas.max}")
        if settings.address:
            typer.echo("It runs in that cluster after this command ends.")
            return
        typer.echo("Ctrl-C stops it.")
        ending = threading.Event()
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda *_: ending.set())
        ending.wait()
        serve.shutdown()
    finally:
        ray.shutdown()
