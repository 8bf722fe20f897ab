"""Prompt heads: what the prompts of known clients begin with, remembered over a restart and read after it.

    tokens   last used      what it is                               value
    24,310   an hour ago    system prompt and tools of Claude Code   23,600: read first
       310   yesterday      system prompt of a chat window           155
     2,000   just now       a system prompt that came once           500

They are tokens in a file of the store, no state: where the blocks of a head are still kept they are loaded,
and where they are gone (evicted, another engine) it is computed again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from perdure import ClosedError, PerdureError, ReuseReport, Runtime, Stream
from perdure.spi.base import make_folder, read_file, write_file
from perdure.spi.cache import BEGINNINGS, PLAIN, StateCodec
from perdure.spi.chat import WORTH, ChatFormat, ChatOptions, PastConversation, reading
from perdure.spi.runtime import Backend, one_request
from perdure.spi.server import ServedModel, ServerState
from perdure.spi.sessions import encryption_of

log = logging.getLogger("perdure.agents")

_VERSION = 1
_COUNT = 32
_TOKENS = 1 << 19
"""Of all that are remembered of one model; of more, those of the least value are forgotten."""
_FILE_BYTES = 16 << 20
"""A file larger than that was not written here."""
_HALF = 86_400.0
"""Seconds without use after which a head is worth half."""
_OFTEN = 4
"""Prompts that a head has its whole value by: one that came once may never come again."""
_PAUSE, _PAUSE_NEW = 60.0, 5.0
"""Seconds between two writes that only record uses, and between two that record new heads."""
_WARMED = 8
"""Heads that are read after a start, at most."""


@dataclass(frozen=True, slots=True)
class PromptHead:
    """What several prompts of a namespace begin with, and when one last did."""

    key: str
    namespace: str
    adapters: Mapping[str, float] | None
    tokens: Sequence[int]
    used: float
    uses: int = 1

    def value(self, now: float) -> float:
        """Tokens that it spares the next prompt, the less likely the longer nobody asked for it."""
        often = min(self.uses, _OFTEN) / _OFTEN
        return often * len(self.tokens) * math.exp2(-max(0.0, now - self.used) / _HALF)

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "namespace": self.namespace,
            "adapters": None if self.adapters is None else dict(self.adapters),
            "tokens": base64.b64encode(array("i", self.tokens).tobytes()).decode(),
            "used": self.used,
            "uses": self.uses,
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> PromptHead:
        tokens = array("i")
        tokens.frombytes(base64.b64decode(stored["tokens"], validate=True))
        adapters = stored["adapters"]
        return cls(
            key=str(stored["key"]),
            namespace=str(stored["namespace"]),
            adapters=None if adapters is None else {str(k): float(v) for k, v in adapters.items()},
            tokens=tokens.tolist(),
            used=float(stored["used"]),
            uses=int(stored["uses"]),
        )


class PromptHeads:
    """The heads of one model's prompts. Safe from any thread.

    Always holds: their number and their tokens are bounded, and so is how often they are written; a file that
    is damaged or gone costs what was remembered, and no more.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        *,
        codec: StateCodec = PLAIN,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`folder` is that of a store, and `model` the digest of its weights. The file stands in the `codec`
        of the store's blocks."""
        self._path = folder / BEGINNINGS / f"{model[:16]}{codec.suffix}"
        self._codec = codec
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, PromptHead] = {}
        self._written: float | None = None
        self._load()

    def use(
        self,
        about: object,
        tokens: Callable[[], Sequence[int]],
        *,
        namespace: str,
        adapters: Mapping[str, float] | None,
    ) -> None:
        """A prompt began so. `about` is all that its head was made of; `tokens` gives it where it is
        new."""
        named = None if adapters is None else sorted(adapters.items())
        key = hashlib.sha256(repr((namespace, named, about)).encode()).hexdigest()[:32]
        now = self._clock()
        with self._lock:
            known = self._known.get(key)
        if known is None:
            if len(made := list(tokens())) < WORTH:
                return
            known, pause = PromptHead(key, namespace, adapters, made, now), _PAUSE_NEW
        else:
            known, pause = replace(known, used=now, uses=known.uses + 1), _PAUSE
        with self._lock:
            self._known[key] = known
            self._forget(now)
        if self._written is None or not 0 <= now - self._written < pause:
            self.save()

    def listen(
        self,
        chat_format: ChatFormat,
        made: PastConversation,
        options: ChatOptions,
        adapters: Mapping[str, float] | None,
    ) -> None:
        """A reply was written: remember what came before the first turn of its prompt, if anything did."""
        head = tuple(takewhile(lambda each: each.role in ("system", "developer"), made.messages))
        if not (head or made.tools):
            return
        about = (chat_format.template.source, head, made.tools, sorted(made.variables.items(), key=str))

        def tokens() -> Sequence[int]:
            return chat_format.shared_beginning(
                head, options, namespace=made.namespace, known=made.transcript
            )

        self.use(about, tokens, namespace=made.namespace, adapters=adapters)

    def by_value(self) -> list[PromptHead]:
        """Those of the most value first."""
        now = self._clock()
        with self._lock:
            return sorted(self._known.values(), key=lambda each: each.value(now), reverse=True)

    def clear(self, namespace: str = "") -> None:
        """Forget those of a namespace; without one, all."""
        with self._lock:
            self._known = {
                key: each for key, each in self._known.items() if namespace and each.namespace != namespace
            }
        self.save()

    def save(self) -> None:
        """Write them down. A store that cannot be written is no error: nothing is warmed after a restart."""
        with self._lock:
            if self._written is not None and not self._path.exists():
                # The store was cleared: what was known before is not brought back.
                latest = max(self._known.values(), key=lambda each: each.used, default=None)
                self._known = {} if latest is None else {latest.key: latest}
            known = [each.to_json() for each in self._known.values()]
            try:
                make_folder(self._path.parent, ours=True)
                data = json.dumps({"version": _VERSION, "beginnings": known}).encode()
                write_file(self._path, self._codec.encode(self._path.name, [data]))
            except PerdureError as error:
                log.debug("the heads of prompts were not written: %s", error)
                return
            self._written = self._clock()

    def warm(
        self,
        backend: Backend,
        budget: int,
        *,
        go_on: Callable[[], bool] = lambda: True,
        warmed: Callable[[ReuseReport], None] = lambda reuse: None,
    ) -> None:
        """Have the most valuable ones read while the engine is idle, one after the other, until `budget`
        tokens were computed or `go_on` says no. `warmed` is called with the reuse of each."""
        for each in self.by_value()[:_WARMED]:
            if not go_on():
                return
            try:
                tokens = each.tokens[: backend.n_ctx - 2]
                estimate = backend.cache.plan(tokens, namespace=each.namespace, adapters=each.adapters)
                tokens = tokens[: len(tokens) - max(0, estimate.computed - budget)]
                if len(tokens) < WORTH:
                    continue
                request = reading(tokens, namespace=each.namespace, adapters=each.adapters)
                [reply] = Stream(one_request(request), backend.submit).replies()
            except ClosedError:
                return
            except PerdureError as error:
                # An adapter that is gone, a worker that died: the next one may go.
                log.debug("a prompt head was not warmed: %s", error)
                continue
            budget -= reply.reuse.computed
            warmed(reply.reuse)

    def _load(self) -> None:
        try:
            data = self._codec.decode(self._path.name, read_file(self._path, _FILE_BYTES))
            if data is None:
                raise ValueError("it was not encrypted by this key")
            stored = json.loads(data)
            if stored["version"] == _VERSION:
                heads = [PromptHead.from_json(each) for each in stored["beginnings"]]
                self._known = {each.key: each for each in heads if len(each.tokens) >= WORTH}
                self._written = self._clock()
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            log.warning("%s is not read: %s", self._path, error)
        with self._lock:
            self._forget(self._clock())

    def _forget(self, now: float) -> None:
        """With the lock held: those beyond the bounds, the least valuable ones."""
        left = sum(len(each.tokens) for each in self._known.values())
        if len(self._known) <= _COUNT and left <= _TOKENS:
            return
        for each in sorted(self._known.values(), key=lambda each: each.value(now)):
            if len(self._known) <= _COUNT and left <= _TOKENS:
                return
            del self._known[each.key]
            left -= len(each.tokens)


class WarmStart:
    """Prompt heads of the models of a server, for as long as it runs."""

    def __init__(self) -> None:
        self._heads: WeakKeyDictionary[Runtime, PromptHeads] = WeakKeyDictionary()

    def start(self, server: ServerState, model: ServedModel) -> None:
        """Remember the heads of prompts from now on, and have those of earlier runs read."""
        runtime = model.runtime
        folder = runtime.sessions.store.own_folder()
        if folder is None:
            return
        encryption = encryption_of(folder)
        codec = PLAIN if encryption is None else encryption.codec()
        self._heads[runtime] = heads = PromptHeads(folder, runtime.model.digest, codec=codec)
        runtime.chat_format.listeners.append(heads.listen)
        heads.warm(
            runtime.backend,
            server.warm,
            go_on=lambda: server.models.is_loaded(model) and not server.stopping,
            warmed=server.ledger.metrics.warmed,
        )

    def save(self, runtime: Runtime) -> None:
        if (heads := self._heads.get(runtime)) is not None:
            with suppress(PerdureError):
                heads.save()

    def forget(self, runtime: Runtime, namespace: str) -> None:
        if (heads := self._heads.get(runtime)) is not None:
            heads.clear(namespace)


WARM_START = WarmStart()
