"""Two models and memory for one: what a switch between them costs a conversation.

A session with SmolLM2 goes on after each switch, while another model (a toy, whose own loading is short) was
asked in between. The first token after a switch is held against loading the model and 1.2 times waking the
same session in an engine that is loaded. Every turn must find all its tokens in the store: one that does not
fails the part.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from bench.engine import model_path
from bench.harness import Bench, Figure, Gauge, Pairs, Run, at_least
from bench.machine import Watch
from perdure.backend import BlockStorage
from perdure.engine_config import EngineConfig
from perdure.server.pool import ModelPool, ModelSpec, PooledModel

_SENTENCE = "The harbour lies still this morning, and the ferry comes in at ten past nine with the mail. "
_ROOM, _NEED = 3 << 30, 2 << 30
_OTHER = "perdure.testing.toy:ToyModel"


def switch(run: Run) -> Iterator[Figure]:
    """The first token after a switch, against loading plus 1.2 times waking."""
    specs = [
        ModelSpec(
            name="one",
            source=str(model_path()),
            config=EngineConfig(n_ctx=4096, slots=1, threads=2),
            memory=_NEED,
        ),
        ModelSpec(name="two", source=_OTHER, config=EngineConfig(n_ctx=512, slots=1), memory=_NEED),
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(ModelPool.open(specs, storage=BlockStorage(folder=Path(folder)), memory=_ROOM)) as pool,
    ):
        one, two = pool.models.values()
        _first_token(pool, one, "main", _SENTENCE * run.pick(60, 12))
        took, allowed = [], []
        with Watch() as watch:
            for number in range(run.pick(50, 4)):
                _first_token(pool, two, f"other {number}", "Hello.")
                tokens = one.runtime.session("main").token_count
                seconds, cached = _first_token(pool, one, "main", f"Go on, part {number}.")
                if cached < tokens - 1:
                    raise RuntimeError(f"{tokens} tokens were there, {cached} were found after a switch")
                session = one.runtime.session("main")
                session.sleep()
                wake, _ = _first_token(pool, one, "main", "And then?")
                took.append(seconds * 1e3)
                allowed.append((one.load_seconds + 1.2 * wake) * 1e3)
                session.rewind(2)
        yield Figure(
            name=f"first token after a switch, {len(took)} switches, {tokens:,} tokens",
            against="loading, and 1.2 times waking",
            unit="ms",
            gauge=Gauge.COST,
            pairs=Pairs(tuple(took), tuple(allowed)),
            target=at_least(1),
            machine=watch.machine,
        )


def _first_token(pool: ModelPool, model: PooledModel, session: str, text: str) -> tuple[float, int]:
    """Seconds from the request to the first token of a turn, and the tokens that were found."""

    async def turn() -> tuple[float, int]:
        began = time.perf_counter()
        await pool.acquire(model)
        try:
            return await asyncio.to_thread(_say, model, session, text, began)
        finally:
            pool.release(model)

    return asyncio.run(turn())


def _say(model: PooledModel, session: str, text: str, began: float) -> tuple[float, int]:
    with model.runtime.session(session).submit(text, max_tokens=4, temperature=0, ignore_eos=True) as stream:
        first = None
        for _ in stream:
            first = first or time.perf_counter()
        reply = stream.reply()
    assert reply.kept, reply.not_kept
    return (first or time.perf_counter()) - began, reply.usage.cached_tokens


main = Bench("switch", (switch,))

if __name__ == "__main__":
    sys.exit(main())
