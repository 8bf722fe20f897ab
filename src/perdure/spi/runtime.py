"""For extensions that open runtimes, submit requests, follow events or bring a backend."""

from perdure import opening
from perdure.backend import (
    AlwaysLoaded,
    Backend,
    BackendState,
    BlockStorage,
    Health,
    LocalBackend,
    Residence,
    SecondOpening,
)
from perdure.cache.prefix_cache import PrefixCacheCalls
from perdure.decode.embedding import EmbeddingFuture, cut, ranked
from perdure.decode.output_queue import NAP, Canceller, OutputQueue, notify
from perdure.decode.request import Request
from perdure.decode.stream import one_request, result_of
from perdure.engine.adapters import Scales, split_layers
from perdure.engine.contract import Tokens
from perdure.engine.deadly_files import LoadedTogether, files_of, is_crash
from perdure.engine_config import QUEUE
from perdure.events.background import FAILURES, BackgroundThread, BackgroundTimer
from perdure.events.event import (
    BlocksStored,
    ChunkRead,
    Ended,
    Event,
    ImageEncoded,
    Restarted,
    TokenDrawn,
    Woken,
)
from perdure.events.hub import EventHub
from perdure.events.sinks import json_line
from perdure.events.subscription import Subscription
from perdure.restart_policy import RestartPolicy
from perdure.sessions.listener import Listener
from perdure.store.owner import StoreLock, StoreOwner, read_owner

__all__ = [
    "FAILURES",
    "NAP",
    "QUEUE",
    "AlwaysLoaded",
    "Backend",
    "BackendState",
    "BackgroundThread",
    "BackgroundTimer",
    "BlockStorage",
    "BlocksStored",
    "Canceller",
    "ChunkRead",
    "EmbeddingFuture",
    "Ended",
    "Event",
    "EventHub",
    "Health",
    "ImageEncoded",
    "Listener",
    "LoadedTogether",
    "LocalBackend",
    "OutputQueue",
    "PrefixCacheCalls",
    "Request",
    "Residence",
    "RestartPolicy",
    "Restarted",
    "Scales",
    "SecondOpening",
    "StoreLock",
    "StoreOwner",
    "Subscription",
    "TokenDrawn",
    "Tokens",
    "Woken",
    "cut",
    "files_of",
    "is_crash",
    "json_line",
    "notify",
    "one_request",
    "opening",
    "ranked",
    "read_owner",
    "result_of",
    "split_layers",
]
