"""The engine side of a runtime: a context, an engine loop and what is kept, opened and closed as one."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Unpack

import numpy as np
from numpy.typing import NDArray

from perdure import system
from perdure.cache.prefix_cache import PrefixCache, PrefixCacheCalls
from perdure.cache.slots.cache import SlotCache
from perdure.cache.tiers.archive import archive_of, model_folder
from perdure.cache.tiers.base import BlockTier
from perdure.cache.tiers.disk import DiskTier
from perdure.cache.tiers.encryption import Encryption
from perdure.cache.tiers.write_behind import WriteBehind
from perdure.checks import check_whole, is_whole
from perdure.config import N_CTX, QUEUE, SLOTS, STORE_BYTES
from perdure.decode.embedding import EmbeddingFuture, EmbeddingQueue
from perdure.decode.engine_loop import CHUNK, STALL, EngineLoop
from perdure.decode.output_queue import OutputQueue
from perdure.decode.request import Request, check_prompt_size
from perdure.decode.speculation.draft_model import ModelDrafter, NextTokenDrafter, check_vocabulary
from perdure.decode.speculation.drafter import Drafter
from perdure.decode.speculation.ngrams import NgramDrafter
from perdure.decode.stream import Stream, one_request
from perdure.engine.adapters import PLAIN, AdapterTable, Scales
from perdure.engine.context import Context
from perdure.engine.contract import ContextKeywords, LoadingKeywords, Tokenizer, Tokens
from perdure.engine.kv_loss import check_kv_type
from perdure.engine.model import Model
from perdure.engine.registry import engine_for, open_model
from perdure.engine.tuning import tuned
from perdure.errors import InvalidInputError, StoreError
from perdure.events.hub import EventHub
from perdure.models.card import ASSISTANTS
from perdure.request_options import Sampling

log = logging.getLogger("perdure.engine")

_WAITING = 256 << 20
"""Bytes that may wait to be written, at least. Most of them are those of blocks in memory."""
_SWAP_SLOTS = 4
"""Sequences on a device without a slot, unless it is said how many: to wait in, and one to change places."""
_ALIKE = ("threads", "flash", "rope_freq_base", "rope_freq_scale")
"""Settings of the context that embeddings are computed with too."""


def _opened(
    model: Model,
    n_ctx: int,
    slots: int,
    swap_slots: int | None,
    context: ContextKeywords,
    assistant: Model | None,
) -> tuple[Context, int]:
    """A context of so many slots and swap slots, and how many of these there are: unless it is said, a few
    where the cache is on a device that has ample room for them. An assistant guesses for it."""
    if swap_slots is None:
        swap_slots = _SWAP_SLOTS if model.spare_sequences(n_ctx, **context) >= _SWAP_SLOTS else 0
    if swap_slots and context.get("shared"):
        raise InvalidInputError(
            "swap_slots have cells of their own, and shared is one pool for all: leave one of the two out"
        )
    n_seq = slots + swap_slots if swap_slots and is_whole(slots) else slots
    guessing = {} if assistant is None else {"assistant": assistant}
    return model.context(n_ctx=n_ctx, n_seq=n_seq, **context, **guessing), swap_slots


class BackendKeywords(ContextKeywords, total=False):
    """What a backend takes besides the model and the store."""

    n_ctx: int | Literal["auto"]
    slots: int | Literal["auto"]
    swap_slots: int | None
    exact: bool
    queue: int
    stall: float
    cache: int | None
    store_bytes: int
    own_blocks: bool
    blocks: Sequence[str]
    blocks_key: bytes | None
    encryption: Encryption | None
    force_kv: bool
    adapters: Mapping[str, float] | None
    adapter_names: Mapping[str, str] | None
    draft: str | Model | None


NEXT_TOKEN = "mtp"
"""What `draft` is for a model's own next-token layers."""


def resolve_draft(
    loading: LoadingKeywords, settings: BackendKeywords
) -> tuple[LoadingKeywords, BackendKeywords]:
    """The same, with what a `draft` by the model's own layers asks of the model and of its context."""
    if settings.get("draft") != NEXT_TOKEN:
        return loading, settings
    settings = {**settings, "mtp": True}
    del settings["draft"]
    return {**loading, "mtp": True}, settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondOpening:
    """How a model is opened a second time, in another process."""

    path: str
    adapters: Mapping[str, float]
    """Files with their scales."""
    rope: tuple[float, float]
    """Base and scale; 0 for those of the model."""


