"""`perdure.open`: a runtime from a model, with an engine of this process, of a child, or of whoever has the
store already."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Never, cast

from perdure import config
from perdure.backend import NEXT_TOKEN, Backend, BackendKeywords, LocalBackend, resolve_draft
from perdure.chat.template.template import Template
from perdure.config import N_CTX, QUEUE, SLOTS
from perdure.engine import registry
from perdure.engine.adapters import absolute_names, absolute_scales
from perdure.engine.contract import LoadingKeywords
from perdure.engine.kv_loss import parse_kv_type
from perdure.engine.model import Model as ModelContract
from perdure.errors import InvalidInputError, StoreLockedError
from perdure.options import refuse_unknown
from perdure.runtime import Runtime
from perdure.sessions.store.registry import cluster_key, encryption_of, store_folder
from perdure.store.owner import StoreLock
from perdure.worker.attached import Link, check_settings, hold_or_attach
from perdure.worker.process import RestartPolicy
from perdure.worker.remote import RemoteBackend

_RESOURCES = frozenset(
    {
        "slots",
        "swap_slots",
        "queue",
        "stall",
        "cache",
        "store_bytes",
        "blocks",
        "blocks_key",
        "encryption",
        "threads",
        "n_batch",
        "force_kv",
        "draft",
    }
)
"""Settings that do not change what a reply is: whoever has the store chooses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """Which engine is wanted: for one of this process, or to compare with that of another."""

    model: str | os.PathLike[str] | ModelContract | None
    n_ctx: int | Literal["auto"] | None = None
    """None: whatever another process has, else the default."""
    loading: LoadingKeywords = field(default_factory=LoadingKeywords)
    settings: BackendKeywords = field(default_factory=BackendKeywords)
    store: Path | None = None
    isolated: bool | RestartPolicy = False

    @property
    def loaded(self) -> bool:
        return self.model is not None and not isinstance(self.model, (str, os.PathLike))

    @property
    def distinctive(self) -> dict[str, Any]:
        """What was chosen that changes replies."""
        chosen: dict[str, Any] = {**self.loading, **self.settings}
        chosen = {name: value for name, value in chosen.items() if name not in _RESOURCES}
        return chosen if chosen.get("exact") else {n: v for n, v in chosen.items() if n != "exact"}

    def build(self, n_ctx: int = 0) -> Backend:
        """An engine for this process, for requests of at least so many tokens."""
        context_length = N_CTX if self.n_ctx is None else self.n_ctx
        if n_ctx:
            context_length = n_ctx if context_length == "auto" else max(context_length, n_ctx)
        loading, settings = resolve_draft(self.loading, {**self.settings, "n_ctx": context_length})
        if self.isolated:
            policy = self.isolated if isinstance(self.isolated, RestartPolicy) else None
            source = cast("str | None", self.model)
            return RemoteBackend(source, restart_policy=policy, loading=loading, store=self.store, **settings)
        if self.loaded:
            return LocalBackend(cast(ModelContract, self.model), store=self.store, **settings)
        cells = registry.cells(context_length, self.settings.get("slots", SLOTS), settings)
        own = registry.open_model(cast("str | None", self.model), loading, cells=cells)
        try:
            return LocalBackend(own, own_model=True, store=self.store, **settings)
        except BaseException:
            own.close()
            raise

    def check(self, link: Link, store: Path) -> None:
        """Refuse the engine of another process that is not the one that is wanted."""
        if not self._is_model_of(link):
            ready = link.welcome.ready
            raise StoreLockedError(
                f"the store {store} is in use by {link.holder} with "
                f"{Path(ready.path).name if ready.path else 'another model'}, and this asks for "
                f"{self._model_name()}: leave the model out to use that one, close that process, or choose "
                "another store"
            )
        check_settings(link, store, self.distinctive, None if self.n_ctx == "auto" else self.n_ctx)

    def _is_model_of(self, link: Link) -> bool:
        ready = link.welcome.ready
        if self.loaded:
            return cast(ModelContract, self.model).digest == ready.digest
        source = cast("str | None", self.model)
        return registry.engine_for(source).is_same(source, ready.path, ready.digest)

    def _model_name(self) -> str:
        if self.loaded:
            path = getattr(self.model, "path", None)
            return Path(path).name if path else "another one"
        return str(self.model or config.settings().model)


