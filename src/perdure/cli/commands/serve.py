"""`perdure serve`: a model for many, over HTTP."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

import perdure
from perdure import system
from perdure.cli.advice import leave_warnings_to_the_log
from perdure.cli.commands.background import open_browser
from perdure.cli.options import shared
from perdure.cli.options.groups import EngineOptions, SamplingOptions, unfolded
from perdure.cli.options.live import LiveOptions
from perdure.cli.output.progress import fetching
from perdure.cli.output.terminal import agrees, note
from perdure.cli.runtime import usual_store
from perdure.config import N_CTX, QUEUE, SLOTS, STORE_BYTES
from perdure.errors import InvalidInputError

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from perdure.backend import BackendKeywords
    from perdure.cli.options.live import SettingsReload
    from perdure.engine.contract import LoadingKeywords
    from perdure.server.core.app_state import AppState
    from perdure.server.core.keys import Keys

_OLLAMA = 11434


@unfolded
def serve(
    context: typer.Context,
    model: shared.ModelName = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME=FILE[,ctx=N…]",
            help="One of several models, loaded when it is asked for: a file or a name with ctx, slots, "
            "gpu_layers, kv_type, threads, keep_alive, memory, pin; a folder of GGUF files; or a TOML file. "
            "May be given several times.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="BYTES",
            show_default="what is free at the start",
            help="Memory for all models that are loaded at once, such as 12G.",
        ),
    ] = None,
    keep_alive: Annotated[
        str,
        typer.Option(
            "--keep-alive",
            metavar="SECONDS",
            help="Unload a model that nobody asked for so long, such as 10m; -1: only to make room.",
        ),
    ] = "-1",
    host: Annotated[
        str,
        typer.Option("--host", metavar="ADDRESS", help="Where to listen. Other than loopback needs --keys."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, metavar="N", help="Port; 0 takes a free one.")
    ] = 8080,
    unix_socket: Annotated[
        Path | None,
        typer.Option(
            "--socket",
            metavar="PATH",
            help="Listen on a Unix socket for your own programs, in place of a port; with --port on both.",
        ),
    ] = None,
    ollama: Annotated[
        bool, typer.Option("--ollama", help=f"Listen on port {_OLLAMA} too, where Ollama's clients look.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            show_default="its file's name",
            help="What the model is called in answers.",
        ),
    ] = None,
    store: shared.StoreFolder = None,
    store_size: Annotated[
        float | None,
        typer.Option(
            "--store-size",
            min=0.001,
            metavar="GIB",
            show_default=str(STORE_BYTES >> 30),
            help="Most state on the disk, in GiB; what was used longest ago goes first. The texts of "
            "sessions are always kept.",
        ),
    ] = None,
    encrypt: Annotated[
        str | None,
        typer.Option(
            "--encrypt",
            metavar="KEY",
            help="Encrypt state on the disk with a key: a file of 32 bytes or 64 hex digits, or cluster for "
            "the key in PostgreSQL. Said once, it holds for the store.",
        ),
    ] = None,
    blocks: Annotated[
        list[str] | None,
        typer.Option(
            "--blocks",
            metavar="URL",
            help="Place where machines share state: file:///DIR, s3://BUCKET/PREFIX or redis://HOST; may be "
            "given several times, the faster first. Needs --store postgresql://…",
        ),
    ] = None,
    no_store: Annotated[
        bool, typer.Option("--no-store", help="Keep nothing: sessions end with the server.")
    ] = False,
    *,
    engine: EngineOptions,
    adapter: Annotated[
        list[str] | None,
        shared.engine_option(
            "--adapter",
            metavar="NAME=FILE[:SCALE]",
            help="Adapter that clients may use by NAME or MODEL:NAME; of several models, MODEL:NAME=FILE.",
        ),
    ] = None,
    exact: shared.Exact = False,
    slots: Annotated[
        str,
        shared.engine_option(
            "--slots",
            metavar="N|auto",
            callback=shared.number_or_auto,
            help="Requests that are answered at once; others wait. auto: as many as fit.",
        ),
    ] = str(SLOTS),
    queue: Annotated[
        int,
        shared.engine_option(
            "--queue", min=0, metavar="N", help="Requests that may wait; more are told to try later (429)."
        ),
    ] = QUEUE,
    threads: Annotated[
        int | None,
        shared.engine_option(
            "--threads", min=1, metavar="N", show_default="by the machine", help="Threads that compute."
        ),
    ] = None,
    isolated: Annotated[
        bool,
        shared.engine_option(
            "--isolated/--in-process",
            help="The engine in a process of its own: if it dies, it is started again.",
        ),
    ] = True,
    keys: Annotated[
        Path | None,
        shared.access_option(
            "--keys",
            metavar="FILE",
            help="File of the keys that clients must have; `perdure keys add NAME` makes one.",
        ),
    ] = None,
    new_key: Annotated[
        str | None,
        shared.access_option(
            "--new-key",
            metavar="NAMESPACE",
            help="Print a new key and its line for the file, and exit; `perdure keys add` does both.",
        ),
    ] = None,
    page: Annotated[
        bool, shared.access_option("--page/--no-page", help="Serve the page for browsers, at /.")
    ] = True,
    open_page: Annotated[bool, shared.access_option("--open", help="Open the page in a browser.")] = False,
    live: LiveOptions,
    sampling: SamplingOptions,
) -> None:
    """Serve a model over HTTP, with a page for browsers.

    Clients of OpenAI, Anthropic and Ollama can use it. Ctrl-C stops it; `perdure start` does the same in the
    background. The sampling options are for requests that do not say. `kill -HUP` has it read the keys and
    the config file again, and costs no request. The exit code is 2 if an option is wrong, and 0 when it was
    told to stop.
    """
    from perdure.cli.options.live import SettingsReload, is_given, live_settings, set_log_level
    from perdure.engine import registry
    from perdure.engine.kv_loss import parse_kv_type
    from perdure.sessions.store.registry import cluster_key, encryption_of

    if new_key is not None:
        _print_key(new_key)
        return
    from perdure.models.catalogue import names_of
    from perdure.pool import (
        ModelPool,
        check_aliases,
        named_adapter,
        parse_duration,
        parse_size,
        read_selection,
        with_adapters,
    )

    try:
        from perdure.server.core.app_state import AppState
        from perdure.server.core.keys import Keys
        from perdure.server.http_server import bind, bind_path, check_address
    except ModuleNotFoundError as error:
        note(f"{error.name} is not installed: pip install 'perdure[server]'")
        raise typer.Exit(1) from None
    try:
        known = Keys.read(keys) if keys is not None else Keys()
        folder = None if no_store else store or usual_store()
        check_address(host, len(known) or keys_in(folder))
        settings_now = live_settings(live, sampling, host=host, keys=known)
        if open_page and not page:
            raise InvalidInputError("--open needs the page; remove --no-page")
        named = {} if models else dict(map(named_adapter, adapter or ()))
        seconds = parse_duration(keep_alive, "--keep-alive")
        selection = None
        if models:
            selection = read_selection([*((model,) if model else ()), *models])
            budget = selection.memory if memory is None else parse_size(memory, "--memory")
            _check_several(isolated=isolated, name=name, adapters=bool(engine.adapters))
            selection = with_adapters(selection, adapter or ())
            check_aliases(live.alias or (), [each.name for each in selection.models])
        elif memory is not None:
            raise InvalidInputError("--memory is for several models: name them with --model")
        if store is not None and no_store:
            raise InvalidInputError("--store and --no-store exclude each other; remove one")
        if encrypt is not None and no_store and is_given(context, "encrypt"):
            raise InvalidInputError(
                "--encrypt is for state on the disk, and --no-store keeps none: remove one"
            )
        ports = [port, *([_OLLAMA] if ollama else [])]
        if unix_socket is not None and not is_given(context, "port"):
            ports.remove(port)
        listening = [bind(host, each) for each in ports]
        if unix_socket is not None:
            listening.append(bind_path(unix_socket.absolute()))
    except InvalidInputError as error:
        note(str(error))
        raise typer.Exit(2) from None
    with ExitStack() as resources:
        if selection is not None:
            specs = []
            for spec in selection.models:
                source = registry.engine_for(spec.source).fetch(spec.source, fetching, agrees)
                specs.append(replace(spec, source=source, template=spec.template or engine.template))
            kv: BackendKeywords = {}
            if engine.kv_type is not None:
                kv["k_type"], kv["v_type"] = parse_kv_type(engine.kv_type)
            if threads is not None:
                kv["threads"] = threads
            if store_size is not None:
                kv["store_bytes"] = round(store_size * (1 << 30))
            if folder is not None and (encryption := encryption_of(folder, encrypt)) is not None:
                kv["encryption"] = encryption
            if blocks:
                kv["blocks"], kv["blocks_key"] = tuple(blocks), cluster_key(folder, blocks)
            pool = ModelPool.open(
                specs,
                store=folder,
                memory=budget,
                keep_alive=seconds,
                loading=cast("LoadingKeywords", engine.loading),
                settings={
                    "n_ctx": engine.n_ctx or N_CTX,
                    "slots": shared.parse_auto(slots) or SLOTS,
                    "queue": queue,
                    "exact": exact,
                    "force_kv": engine.force_kv,
                    **kv,
                },
            )
            resources.callback(pool.close)
            first = pool.default
            runtime, label, source, adapters = first.runtime, first.name, first.source, first.adapters
            model_bytes, own_aliases = first.facts().nbytes, selection.aliases
        else:
            opener = registry.engine_for(model)
            source = opener.fetch(model, fetching, agrees)
            runtime = perdure.open(
                source,
                n_ctx=engine.n_ctx,
                slots=shared.parse_auto(slots) or SLOTS,
                queue=queue,
                exact=exact,
                store=folder,
                store_bytes=None if store_size is None else round(store_size * (1 << 30)),
                encrypt=None if no_store else encrypt,
                blocks=blocks,
                isolated=isolated,
                threads=threads,
                template=engine.template,
                kv_type=engine.kv_type,
                force_kv=engine.force_kv,
                draft=engine.draft,
                adapters=engine.adapters,
                adapter_names={each: file for each, (file, _) in named.items()} or None,
                **engine.loading,
            )
            resources.enter_context(runtime)
            label, model_bytes, own_aliases = name or opener.label(source), runtime.model.info.nbytes, ()
            adapters = {each: scale for each, (_, scale) in named.items()}
            pool = ModelPool.of_runtime(label, runtime, keep_alive=seconds)
            resources.callback(pool.close)
        app_state = AppState(
            runtime=runtime,
            name=label,
            short_names=names_of(source),
            model_bytes=model_bytes,
            keys=known,
            page=page,
            pool=pool,
            adapters=adapters,
            own_aliases=own_aliases,
        )
        app_state.change(settings_now)
        set_log_level(live.log_level)
        reload = SettingsReload(context, host=host)
        resources.callback(known.usage.save)
        if unix_socket is not None:
            resources.callback(unix_socket.unlink, missing_ok=True)
        _listen(app_state, reload, listening, folder, isolated, open_page=open_page)


def keys_in(folder: Path | None) -> int:
    """How many keys the replicas of a database share."""
    from perdure.server.core.shared_keys import read_keys
    from perdure.sessions.store.registry import open_accounts

    with open_accounts(folder) as accounts:
        return 0 if accounts is None else len(read_keys(accounts).keys)


def _check_several(*, isolated: bool, name: str | None, adapters: bool) -> None:
    """Refuse what is for one model."""
    if not isolated:
        raise InvalidInputError("--in-process is for one model: each of several has a process of its own")
    if name is not None:
        raise InvalidInputError("--name is for one model: --model NAME=FILE names one of several")
    if adapters:
        raise InvalidInputError(
            "adapters for every reply are for one model: give one of several an adapter that clients name by "
            "--adapter MODEL:NAME=FILE"
        )


def _listen(
    app_state: AppState,
    reload: SettingsReload,
    listening: Sequence[socket.socket],
    folder: Path | None,
    isolated: bool,
    *,
    open_page: bool,
) -> None:
    import logging

    from perdure.server.core.middleware import JsonLines
    from perdure.server.http_server import HttpServer, address

    leave_warnings_to_the_log()
    logging.getLogger().addHandler(JsonLines(sys.stderr))
    # What the engine has to say below this is for those who build it, and that clients leave is no news.
    for name in ("perdure.llama", "uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for each in listening:
        each.listen(2048)
    for title, value in (
        ("address", " and ".join(map(address, listening))),
        ("page", "at that address, in a browser" if app_state.page else "none"),
        *_model_lines(app_state, isolated),
        ("store", str(folder) if folder else "none: sessions end with the server"),
        ("keys", _state(app_state.keys)),
    ):
        typer.echo(f"{title:<8} {value}")
    typer.echo("Ctrl-C stops it.")
    sys.stdout.flush()
    if open_page:
        # The socket listens already: the browser's first request waits there.
        open_browser(address(listening[0]))
    server = HttpServer(app_state, read_settings=lambda: reload.into(app_state))
    system.freeze_memory()
    server.run(sockets=list(listening))


def _model_lines(app_state: AppState, isolated: bool) -> list[tuple[str, str]]:
    """What is said of the models at the start."""
    pool = app_state.pool
    if pool is not None and pool.room is not None:
        names = [f"{model.name} (pinned)" if model.pinned else model.name for model in app_state.models]
        return [
            ("model", f"{', '.join(names)}; each in a process of its own, loaded when it is asked for"),
            ("memory", f"{pool.room.machine / 2**30:.1f} GiB for those that are loaded at once"),
        ]
    runtime = app_state.runtime
    holder = getattr(runtime.backend, "holder", None)
    state = "in a process of its own" if isolated else "in this process"
    if holder is not None:
        state = f"in {holder}, which has the store open"
    return [
        ("model", f"{app_state.name}, {state}"),
        ("context", f"{runtime.n_ctx} tokens a request"),
        ("slots", f"{runtime.slots} requests at once"),
    ]


def _state(keys: Keys) -> str:
    if not len(keys):
        return "none: everybody on this machine may use it"
    return f"{len(keys)}, of {', '.join(keys.namespaces)}"


def _print_key(namespace: str) -> None:
    from perdure.server.core.keys import new_key

    try:
        secret, key = new_key(namespace)
    except InvalidInputError as error:
        note(str(error))
        raise typer.Exit(2) from None
    typer.echo(f"key   {secret}")
    typer.echo(f"line  {key.line}")
    note("the key is shown this once; put the line into the file that --keys names")
