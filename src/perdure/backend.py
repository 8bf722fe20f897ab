"""The engine side of a runtime: a context, an engine loop and what is kept, opened and closed as one."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from perdure import system
from perdure.cache.slots.cache import SlotCache
from perdure.decode.engine_loop import CHUNK, STALL, EngineLoop
from perdure.decode.output_queue import OutputQueue
from perdure.decode.request import Request, check_prompt_size
from perdure.decode.stream import Stream, one_request
from perdure.engine import advice
from perdure.engine.adapters import PLAIN, AdapterTable, Scales
from perdure.engine.context import Context
from perdure.engine.contract import Tokenizer, Tokens
from perdure.engine.model import EngineModel
from perdure.engine_config import N_CTX, QUEUE, SLOTS, STORE_BYTES, EngineConfig
from perdure.errors import ClosedError, InvalidInputError
from perdure.events.hub import EventHub
from perdure.extension import part
from perdure.request_options import Sampling

if TYPE_CHECKING:
    from perdure.cache.prefix_cache import PrefixCache, PrefixCacheCalls
    from perdure.cache.tiers.base import BlockTier
    from perdure.cache.tiers.codec import Encryption
    from perdure.decode.drafter import Drafter
    from perdure.decode.embedding import EmbeddingFuture
    from perdure.engine.media import MediaSource, MediumRows

log = logging.getLogger("perdure.engine")

_WAITING = 256 << 20
"""Bytes that may wait to be written, at least. Most of them are those of blocks in memory."""
_SWAP_SLOTS = 4
"""Sequences on a device without a slot, unless it is said how many: to wait in, and one to change places."""
_ALIKE = ("threads", "flash", "rope_freq_base", "rope_freq_scale")
"""Settings of the context that embeddings are computed with too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStorage:
    """Where a backend keeps blocks of state besides memory."""

    folder: Path | None = None
    """Of the store; None: nowhere."""
    own_blocks: bool = False
    """Whether the model's blocks are in a folder inside the store, so that engines of other models can write
    to theirs."""
    encryption: Encryption | None = None
    """Of what is on the disk."""
    shared_key: bytes | None = None
    """The key that encrypts state in places of several machines."""


def _opened(
    model: EngineModel,
    config: EngineConfig,
    n_ctx: int,
    slots: int,
    swap_slots: int | None,
    options: Mapping[str, Any],
) -> tuple[Context, int]:
    """A context of so many slots and swap slots, and how many of these there are: unless it is said, a few
    where the cache is on a device that has ample room for them. `options` are what a drafter asks of it."""
    if swap_slots is None:
        swap_slots = _SWAP_SLOTS if model.spare_sequences(n_ctx, config) >= _SWAP_SLOTS else 0
    if swap_slots and config.shared:
        raise InvalidInputError(
            "swap_slots have cells of their own, and shared is one pool for all: leave one of the two out"
        )
    return model.context(n_ctx=n_ctx, n_seq=slots + swap_slots, **config.context, **options), swap_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondOpening:
    """How a model is opened a second time, in another process."""

    path: str
    adapters: Mapping[str, float]
    """Files with their scales."""
    rope: tuple[float, float]
    """Base and scale; 0 for those of the model."""


