"""`perdure serve`: a model for many, over HTTP."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import perdure
from perdure import system
from perdure.atomic import atomic_write
from perdure.cli.advice import leave_warnings_to_the_log
from perdure.cli.commands.background import RunningServer, open_browser
from perdure.cli.options import shared
from perdure.cli.options.groups import SamplingOptions, ServeEngine, unfolded
from perdure.cli.options.live import LiveOptions
from perdure.cli.output import words
from perdure.cli.output.progress import fetching
from perdure.cli.output.terminal import agrees, note
from perdure.cli.runtime import keys_in, usual_store
from perdure.engine_config import STORE_BYTES, engine_options
from perdure.errors import InvalidInputError
from perdure.extension import optional_part, part

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from perdure.backend import BlockStorage
    from perdure.cli.options.live import SettingsReload
    from perdure.engine_config import EngineConfig
    from perdure.server.core.keys import Keys
    from perdure.server.core.server_state import ServerState
    from perdure.server.pool import Selection
    from perdure.server.tls import Certificate

_OLLAMA = 11434
_OF_A_MODEL = ", ".join(each.command for each in engine_options().values() if "models" in each.surfaces)
"""The options of the engine that can be said of one of several models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """Which models there are, and how they are called."""

    model: shared.ModelName = None
    models: list[str] | None = typer.Option(
        None,
        "--model",
        "-m",
        metavar="NAME=FILE[,ctx=N…]",
        help=f"One of several models, loaded when it is asked for: a file or a name with {_OF_A_MODEL}, "
        "template, keep_alive, memory, pin; a folder of GGUF files; or a TOML file. May be given several "
        "times.",
    )
    memory: str | None = typer.Option(
        None,
        "--memory",
        metavar="BYTES",
        show_default="what is free at the start",
        help="Memory for all models that are loaded at once, such as 12G.",
    )
    keep_alive: str = typer.Option(
        "-1",
        "--keep-alive",
        metavar="SECONDS",
        help="Unload a model after so long without a request, such as 10m; -1: only to make room.",
    )
    name: str | None = typer.Option(
        None,
        "--name",
        metavar="NAME",
        show_default="its file's name",
        help="What the model is called in answers.",
    )

    @property
    def selection(self) -> Selection | None:
        """Several models; None of one."""
        from perdure.server.pool import read_selection

        return read_selection([*filter(None, [self.model]), *self.models]) if self.models else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Where the server listens."""

    host: str = typer.Option(
        "127.0.0.1", "--host", metavar="ADDRESS", help="Where to listen. Other than loopback needs --keys."
    )
    port: int = typer.Option(
        8080, "--port", "-p", min=0, max=65535, metavar="N", help="Port; 0 takes a free one."
    )
    unix_socket: Path | None = typer.Option(
        None,
        "--socket",
        metavar="PATH",
        help="Listen on a Unix socket for your own programs, in place of a port; with --port on both.",
    )
    ollama: bool = typer.Option(
        False, "--ollama", help=f"Listen on port {_OLLAMA} too, where Ollama's clients look."
    )

    tls_cert: Path | None = typer.Option(
        None,
        "--tls-cert",
        metavar="FILE",
        help="Speak TLS on ports, with this certificate in PEM. It is read again when it was replaced.",
    )
    tls_key: Path | None = typer.Option(
        None, "--tls-key", metavar="FILE", show_default="in the same file", help="Its key."
    )

    def certificate(self) -> Certificate | None:
        from perdure.server.tls import Certificate

        if self.tls_cert is None:
            if self.tls_key is not None:
                raise InvalidInputError("--tls-key is the key of a certificate: name that with --tls-cert")
            return None
        return Certificate(self.tls_cert, self.tls_key)

    def sockets(self, *, with_port: bool) -> list[socket.socket]:
        """What it listens on, bound. A Unix socket is in place of a port, unless that was given too."""
        from perdure.server.http_server import bind, bind_path

        ports = [self.port] if with_port or self.unix_socket is None else []
        bound = [bind(self.host, each) for each in (*ports, *([_OLLAMA] if self.ollama else []))]
        return bound if self.unix_socket is None else [*bound, bind_path(self.unix_socket.absolute())]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What is kept, and where."""

    store: shared.StoreFolder = None
    store_size: float | None = typer.Option(
        None,
        "--store-size",
        min=0.001,
        metavar="GIB",
        show_default=str(STORE_BYTES >> 30),
        help="Most state on the disk, in GiB; what was used longest ago goes first. The texts of "
        "sessions are always kept.",
    )
    encrypt: str | None = typer.Option(
        None,
        "--encrypt",
        metavar="KEY",
        help="Encrypt state on the disk with a key: a file of 32 bytes or 64 hex digits, or cluster for "
        "the key in PostgreSQL. Said once, it holds for the store.",
    )
    blocks: list[str] | None = typer.Option(
        None,
        "--blocks",
        metavar="URL",
        help="Place where machines share state: file:///DIR, s3://BUCKET/PREFIX or redis://HOST; may be "
        "given several times, the faster first. Needs --store postgresql://…",
    )
    no_store: bool = typer.Option(False, "--no-store", help="Keep nothing: sessions end with the server.")

    @property
    def folder(self) -> Path | None:
        return None if self.no_store else self.store or usual_store()

    def check(self, *, encrypt_given: bool) -> None:
        """Refuse options that exclude each other."""
        if self.store is not None and self.no_store:
            raise InvalidInputError("--store and --no-store exclude each other; remove one")
        if self.encrypt is not None and self.no_store and encrypt_given:
            raise InvalidInputError(
                "--encrypt is for state on the disk, and --no-store keeps none: remove one"
            )

    def within(self, config: EngineConfig) -> EngineConfig:
        """An engine's options with those of its storage."""
        size = None if self.store_size is None else round(self.store_size * (1 << 30))
        return replace(config, blocks=self.blocks or None, store_bytes=size)

    @property
    def storage(self) -> BlockStorage:
        from perdure.backend import BlockStorage
        from perdure.sessions.store.registry import cluster_key, encryption_of

        folder = self.folder
        return BlockStorage(
            folder=folder,
            encryption=None if folder is None else encryption_of(folder, self.encrypt),
            shared_key=cluster_key(folder, self.blocks) if self.blocks else None,
        )


