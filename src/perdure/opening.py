"""`perdure.open`: starts an engine in process, in a child process, or attaches to the process that owns the
store."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, cast

from perdure import config as configuration
from perdure.backend import Backend, BlockStorage, LocalBackend
from perdure.engine import registry
from perdure.engine.adapters import absolute_names, absolute_scales
from perdure.engine.model import EngineModel as ModelContract
from perdure.engine_config import N_CTX, EngineConfig
from perdure.engine_config.keywords import EngineKeywords
from perdure.errors import InvalidInputError, StoreLockedError
from perdure.extension import optional_part, part
from perdure.options import named_by
from perdure.runtime import Runtime
from perdure.sessions.store.registry import cluster_key, encryption_of, store_folder

if TYPE_CHECKING:
    from perdure.chat.template.template import Template
    from perdure.restart_policy import RestartPolicy
    from perdure.store.owner import StoreLock, StoreOwner


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Which engine is wanted: for one of this process, or to compare with that of another."""

    model: str | os.PathLike[str] | ModelContract | None
    config: EngineConfig = field(default_factory=EngineConfig)
    """Without `n_ctx`: that of another process, else the usual one."""
    storage: BlockStorage = field(default_factory=BlockStorage)
    isolated: bool | RestartPolicy = False

    @property
    def loaded(self) -> bool:
        return self.model is not None and not isinstance(self.model, (str, os.PathLike))

    def build(self, n_ctx: int = 0) -> Backend:
        """An engine for this process, for requests of at least so many tokens."""
        config = self.config.resolved()
        if n_ctx:
            known = config.n_ctx or N_CTX
            config = replace(config, n_ctx=n_ctx if known == "auto" else max(known, n_ctx))
        if self.isolated:
            from perdure.restart_policy import RestartPolicy

            policy = self.isolated if isinstance(self.isolated, RestartPolicy) else None
            source = cast("str | None", self.model)
            in_process: Callable[..., Backend] = part("isolated", "workers")
            return in_process(source, config, storage=self.storage, restart_policy=policy)
        if self.loaded:
            return LocalBackend(cast(ModelContract, self.model), config, storage=self.storage)
        own = registry.open_model(
            cast("str | None", self.model), config.loading, cells=registry.cells(config)
        )
        try:
            return LocalBackend(own, config, storage=self.storage, own_model=True)
        except BaseException:
            own.close()
            raise

    def check(self, path: str | None, digest: str, holder: StoreOwner) -> None:
        """Refuse the engine of another process whose model is not the one that is wanted."""
        if not self._is_model(path, digest):
            raise StoreLockedError(
                f"the store {self.storage.folder} is in use by {holder} with "
                f"{Path(path).name if path else 'another model'}, and this asks for "
                f"{self._model_name()}: leave the model out to use that one, close that process, or choose "
                "another store"
            )

    def _is_model(self, path: str | None, digest: str) -> bool:
        if self.loaded:
            return cast(ModelContract, self.model).digest == digest
        source = cast("str | None", self.model)
        return registry.engine_for(source).is_same(source, path, digest)

    def _model_name(self) -> str:
        if self.loaded:
            path = cast(ModelContract, self.model).path
            return path.name if path is not None else "another one"
        return str(self.model or configuration.settings().model)


def open_runtime(
    opening: Opening,
    *,
    template: str | os.PathLike[str] | Template | None = None,
    build: Callable[[], Backend] | None = None,
) -> Runtime:
    """A runtime with a new engine; or where another process has the store, with the engine of that one.
    `build` makes the first backend of this process, if there is a better way than `opening.build`."""
    folder, distinctive = opening.storage.folder, opening.config.distinctive
    if folder is None:
        return _opened((build or opening.build)(), lambda backend: Runtime(backend, template=template))
    from perdure.store.owner import StoreLock

    lock_or_backend: StoreLock | Backend
    try:
        lock_or_backend = StoreLock(folder)
    except StoreLockedError:
        lock_or_attach = optional_part("store of another process")
        if lock_or_attach is None:
            raise
        n_ctx = None if opening.config.n_ctx == "auto" else opening.config.n_ctx
        lock_or_backend = lock_or_attach(folder, opening.check, opening.build, distinctive, n_ctx)
    if not isinstance(lock_or_backend, StoreLock):
        return _opened(lock_or_backend, lambda backend: Runtime(backend, store=folder, template=template))
    try:
        return _opened(
            (build or opening.build)(),
            lambda backend: Runtime(
                backend,
                store=folder,
                template=template,
                lock=lock_or_backend,
                settings=opening.config.distinctive,
            ),
        )
    except BaseException:
        lock_or_backend.release()
        raise


