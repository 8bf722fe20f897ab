"""Kept prefixes: what callers asked to keep, for a time or without an end.

warm("You are terse.", labels=["bot"])   no end: listed by label, also after a restart
cache_control in a message, 5 minutes    an end: its blocks are not evicted until then
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perdure.cache.eviction import Pins
from perdure.cache.prefix_search import (
    common_prefix_length,
    key_of,
)
from perdure.cache.sorted_keys import SortedKeys
from perdure.decode.request import KeptPrefix, prefix_cost
from perdure.errors import InvalidInputError, StoreFullError

if TYPE_CHECKING:
    from perdure.cache.held_blocks import HeldBlocks

Ids = NDArray[np.int32]

PREFIXES = 10_000
"""Prefixes without an end of one namespace, at most."""
PREFIX_BYTES = 64 << 20
"""Memory for listing those of all namespaces, at most."""
LABELS = 64
"""Labels of one prefix, at most, and each of so many characters:"""
LABEL_LENGTH = 256


def check_labels(labels: frozenset[str]) -> None:
    """Raise unless one prefix may carry all of `labels`."""
    if len(labels) > LABELS or any(len(label) > LABEL_LENGTH for label in labels):
        raise InvalidInputError(
            f"a prefix carries at most {LABELS} labels of {LABEL_LENGTH} characters, got {len(labels)} "
            f"of up to {max(map(len, labels))}"
        )
    for label in labels:
        try:
            label.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"a label must be valid Unicode text: {error}") from None


class KeptPrefixes:
    """The one table of kept prefixes. Those without an end are listed, sorted by where their chain starts and
    by their tokens; of those with an end, the blocks are `held`.

    Always holds: no namespace has more than its share, and all of them keep to one budget.
    """

    def __init__(
        self,
        prefixes: Iterable[KeptPrefix] = (),
        pins: Pins | None = None,
        *,
        limit: int = PREFIXES,
        budget: int = PREFIX_BYTES,
        changed: Callable[[KeptPrefix, bool], None] = lambda prefix, listed: None,
    ) -> None:
        """`changed` hears of each prefix that is listed (True) or is not any more."""
        self._changed = changed
        self.pins = Pins() if pins is None else pins
        self.nbytes = 0
        """What listing takes."""
        self.limit = limit
        self.budget = budget
        self._spaces: dict[str, SortedKeys[KeptPrefix]] = {}
        """By namespace, in the order in which they came."""
        self._places: dict[str, bytes] = {}
        """Where each stands in that order, by its id."""
        self._last = 0
        self._keys: SortedKeys[KeptPrefix] = SortedKeys()
        for prefix in prefixes:
            self.put(prefix)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def held(self) -> HeldBlocks:
        """The blocks of prefixes with an end."""
        return self.pins.blocks

    def get(self, prefix: KeptPrefix) -> KeptPrefix | None:
        return self.find(prefix.root, prefix.ids)

    def find(self, root: bytes, tokens: Ids) -> KeptPrefix | None:
        return self._keys.get(root + key_of(tokens))

    def of(self, labels: frozenset[str] | None, namespace: str) -> list[KeptPrefix]:
        """The prefixes of a namespace, or those of them that carry one of `labels`."""
        return self.page(labels, namespace)

    def page(
        self,
        labels: frozenset[str] | None,
        namespace: str,
        *,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[KeptPrefix]:
        """Up to `limit` of them, those that came after the one whose id is `after`."""
        prefixes: SortedKeys[KeptPrefix] = self._spaces.get(namespace, SortedKeys())
        place = b"" if after is None else self._places.get(after, b"")
        if after is not None and prefixes.get(place) is None:
            raise InvalidInputError(
                f"there is no warmed prefix {after!r}, or it is gone: list again from the first one"
            )
        fitting = (each for each in prefixes.walk(place + b"\0") if each.carries(labels, namespace))
        return list(islice(fitting, limit))

    def all(self) -> list[KeptPrefix]:
        return [prefix for each in self._spaces.values() for prefix in each.walk()]

    def check_room(self, tokens: int, namespace: str) -> None:
        """Raise unless one more prefix of this size may be kept."""
        count = len(self._spaces.get(namespace, ()))
        if count >= self.limit:
            raise StoreFullError(
                f"{count} warmed prefixes of this namespace are kept, {self.limit} may be: clear some first",
                needed=1,
            )
        needed = prefix_cost(tokens)
        if self.nbytes + needed > self.budget:
            raise StoreFullError(
                f"warmed prefixes take {self.nbytes} bytes of memory, this one {needed} more, and "
                f"{self.budget} may be used: clear some by label",
                needed=needed,
            )

    def add(self, prefix: KeptPrefix, blocks: Iterable[tuple[bytes, int]] = ()) -> bool:
        """Keep a prefix: list it, or hold its `blocks`, each with its bytes, until its end. False: there is
        no room for these."""
        if prefix.seconds is None:
            self.put(prefix)
            return True
        sizes = dict(blocks)
        key = prefix.key.encode() or next(reversed(sizes))
        return self.held.add(prefix.namespace, key, sizes.items(), prefix.seconds)

    def put(self, prefix: KeptPrefix) -> None:
        self.remove(prefix)
        key = prefix.root + key_of(prefix.ids)
        self._keys.add(key, prefix)
        self._last += 1
        place = self._places[prefix.id] = self._last.to_bytes(8, "big")
        self._spaces.setdefault(prefix.namespace, SortedKeys()).add(place, prefix)
        self.nbytes += prefix.nbytes
        self._changed(prefix, True)

    def remove(self, prefix: KeptPrefix) -> None:
        key = prefix.root + key_of(prefix.ids)
        known = self._keys.get(key)
        if known is None:
            return
        self._keys.remove(key)
        self.nbytes -= known.nbytes
        prefixes = self._spaces[known.namespace]
        prefixes.remove(self._places.pop(known.id))
        if not len(prefixes):
            del self._spaces[known.namespace]
        self._changed(known, False)

    def clear(self) -> None:
        for prefix in self.all():
            self._changed(prefix, False)
        self.pins.clear()
        self._spaces, self._places, self._keys, self.nbytes = {}, {}, SortedKeys(), 0

    # Which prefix needs which blocks.

    def passes(self, root: bytes, tokens: Ids) -> bool:
        """Whether a prefix starts with `tokens`, or is just them."""
        key = root + key_of(tokens)
        next_key = self._keys.at_or_after(key)
        return next_key is not None and next_key.startswith(key)

    def ends_within(self, root: bytes, tokens: Ids, start: int) -> Iterable[int]:
        """The lengths above `start` and below all of `tokens` at which prefixes end, the longest first."""
        data = root + key_of(tokens)
        for length in range(len(tokens) - 1, start, -1):
            if self._keys.get(data[: len(root) + 4 * length]) is not None:
                yield length

    def longest_beginning(self, root: bytes, tokens: Ids) -> int:
        """The length of the longest prefix that `tokens` start with."""
        while len(tokens):
            key = self._keys.at_or_before(root + key_of(tokens))
            if key is None or not key.startswith(root):
                return 0
            theirs = np.frombuffer(key[len(root) :], "<i4").astype(np.int32)
            shared = common_prefix_length(theirs, tokens)
            if shared == len(theirs):
                return shared
            tokens = tokens[:shared]
        return 0