@unfolded
def serve(
    context: typer.Context,
    *,
    chosen: ModelChoice,
    listen: ListenOptions,
    kept: StoreOptions,
    engine: ServeEngine,
    adapter: list[str] | None = shared.of_engine(
        None,
        "--adapter",
        metavar="NAME=FILE[:SCALE]",
        help="Adapter that clients may use by NAME or MODEL:NAME; of several models, MODEL:NAME=FILE.",
    ),
    isolated: bool = shared.of_engine(
        True,
        "--isolated/--in-process",
        help="Run the engine in a child process: if it dies, it is restarted.",
    ),
    keys: Path | None = shared.access_option(
        None,
        "--keys",
        metavar="FILE",
        help="File of the keys that clients must have; `perdure keys add NAME` makes one.",
    ),
    new_key: str | None = shared.access_option(
        None,
        "--new-key",
        metavar="NAMESPACE",
        help="Print a new key and its line for the file, and exit; `perdure keys add` does both.",
    ),
    page: bool = shared.access_option(True, "--page/--no-page", help="Serve the page for browsers, at /."),
    open_page: bool = shared.access_option(False, "--open", help="Open the page in a browser."),
    state_file: Path | None = typer.Option(
        None,
        "--state",
        metavar="FILE",
        help="Write process, address, models and store into FILE as JSON once it listens.",
    ),
    otel: str | None = typer.Option(
        None,
        "--otel",
        metavar="URL",
        help="Send spans and metrics of requests to an OpenTelemetry collector by OTLP over HTTP, such as "
        "http://127.0.0.1:4318. No text is in them.",
    ),
    live: LiveOptions,
    sampling: SamplingOptions,
) -> None:
    """Serve a model over HTTP, with a page for browsers.

    Clients of OpenAI, Anthropic and Ollama can use it. Ctrl-C stops it; `perdure start` does the same in the
    background. The sampling options are for requests that do not say. `kill -HUP` has it read the keys and
    the config file again, and costs no request. The exit code is 2 if an option is wrong, and 0 after a
    signal stopped it.
    """
    if new_key is not None:
        _print_key(new_key)
        return
    try:
        from perdure.server.core.keys import Keys
        from perdure.server.core.server_state import ServerState
        from perdure.server.http_server import check_address
    except ModuleNotFoundError as error:
        note(f"{error.name} is not installed: pip install 'perdure[server]'")
        raise typer.Exit(1) from None
    from perdure.cli.options.live import SettingsReload, is_given, live_settings, set_log_level
    from perdure.server.pool import parse_duration

    try:
        known = Keys.read(keys) if keys is not None else Keys()
        check_address(listen.host, len(known) or keys_in(kept.folder))
        settings_now = live_settings(live, sampling, host=listen.host, keys=known)
        if open_page and not page:
            raise InvalidInputError("--open needs the page; remove --no-page")
        seconds = parse_duration(chosen.keep_alive, "--keep-alive")
        config = kept.within(engine.config)
        selection, budget, named = _checked(
            chosen, config, adapter or (), live.alias or (), isolated=isolated
        )
        kept.check(encrypt_given=is_given(context, "encrypt"))
        telemetry = part("serve --otel", "otel")(otel) if otel is not None else None
        certificate = listen.certificate()
        listening = Listening(listen.sockets(with_port=is_given(context, "port")), certificate)
    except InvalidInputError as error:
        note(str(error))
        raise typer.Exit(2) from None
    with ExitStack() as resources:
        if selection is not None:
            served = _several(selection, config, kept, engine.template, budget, seconds, resources)
        else:
            served = _one(chosen, config, kept, engine.template, named, seconds, resources, isolated=isolated)
        server_state = ServerState(keys=known, page=page, **served)
        server_state.change(settings_now)
        set_log_level(live.log_level)
        resources.callback(known.usage.save)
        watch = optional_part("watch of model folders")
        if watch is not None and selection is not None and selection.folders:
            resources.enter_context(watch(server_state, selection.folders, template=engine.template))
        if telemetry is not None:
            resources.enter_context(telemetry.follow(server_state))
        if listen.unix_socket is not None:
            resources.callback(listen.unix_socket.unlink, missing_ok=True)
        _announce(server_state, listening, kept, config, isolated=isolated)
        if state_file is not None:
            _write_state(state_file, server_state, listening, kept.folder)
            resources.callback(state_file.unlink, missing_ok=True)
        if open_page:
            # The socket listens already: the browser's first request waits there.
            open_browser(listening.address())
        _run(server_state, SettingsReload(context, host=listen.host), listening)