def _opened(backend: Backend, make: Callable[[Backend], Runtime]) -> Runtime:
    """A runtime on a backend, which is closed where it cannot be made."""
    try:
        return make(backend)
    except BaseException:
        backend.close()
        raise


@named_by(EngineKeywords)
def open(  # noqa: A001
    model: str | os.PathLike[str] | ModelContract | None = None,
    *,
    store: str | os.PathLike[str] | None = None,
    encrypt: str | os.PathLike[str] | None = None,
    template: str | os.PathLike[str] | Template | None = None,
    isolated: bool | RestartPolicy = False,
    **options: Unpack[EngineKeywords],
) -> Runtime:
    """A runtime on a model: a file, a name, a loaded model, or the default one.

    - `store`: a folder where state, and every session, outlives the process. Where another process has that
      folder open, its engine is used instead of a second one. One that begins with postgresql:// has the
      sessions of several machines, and state in a folder of this one.
    - `encrypt`: the key that state on the disk is encrypted with, a file of 32 bytes or 64 hex digits, or
      "cluster" for the one in PostgreSQL. Said once, it holds for the folder.
    - `template`: a chat template to use instead of the model's own, a name or a file.
    - `isolated`: the engine is in another process that may die and is started again; a `RestartPolicy` says
      when and how.

    Of the engine:

    - `n_ctx`: context size: tokens of prompt and reply together; auto: as many as fit (default: 4096).
    - `slots`: requests that are answered at once, others wait; auto: as many as fit (default: 4).
    - `swap_slots`: conversations whose state stays on the device between two requests (default: a few where a
      device has room, none on a CPU).
    - `exact`: decode each reply alone, so that its last bit never depends on others (default: false).
    - `queue`: requests that may wait; a server answers more with 429 (default: 256).
    - `stall`: seconds of a prompt's chunk while others wait (default: 0.05).
    - `cache`: bytes of state that are kept in memory between requests (default: an eighth of the memory, at
      most 2 GiB or a twelfth of it).
    - `store_bytes`: bytes of state that the store keeps; texts of sessions are always kept (default: 16 GiB).
    - `blocks`: places where machines share state: file://, s3:// or redis://, the faster first (default:
      none).
    - `force_kv`: use a K/V type that was measured to cost the model much (default: false).
    - `adapters`: LoRAs and control vectors for replies that name no others: files with their scales (default:
      none).
    - `adapter_names`: files of adapters by the names that replies may use (default: none).
    - `gpu_layers`: layers of the model on the GPU; auto: as many as fit (default: auto).
    - `cpu_experts`: layers whose experts stay in memory and are computed by the CPU; auto: as few as must
      (default: auto).
    - `devices`: name of a GPU to use (default: all).
    - `tensor_split`: share of the model for each GPU (default: by free memory).
    - `kv_offload`: keep the K/V cache on the GPU too (default: true).
    - `threads`: threads that compute (default: by the machine).
    - `n_batch`: most tokens of a prompt in one step (default: 512).
    - `shared`: one pool of cells for all sequences, in place of a part for each (default: false).
    - `kv_type`: type of the K/V cache: f16, q8_0, q4_0 and others, or one for K and one for V (default: f16).
    - `k_type`: type of the keys alone, in place of kv_type (default: f16).
    - `v_type`: type of the values alone, in place of kv_type (default: f16).
    - `flash`: flash attention (default: true).
    - `swa_full`: keep rows that have slid out of a window, so that a sequence can be cut short (default:
      true).
    - `rope_freq_base`: base of the rotation; 0: the model's own (default: 0).
    - `rope_freq_scale`: scale of the rotation; 0: the model's own (default: 0).
    - `trace`: keep what layers compute in every step, which takes longer: hidden, ffn, router (default:
      none).
    - `trace_layers`: layers that trace is for (default: all).
    - `draft`: guesses ahead for replies with speculate: a smaller model, its assistant (Gemma 4), or mtp
      (default: none).
    """
    # Before a model is fetched and loaded for nothing.
    config = EngineConfig.of(options, open)
    folder = None if store is None else store_folder(store)
    config = replace(
        config,
        adapters=None if config.adapters is None else absolute_scales(config.adapters),
        adapter_names=None if config.adapter_names is None else absolute_names(config.adapter_names),
    )
    storage = BlockStorage(
        folder=folder,
        encryption=encryption_of(folder, encrypt),
        shared_key=cluster_key(folder, config.blocks) if config.blocks else None,
    )
    opening = Opening(model=model, config=config, storage=storage, isolated=isolated)
    if opening.loaded and config.loading:
        raise InvalidInputError(
            f"this model is loaded already: give {', '.join(config.loading)} to perdure.Model, or name the "
            "file here"
        )
    if opening.loaded and isolated:
        raise InvalidInputError("a loaded model cannot move to another process; give its file or its name")
    return open_runtime(opening, template=template)
