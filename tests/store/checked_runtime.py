"""Runtimes with a store, on any model: every row of every answer is checked against a fresh context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import perdure
from inside import inside
from perdure import LogitsView, Reply, Runtime
from subjects import NARROW, Row, Subject, check, compared

SETTINGS: dict[str, Any] = {"n_ctx": 256, "n_batch": NARROW, "threads": 1}


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    reply: Reply

    @property
    def tokens(self) -> list[int]:
        """The conversation so far."""
        return [*self.prompt, *self.reply.tokens]

    @property
    def tiers(self) -> dict[str, int]:
        return dict(self.reply.reuse.tiers)

    @property
    def from_disk(self) -> int:
        return self.tiers.get("disk", 0)

    @property
    def why(self) -> str:
        return self.reply.reuse.why


class Kept:
    """A runtime whose answers are checked: warm equals cold, as closely as this machine repeats itself."""

    def __init__(self, subject: Subject, runtime: Runtime, settings: dict[str, Any], bound: float) -> None:
        self.subject = subject
        self.runtime = runtime
        self.cache = runtime.cache
        self._settings = settings
        self._bound = bound

    def say(self, prompt: Sequence[int], **request: Any) -> Answer:
        rows: list[Row] = []

        def record(_: Sequence[int], view: LogitsView) -> NDArray[np.float32]:
            rows.append(view.copy())
            return view.copy()

        reply = self.runtime.generate(
            list(prompt), max_tokens=3, temperature=0, ignore_eos=True, processors=(record,), **request
        )
        for warm, cold in zip(rows, self._cold(prompt, reply.tokens), strict=True):
            check(warm, cold, self._bound)
        return Answer(list(prompt), reply)

    def flush(self) -> None:
        """Wait for what is being written behind the replies."""
        inside(self.runtime).slot_cache.tiers.flush()

    def _cold(self, prompt: Sequence[int], written: Sequence[int]) -> list[Row]:
        key = (self.subject.name, *sorted(map(str, self._settings.items())), *prompt, 0, *written)
        if key not in _COLD:
            with self.subject.context(n_seq=1, **self._settings) as ctx:
                ctx.decode(list(prompt))
                rows = [ctx.logits().copy()]
                for token in written[:-1]:
                    ctx.decode([token])
                    rows.append(ctx.logits().copy())
            _COLD[key] = rows
        return _COLD[key]


_COLD: dict[tuple[object, ...], list[Row]] = {}


@contextmanager
def kept(subject: Subject, folder: Path, **options: Any) -> Iterator[Kept]:
    names = ("slots", "swap_slots", "cache", "store_bytes")
    own = {name: options.pop(name) for name in names if name in options}
    narrow = compared(subject.model, **options)
    settings = {**SETTINGS, **narrow.settings, **options}
    with perdure.open(subject.model, store=folder, **{"slots": 2, **own}, **settings) as runtime:
        yield Kept(subject, runtime, settings, narrow.bound)