def _checked(
    chosen: ModelChoice,
    config: EngineConfig,
    adapter: Sequence[str],
    aliases: Sequence[str],
    *,
    isolated: bool,
) -> tuple[Selection | None, int | None, dict[str, tuple[str, float]]]:
    """The models if there are several, the memory for all of them, and the adapters of a single one."""
    from perdure.server.pool import check_aliases, named_adapter, parse_size, with_adapters

    selection = chosen.selection
    if selection is None:
        if chosen.memory is not None:
            raise InvalidInputError("--memory is for several models: name them with --model")
        return None, None, dict(map(named_adapter, adapter))
    if not isolated:
        raise InvalidInputError("--in-process is for one model: each of several runs in a separate process")
    if chosen.name is not None:
        raise InvalidInputError("--name is for one model: --model NAME=FILE names one of several")
    if config.adapters:
        raise InvalidInputError(
            "adapters for every reply are for one model: give one of several an adapter that clients name by "
            "--adapter MODEL:NAME=FILE"
        )
    selection = with_adapters(selection, adapter)
    check_aliases(aliases, [each.name for each in selection.models])
    return selection, selection.memory if chosen.memory is None else parse_size(chosen.memory, "--memory"), {}


def _several(
    selection: Selection,
    config: EngineConfig,
    kept: StoreOptions,
    template: str | None,
    budget: int | None,
    keep_alive: float,
    resources: ExitStack,
) -> dict[str, Any]:
    """Several models, fetched now and loaded when they are asked for."""
    from perdure.engine import registry
    from perdure.models.finder import finder
    from perdure.server.pool import ModelPool

    specs = []
    for spec in selection.models:
        source = registry.engine_for(spec.source).fetch(spec.source, fetching, agrees)
        specs.append(replace(spec, source=source, template=spec.template or template))
    pool = ModelPool.open(specs, config, storage=kept.storage, memory=budget, keep_alive=keep_alive)
    resources.callback(pool.close)
    first = pool.default
    return {
        "runtime": first.runtime,
        "name": first.name,
        "short_names": finder().short_names(first.source),
        "model_bytes": first.facts().nbytes,
        "pool": pool,
        "adapters": first.adapters,
        "own_aliases": selection.aliases,
    }


def _one(
    chosen: ModelChoice,
    config: EngineConfig,
    kept: StoreOptions,
    template: str | None,
    named: dict[str, tuple[str, float]],
    keep_alive: float,
    resources: ExitStack,
    *,
    isolated: bool,
) -> dict[str, Any]:
    """One model, fetched and loaded now."""
    from perdure.engine import registry
    from perdure.models.finder import finder
    from perdure.server.pool import ModelPool

    opener = registry.engine_for(chosen.model)
    source = opener.fetch(chosen.model, fetching, agrees)
    files = {each: file for each, (file, _) in named.items()}
    runtime = perdure.open(
        source,
        store=kept.folder,
        encrypt=None if kept.no_store else kept.encrypt,
        isolated=isolated,
        template=template,
        **replace(config, adapter_names=files or None).keywords,
    )
    resources.enter_context(runtime)
    name = chosen.name or opener.label(source)
    # Adapters, and options of extensions such as a draft, are of this model alone.
    others = replace(config, adapters=None, extended={})
    pool = ModelPool.of_runtime(name, runtime, source=source, config=others, keep_alive=keep_alive)
    resources.callback(pool.close)
    return {
        "runtime": runtime,
        "name": name,
        "short_names": finder().short_names(source),
        "model_bytes": runtime.model.info.nbytes,
        "pool": pool,
        "adapters": {each: scale for each, (_, scale) in named.items()},
    }