class Backend(Protocol):
    """Requests in, replies out, whichever process the engine is in. Safe from any thread."""

    @property
    def model(self) -> Tokenizer: ...
    @property
    def cache(self) -> PrefixCacheCalls: ...
    @property
    def n_ctx(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def exact(self) -> bool:
        """Whether a reply depends in no bit on who else is served."""
        ...

    @property
    def load(self) -> tuple[int, int]:
        """Requests waiting, and being served."""
        ...

    @property
    def events(self) -> EventHub:
        """What happens there, for those who subscribe."""
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


class LocalBackend:
    """The engine in this process."""

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int | Literal["auto"] = N_CTX,
        slots: int | Literal["auto"] = SLOTS,
        swap_slots: int | None = None,
        exact: bool = False,
        queue: int = QUEUE,
        stall: float = STALL,
        cache: int | None = None,
        store: str | os.PathLike[str] | None = None,
        store_bytes: int = STORE_BYTES,
        own_blocks: bool = False,
        blocks: Sequence[str] = (),
        blocks_key: bytes | None = None,
        encryption: Encryption | None = None,
        force_kv: bool = False,
        tiers: Sequence[BlockTier] = (),
        adapters: Mapping[str, float] | None = None,
        adapter_names: Mapping[str, str] | None = None,
        own_model: bool = False,
        draft: str | Model | None = None,
        drafters: Sequence[Drafter] | None = None,
        **context: Unpack[ContextKeywords],
    ) -> None:
        """`adapters` are used where a request names none, and `adapter_names` are files by the names that
        requests may use. With `own_blocks` the model's blocks are in a folder of their own inside the store,
        so that engines of other models can write to theirs. `blocks` are places of several machines, behind
        the disk in this order, and `blocks_key` is what seals state there; `encryption` is for that on the
        disk. Where n-grams have no guess, the model's own next-token layers guess (`mtp`, of the context),
        then `draft`, a smaller model; `drafters` guess instead of all of these."""
        self.model = model
        self.exact = exact
        self.events = EventHub()
        self._own_model = own_model
        self._rope = (context.get("rope_freq_base", 0.0), context.get("rope_freq_scale", 0.0))
        self.adapters = AdapterTable(getattr(model, "adapter", None), names=adapter_names, default=adapters)
        budget = _bytes("cache", _default_budget() if cache is None else cache)
        if store is not None and not budget:
            raise InvalidInputError("a store needs a cache: leave cache out, or give it some bytes")
        _bytes("store_bytes", store_bytes)
        if swap_slots is not None:
            check_whole("swap_slots", swap_slots, 0)
        if exact and (draft is not None or context.get("mtp")):
            raise InvalidInputError("an exact runtime does not guess ahead: leave draft or exact out")
        context = tuned(model, context)
        check_kv_type(
            model,
            context.get("k_type", "f16"),
            context.get("v_type", "f16"),
            force=force_kv,
            threads=context.get("threads"),
        )
        if n_ctx == "auto" or slots == "auto":
            n_ctx, slots = model.fit_context(
                None if n_ctx == "auto" else n_ctx, None if slots == "auto" else slots, **context
            )
            log.info("%d tokens for each of %d requests at once fit beside the model", n_ctx, slots)
        with ExitStack() as undo:
            assistant = _assistant(draft, model) if draft is not None and drafters is None else None
            try:
                self.context, swap_slots = _opened(
                    model, n_ctx, slots, swap_slots if budget else 0, context, assistant
                )
            finally:
                if assistant is not None and assistant is not draft:
                    # The context keeps what it needs of it.
                    assistant.close()
            undo.callback(self.context.close)
            if drafters is None:
                drafters = [NgramDrafter()]
                if self.context.capabilities.guesses:
                    drafters.append(NextTokenDrafter(self.context))
                if draft is not None and assistant is None:
                    drafters.append(_draft_model(draft, self, context.get("threads")))
                    undo.callback(drafters[-1].close)
            if self.adapters.always != PLAIN:
                self.context.adapt(self.adapters.always)
            lower = []
            if store is not None:
                disks = _disk_tiers(Path(store), model.digest, store_bytes, own_blocks, encryption)
                tiers = [*disks, *tiers]
            tiers = [*tiers, *_shared_tiers(blocks, blocks_key, self.context.identity.digest)]
            for tier in tiers:
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
                stall=stall,
                slots=slot_cache if budget else None,
                adapters=self.adapters,
                events=self.events,
                drafters=drafters,
            )
            undo.callback(self.engine_loop.close)
            if store is not None:
                # Now, rather than when somebody waits for the first session to wake; and in the engine's own
                # thread, since a second one that has computed slows the first down for ever.
                self.engine_loop.call(self.context.prepare)
            # Not opened before somebody asks for it: it has a memory of its own.
            alike = {name: value for name, value in context.items() if name in _ALIKE}
            self.embeddings = EmbeddingQueue(
                lambda: model.embedder(n_ctx=n_ctx, **alike),
                self.engine_loop.post,
                choose=self.adapters.choose,
                replying=lambda: self.load[1] > 0,
                limit=queue,
            )
            self.cache = PrefixCache(
                slot_cache,
                tokenize=self._tokenize,
                read=self._read_only,
                adapters=self.adapters,
                call=self.engine_loop.call,
                post=self.engine_loop.post,
                post_in_quiet=self.engine_loop.post_in_quiet,
                look=self.engine_loop.look,
            )
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

    def submit(self, request: Request) -> OutputQueue:
        return self.engine_loop.submit(request)

    def embed(self, texts: Sequence[Tokens], adapters: Scales | None = None) -> EmbeddingFuture:
        self.engine_loop.check_thread()
        return self.embeddings.submit(texts, adapters)

    def embedding_width(self) -> int:
        return self.embeddings.width

    def second_opening(self, adapters: Scales | None) -> SecondOpening:
        path = getattr(self.model, "path", None)
        if path is None or not hasattr(self.model, "trace"):
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
            ending.callback(self.embeddings.close)
            if self.slot_cache.tiers.lower and not self.context.closed:
                self.slot_cache.store_all()

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


