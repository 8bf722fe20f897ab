"""A scheduler over a working set of small blocks, on any model: its every row is checked against cold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inside import core_of
from perdure import Context, LogitsView, Reply, Sampling, Stream
from perdure.cache.prefix_cache import PrefixCache
from perdure.cache.slots.cache import SlotCache
from perdure.decode.engine_loop import CHUNK, EngineLoop
from perdure.decode.request import Request
from perdure.decode.stream import one_request
from perdure.engine.adapters import AdapterSet, AdapterTable, Scales
from perdure.memory import SlidingWindow
from subjects import MLX, NARROW, ON_A_GPU, Compared, Row, Subject, check

BLOCK = 8
SPACING = 16
BOUND = {
    "llama": 2.2e-4,
    "qwen3": 2.1e-4,
    "qwen3moe": 2e-2,
    "deepseek2": 2e-2,
    "deepseek2-mtp": 2e-2,
    "gemma3": 2.3e-4,
    "step35-mtp": 2.3e-4,
    "gemma4-drafted": 2.3e-4,
    "qwen35-mtp": 2.1e-4,
    "mamba": 1e-8,
    "jamba": 2.1e-4,
    **dict.fromkeys(MLX, 1e-9),
}
"""The KL of a row from a fresh context's by rounding alone, at most, as measured:
docs/measurements/exactness.md."""
EXPERTS = ("qwen3moe", "deepseek2", "deepseek2-mtp", "mlx-qwen3moe", "mlx-llama4")
"""Rounding can send a token to another expert, so that only equal shapes tell noise from error."""
PLENTY = 64 << 20


def other_shapes(subject: Subject) -> float:
    """What other shapes of steps make of a row at most, on this machine's devices."""
    return max(BOUND[subject.name], ON_A_GPU[subject.name].usual if subject.on_gpu else 0.0)


@dataclass(frozen=True)
class Answer:
    """A reply, with the row of logits that each of its tokens was drawn from."""

    prompt: list[int]
    reply: Reply
    rows: list[Row]
    adapters: Scales | None = None

    @property
    def tokens(self) -> list[int]:
        """The conversation so far."""
        return [*self.prompt, *self.reply.tokens]

    @property
    def reused(self) -> int:
        return self.reply.reuse.reused

    @property
    def tiers(self) -> dict[str, int]:
        return dict(self.reply.reuse.tiers)

    @property
    def why(self) -> str:
        return self.reply.reuse.why


class Served:
    """A runtime in all but the size of its blocks."""

    def __init__(
        self,
        subject: Subject,
        *,
        slots: int = 2,
        swap_slots: int = 0,
        budget: int = PLENTY,
        block: int = BLOCK,
        spacing: int = SPACING,
        exact: bool = False,
        names: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        """`names` are adapters that requests may name."""
        self.subject = subject
        # In a pool, and in a window that is not kept, other cells round otherwise.
        elsewhere = settings.get("shared") or (
            subject.kind is SlidingWindow and not settings.get("swa_full", True)
        )
        # In exact mode the shapes of steps are those of a fresh context that reads in the same steps.
        narrow = subject.narrow if not exact and settings.get("n_batch", NARROW) <= NARROW else Compared()
        self.settings: dict[str, Any] = {"n_ctx": 256, "n_batch": NARROW, **narrow.settings, **settings}
        self.context: Context = subject.context(n_seq=slots + swap_slots, **self.settings)
        self.exact = min(block, self.context.n_batch) if exact else None
        self.slot_cache = SlotCache(
            self.context,
            budget=budget,
            block_size=block,
            spacing=spacing,
            exact=self.exact,
            swap_slots=swap_slots,
        )
        self.table = AdapterTable(subject.model.adapter, names=names)
        self.engine_loop = EngineLoop(
            subject.model,
            self.context,
            exact=exact,
            chunk=self.exact or CHUNK,
            slots=self.slot_cache,
            adapters=self.table,
        )
        self.cache = PrefixCache(
            self.slot_cache,
            tokenize=subject.model.tokenize,
            read=self._read,
            adapters=self.table,
            call=self.engine_loop.call,
            post=self.engine_loop.post,
            post_in_quiet=self.engine_loop.post_in_quiet,
            peek=self.engine_loop.peek,
        )
        wide = not exact and self.context.n_batch > NARROW
        self.bound = other_shapes(subject) if (wide or elsewhere) and not subject.toy else narrow.bound
        self.adapters: dict[Any, float] = {}

    # Asking.

    def submit(
        self, prompt: Sequence[int], rows: list[Row] | None = None, **request: Any
    ) -> Stream[Any, Any]:
        def record(_: Sequence[int], view: LogitsView) -> NDArray[np.float32]:
            if rows is not None:
                rows.append(view.copy())
            return view.copy()

        fields: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "sampling": Sampling(temperature=0)}
        asked = Request(prompt=list(prompt), processors=(record,), **{**fields, **request})
        return Stream(one_request(asked), self.engine_loop.submit)

    def say(self, prompt: Sequence[int], **request: Any) -> Answer:
        """The answer to a prompt, every row of it checked against a fresh context."""
        rows: list[Row] = []
        reply = self.submit(prompt, rows, **request).reply()
        answer = Answer(list(prompt), reply, rows, request.get("adapters"))
        self.check(answer)
        return answer

    def check(self, answer: Answer) -> None:
        """W≡C for every row that a token was drawn from."""
        for warm, cold in zip(answer.rows, self.cold(answer), strict=False):
            check(warm, cold, self.bound)

    def cold(self, answer: Answer) -> Iterator[Row]:
        """What a fresh context says of the same tokens."""
        chosen = self.table.choose(answer.adapters, answer.prompt)
        with self.subject.context(n_seq=1, **self.settings) as ctx:
            ctx.adapt(AdapterSet.of(self.adapters) if chosen is None else chosen, 0)
            self.read(ctx, answer.prompt)
            yield ctx.logits().copy()
            for token in answer.reply.tokens:
                if ctx.length() == ctx.n_ctx:
                    return
                ctx.decode([token])
                yield ctx.logits().copy()

    def read(self, ctx: Context, prompt: list[int]) -> None:
        """Have a prompt computed in the steps in which it is served."""
        size = self.exact or len(prompt)
        for start in range(0, len(prompt), size):
            last = start + size >= len(prompt)
            ctx.decode(prompt[start : start + size], rows="last" if last else "none")

    def adapt(self, adapters: dict[Any, float]) -> None:
        self.adapters = adapters
        self.engine_loop.call(lambda: self.context.adapt(adapters))

    @contextmanager
    def counting(self) -> Iterator[Callable[[], int]]:
        """How many tokens the engine computes within the block."""
        core, count = core_of(self.context), 0
        decode = core.decode

        def counted(batch: Any) -> Any:
            nonlocal count
            count += batch.size
            return decode(batch)

        core.decode = counted  # type: ignore[method-assign]
        try:
            yield lambda: count
        finally:
            del core.decode

    def _read(self, tokens: NDArray[np.int32], namespace: str, adapters: Scales | None) -> None:
        prompt = [*tokens.tolist(), int(tokens[-1])]
        self.submit(prompt, max_tokens=1, namespace=namespace, adapters=adapters).reply()

    # Its own life.

    def close(self) -> None:
        self.engine_loop.close()
        self.context.close()

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