def _announce(
    server_state: ServerState,
    listening: Listening,
    kept: StoreOptions,
    config: EngineConfig,
    *,
    isolated: bool,
) -> None:
    """Listen, and say where and with what."""
    for each in listening.sockets:
        each.listen(2048)
    for title, value in (
        ("address", listening.address(" and ")),
        ("page", "at that address, in a browser" if server_state.page else "none"),
        *_model_lines(server_state, isolated),
        *_store_lines(kept, config),
        ("keys", _state(server_state.keys)),
    ):
        typer.echo(f"{title:<8} {value}")
    typer.echo("Ctrl-C stops it.")
    sys.stdout.flush()


def _store_lines(kept: StoreOptions, config: EngineConfig) -> list[tuple[str, str]]:
    """Where sessions and state are, how much state at most, and whether it is encrypted."""
    from perdure.sessions.store.remote import remote_of

    folder = kept.folder
    if folder is None:
        return [("store", "none: sessions end with the server")]
    most = STORE_BYTES if config.store_bytes is None else config.store_bytes
    sealed = ", encrypted" if kept.storage.encryption is not None else ""
    state = f"up to {words.size(most)} of state{sealed}"
    remote = remote_of(folder)
    if remote is None:
        return [("store", f"{folder}, {state}")]
    return [("sessions", remote.shown(folder)), ("store", f"{folder}, {state}")]


@dataclass(frozen=True, slots=True)
class Listening:
    """The sockets of a server, and the certificate of its ports."""

    sockets: Sequence[socket.socket]
    certificate: Certificate | None

    def address(self, between: str | None = None) -> str:
        """The address of the first socket, or all with a word between them."""
        from perdure.server.http_server import address

        shown = [address(each, tls=self.certificate is not None) for each in self.sockets]
        return shown[0] if between is None else between.join(shown)


def _write_state(file: Path, server_state: ServerState, listening: Listening, folder: Path | None) -> None:
    models = server_state.models
    several = models.pool is not None and models.pool.room is not None
    running = RunningServer(
        pid=os.getpid(),
        address=listening.address(" and "),
        model=", ".join(model.name for model in models.pooled) if several else models.first.name,
        store=str(folder or ""),
        since=time.time(),
    )
    with atomic_write(file, private=True) as out:
        out.write(json.dumps(asdict(running)).encode())


def _run(server_state: ServerState, reload: SettingsReload, listening: Listening) -> None:
    """Serve until a signal stops the process. From now on there is a log."""
    from perdure.server.core.middleware import JsonLinesHandler
    from perdure.server.http_server import HttpServer

    leave_warnings_to_the_log()
    logging.getLogger().addHandler(JsonLinesHandler(sys.stderr))
    # Engine messages below this level are for developers, and clients that leave are no news.
    for name in ("perdure.llama", "uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.ERROR)
    server = HttpServer(
        server_state,
        read_settings=lambda: reload.into(server_state),
        certificate=listening.certificate,
    )
    system.freeze_memory()
    server.run(sockets=list(listening.sockets))


def _model_lines(server_state: ServerState, isolated: bool) -> list[tuple[str, str]]:
    """What is said of the models at the start."""
    pool = server_state.models.pool
    if pool is not None and pool.room is not None:
        names = [
            f"{model.name} (pinned)" if model.pinned else model.name for model in server_state.models.pooled
        ]
        return [
            ("model", f"{', '.join(names)}; each in a separate process, loaded by its first request"),
            ("memory", f"{pool.room.machine / 2**30:.1f} GiB for those that are loaded at once"),
        ]
    first = server_state.models.first
    runtime = first.runtime
    holder = getattr(runtime.backend, "holder", None)
    state = "in a separate process" if isolated else "in this process"
    if holder is not None:
        state = f"in {holder}, which has the store open"
    return [
        ("model", f"{first.name}, {state}"),
        ("context", f"{runtime.n_ctx} tokens a request"),
        ("slots", f"{words.count(runtime.slots, 'request')} at once"),
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