def open_runtime(
    options: BackendOptions,
    *,
    template: str | os.PathLike[str] | Template | None = None,
    build: Callable[[], Backend] | None = None,
) -> Runtime:
    """A runtime with an engine of its own; or where another process has the store, with the engine of that
    one. `build` makes the first backend of this process, if there is a better way than `options.build`."""
    folder = options.store
    if folder is None:
        return _opened((build or options.build)(), lambda backend: Runtime(backend, template=template))
    backend_or_lock = hold_or_attach(
        folder, lambda link: options.check(link, folder), options.build, options.distinctive
    )
    if not isinstance(backend_or_lock, StoreLock):
        return _opened(backend_or_lock, lambda backend: Runtime(backend, store=folder, template=template))
    try:
        return _opened(
            (build or options.build)(),
            lambda backend: Runtime(
                backend, store=folder, template=template, lock=backend_or_lock, settings=options.distinctive
            ),
        )
    except BaseException:
        backend_or_lock.release()
        raise


def _opened(backend: Backend, make: Callable[[Backend], Runtime]) -> Runtime:
    """A runtime on a backend, which is closed where it cannot be made."""
    try:
        return make(backend)
    except BaseException:
        backend.close()
        raise


def open(  # noqa: A001
    model: str | os.PathLike[str] | ModelContract | None = None,
    *,
    n_ctx: int | Literal["auto"] | None = None,
    slots: int | Literal["auto"] = SLOTS,
    swap_slots: int | None = None,
    exact: bool = False,
    queue: int = QUEUE,
    stall: float | None = None,
    cache: int | None = None,
    store: str | os.PathLike[str] | None = None,
    store_bytes: int | None = None,
    encrypt: str | os.PathLike[str] | None = None,
    blocks: Sequence[str] | None = None,
    template: str | os.PathLike[str] | Template | None = None,
    isolated: bool | RestartPolicy = False,
    gpu_layers: int | Literal["auto"] | None = None,
    devices: Sequence[str] | None = None,
    tensor_split: Sequence[float] | None = None,
    kv_offload: bool | None = None,
    cpu_experts: int | Literal["all", "auto"] | None = None,
    threads: int | None = None,
    n_batch: int | None = None,
    shared: bool | None = None,
    k_type: str | None = None,
    v_type: str | None = None,
    kv_type: str | None = None,
    force_kv: bool = False,
    flash: bool | None = None,
    swa_full: bool | None = None,
    rope_freq_base: float | None = None,
    rope_freq_scale: float | None = None,
    trace: str | Sequence[str] | None = None,
    trace_layers: Sequence[int] | None = None,
    adapters: Mapping[str, float] | None = None,
    adapter_names: Mapping[str, str | os.PathLike[str]] | None = None,
    draft: str | os.PathLike[str] | ModelContract | None = None,
    **unknown: Never,
) -> Runtime:
    """A runtime on a model: a file, a name, a loaded model, or the default one.

    `n_ctx` is what one request can hold, 4096 tokens unless you choose; `slots` is how many are served at
    once, and up to `queue` more wait; "auto" for either is what fits into the memory that is there (`fit`).
    `swap_slots` more conversations keep their state on the device between two requests: a few where it has
    room, and none on a CPU, unless you say how many. While others wait, a prompt is computed in chunks of
    about `stall` seconds. `cache` is how many bytes of state are kept between requests, 0 for none; `store`
    is a folder where that state, and every session, outlives the process, and `store_bytes` bounds it:
    where another process has that folder open, its engine is used instead of a second one. `encrypt` is the
    key that state on the disk is encrypted with, a file of 32 bytes or 64 hex digits, or "cluster" for the
    one in PostgreSQL; said once, it holds for the folder. A `store` that begins with postgresql:// has the
    sessions of several machines, and state in a folder of this one; `blocks` are then places that they share
    state in, behind that folder: file://, s3:// or redis:// each.
    `template` is a chat template to use instead of the model's own: a name or a file. With `exact`, a reply
    does not depend in the last bit on who else is served. With `isolated`, the engine is in a process of its
    own that may die and is started again; a `RestartPolicy` says when and how. `gpu_layers`, `devices`,
    `tensor_split`, `kv_offload` and `cpu_experts` are those of `Model`; what follows them is as for
    `Model.context`.
    `kv_type` is the type of K and V in one word (`q8_0`, or `q8_0:f16` for K and V); what it costs the
    model is measured once, and one that costs much is refused unless `force_kv`.
    `adapters` are LoRAs and control vectors, files with their scales, for every reply that names no others;
    `adapter_names` are files by the names that replies may use besides. `draft` guesses ahead for replies
    with `speculate`: a smaller model of the same vocabulary or the model's assistant (Gemma 4), a file or a
    name, or "mtp" for the model's own next-token layers. None is the default of whoever it is for.
    """
    # Before a model is fetched and loaded for nothing.
    refuse_unknown(unknown, open)
    if kv_type is not None:
        if k_type is not None or v_type is not None:
            raise InvalidInputError("kv_type is k_type and v_type in one; leave it or those out")
        k_type, v_type = parse_kv_type(kv_type)
    chosen = {
        "gpu_layers": gpu_layers,
        "devices": None if devices is None else tuple(devices),
        "tensor_split": None if tensor_split is None else tuple(tensor_split),
        "kv_offload": kv_offload,
        "cpu_experts": cpu_experts,
    }
    loading = cast(LoadingKeywords, _given(chosen))
    settings: dict[str, Any] = {"slots": slots, "exact": exact, "queue": queue}
    settings |= _given(
        {
            "swap_slots": swap_slots,
            "stall": stall,
            "cache": cache,
            "store_bytes": store_bytes,
            "threads": threads,
            "n_batch": n_batch,
            "shared": shared,
            "k_type": k_type,
            "v_type": v_type,
            "force_kv": force_kv or None,
            "flash": flash,
            "swa_full": swa_full,
            "rope_freq_base": rope_freq_base,
            "rope_freq_scale": rope_freq_scale,
            "trace": trace,
            "trace_layers": trace_layers,
            "adapters": None if adapters is None else absolute_scales(adapters),
            "adapter_names": None if adapter_names is None else absolute_names(adapter_names),
            "draft": _named(draft),
        }
    )
    folder = None if store is None else store_folder(store)
    if blocks:
        settings |= {"blocks": tuple(blocks), "blocks_key": cluster_key(folder, blocks)}
    settings |= _given({"encryption": encryption_of(folder, encrypt)})
    options = BackendOptions(
        model=model,
        n_ctx=n_ctx,
        loading=loading,
        settings=cast(BackendKeywords, settings),
        store=folder,
        isolated=isolated,
    )
    if options.loaded and loading:
        raise InvalidInputError(
            f"this model is loaded already: give {', '.join(loading)} to perdure.Model, or name the file here"
        )
    if options.loaded and isolated:
        raise InvalidInputError("a loaded model cannot move to another process; give its file or its name")
    return open_runtime(options, template=template)


def _named(draft: str | os.PathLike[str] | ModelContract | None) -> str | ModelContract | None:
    """A draft model as the engine's process finds it, which may be in another folder."""
    if draft in (None, NEXT_TOKEN) or not isinstance(draft, (str, os.PathLike)):
        return draft
    file = Path(draft)
    return str(file.absolute()) if file.exists() else os.fspath(draft)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that were chosen."""
    return {name: value for name, value in values.items() if value is not None}
