"""For extensions that open runtimes, submit requests or follow events."""

from perdure import opening
from perdure.backend import Backend, BlockStorage, LocalBackend, SecondOpening
from perdure.decode.embedding import EmbeddingFuture, cut, ranked
from perdure.decode.stream import one_request
from perdure.events.background import BackgroundThread, BackgroundTimer
from perdure.events.event import BlocksStored, ChunkRead, Event, ImageEncoded, TokenDrawn, Woken
from perdure.events.sinks import json_line
from perdure.events.subscription import Subscription

__all__ = [
    "Backend",
    "BackgroundThread",
    "BackgroundTimer",
    "BlockStorage",
    "BlocksStored",
    "ChunkRead",
    "EmbeddingFuture",
    "Event",
    "ImageEncoded",
    "LocalBackend",
    "SecondOpening",
    "Subscription",
    "TokenDrawn",
    "Woken",
    "cut",
    "json_line",
    "one_request",
    "opening",
    "ranked",
]
