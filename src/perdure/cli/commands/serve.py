"""`perdure serve`: a model for many, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.options import shared
from perdure.cli.options.completion import model_names
from perdure.cli.options.groups import EngineOptions, unfolded
from perdure.cli.page import open_browser
from perdure.config import QUEUE, SLOTS

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from perdure.server.app_state import AppState
    from perdure.server.keys import Keys

_OLLAMA = 11434
_Engine = "Engine"
_Access = "Access"
_Limits = "Limits"


@unfolded
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            autocompletion=model_names,
            show_default="that of `perdure config show`, else the small default model",
            help="A .gguf file, or any name that `perdure pull` takes.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option("--host", metavar="ADDRESS", help="Where to listen. Other than loopback needs --keys."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, metavar="N", help="Port; 0 takes a free one.")
    ] = 8080,
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
    alias: Annotated[
        list[str] | None,
        typer.Option(
            "--alias",
            metavar="PATTERN",
            help="A further name for the model, such as 'gpt-*'; may be given several times.",
        ),
    ] = None,
    store: shared.StoreFolder = None,
    no_store: Annotated[
        bool, typer.Option("--no-store", help="Keep nothing: sessions end with the server.")
    ] = False,
    *,
    engine: EngineOptions,
    exact: shared.Exact = False,
    slots: Annotated[
        int,
        typer.Option(
            "--slots",
            min=1,
            metavar="N",
            help="Requests that are answered at once; others wait.",
            rich_help_panel=_Engine,
        ),
    ] = SLOTS,
    queue: Annotated[
        int,
        typer.Option(
            "--queue",
            min=0,
            metavar="N",
            help="Requests that may wait; more are told to try later (429).",
            rich_help_panel=_Engine,
        ),
    ] = QUEUE,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            metavar="N",
            show_default="by the machine",
            help="Threads that compute.",
            rich_help_panel=_Engine,
        ),
    ] = None,
    isolated: Annotated[
        bool,
        typer.Option(
            "--isolated/--in-process",
            help="The engine in a process of its own: if it dies, it is started again.",
            rich_help_panel=_Engine,
        ),
    ] = True,
    keys: Annotated[
        Path | None,
        typer.Option(
            "--keys",
            metavar="FILE",
            help="File of the keys that clients must have; `perdure keys add NAME` makes one.",
            rich_help_panel=_Access,
        ),
    ] = None,
    new_key: Annotated[
        str | None,
        typer.Option(
            "--new-key",
            metavar="NAMESPACE",
            help="Print a new key and its line for the file, and exit; `perdure keys add` does both.",
            rich_help_panel=_Access,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="A further host name that requests may be sent to; may be given several times.",
            rich_help_panel=_Access,
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            "--cors",
            metavar="ORIGIN",
            help="A site whose pages may use the server, such as https://chat.example.org, or * for any "
            "(with --keys); may be given several times.",
            rich_help_panel=_Access,
        ),
    ] = None,
    page: Annotated[
        bool,
        typer.Option("--page/--no-page", help="Serve the page for browsers, at /.", rich_help_panel=_Access),
    ] = True,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page in a browser.", rich_help_panel=_Access)
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Refuse requests with fields that are not known.", rich_help_panel=_Access
        ),
    ] = False,
    log_text: Annotated[
        bool,
        typer.Option("--log-text", help="Put messages and replies into the log.", rich_help_panel=_Access),
    ] = False,
    body_bytes: Annotated[
        int,
        typer.Option(
            "--body-bytes", min=1, metavar="N", help="Most bytes of one request.", rich_help_panel=_Limits
        ),
    ] = 16 << 20,
    messages: Annotated[
        int,
        typer.Option(
            "--messages", min=1, metavar="N", help="Most messages of one request.", rich_help_panel=_Limits
        ),
    ] = 4096,
    requests: Annotated[
        int,
        typer.Option(
            "--requests",
            min=1,
            metavar="N",
            help="Most requests at once, waiting ones included.",
            rich_help_panel=_Limits,
        ),
    ] = 512,
    request_seconds: Annotated[
        float,
        typer.Option(
            "--request-seconds",
            metavar="S",
            help="Seconds that one request may take.",
            rich_help_panel=_Limits,
        ),
    ] = 900.0,
    body_seconds: Annotated[
        float,
        typer.Option(
            "--body-seconds",
            metavar="S",
            help="Seconds that the body of a request may take to arrive.",
            rich_help_panel=_Limits,
        ),
    ] = 60.0,
    response_days: Annotated[
        float,
        typer.Option(
            "--response-days",
            metavar="N",
            help="That a stored response is kept.",
            rich_help_panel=_Limits,
        ),
    ] = 30.0,
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            metavar="S",
            help="Seconds for replies to finish once the server is told to stop.",
            rich_help_panel=_Limits,
        ),
    ] = 20.0,
) -> None:
    """Serve a model over HTTP, with a page for browsers.

    Clients of OpenAI, Anthropic and Ollama can use it. Ctrl-C stops it; `perdure start` does the same in the
    background. The exit code is 2 if an option is wrong, and 0 when it was told to stop.
    """
    import perdure
    from perdure import InvalidInputError, models
    from perdure.cli.output.progress import fetching
    from perdure.cli.output.terminal import have_library, note
    from perdure.config import settings

    if new_key is not None:
        _print_key(new_key)
        return
    try:
        from perdure.server.app_state import AppState
        from perdure.server.http_server import bind, check_address
        from perdure.server.keys import Keys
        from perdure.server.limits import Limits
        from perdure.server.middleware.host_check import AllowedHosts, check_origins
    except ModuleNotFoundError as error:
        note(f"{error.name} is not installed: pip install 'perdure[server]'")
        raise typer.Exit(1) from None
    try:
        limits = Limits(
            body_bytes=body_bytes,
            messages=messages,
            requests=requests,
            request_seconds=request_seconds,
            body_seconds=body_seconds,
            response_seconds=86400 * response_days,
            grace_seconds=grace,
        )
        known = Keys.read(keys) if keys is not None else Keys()
        check_address(host, len(known))
        origins = check_origins(cors or (), keys=len(known))
        hosts = AllowedHosts(host, allow_host or (), origins) if allow_host or not len(known) else None
        if open_page and not page:
            raise InvalidInputError("--open and --no-page cannot both be meant")
        if store is not None and no_store:
            raise InvalidInputError("--store and --no-store cannot both be meant")
        listening = [bind(host, port), *([bind(host, _OLLAMA)] if ollama else [])]
    except InvalidInputError as error:
        note(str(error))
        raise typer.Exit(2) from None
    folder = None if no_store else store or settings().store
    if models.is_here(model):
        # What is wrong with a file is told before a library is fetched for it.
        models.path(model)
    have_library()
    with fetching(model or "the default model") as progress:
        path = models.path(model, progress)
    with perdure.open(
        path,
        n_ctx=engine.ctx,
        slots=slots,
        queue=queue,
        exact=exact,
        store=folder,
        isolated=isolated,
        threads=threads,
        template=engine.template,
        **engine.loading,
    ) as runtime:
        app_state = AppState(
            runtime=runtime,
            name=name or path.stem,
            aliases=tuple(alias or ()),
            model_bytes=path.stat().st_size,
            limits=limits,
            keys=known,
            hosts=hosts,
            origins=origins,
            strict=strict,
            log_text=log_text,
            page=page,
        )
        _listen(app_state, listening, folder, isolated, open_page=open_page)


def _listen(
    app_state: AppState,
    listening: Sequence[socket.socket],
    folder: Path | None,
    isolated: bool,
    *,
    open_page: bool,
) -> None:
    import logging
    import sys

    from perdure.cli.output.log_notes import leave_warnings_to_the_log
    from perdure.server.http_server import HttpServer, address
    from perdure.server.middleware.access_log import JsonLines

    leave_warnings_to_the_log()
    logging.getLogger().addHandler(JsonLines(sys.stderr))
    logging.getLogger("perdure").setLevel(logging.INFO)
    # What the engine has to say below this is for those who build it, and that clients leave is no news.
    for name in ("perdure.llama", "uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for each in listening:
        each.listen(2048)
    runtime = app_state.runtime
    holder = getattr(runtime.backend, "holder", None)
    state = "in a process of its own" if isolated else "in this process"
    if holder is not None:
        state = f"in {holder}, which has the store open"
    for title, value in (
        ("address", " and ".join(map(address, listening))),
        ("page", "at that address, in a browser" if app_state.page else "none"),
        ("model", f"{app_state.name}, {state}"),
        ("context", f"{runtime.n_ctx} tokens a request"),
        ("slots", f"{runtime.slots} requests at once"),
        ("store", str(folder) if folder else "none: sessions end with the server"),
        ("keys", _state(app_state.keys)),
    ):
        typer.echo(f"{title:<8} {value}")
    typer.echo("Ctrl-C stops it.")
    sys.stdout.flush()
    if open_page:
        # The socket listens already: the browser's first request waits there.
        open_browser(address(listening[0]))
    HttpServer(app_state).run(sockets=list(listening))


def _state(keys: Keys) -> str:
    if not len(keys):
        return "none: everybody on this machine may use it"
    return f"{len(keys)}, of {', '.join(keys.namespaces)}"


def _print_key(namespace: str) -> None:
    from perdure import InvalidInputError
    from perdure.cli.output.terminal import note
    from perdure.server.keys import new_key

    try:
        secret, key = new_key(namespace)
    except InvalidInputError as error:
        note(str(error))
        raise typer.Exit(2) from None
    typer.echo(f"key   {secret}")
    typer.echo(f"line  {key.line}")
    note("the key is shown this once; put the line into the file that --keys names")
