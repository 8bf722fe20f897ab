"""For extensions that open runtimes, submit requests, follow events or bring a backend."""

from perdure import opening as opening
from perdure.backend import (
    AlwaysLoaded as AlwaysLoaded,
    Backend as Backend,
    BackendState as BackendState,
    BlockStorage as BlockStorage,
    Health as Health,
    LocalBackend as LocalBackend,
    Residence as Residence,
    SecondOpening as SecondOpening,
)
from perdure.cache.prefix_cache import PrefixCacheCalls as PrefixCacheCalls
from perdure.decode.embedding import (
    EmbeddingFuture as EmbeddingFuture,
    cut as cut,
    ranked as ranked,
)
from perdure.decode.output_queue import (
    NAP as NAP,
    Canceller as Canceller,
    OutputQueue as OutputQueue,
    notify as notify,
)
from perdure.decode.request import Request as Request
from perdure.decode.stream import one_request as one_request, result_of as result_of
from perdure.engine.adapters import Scales as Scales, split_layers as split_layers
from perdure.engine.contract import Tokens as Tokens
from perdure.engine_config import QUEUE as QUEUE
from perdure.events.background import (
    FAILURES as FAILURES,
    BackgroundThread as BackgroundThread,
    BackgroundTimer as BackgroundTimer,
)
from perdure.events.event import (
    BlocksStored as BlocksStored,
    ChunkRead as ChunkRead,
    Ended as Ended,
    Event as Event,
    ImageEncoded as ImageEncoded,
    Placed as Placed,
    Queued as Queued,
    Restarted as Restarted,
    TokenDrawn as TokenDrawn,
    Woken as Woken,
)
from perdure.events.hub import EventHub as EventHub
from perdure.events.subscription import Subscription as Subscription
from perdure.restart_policy import RestartPolicy as RestartPolicy
from perdure.sessions.listener import Listener as Listener
from perdure.store.owner import (
    StoreLock as StoreLock,
    StoreOwner as StoreOwner,
    read_owner as read_owner,
)