def _shared_tiers(urls: Sequence[str], key: bytes | None, identity: bytes) -> list[BlockTier]:
    """The places of several machines, in order. One that cannot be reached now is left out."""
    tiers: list[BlockTier] = []
    for url in urls:
        from perdure.cache.tiers.places import open_place
        from perdure.cache.tiers.shared import SharedTier

        if key is None:
            raise InvalidInputError("blocks of several machines need the key of their cluster")
        try:
            place, size, tokens = open_place(url)
        except StoreError as error:
            log.warning("%s; this engine goes on without it until it is started again", error)
            continue
        if any(tier.name == place.name for tier in tiers):
            raise InvalidInputError(f"one place of a kind: {place.name} is named twice")
        tiers.append(SharedTier(place, key=key, identity=identity, budget=size, tokens=tokens))
    return tiers


def _disk_tiers(
    store: Path, digest: str, budget: int, own_blocks: bool, encryption: Encryption | None
) -> list[BlockTier]:
    """The folder that the blocks of a model are written to, and the other one where some may be."""
    folder = model_folder(store, digest) if own_blocks else store
    disk = DiskTier(folder, budget=budget, encryption=encryption)
    try:
        archive = archive_of(store, digest, beside=own_blocks, encryption=encryption)
    except StoreError as error:
        # What cannot be read there is computed again.
        log.warning("the other blocks of this model cannot be read: %s", error)
        archive = None
    return [disk] if archive is None else [disk, archive]


def _assistant(draft: str | Model, model: Model) -> Model | None:
    """The model that is to guess for `model`, if it reads the hidden states of that one."""
    if not isinstance(draft, str):
        if draft.info.architecture not in ASSISTANTS:
            return None
        assistant = draft
    else:
        engine = engine_for(draft)
        file = engine.fetch(draft)
        if not engine.is_assistant(file):
            return None
        # It reads the caches of the model, and is where these are. It has none: it needs room for no token.
        place: LoadingKeywords = {} if getattr(model, "gpu_layers", 0) else {"gpu_layers": 0}
        assistant = engine.open(file, cells=0, **place)
    with ExitStack() as undo:
        if assistant is not draft:
            undo.callback(assistant.close)
        check_vocabulary(model, assistant)
        undo.pop_all()
    return assistant


def _draft_model(draft: str | Model, backend: LocalBackend, threads: int | None) -> Drafter:
    """A drafter by a smaller model, which is opened unless it is."""
    n_ctx, n_seq = backend.context.n_ctx, backend.context.n_seq
    model = open_model(draft, {}, cells=n_ctx * n_seq) if isinstance(draft, str) else draft
    with ExitStack() as undo:
        if isinstance(draft, str):
            undo.callback(model.close)
        check_vocabulary(backend.model, model)
        context = model.context(n_ctx=n_ctx, n_seq=n_seq, threads=threads)
        undo.pop_all()
    return ModelDrafter(model, context, own_model=isinstance(draft, str))


def _bytes(name: str, value: int) -> int:
    if not is_whole(value) or value < 0:
        raise InvalidInputError(f"{name} is a number of bytes, 0 for none, got {value!r}")
    return value


def _default_budget() -> int:
    """An eighth of this machine's memory, but no more than 2 GiB or a twelfth of it. A system that does not
    tell is taken to have 4 GiB."""
    memory = system.memory_to_share()
    return min(max(2 << 30, memory // 12), memory // 8)