BackendState = Literal[
    "starting", "ready", "unresponsive", "restarting", "unloading", "unloaded", "failed", "closed"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How an engine is now, and the process that it is in where that is not this one."""

    state: BackendState
    restarts: int = 0
    last_death: str | None = None
    """Why the last process ended that was not asked to."""
    pid: int | None = None
    rss: int | None = None
    """Resident bytes, where the system reports it."""
    uptime: float | None = None
    """Seconds since it was ready."""
    failed_threads: Mapping[str, int] = field(default_factory=dict)
    """How often threads of another process failed, by their names."""


class Residence:
    """Says when an engine may take its memory, and hears when it has it and when not. This one lets it have
    it always. All calls come from the thread that starts the engine."""

    def enter(self) -> bool:
        """Whether the engine may be loaded now. It is asked again until it may."""
        return True

    def ready(self) -> None:
        """The engine serves."""

    def left(self) -> None:
        """The engine is gone, and is not started before a request needs it."""

    def failed(self, error: Exception) -> None:
        """It could not be started, and is not tried again before a request needs it."""


class Backend(Protocol):
    """Requests in, replies out, whichever process the engine is in. Safe from any thread."""

    @property
    def model(self) -> Tokenizer: ...
    @property
    def cache(self) -> PrefixCacheCalls: ...
    @property
    def storage(self) -> BlockStorage:
        """Where it keeps state, and finds the rows of images."""
        ...

    @property
    def n_ctx(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def exact(self) -> bool:
        """Whether a reply depends in no bit on other requests."""
        ...

    @property
    def is_attached(self) -> bool:
        """Whether another process, which has the store, has the engine."""
        ...

    @property
    def is_known(self) -> bool:
        """Whether it was loaded at some time: what it says of itself is there without waiting."""
        ...

    @property
    def can_unload(self) -> bool:
        """Whether `unload` frees its memory."""
        ...

    def health(self) -> Health: ...

    def start(self) -> None:
        """Have the engine loaded, without waiting for that. Every request does so by itself, and waits."""
        ...

    def unload(self) -> bool:
        """Free its memory until the next request; its state is in the store. False, and nothing done, where
        something is being asked of it."""
        ...

    def watch(self, residence: Residence) -> None:
        """From now on ask `residence` before each load, and report each load to it."""
        ...

    def attach_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Have what another process says read in the event loop of those who wait for it; None: not any
        more."""
        ...

    @property
    def load(self) -> tuple[int, int]:
        """Requests waiting, and being served."""
        ...

    @property
    def events(self) -> EventHub:
        """What happens there, for subscribers."""
        ...

    weights: Mapping[str, float]
    """By namespace: what part of the engine it has while others ask too; 1 where none is given."""

    def shares(self) -> Mapping[str, Mapping[str, float]]:
        """What namespaces have had of the engine (`QueueOrder.shares`)."""
        ...

    def submit(self, request: Request) -> OutputQueue:
        """Queue a request. What is wrong with it is raised here."""
        ...

    def embed(self, texts: Sequence[Tokens], adapters: Scales | None = None) -> EmbeddingFuture:
        """Have vectors made of texts. Cancelling the future ends that."""
        ...

    def embedding_width(self) -> int:
        """Numbers of a vector. It may have to wait for the engine."""
        ...

    def second_opening(self, adapters: Scales | None) -> SecondOpening:
        """How another process opens the same model, to look inside it. An engine that cannot be looked into
        is an error. `adapters` are by name."""
        ...

    def close(self) -> None: ...


class AlwaysLoaded:
    """The common part of backends whose engine is loaded for as long as they are open."""

    can_unload = False
    weights: Mapping[str, float] = MappingProxyType({})

    def weighed(self, request: Request) -> Request:
        weight = self.weights.get(request.namespace)
        return request if weight is None else replace(request, weight=weight)

    @property
    def is_known(self) -> bool:
        return True

    def start(self) -> None:
        """Nothing: it is loaded."""

    def unload(self) -> bool:
        return False

    def watch(self, residence: Residence) -> None:
        """Nothing: it is never asked, as there is no other load."""

    def attach_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Nothing: no other process says anything."""


class LocalBackend(AlwaysLoaded):
    """The engine in this process."""

    is_attached = False

    def __init__(
        self,
        model: EngineModel,
        config: EngineConfig | None = None,
        *,
        storage: BlockStorage | None = None,
        tiers: Sequence[BlockTier] = (),
        drafter: Drafter | None = None,
        own_model: bool = False,
    ) -> None:
        """`drafter` guesses ahead in place of what extensions bring. `tiers` stand behind the disk. With
        `own_model` the model is closed with the backend."""
        config = advice.tuned(model, (config or EngineConfig()).resolved())
        self.storage = storage = storage or BlockStorage()
        self.model = model
        self.exact = exact = bool(config.exact)
        self.events = EventHub()
        self._own_model = own_model
        self._config = config
        self._drafter = drafter
        self._rope = (config.rope_freq_base or 0.0, config.rope_freq_scale or 0.0)
        names = cast("Mapping[str, str] | None", config.adapter_names)
        self.adapters = AdapterTable(model.adapter, names=names, default=config.adapters)
        budget = _default_budget() if config.cache is None else config.cache
        self._limit = queue = QUEUE if config.queue is None else config.queue
        if storage.folder is not None and not budget:
            raise InvalidInputError("a store needs a cache: leave cache out, or give it some bytes")
        advice.check_kv_type(model, config)
        n_ctx, slots = config.n_ctx or N_CTX, config.slots or SLOTS
        if n_ctx == "auto" or slots == "auto":
            n_ctx, slots = model.fit_context(
                None if n_ctx == "auto" else n_ctx, None if slots == "auto" else slots, config
            )
            log.info("%d tokens for each of %d requests at once fit beside the model", n_ctx, slots)
        with ExitStack() as undo:
            # What guesses ahead is opened when a reply asks for it, or now if its options were chosen.
            opener = None
            if config.extended and drafter is None:
                from perdure.decode.drafter import drafter_opener

                opener = drafter_opener()
            with nullcontext({}) if opener is None else opener.context_options(model, config) as options:
                self.context, swap_slots = _opened(
                    model, config, n_ctx, slots, config.swap_slots if budget else 0, options
                )
            undo.callback(self.context.close)
            if opener is not None:
                self._drafter = opener.open(model, self.context, config)
                undo.callback(self._drafter.close)
            if self.adapters.always != PLAIN:
                self.context.adapt(self.adapters.always)
            lower = []
            if storage.folder is not None:
                from perdure.cache.tiers.opening import disk_tiers

                limit = STORE_BYTES if config.store_bytes is None else config.store_bytes
                own, encryption = storage.own_blocks, storage.encryption
                disk = disk_tiers(storage.folder, model.digest, limit, own_blocks=own, encryption=encryption)
                tiers = [*disk, *tiers]
                self.context.media = LazyMedia(storage)
            if config.blocks:
                from perdure.cache.tiers.opening import shared_tiers

                identity = self.context.identity.digest
                tiers = [*tiers, *shared_tiers(config.blocks, storage.shared_key, identity)]
            for tier in tiers:
                from perdure.cache.tiers.write_behind import WriteBehind

                lower.append(WriteBehind(tier, limit=max(_WAITING, budget // 2)))
                undo.callback(lower[-1].close)
            chunk = min(CHUNK, self.context.n_batch)
            self.slot_cache = slot_cache = SlotCache(
                self.context,
                budget=budget,
                lower=lower,
                exact=chunk if exact else None,
                swap_slots=swap_slots,
                events=self.events,
            )
            self.engine_loop = EngineLoop(
                model,
                self.context,
                exact=exact,
                queue=queue,
                chunk=chunk,
                stall=STALL if config.stall is None else config.stall,
                slots=slot_cache if budget else None,
                adapters=self.adapters,
                events=self.events,
                open_drafter=self._open_drafter,
            )
            undo.callback(self.engine_loop.close)
            if storage.folder is not None:
                # Now, rather than when somebody waits for the first session to wake; and in the engine's own
                # thread, since a second one that has computed slows the first down for ever.
                self.engine_loop.call(self.context.prepare)
            # Opened by the first request for vectors: it has separate memory.
            alike = {name: value for name, value in config.context.items() if name in _ALIKE}
            self._open_embedder = partial(model.embedder, n_ctx=n_ctx, **alike)
            self._embeddings: Any = None
            self._embeddings_lock = threading.Lock()
            self._closed = False
            self._cache: PrefixCache | None = None
            self._cache_lock = threading.Lock()
            if slot_cache.tiers.lower:
                # It lists the prefixes that a lower tier has kept.
                _ = self.cache
            undo.pop_all()

    @property
    def n_ctx(self) -> int:
        return self.context.n_ctx

    @property
    def slots(self) -> int:
        return self.slot_cache.count

    @property
    def load(self) -> tuple[int, int]:
        return self.engine_loop.load

    def health(self) -> Health:
        return Health(state="failed" if self.engine_loop.failed else "ready")

    def submit(self, request: Request) -> OutputQueue:
        return self.engine_loop.submit(self.weighed(request))

    def shares(self) -> Mapping[str, Mapping[str, float]]:
        return self.engine_loop.scheduler.order.shares()

    def embed(self, texts: Sequence[Tokens], adapters: Scales | None = None) -> EmbeddingFuture:
        self.engine_loop.check_thread()
        answer: EmbeddingFuture = self.embeddings.submit(texts, adapters)
        return answer

    def embedding_width(self) -> int:
        width: int = self.embeddings.width
        return width

    @property
    def cache(self) -> PrefixCache:
        """Made for the first caller who asks what is kept."""
        with self._cache_lock:
            if self._cache is None:
                from perdure.cache.prefix_cache import PrefixCache

                loop = self.engine_loop
                self._cache = PrefixCache(
                    self.slot_cache,
                    tokenize=self._tokenize,
                    read=self._read_only,
                    adapters=self.adapters,
                    call=loop.call,
                    post=loop.post,
                    post_in_quiet=loop.post_in_quiet,
                    peek=loop.peek,
                )
            return self._cache

    @property
    def embeddings(self) -> Any:
        """Made for the first text."""
        with self._embeddings_lock:
            if self._embeddings is None:
                if self._closed:
                    raise ClosedError("this runtime is closed")
                self._embeddings = part("rt.embed and rt.rank", "embeddings")(
                    self._open_embedder,
                    self.engine_loop.post,
                    choose=self.adapters.choose,
                    replying=lambda: self.load[1] > 0,
                    limit=self._limit,
                )
            return self._embeddings

    def _close_embeddings(self) -> None:
        with self._embeddings_lock:
            self._closed = True
        if self._embeddings is not None:
            self._embeddings.close()

    def second_opening(self, adapters: Scales | None) -> SecondOpening:
        path = self.model.path
        if path is None or not self.model.traces:
            raise InvalidInputError(
                "this model cannot be looked into: its engine does not tell what layers compute; models on "
                "llama.cpp (GGUF files) can"
            )
        return SecondOpening(path=str(path), adapters=self.adapters.files(adapters), rope=self._rope)

    def close(self) -> None:
        """End what is running as cancelled, and give everything back."""
        # First, for it may refuse: a processor cannot close the runtime that waits for it.
        self.engine_loop.close()
        with ExitStack() as ending:
            # Last, so that it hears of what is stored now.
            ending.callback(self.events.close)
            if self._own_model:
                ending.callback(self.model.close)
            for tier in self.slot_cache.tiers.lower:
                ending.callback(tier.close)
            ending.callback(self.context.close)
            if self._drafter is not None:
                ending.callback(self._drafter.close)
            ending.callback(self._close_embeddings)
            if self.slot_cache.tiers.lower and not self.context.closed:
                self.slot_cache.store_all()

    def _open_drafter(self) -> Drafter | None:
        from perdure.decode.drafter import drafter_opener

        if self._drafter is None and (opener := drafter_opener()) is not None:
            self._drafter = opener.open(self.model, self.context, self._config)
        return self._drafter

    def _tokenize(self, text: str) -> list[int]:
        check_prompt_size(text, self.model, self.n_ctx)
        return self.model.tokenize(text)

    def _read_only(self, tokens: NDArray[np.int32], namespace: str, adapters: Scales | None) -> None:
        """Have a prompt computed, for its state alone. The token after it is drawn and dropped."""
        # The last token is doubled: what is fed to draw from is not kept.
        prompt = [*tokens.tolist(), int(tokens[-1])]
        request = Request(
            prompt=prompt,
            max_tokens=1,
            sampling=Sampling(temperature=0),
            namespace=namespace,
            adapters=adapters,
        )
        with Stream(one_request(request), self.submit) as stream:
            stream.reply()


class LazyMedia:
    """The rows of images in a store, which is opened for the first."""

    def __init__(self, storage: BlockStorage) -> None:
        self._storage = storage
        self._source: MediaSource | None = None

    def medium(self, ids: NDArray[np.int32]) -> MediumRows:
        if self._source is None:
            storage = self._storage
            self._source = part("images in a prompt", "images")(storage.folder, storage.encryption)
        assert self._source is not None
        return self._source.medium(ids)


def _default_budget() -> int:
    """An eighth of this machine's memory, but no more than 2 GiB or a twelfth of it. A system that does not
    tell is taken to have 4 GiB."""
    memory = system.memory_to_share()
    return min(max(2 << 30, memory // 12), memory // 8)
