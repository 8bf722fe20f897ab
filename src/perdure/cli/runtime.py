"""A runtime for a command: with a model that is loaded here, or through the process that has the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from perdure.cli.output import terminal
from perdure.config import N_CTX
from perdure.errors import StoreLockedError

if TYPE_CHECKING:
    from perdure import Runtime
    from perdure.backend import Backend, BackendKeywords
    from perdure.engine.contract import LoadingKeywords
    from perdure.engine.model import Model


def opened(
    name: str | None,
    *,
    ctx: int | None,
    store: Path | None = None,
    template: str | None = None,
    loading: LoadingKeywords | None = None,
    model: Model | None = None,
    **settings: Unpack[BackendKeywords],
) -> Runtime:
    """A runtime on the model of that name, or on `model`, which is loaded already.

    Without a `ctx` it has the usual room, or that of whoever has the store.
    """
    from perdure.backend import LocalBackend
    from perdure.opening import BackendOptions, open_runtime

    options = BackendOptions(model=name, n_ctx=ctx, loading=loading or {}, settings=settings, store=store)
    n_ctx = N_CTX if ctx is None else ctx
    sized: BackendKeywords = {**settings, "n_ctx": n_ctx}

    def build() -> Backend:
        own = model or terminal.load(name, cells=n_ctx * settings.get("slots", 1), **options.loading)
        try:
            return LocalBackend(own, own_model=True, store=store, **sized)
        except BaseException:
            own.close()
            raise

    try:
        runtime = open_runtime(options, template=template, build=build)
    except StoreLockedError as error:
        raise StoreLockedError(_in_options(str(error))) from None
    holder = getattr(runtime.backend, "holder", None)
    if holder is not None:
        terminal.tell(f"Through {holder}, which has {store} open.")
    return runtime


def model_path(runtime: Runtime) -> Path:
    """The file of a runtime's model."""
    path = getattr(runtime.model, "path", None)
    return path if isinstance(path, Path) else Path("a model without a file")


def _in_options(text: str) -> str:
    """What the library says about a store in use, in the words of the command."""
    return text.replace(
        "choose another store, or open this one for reading", "choose another one by --store"
    ).replace("choose another store", "choose another store by --store")
